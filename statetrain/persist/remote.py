"""Named blobs under a URL that fsspec can open: the only importer of fsspec."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Protocol, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from statetrain.errors import CheckpointError
from statetrain.persist.local import LocalFiles

__all__ = ["Files", "RemoteFiles", "files_at"]

T = TypeVar("T")

BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "http", "https"}
WINDOW = 256 << 10  # what one request for a header, an index or a trailer fetches
PARALLEL = 8  # ranges of 8 MiB under way at a time
PIPELINED = 64  # reads under way at a time, over sftp
REFUSED = {401, 403}
NO_ROOM = {413, 507}
# the names of what is raised without a code; no backend is imported to name its classes
_REFUSALS = (
    "NoCredentials", "PartialCredentials", "CredentialRetrieval", "ProfileNotFound", "NoAuthToken",
    "ClientAuthentication", "AuthenticationException", "PasswordRequired", "BadHostKey",
    "DefaultCredentials", "Refresh", "HttpAuth",
)  # fmt: skip


class Files(Protocol):
    """What a store needs of the place where its blobs are; `LocalFiles` says what each does."""

    def write_new(self, name: str, write: Callable[[BinaryIO], T]) -> tuple[T, int]: ...  # noqa: D102
    def put(self, name: str, data: bytes) -> None: ...  # noqa: D102
    def hint(self, name: str, data: bytes) -> None: ...  # noqa: D102
    def get(self, name: str) -> bytes: ...  # noqa: D102
    def open(self, name: str, size: int | None = None) -> BinaryIO: ...  # noqa: D102
    def size(self, name: str) -> int: ...  # noqa: D102
    def names(self, folder: str) -> list[str]: ...  # noqa: D102
    def everything(self) -> list[str]: ...  # noqa: D102
    def unlink(self, name: str) -> None: ...  # noqa: D102
    def remove(self, name: str) -> None: ...  # noqa: D102
    def settle(self, folder: str) -> None: ...  # noqa: D102
    def renew(self) -> None: ...  # noqa: D102


def files_at(url: str, options: Mapping[str, Any] | None = None) -> Files:
    """Return the place that `url` names: a local path, or any URL that fsspec can open.

    `options` goes to the file system of the URL.

    Raises:
        CheckpointError: the URL's kind is unknown, or the package for it is missing.
        OSError: it cannot be reached.
    """
    if not url or ("::" in url and "://" not in url):
        raise CheckpointError(f"{url!r} is no place for checkpoints: give a path or a URL")
    if "://" not in url:
        if options:
            raise CheckpointError(f"{url!r} is a local path and takes no storage_options")
        return LocalFiles(os.path.abspath(os.path.expanduser(url)))
    fs, root = _opened(url, dict(options or {}))
    if isinstance(fs, LocalFileSystem):
        return LocalFiles(root)
    return RemoteFiles(fs, root, lambda: _opened(url, dict(options or {}))[0])


def _opened(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Return an instance of our own, that shares no listing with others, and the path in it."""
    try:
        with _os_errors():
            try:
                return _url_to_fs(url, use_listings_cache=False, **options)
            except TypeError:  # sftp hands what it is given to a client that knows no such thing
                return _url_to_fs(url, **options)
    except OSError as error:
        cause = error.__cause__ or error
        if isinstance(cause, ImportError):
            raise CheckpointError(
                f"{url} needs a package that is not installed: {cause}"
            ) from error
        if isinstance(cause, (ValueError, TypeError)):
            raise CheckpointError(
                f"cannot open {url}: {cause}; check the URL and its credentials"
            ) from error
        raise


def _url_to_fs(url: str, **options: Any) -> tuple[Any, str]:
    fs, root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
    return fs, str(root)


class RemoteFiles:
    """Blobs under a path of an fsspec file system: no rename, exclusive create or fsync is needed.

    Whatever a backend raises comes out as an OSError. `make` makes the file system anew, with new
    connections.
    """

    def __init__(self, fs: Any, root: str, make: Callable[[], Any]) -> None:
        self.fs = fs
        self.root = root.rstrip("/")
        self._make = make
        kinds = {fs.protocol} if isinstance(fs.protocol, str) else {*fs.protocol}
        self._folders = not kinds & BUCKETS  # making a "folder" there may make a bucket

    def renew(self) -> None:
        """Connect anew: a client whose connection was cut may never recover by itself."""
        self.fs = self._make()

    def write_new(self, name: str, write: Callable[[BinaryIO], T]) -> tuple[T, int]:
        """Write the blob `name` as one stream and return `write`'s result and the blob's size."""
        path = self._path(name)
        with _os_errors():
            self._make_folder(path)
            file = self.fs.open(path, "wb")
        if hasattr(file, "set_pipelined"):  # sftp: else each 32 KiB waits for an answer
            file.set_pipelined(True)
        try:
            result = write(_Stream(file))  # type: ignore[arg-type]  # all of BinaryIO that is used
            with _os_errors():
                file.close()
        except BaseException:
            _discard(file)
            with contextlib.suppress(Exception):
                self.fs.rm_file(path)
            raise
        return result, self.size(name)

    def put(self, name: str, data: bytes) -> None:
        """Write `data` as the blob `name` in one request where the backend can."""
        with _os_errors():
            self._make_folder(self._path(name))
            self.fs.pipe_file(self._path(name), data)

    hint = put

    def get(self, name: str) -> bytes:
        """Return the bytes of the blob `name`."""
        path = self._path(name)
        with _os_errors():
            data = self.fs.cat_file(path, start=0, end=WINDOW)  # a whole one may take two requests
            return bytes(data if len(data) < WINDOW else self.fs.cat_file(path))

    def open(self, name: str, size: int | None = None) -> BinaryIO:
        """Open the blob `name` for reading, as a file that seeks; its known size saves a request.

        That it is missing is then found when it is first read.
        """
        known = self.size(name) if size is None else size
        return io.BufferedReader(_Ranges(self.fs, self._path(name), known), WINDOW)

    def size(self, name: str) -> int:
        """Return the size of the blob `name`."""
        with _os_errors():
            self.fs.invalidate_cache()
            return int(self.fs.info(self._path(name))["size"])

    def names(self, folder: str) -> list[str]:
        """Return the names in `folder`, sorted, as they are now and not as a cache has them."""
        with _os_errors():
            self.fs.invalidate_cache()
            try:
                paths = self.fs.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
        return sorted({path.rstrip("/").rsplit("/", 1)[-1] for path in paths})

    def everything(self) -> list[str]:
        """Return the names of all blobs, sorted: one request where the backend can."""
        with _os_errors():
            self.fs.invalidate_cache()
            return sorted(path.removeprefix(f"{self.root}/") for path in self.fs.find(self.root))

    def unlink(self, name: str) -> None:
        """Remove the one blob `name`, if it is there."""
        with _os_errors(), contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))

    def remove(self, name: str) -> None:
        """Remove the blob `name`, or all blobs below it, if there are any."""
        with _os_errors(), contextlib.suppress(FileNotFoundError):
            self.fs.invalidate_cache()
            self.fs.rm(self._path(name), recursive=True)

    def settle(self, folder: str) -> None:
        """Do nothing: these backends have no write-back cache of ours to flush."""

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _make_folder(self, path: str) -> None:
        if not self._folders:
            return
        with contextlib.suppress(FileExistsError):  # another rank was faster
            self.fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)


