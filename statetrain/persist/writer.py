"""A save that is written in a thread while training goes on: one at a time."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import BinaryIO

from statetrain.errors import CheckpointError
from statetrain.persist.arena import Arena
from statetrain.persist.layout import Segment

__all__ = ["Write", "Writer"]

Write = Callable[[BinaryIO], Segment]


class Writer:
    """Copy a tree at once, and write it meanwhile.

    The thread lives as long as a save. An interpreter that ends waits for it; a forked process has
    none. `failed` is called in the thread when a save has failed, after `error` says why.
    """

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._arena = Arena()
        self.error: BaseException | None = None
        self._stopped = False
        self._began = 0.0
        self._done = threading.Event()
        self._done.set()
        _writers.add(self)

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return not self._done.is_set()

    @property
    def age(self) -> float:
        """For how many seconds the save in flight, or the last one, has been written."""
        return time.perf_counter() - self._began

    def start(self, tree: object, save: Callable[[Write], object]) -> None:
        """Copy `tree`, and let `save(write)` store it in a thread; wait for an earlier save first.

        Raises:
            CheckpointError: something in the tree cannot be stored.
            OSError, MemoryError, RuntimeError: there is no memory for a copy.
        """
        self.wait()
        self._began = time.perf_counter()
        image = self._arena.take(tree)

        def write(file: BinaryIO) -> Segment:
            return image.write(file, check=self._check)

        self._stopped = False
        self._done.clear()
        thread = threading.Thread(target=self._work, args=(save, write), name="statetrain-writer")
        try:
            thread.start()
        except BaseException:
            self._done.set()
            raise

    def wait(self) -> None:
        """Wait for the save in flight; a second Ctrl-C stops it and leaves at once."""
        try:
            self._done.wait()
        except BaseException:
            self._stopped = True
            raise

    def drop(self) -> None:
        """Stop the save in flight, and wait until it has stopped."""
        self._stopped = True
        self.wait()
        self.error = None

    def take_error(self) -> BaseException | None:
        """Return why the last save has failed, once."""
        error, self.error = self.error, None
        return error

    def close(self, *, at_once: bool = False) -> None:
        """Wait for the save in flight and give the memory back; `at_once` stops it instead."""
        if at_once:
            self._stopped = True
            self._done.wait(1.0)  # for the slice in hand
        else:
            self.wait()
        if not self.busy:
            self._arena.release()

    def _work(self, save: Callable[[Write], object], write: Write) -> None:
        try:
            save(write)
        except BaseException as error:  # noqa: BLE001  # it is raised in the main thread
            self.error = error
            self._failed()
        finally:
            self._done.set()

    def _check(self) -> None:
        if self._stopped:
            raise CheckpointError("the save was stopped before it was whole")

    def _forget(self) -> None:
        self._done = threading.Event()
        self._done.set()
        self.error = None
        self._arena = Arena()


def _forget_in_child() -> None:
    """Leave a forked process, such as a loader's worker, without the save that it has not begun."""
    for writer in list(_writers):
        writer._forget()  # noqa: SLF001 - both are this file's


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
