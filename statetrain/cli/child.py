"""A process that stands for this one: signals that come here are passed on to it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Child"]

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
TYPED = ("SIGINT", "SIGQUIT")  # what a terminal sends to every process in its foreground
LOOK_UP = 0.5  # seconds


class Child:
    """Run commands one after another; `told` names the first signal that came to this process.

    A signal that is ignored here, as SIGHUP is under nohup, stays ignored in both. A Ctrl-C in a
    terminal reaches the child by itself, and is not passed on: two would interrupt it at once.
    """

    def __init__(self) -> None:
        self.told: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Child:
        if threading.current_thread() is threading.main_thread():  # no other may have handlers
            for name in PASSED_ON:
                number = getattr(signal, name, None)  # some systems lack some
                if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def run(self, command: Sequence[str]) -> int:
        """Run `command` to its end and return its exit code, 128 + n if signal n ended it."""
        with subprocess.Popen(command) as process:  # noqa: S603  running it is what was asked for
            self._process = process
            while self._waiting:  # what came while it was being started
                process.send_signal(self._waiting.pop(0))
            code = _ended(process)
            self._process = None
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        received = signal.Signals(number)
        self.told = self.told or received.name
        if received.name in TYPED and _in_foreground():
            return
        if self._process is None:
            self._waiting.append(received)
        else:
            self._process.send_signal(received)  # it does nothing once the process is over


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end, and let handlers run: only the main thread runs them.

    Where two signals come at once, the system may hand the second to another thread, which does
    not wake this one: so it looks up once in a while.
    """
    waiter = threading.Thread(target=process.wait, daemon=True)
    waiter.start()
    while waiter.is_alive():
        waiter.join(LOOK_UP)
    return process.wait()


def _in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDWR)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
