"""How far a run is: a line that renews itself in a terminal, plain lines anywhere else.

It costs a batch nothing: a thread of its own reads the run's fields a few times a second, and only
values that do not wait for a device. It knows no loop's states, except by their names.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from statetrain.callbacks import Callback, Callbacks, point
from statetrain.loop import Loop
from statetrain.pace import Count, Look, Pace, in_words
from statetrain.run import Run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

__all__ = ["Progress", "terminal"]

log = logging.getLogger("statetrain")

LINES_AT = ("epoch_end", "validation_end")  # the states after which a plain line is written
LAST = -(10**9)  # a priority: after all other callbacks, so that what they log is there
SILENCE = 60.0  # seconds after which a plain line is written in any state
SECONDS_A_LOOK = 1.0  # how often the thread asks whether that is so
LOOKS_A_SECOND = 4  # how often the line in a terminal is renewed
THE_LOSS = ("loss", "train_loss")  # metrics that say again what run.loss says
BAR = 16  # columns
PROXIED = "rich_proxied_file"  # what rich calls the stream behind its own


class Progress:
    """Show how far `run` is while the `with` block runs; enter it where the run goes on.

    In a terminal one line shows the epoch, the batch, the step, the loss, the newest metrics, the
    rate, the time left under the trainer's limits, and the state. Elsewhere `attach` lets a plain
    line be written after each epoch and validation; without news there is one a minute. The rate
    counts what was done in the block, so a resumed run does not look faster than it is. A failure
    of the display ends the display, never the training.

    Args:
        run: what to look at. Without a `Loader` it shows its epoch, step, metrics and state.
        loop: the loop that it goes through.
        stream: where to write; by default `sys.stderr` as it is now.
        live: whether the stream is a terminal; None asks it.
        clock: seconds from any beginning.
    """

    def __init__(
        self,
        run: Run,
        loop: Loop,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.stream = sys.stderr if stream is None else stream
        self.console = terminal(self.stream, live=live)
        self.failed = self._over = False
        plain = self.console is None or self.console.options.ascii_only
        self._marks = "#-" if plain else "━─"
        self._pace = Pace(run=run, clock=clock, epochs=any("epoch" in s for s in loop.names))
        self._state_width = max(map(len, loop.names))
        self._lock = threading.Lock()
        self._written_at = 0.0
        self._written: object = None
        self._live: Live | None = None
        self._exit = ExitStack()

    def attach(self, callbacks: Callbacks) -> list[Callback]:
        """Write plain lines in `LINES_AT`, those of them that the loop has; none if live."""
        if self.console is not None:
            return []
        places = [point(name, priority=LAST) for name in LINES_AT]
        return [callbacks.attach(self.line, where) for where in places if callbacks.has(where)]

    def __enter__(self) -> Progress:
        self._pace.begin()
        self._written_at = self._pace.clock()
        with ExitStack() as opened:
            if self.console is None:
                self._watch(opened)
            else:
                self._draw(self.console, opened)
            self._exit = opened.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over = True
        try:
            self._exit.close()
        except (OSError, ValueError) as error:  # the terminal is gone
            self._fail(error)

    def line(self, _run: object = None) -> None:
        """Write a plain line, unless it would say what the newest one says."""
        try:
            with self._lock:
                self._write(self._pace.look())
        except Exception as error:  # noqa: BLE001 - a display must not end a training
            self._fail(error)

    def tick(self) -> None:
        """Write a plain line if there was none for a minute; the thread calls this."""
        if self._pace.clock() - self._written_at >= SILENCE:
            self.line()

    def refresh(self) -> None:
        """Renew the line in the terminal now; the thread calls this too."""
        if self._live is not None:
            self._live.refresh()

    def text(self, width: int) -> Text:
        """Return the line for so many columns: what matters least is left out."""
        from rich.text import Text

        look = self._pace.look()
        numbers = look.numbers
        if look.loss is not None:
            numbers = {n: value for n, value in numbers.items() if n not in THE_LOSS}
        parts = [
            *_position(look, look.validation),
            _Part(_bar(look.validation or look.batch, self._marks), 1, "cyan"),
            _Part(f"step {look.step}", 7),
            _Part("" if look.loss is None else f"loss {in_words(look.loss)}", 6),
            *(_Part(f"{name} {in_words(value)}", 2) for name, value in numbers.items()),
            _Part(self._pace.rate(), 4),
            _Part(self._pace.taken() if self._over else self._pace.left(), 5),
            _Part(f"{look.state:{self._state_width}}", 3, "dim"),
        ]
        words = [Text(part.text, part.style) for part in _fitting(parts, width)]
        line = Text("  ").join(words)
        line.no_wrap, line.overflow = True, "ellipsis"
        return line

    def _write(self, look: Look) -> None:
        numbers = look.numbers or ({} if look.loss is None else {"loss": look.loss})
        says = (look.epoch, look.step, numbers)
        if self.failed or says == self._written:
            return
        if look.batch is not None and look.batch.done == look.batch.total:
            look = replace(look, batch=None)  # the epoch is over
        words = [
            *(part.text for part in _position(look)),
            f"step {look.step}",
            *(f"{name} {in_words(value)}" for name, value in numbers.items()),
            self._pace.rate(),
        ]
        self.stream.write("  ".join(word for word in words if word) + "\n")
        self.stream.flush()
        self._written, self._written_at = says, self._pace.clock()

    def _watch(self, opened: ExitStack) -> None:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(SECONDS_A_LOOK) and not self.failed:
                self.tick()

        thread = threading.Thread(target=watch, name="statetrain progress", daemon=True)
        thread.start()
        opened.callback(thread.join, 1.0)
        opened.callback(over.set)

    def _draw(self, console: Console, opened: ExitStack) -> None:
        from rich.live import Live

        self._live = opened.enter_context(
            Live(
                console=console,
                refresh_per_second=LOOKS_A_SECOND,
                get_renderable=lambda: self._drawn(console),
                redirect_stdout=sys.stdout.isatty(),  # what goes to a file is to get there
            )
        )
        console.show_cursor(True)  # a SIGKILL would leave it hidden
        opened.callback(_flush)
        _free_children(self._live, _logs_above_the_line(opened))

    def _drawn(self, console: Console) -> Text | str:
        try:
            return "" if self.failed else self.text(console.width - 1)
        except Exception as error:  # noqa: BLE001 - a display must not end a training
            self._fail(error)
            return ""

    def _fail(self, error: Exception) -> None:
        if not self.failed:
            self.failed = True
            log.warning("progress is not shown any more: %r", error)


class _Part(NamedTuple):
    text: str
    keep: int  # the higher, the longer it stays where the line is too long
    style: str = ""


def _position(look: Look, validation: Count | None = None) -> list[_Part]:
    """Return the epoch, and the batch of it or of its validation."""
    parts = []
    if look.epoch is not None:
        parts.append(_Part(f"epoch {look.epoch}{_of(look.epochs)}", 9))
    for name, count in (("validation", validation), ("batch", look.batch)):
        if count is not None:
            width = len(_of(count.total)) - 1
            parts.append(_Part(f"{name} {count.done:{max(0, width)}}{_of(count.total)}", 8))
            break
    return parts


def _of(total: int | None) -> str:
    return "" if total is None else f"/{total}"


def _bar(count: Count | None, marks: str) -> str:
    if count is None or not count.total:
        return ""
    full = min(BAR, BAR * count.done // count.total)
    return marks[0] * full + marks[1] * (BAR - full)


def _fitting(parts: list[_Part], width: int) -> list[_Part]:
    """Leave out the least important parts, the last of them first, until the rest fits."""
    kept = [part for part in parts if part.text]
    while len(kept) > 1 and sum(len(part.text) + 2 for part in kept) - 2 > width:
        least = min(reversed(kept), key=lambda part: part.keep)
        kept = [part for part in kept if part is not least]
    return kept


def terminal(stream: TextIO, *, live: bool | None) -> Console | None:
    """Return rich's console on a terminal where nobody else draws, else None."""
    if live is False or (live is None and not stream.isatty()) or hasattr(stream, PROXIED):
        return None
    before = random.getstate()
    from rich.console import Console

    random.setstate(before)  # rich draws a number when it is imported
    console = Console(file=stream, force_terminal=live)
    return None if console.is_dumb_terminal else console


Moved = list[tuple["logging.StreamHandler[Any]", TextIO]]


def _logs_above_the_line(opened: ExitStack) -> Moved:
    """Let log handlers that write to the terminal write through rich, as `print` does."""
    moved: Moved = []
    for proxy in (sys.stdout, sys.stderr):
        stream = getattr(proxy, PROXIED, None)
        for handler in (*logging.getLogger().handlers, *log.handlers):
            if isinstance(handler, logging.StreamHandler) and stream is handler.stream is not None:
                handler.setStream(proxy)
                opened.callback(handler.setStream, stream)
                moved.append((handler, stream))
    return moved


def _flush() -> None:
    sys.stdout.flush()  # rich drops an unfinished line when it ends
    sys.stderr.flush()


def _free_children(live: Live, moved: Moved) -> None:
    """Give forked children, such as loader workers, the bare streams: rich's lock may be held."""
    known = weakref.ref(live)

    def free() -> None:
        mine = known()
        if mine is None or not mine.is_started:
            return
        for name in ("stdout", "stderr"):
            setattr(sys, name, getattr(getattr(sys, name), PROXIED, getattr(sys, name)))
        for handler, stream in moved:
            handler.stream = stream

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=free)
