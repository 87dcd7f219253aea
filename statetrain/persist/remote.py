"""Named blobs under a URL that fsspec can open: the only importer of fsspec."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from statetrain.errors import CheckpointError
from statetrain.persist.local import LocalFiles

__all__ = ["Files", "RemoteFiles", "files_at"]

T = TypeVar("T")


class Files(Protocol):
    """What a store needs of the place where its blobs are; `LocalFiles` says what each does."""

    def write_new(self, name: str, write: Callable[[BinaryIO], T]) -> tuple[T, int]: ...  # noqa: D102
    def put(self, name: str, data: bytes) -> None: ...  # noqa: D102
    def hint(self, name: str, data: bytes) -> None: ...  # noqa: D102
    def get(self, name: str) -> bytes: ...  # noqa: D102
    def open(self, name: str) -> BinaryIO: ...  # noqa: D102
    def size(self, name: str) -> int: ...  # noqa: D102
    def names(self, folder: str) -> list[str]: ...  # noqa: D102
    def remove(self, name: str) -> None: ...  # noqa: D102
    def settle(self, folder: str) -> None: ...  # noqa: D102


def files_at(url: str) -> Files:
    """Return the place that `url` names: a local path, or any URL that fsspec can open.

    Raises:
        CheckpointError: the URL's kind is unknown, or the package for it is missing.
    """
    if not url or ("::" in url and "://" not in url):
        raise CheckpointError(f"{url!r} is no place for checkpoints: give a path or a URL")
    if "://" not in url:
        return LocalFiles(os.path.abspath(os.path.expanduser(url)))
    try:
        fs, root = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    except ImportError as error:
        raise CheckpointError(f"{url} needs a package that is not installed: {error}") from error
    except Exception as error:  # backends raise what they like
        raise CheckpointError(
            f"cannot open {url}: {error}; check the URL and its credentials"
        ) from error
    return LocalFiles(root) if isinstance(fs, LocalFileSystem) else RemoteFiles(fs, root)


class RemoteFiles:
    """Blobs under a path of an fsspec file system: no rename, exclusive create or fsync is needed.

    Whatever a backend raises comes out as an OSError.
    """

    def __init__(self, fs: Any, root: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/")

    def write_new(self, name: str, write: Callable[[BinaryIO], T]) -> tuple[T, int]:
        """Write the blob `name` as one stream and return `write`'s result and the blob's size."""
        path = self._path(name)
        with _os_errors():
            self._make_folder(path)
            file = self.fs.open(path, "wb")
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
        with _os_errors():
            return bytes(self.fs.cat_file(self._path(name)))

    def open(self, name: str) -> BinaryIO:
        """Open the blob `name` for reading, as a file that seeks."""
        with _os_errors():
            return _Stream(self.fs.open(self._path(name), "rb"))  # type: ignore[return-value]

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
        with contextlib.suppress(FileExistsError):  # another rank was faster
            self.fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)


class _Stream(io.RawIOBase):
    """A backend's file whose failures are OSErrors, so that they differ from a reader's own."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        with _os_errors():
            self._file.write(data)
        return len(data)

    def readinto(self, target: Any, /) -> int:
        with _os_errors():
            data = self._file.read(len(target))
        target[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        with _os_errors():
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed and getattr(self._file, "mode", "") == "rb":
            self._file.close()  # one that is written is closed, or discarded, by who opened it
        super().close()


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Turn whatever a backend raises into an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # backends raise what they like
        raise OSError(f"{type(error).__name__}: {error}") from error


def _discard(file: Any) -> None:
    """Keep a stream that failed from publishing what it has when it is closed or collected."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(Exception):
        file.closed = True
