"""Signals become a flag: a handler notes that one came, and nothing else."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

__all__ = ["Signals"]

log = logging.getLogger("statetrain")


class Signals:
    """Note signals while the `with` block runs; `received` is the first of them.

    It came at `received_at`. Then `asked` is called, which may set another flag. Handlers that were
    there before are called too, and are put back at the end. Where a signal came and there was
    none, it is ignored from then on: it would kill a process that has saved and is on its way out.
    A second Ctrl-C raises `KeyboardInterrupt` at once. Outside the main thread, where Python allows
    no handlers, nothing is noted.
    """

    def __init__(
        self, watched: Iterable[signal.Signals], asked: Callable[[], None] | None = None
    ) -> None:
        self.watched = tuple(watched)
        self._asked = asked
        self.received: signal.Signals | None = None
        self.received_at = 0.0  # of time.monotonic()
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in self.watched:
                self._before[number] = signal.signal(number, self._note)
        elif self.watched:
            log.warning("fit runs outside the main thread: signals do not save the run")
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            leaving = self.received is not None and handler in (None, signal.SIG_DFL)
            signal.signal(number, signal.SIG_IGN if leaving else handler or signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number)
            self.received_at = time.monotonic()
            if self._asked is not None:
                self._asked()
        before = self._before.get(signal.Signals(number))
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
