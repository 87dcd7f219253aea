"""`FaultFS`: a file system that fails as a test says, over memory or over a folder.

Options of the URL: `over` is "memory" or "file"; `writer` names whose operations they are, so that
two writers of one place can be told apart, and each has a view of its own.
"""

from __future__ import annotations

import errno
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem


class Torn(Exception):  # noqa: N818  # a word of the plan, and no error of its own
    """Raised by a plan to let half of the bytes arrive; `error` is what the caller sees."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Said(Exception):  # noqa: N818
    """Raised by a plan to answer in place of the file system."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer


def nothing(fs: FaultFS, operation: str, path: str) -> None:
    """Fail nowhere."""


class FaultFS(AbstractFileSystem):
    """Asks `plan(fs, operation, path)` before each operation, which may raise.

    Operations: ls, info, get, put, open rb, open wb, write, close, rm, and "done" after a put or a
    close, when it has happened but its caller does not know.
    """

    protocol = "fault"
    plan = staticmethod(nothing)

    def __init__(self, over: str = "memory", writer: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.writer = writer
        self.under = fsspec.filesystem(over, **({"auto_mkdir": True} if over == "file" else {}))

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("fault://").strip("/")

    def makedirs(self, path, exist_ok=False):
        self.under.makedirs(path, exist_ok=True)

    def ls(self, path, detail=True, **_options):
        return self._asked("ls", path, lambda: self.under.ls(path, detail=detail))

    def info(self, path, **_options):
        return self._asked("info", path, lambda: self.under.info(path))

    def cat_file(self, path, start=None, end=None, **_options):
        return self._asked("get", path, lambda: self.under.cat_file(path, start=start, end=end))

    def pipe_file(self, path, value, **_options):
        try:
            self._asked("put", path, lambda: self.under.pipe_file(path, value))
        except Torn as torn:
            self.under.pipe_file(path, value[: len(value) // 2])
            if torn.error is not None:
                raise torn.error from None
        FaultFS.plan(self, "done", path)

    def rm(self, path, recursive=False, **_options):
        found = self.under.find(path) if self.under.exists(path) else []
        if not found:
            raise FileNotFoundError(path)
        for each in found:  # one after the other, as an object store removes them
            FaultFS.plan(self, "rm", each)
            self.under.rm_file(each)
        if self.under.exists(path):
            self.under.rm(path, recursive=recursive)

    def rm_file(self, path):
        FaultFS.plan(self, "rm", path)
        self.under.rm_file(path)

    def _open(self, path, mode="rb", **_options):
        file = self._asked(f"open {mode}", path, lambda: self.under.open(path, mode))
        return _Writing(self, path, file) if mode == "wb" else file

    def _asked(self, operation, path, answer):
        try:
            FaultFS.plan(self, operation, path)
        except Said as said:
            return said.answer
        return answer()


class _Writing:
    """What is written shows at once, as it does on a local disk and over sftp."""

    def __init__(self, fs: FaultFS, path: str, file: Any) -> None:
        self.fs, self.path, self.file = fs, path, file
        self.mode = "wb"
        self.closed = False

    def write(self, data):
        try:
            FaultFS.plan(self.fs, "write", self.path)
        except Torn as torn:
            self.file.write(bytes(data)[: len(data) // 2])
            self._show()
            if torn.error is not None:
                raise torn.error from None
            return len(data)
        written = self.file.write(data)
        self._show()
        return written

    def _show(self):
        self.file.flush()

    def tell(self):
        return self.file.tell()

    def close(self):
        if not self.closed:
            FaultFS.plan(self.fs, "close", self.path)
            self.file.close()
            self.closed = True
            FaultFS.plan(self.fs, "done", self.path)

    def discard(self):
        self.file.close()


fsspec.register_implementation("fault", FaultFS, clobber=True)

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