class _Stream(io.RawIOBase):
    """A backend's file being written, whose failures are OSErrors: a reader's own differ."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        with _os_errors():
            self._file.write(data)
        return len(data)

    def tell(self) -> int:
        return int(self._file.tell())


class _Ranges(io.RawIOBase):
    """A blob that is read in ranges of its bytes, each of which must come back whole.

    A file begins and ends with small things: one request for the end brings them all.
    """

    def __init__(self, fs: Any, path: str, size: int) -> None:
        self._fs = fs
        self._path = path
        self._size = size
        self._at = 0
        self._begin = b""
        self._end = b""
        self._file: Any = None  # where the backend does not know ranges
        self._mutex = threading.Lock()
        self.parallel = PARALLEL if getattr(fs, "async_impl", False) else 1

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return a range of the blob; `parallel` threads may ask at a time."""
        return self._range(offset, offset + nbytes)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        wanted = min(len(target), self._size - self._at)
        if wanted <= 0:
            return 0
        data = self._bytes(self._at, self._at + wanted)
        target[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()

    def _bytes(self, start: int, end: int) -> bytes:
        if end <= WINDOW and self._size > 2 * WINDOW:  # the header is read twice
            self._begin = self._begin or self._range(0, WINDOW)
            return self._begin[start:end]
        tail = max(0, self._size - WINDOW)
        if start >= tail:
            self._end = self._end or self._range(tail, self._size)
            return self._end[start - tail : end - tail]
        return self._range(start, end)

    def _range(self, start: int, end: int) -> bytes:
        with _os_errors():
            data = b""
            if self._file is None and "sftp" not in self._fs.protocol:
                data = self._fs.cat_file(self._path, start=start, end=end)
            if len(data) == end - start:
                return data
            with self._mutex:
                self._file = self._file or self._fs.open(self._path, "rb")
                data = _read_at(self._file, start, end)
            if len(data) == end - start or self._fs.info(self._path)["size"] < end:
                return data  # it was cut off: that is damage, for the reader to see
        raise OSError(f"{len(data)} bytes came back for {start} to {end} of {self._path}")


def _read_at(file: Any, start: int, end: int) -> bytes:
    if hasattr(file, "readv"):  # sftp: else each 32 KiB waits for the one before
        return b"".join(file.readv([(start, end - start)], PIPELINED))
    file.seek(start)
    return bytes(file.read(end - start))


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Turn whatever a backend raises into an OSError that says whether it may pass."""
    try:
        yield
    except Exception as error:  # backends raise what they like
        found = _as_os_error(error)
        if found is error:
            raise
        raise found from error


def _as_os_error(error: Exception) -> OSError:
    """Return a refusal as a PermissionError and what is missing as a FileNotFoundError."""
    if isinstance(error, OSError) and (error.errno or type(error) is not OSError):
        return error
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(chain) < 10:
        chain.append(link)
        link = link.__cause__ or link.__context__
    codes = {_code(link) for link in chain}
    names = [type(link).__name__ for link in chain]
    if codes & REFUSED or text.startswith("OSError: Forbidden"):
        return PermissionError(errno.EACCES, text)
    if any(name.startswith(_REFUSALS) for name in names):
        return PermissionError(errno.EACCES, text)
    if 404 in codes:
        return FileNotFoundError(errno.ENOENT, text)
    if codes & NO_ROOM:
        return OSError(errno.ENOSPC, text)
    return error if isinstance(error, OSError) else OSError(text)


def _code(error: BaseException) -> int | None:
    """Return the HTTP status that an error of any backend carries."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    for name in ("status_code", "status", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return None


def _discard(file: Any) -> None:
    """Keep a stream that failed from publishing what it has when it is closed or collected."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(Exception):
        file.closed = True
