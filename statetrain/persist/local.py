"""Named files under a local directory that survive a power cut, and a live writer's lock."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import secrets
import socket
import weakref
from collections.abc import Callable
from typing import BinaryIO, TypeVar

from statetrain.errors import CheckpointError

__all__ = ["LocalFiles", "Lock"]

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("statetrain")
T = TypeVar("T")

NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.EACCES}
NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EROFS}


class LocalFiles:
    """Files named `folder/name` under `root`. What a method has written survives a power cut."""

    def __init__(self, root: str) -> None:
        self.root = root

    def write_new(self, name: str, write: Callable[[BinaryIO], T]) -> tuple[T, int]:
        """Create the file `name`, let `write` fill it, and return its result and the file's size.

        If `write` fails, the file is removed as far as that is possible.
        """
        path = self._path(name)
        self._make_folder(os.path.dirname(path))
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _flag("O_CLOEXEC"), 0o666)
        try:
            with open(fd, "wb", buffering=0) as file:
                result = write(file)
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        _sync_folder(os.path.dirname(path))
        return result, size

    def put(self, name: str, data: bytes) -> None:
        """Write `data` as the new file `name`: it is there whole, or not at all."""
        path = self._path(name)
        folder = os.path.dirname(path)
        spare = os.path.join(folder, f".{os.path.basename(path)}.{secrets.token_hex(4)}.tmp")
        self._make_folder(folder)
        try:
            with open(spare, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _publish(spare, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(spare)
        _sync_folder(folder)

    def hint(self, name: str, data: bytes) -> None:
        """Write or overwrite `name`, which nothing relies on."""
        path = self._path(name)
        spare = f"{path}.tmp"
        with open(spare, "wb") as file:
            file.write(data)
        os.replace(spare, path)

    def get(self, name: str) -> bytes:
        """Return the bytes of the file `name`."""
        with open(self._path(name), "rb") as file:
            return file.read()

    def open(self, name: str, size: int | None = None) -> BinaryIO:
        """Open the file `name` for reading."""
        return open(self._path(name), "rb")

    def size(self, name: str) -> int:
        """Return the size of the file `name`."""
        return os.stat(self._path(name)).st_size

    def names(self, folder: str) -> list[str]:
        """Return the names in `folder`, sorted; none if it is not there."""
        try:
            return sorted(os.listdir(self._path(folder)))
        except FileNotFoundError:
            return []

    def everything(self) -> list[str]:
        """Return the names of all files here and in all folders, sorted."""
        found = [
            os.path.relpath(os.path.join(folder, name), self.root).replace(os.sep, "/")
            for folder, _, names in os.walk(self.root)
            for name in names
        ]
        return sorted(found)

    def unlink(self, name: str) -> None:
        """Remove the file `name`, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def remove(self, name: str) -> None:
        """Remove the file `name`, or the folder with the files in it, if it is there."""
        path = self._path(name)
        if os.path.isdir(path):
            for inner in self.names(name):
                self.remove(f"{name}/{inner}")
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(path)
        else:
            self.unlink(name)

    def renew(self) -> None:
        """Do nothing: there is no connection to be lost."""

    def settle(self, folder: str) -> None:
        """Make removals from `folder` durable before what depends on them is removed."""
        _sync_folder(self._path(folder))

    def _path(self, name: str) -> str:
        return os.path.join(self.root, *name.split("/"))

    def _make_folder(self, folder: str) -> None:
        """Make `folder` and what is missing above it, and make each new entry durable."""
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for new in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(new)
            _sync_folder(os.path.dirname(new))


class Lock:
    """A lock on a local store that dies with its process; a second live writer is refused."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: io.FileIO | None = None

    def acquire(self) -> None:
        """Take the lock, or say who has it. A folder that is removed meanwhile is made again.

        Raises:
            CheckpointError: another live writer has it.
        """
        if self._file is not None:
            return
        if fcntl is None:
            log.info("%s cannot be locked on this system", self.path)
            return
        file = io.FileIO(
            os.open(self.path, os.O_RDWR | os.O_CREAT | _flag("O_CLOEXEC"), 0o666), "r+"
        )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = file.read(200).decode(errors="replace").strip() or "another process"
            file.close()
            raise CheckpointError(
                f"{os.path.dirname(self.path)} is being written by {holder}: wait for it to end, "
                "or give this run another place"
            ) from error
        except OSError as error:
            file.close()
            if error.errno not in NO_LOCKS:
                raise
            log.info("%s cannot be locked here: %s", self.path, error)
            return
        if not _is_at(file, self.path):
            file.close()
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self.acquire()
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._file = file
        _held.add(self)

    def release(self) -> None:
        """Let another writer in."""
        _held.discard(self)
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.release()


def _is_at(file: io.FileIO, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _let_go_in_child() -> None:
    """Close inherited locks: a loader's worker must not keep a dead trainer's lock alive."""
    for lock in list(_held):
        lock.release()


_held: weakref.WeakSet[Lock] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


def _publish(spare: str, path: str) -> None:
    try:
        os.link(spare, path)  # unlike rename it never replaces
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        os.rename(spare, path)


def _sync_folder(path: str) -> None:
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF}:
            raise  # those say that this file system has no such thing
    finally:
        os.close(fd)


def _flag(name: str) -> int:
    return int(getattr(os, name, 0))
