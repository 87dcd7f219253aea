"""Checkpoints of a run: when to save, what a snapshot holds, and whether it fits this run."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from statetrain.errors import CheckpointError
from statetrain.loop import Loop, nearest
from statetrain.persist import container
from statetrain.persist.compare import unequal
from statetrain.persist.parts import Part
from statetrain.persist.record import Record
from statetrain.persist.registry import register
from statetrain.persist.snapshot import differences
from statetrain.persist.store import Store
from statetrain.run import Run

__all__ = ["Checkpoints", "Snapshot"]

log = logging.getLogger("statetrain")

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
EVERY = re.compile(r"(\d+(?:\.\d+)?)\s*(minutes?|min|steps?|epochs?)")


@dataclass(kw_only=True)
class Snapshot:
    """What a checkpoint holds: the run's fields, and all that belongs to it beside them.

    `replay` is what the action of the state needs from before it ran, in a replay state.
    """

    run: dict[str, Any]
    static: dict[str, Any]
    random: dict[str, Any]
    callbacks: dict[str, Any]
    loggers: list[Any]
    attributes: dict[str, Any]
    loop: dict[str, Any]
    options: dict[str, Any]
    limits: dict[str, Any]
    replay: dict[str, Any] | None = None


register(Snapshot, "statetrain.Snapshot")
register(Part, "statetrain.Part")


class Checkpoints:
    """Say where a run is saved, and when.

    Args:
        url: a local path or any URL that fsspec opens. It is the identity of the run: the same
            command with the same URL goes on where the newest checkpoint was made.
        every: when to save: `"10 min"`, `"500 steps"`, `"1 epoch"`, or several of them. None saves
            when the run asks, when a signal stops it, and at the end.
        at: the states in which periodic saves are made; None: the first that comes. Naming a
            replay state lets every save and stop happen there too, for the price of a copy of
            buffers and random streams at each visit.
        keep: how many checkpoints stay, at least 1.
        signals: names of the signals that save, leave, and end the process with exit code 75.

    Raises:
        CheckpointError: one of these has no meaning, or the URL cannot be opened.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        every: str | Collection[str] | None = ("10 min", "1 epoch"),
        at: str | Collection[str] | None = None,
        keep: int = 2,
        signals: Collection[str] = SIGNALS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise CheckpointError(f"keep={keep!r}: give a whole number from 1")
        self.store = Store(url)
        self.keep = keep
        self.at = frozenset((at,) if isinstance(at, str) else at or ())
        self.signals = tuple(_signal(name) for name in signals)
        self._seconds, self._steps, self._epochs = _intervals(every)
        self._clock = clock
        self._saved_at, self._saved_step, self._saved_epochs, self._ended = clock(), 0, 0, 0

    @property
    def url(self) -> str:
        """Where the checkpoints are."""
        return self.store.url

    def beside(self, name: str) -> Checkpoints:
        """Return the same policy for another run, at `url/name`, in any state."""
        made = Checkpoints(f"{self.url.rstrip('/')}/{name}", every=None, keep=self.keep)
        made.signals = self.signals
        made._seconds, made._clock = self._seconds, self._clock
        return made

    def check(self, loop: Loop) -> None:
        """Raise a `CheckpointError` if `at` names a state that the loop does not have."""
        for name in self.at - set(loop.names):
            raise CheckpointError(
                f"Checkpoints(at={name!r}): no such state{nearest(name, loop.names)}"
            )

    def begin(self, run: Run) -> None:
        """Count the intervals from here."""
        self._saved_at, self._saved_step = self._clock(), run.step
        self._saved_epochs = self._ended = run.epoch + (run.state == "epoch_end")

    def due(self, run: Run, state: str) -> bool:
        """Whether a periodic save is due in `state`, an epoch counting as ended in `epoch_end`."""
        if state == "epoch_end":
            self._ended = run.epoch + 1
        elif run.epoch > self._ended:
            self._ended = run.epoch
        return (
            (self._steps is not None and run.step // self._steps > self._saved_step // self._steps)
            or (
                self._epochs is not None
                and self._ended // self._epochs > self._saved_epochs // self._epochs
            )
            or (self._seconds is not None and self._clock() - self._saved_at >= self._seconds)
        )

    def chosen(self, state: str) -> bool:
        """Whether periodic saves are made in `state`."""
        return not self.at or state in self.at

    def save(self, run: Run, snapshot: Snapshot, state: str) -> Record:
        """Store `snapshot`, and remove what `keep` does not keep.

        Raises:
            CheckpointError: it could not be stored; what was stored before is untouched.
        """
        record = self.store.save(
            lambda file: container.write(snapshot, file),
            step=run.step,
            state=state,
            versions={"torch": str(torch.__version__)},
        )
        self._saved_at, self._saved_step = self._clock(), run.step
        self._saved_epochs = self._ended
        try:
            self.store.prune(self.keep)
        except CheckpointError as error:  # the save is made: training goes on
            log.warning("%s; older checkpoints stay", error)
        log.info("saved %s in state %r at %s", record.id, state, self.url)
        return record

    def newest(self) -> tuple[Record, Snapshot] | None:
        """Return the newest checkpoint that is whole; None if there is none at all.

        Raises:
            CheckpointError: there are checkpoints, but none is whole, or they cannot be read.
        """
        return self.store.newest(read)


def read(file: BinaryIO) -> Snapshot:
    """Read and verify a snapshot."""
    found = container.read(file)
    if not isinstance(found, Snapshot):
        raise CheckpointError("the file holds no snapshot of a run: it was made for something else")
    return found


def graph(loop: Loop) -> dict[str, Any]:
    """Return the loop's graph as data: what a resumed run must have the same."""
    return {
        "initial": loop.initial,
        "states": [[s.name, s.replay, s.final] for s in loop.states],
        "transitions": [[e.source, e.dest, _guard_name(e.when)] for e in loop.transitions],
    }


def misfits(loop: Loop, run: Run, snapshot: Snapshot) -> list[str]:
    """Name everything in which `snapshot` does not fit the loop and the run."""
    here = graph(loop)
    found: list[str] = []
    if here["initial"] != snapshot.loop["initial"]:
        found.append(f"the loop starts in {here['initial']!r}, not {snapshot.loop['initial']!r}")
    for what in ("states", "transitions"):
        was, now = snapshot.loop[what], here[what]
        found += [
            f"{_shown(what, item)} is only in the checkpoint's loop"
            for item in was
            if item not in now
        ]
        found += [f"{_shown(what, item)} is only in this loop" for item in now if item not in was]
    if not found and here != snapshot.loop:
        found.append("transitions are declared in another order")
    return [*found, *differences(run, snapshot.run)]


def changed(what: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which settings differ between the checkpoint and this run."""
    return [
        f"{what} {name}: {was.get(name)!r} in the checkpoint, {now.get(name)!r} here"
        for name in {**was, **now}
        if unequal(was.get(name), now.get(name))
    ]


def _shown(what: str, item: list[Any]) -> str:
    if what == "states":
        marks = [word for word, there in zip(("replay", "final"), item[1:], strict=True) if there]
        return f"state {item[0]!r}" + (f" ({', '.join(marks)})" if marks else "")
    return f"transition '{item[0]} -> {item[1]}'" + (f" [{item[2]}]" if item[2] else "")


def _guard_name(guard: Any) -> str | None:
    return None if guard is None else str(getattr(guard, "__name__", type(guard).__name__))


def _intervals(every: Any) -> tuple[float | None, int | None, int | None]:
    seconds, steps, epochs = None, None, None
    several = isinstance(every, (list, tuple, set, frozenset))
    for item in () if every is None else every if several else (every,):
        match = EVERY.fullmatch(item.strip()) if isinstance(item, str) else None
        amount = float(match[1]) if match else 0
        whole = match is not None and (match[2].startswith("min") or amount == int(amount))
        if match is None or amount <= 0 or not whole:
            raise CheckpointError(f'every={item!r}: write "10 min", "500 steps" or "1 epoch"')
        if match[2].startswith("min"):
            seconds = amount * 60
        elif match[2].startswith("step"):
            steps = int(amount)
        else:
            epochs = int(amount)
    return seconds, steps, epochs


def _signal(name: str) -> signal.Signals:
    if name not in signal.Signals.__members__:
        raise CheckpointError(f"signals has {name!r}{nearest(name, signal.Signals.__members__)}")
    if name in ("SIGKILL", "SIGSTOP"):
        raise CheckpointError(f"signals has {name!r}, which no process can catch: leave it out")
    return signal.Signals[name]
