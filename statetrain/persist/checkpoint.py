"""Checkpoints of a run: when to save, what a snapshot holds, and whether it fits this run."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, BinaryIO

import torch

from statetrain.errors import CheckpointError
from statetrain.loop import Loop, nearest
from statetrain.persist import container
from statetrain.persist.compare import unequal
from statetrain.persist.keep import Keep, metric_tags
from statetrain.persist.mirror import Mirrored
from statetrain.persist.parts import Part
from statetrain.persist.record import Record
from statetrain.persist.registry import register
from statetrain.persist.snapshot import differences
from statetrain.persist.store import Store
from statetrain.persist.writer import Write, Writer
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
    loggers: dict[str, Any]
    attributes: dict[str, Any]
    loop: dict[str, Any]
    options: dict[str, Any]
    limits: dict[str, Any]
    numerics: dict[str, Any]
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
        keep: how many of the newest checkpoints stay, or a `Keep` that says more.
        signals: names of the signals that save, leave, and end the process with exit code 75.
        mirror: a second place, such as a bucket behind a local disk: saves go to `url`, and are
            copied there meanwhile. A run goes on from the newer of both.
        storage_options: what fsspec needs for the file system of `mirror`, or of `url` without one.
        asynchronous: copy the state into memory and write it while training goes on, for the price
            of that memory: the size of a checkpoint once more, from the first save to the end of
            `fit`. False writes while training waits, and needs none. What is saved is the same.
        busy: what a periodic save does while an earlier one is still being written: `"wait"` for
            it, or `"skip"` and leave it to the next interval. All other saves wait.
        on_error: a save that fails, other than the last one of `fit`, ends training with the error
            (`"raise"`; that of an asynchronous one at the next transition) or is logged (`"warn"`).
        grace: how many seconds lie between a signal and the kill, as the cluster has it. Where they
            do not suffice for the save in flight and one of the newest state, the first is dropped;
            where they do not suffice for the newest, the one in flight is finished. None: they do.

    Attributes:
        time_to_save: how many seconds the last save took until it was there; None before the first.

    Raises:
        CheckpointError: one of these has no meaning, or the URL cannot be opened.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        every: str | Collection[str] | None = ("10 min", "1 epoch"),
        at: str | Collection[str] | None = None,
        keep: int | Keep = 2,
        signals: Collection[str] = SIGNALS,
        mirror: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        asynchronous: bool = True,
        busy: str = "wait",
        on_error: str = "raise",
        grace: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, given, known in (
            ("asynchronous", asynchronous, (True, False)),
            ("busy", busy, ("wait", "skip")),
            ("on_error", on_error, ("raise", "warn")),
        ):
            if given not in known:
                raise CheckpointError(f"{name}={given!r}: give {known[0]!r} or {known[1]!r}")
        if grace is not None and (isinstance(grace, bool) or not grace > 0):
            raise CheckpointError(
                f"grace={grace!r}: give the seconds between a signal and the kill"
            )
        self.store: Store | Mirrored = _store(url, mirror, storage_options)
        self._options = None if mirror is not None else storage_options
        self.keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self.at = frozenset((at,) if isinstance(at, str) else at or ())
        self.signals = tuple(_signal(name) for name in signals)
        self._seconds, self._steps, self._epochs = _intervals(every)
        self.asynchronous = asynchronous
        self.busy = busy
        self.on_error = on_error
        self.grace = grace
        self.time_to_save: float | None = None
        self._writer = Writer(self._look)
        self._clock = clock
        self._missed = False  # whether it was said that the metric of `keep` is not there
        self._next_step: float = inf
        self._next_epoch: float = inf
        self._next_time: float = inf

    @property
    def url(self) -> str:
        """Where the checkpoints are."""
        return self.store.url

    def beside(self, name: str) -> Checkpoints:
        """Return the same policy for another run, at `url/name`, in any state."""
        made = Checkpoints(
            f"{self.url.rstrip('/')}/{name}",
            every=None,
            keep=self.keep,
            storage_options=self._options,
        )
        made.signals, made.asynchronous = self.signals, self.asynchronous
        made.busy, made.on_error, made.grace = self.busy, self.on_error, self.grace
        made._seconds, made._clock = self._seconds, self._clock
        return made

    def check(self, loop: Loop) -> None:
        """Raise a `CheckpointError` if `at` names a state that the loop does not have."""
        for name in self.at - set(loop.names):
            raise CheckpointError(
                f"Checkpoints(at={name!r}): no such state{nearest(name, loop.names)}"
            )

    def begin(self, run: Run) -> None:
        """Count the intervals from here: multiples of steps and of epochs, and seconds."""
        ended = run.epoch + (run.state == "epoch_end")
        self._next_step = _multiple(self._steps, run.step)
        self._next_epoch = _multiple(self._epochs, ended)
        self._next_time = inf if self._seconds is None else self._clock() + self._seconds
        if self._writer.error is not None:  # it came while this was counted
            self._look()

    def due(self, run: Run) -> bool:
        """Whether something was asked for, or a periodic save is due; asked in each state.

        In `epoch_end` the running epoch counts as ended.
        """
        return (
            run.request is not None
            or run.step >= self._next_step
            or run.epoch >= self._next_epoch
            or (self._next_time != inf and self._clock() >= self._next_time)
            or (run.state == "epoch_end" and run.epoch + 1 >= self._next_epoch)
        )

    def chosen(self, state: str) -> bool:
        """Whether periodic saves are made in `state`."""
        return not self.at or state in self.at

    def settle(self, run: Run) -> None:
        """Raise, or log, why the save that was being written has failed; else do nothing."""
        error = self._writer.take_error()
        if error is None:
            return
        self.begin(run)
        if self.on_error == "raise" or not isinstance(error, CheckpointError):
            raise error
        log.warning("a checkpoint was not saved: %s", error)

    def skips(self, run: Run) -> bool:
        """Whether a periodic save is left out because an earlier one is still being written."""
        if self.busy == "wait" or not self._writer.busy:
            return False
        self.begin(run)
        log.info("no checkpoint at step %d: the last one is still being written", run.step)
        return True

    def save(
        self,
        run: Run,
        snapshot: Snapshot,
        state: str,
        *,
        last: bool = False,
        left: float | None = None,
    ) -> None:
        """Store `snapshot` as it is now, and remove what `keep` does not keep.

        It may still be being written on return, except the `last` one. An earlier one is finished
        first. `left` are the seconds until the process is killed; see `grace`.

        Raises:
            CheckpointError: it could not be stored; what was stored before is untouched.
        """
        if left is not None and self._is_too_late(left):
            return
        self._writer.wait()
        if not last:
            self.settle(run)
        elif (error := self._writer.take_error()) is not None:
            log.warning("a checkpoint was not saved: %s; this one follows", error)
        self.begin(run)
        store = partial(
            self._store,
            step=run.step,
            state=state,
            tags=self._tags(run),
            pin=run.pin,
            began=time.perf_counter(),
        )
        run.pin = None
        try:
            if last or not self.asynchronous or not self._started(snapshot, store):
                store(lambda file: container.write(snapshot, file))
        except CheckpointError as error:
            if last or self.on_error == "raise":
                raise
            log.warning("a checkpoint was not saved: %s", error)

    def _is_too_late(self, left: float) -> bool:
        """Whether only the save in flight was still possible; drop it where it is in the way."""
        takes = self.time_to_save
        if takes is None or not self._writer.busy:
            return False
        rest = max(0.0, takes - self._writer.age)
        if rest + takes <= left:
            return False
        if takes <= left:
            log.warning("%.1f s are left: the save in flight is dropped for a newer one", left)
            self._writer.drop()
            return False
        log.warning(
            "%.1f s are left and a save takes %.1f s: the one in flight is the last", left, takes
        )
        self._writer.wait()
        return self._writer.error is None

    def close(self, *, at_once: bool = False) -> None:
        """Finish what is being written, or stop it if it is to end `at_once`; log if it failed."""
        self._writer.close(at_once=at_once)
        self.store.close(at_once=at_once)
        error = self._writer.take_error()
        if error is not None:
            log.error("a checkpoint was not saved: %s", error)

    def _look(self) -> None:
        """Make the run look at once at what the writer has met; called in the writer's thread."""
        self._next_step = -inf

    def _started(self, snapshot: Snapshot, store: Callable[[Write], None]) -> bool:
        try:
            self._writer.start(snapshot, store)
        except (OSError, MemoryError, RuntimeError) as error:
            log.warning("no memory to save asynchronously (%r): training waits for it", error)
            self.asynchronous = False
        return self.asynchronous

    def _tags(self, run: Run) -> tuple[str, ...]:
        """Return the metric that `keep` goes by, if it was logged at this step."""
        name = self.keep.metric
        if name is None:
            return ()
        if name not in run.metrics and run.metrics and not self._missed:
            self._missed = True
            log.warning(
                "Keep(metric=%r): nothing is logged as that%s", name, nearest(name, run.metrics)
            )
        now = run.logged.get(name) == run.step
        return metric_tags({name: float(run.metrics[name])}) if now else ()

    def _store(
        self,
        write: Write,
        *,
        step: int,
        state: str,
        tags: tuple[str, ...],
        pin: str | None,
        began: float,
    ) -> None:
        versions = {"torch": str(torch.__version__)}
        record = self.store.save(
            write, step=step, state=state, tags=tags, pin=pin, versions=versions
        )
        self.time_to_save = time.perf_counter() - began
        log.info("saved %s in state %r at %s", record.id, state, self.url)
        try:
            self.store.retain(self.keep.chosen)
        except CheckpointError as error:  # the save is made: training goes on
            log.warning("%s; older checkpoints stay", error)

    def newest(self) -> tuple[Record, Snapshot] | None:
        """Return the newest checkpoint that is whole; None if there is none at all.

        Raises:
            CheckpointError: there are checkpoints, but none is whole, or they cannot be read.
        """
        return self.store.newest(read)


def _store(
    url: str | os.PathLike[str],
    mirror: str | os.PathLike[str] | None,
    options: Mapping[str, Any] | None,
) -> Store | Mirrored:
    if mirror is None:
        return Store(url, storage_options=options)
    first = Store(url)
    second = Store(mirror, storage_options=options, uid=first.uid)
    if first.url.rstrip("/") == second.url.rstrip("/"):
        raise CheckpointError(f"mirror={second.url!r} is the place itself: name another")
    return Mirrored(first, second)


def _multiple(interval: int | None, now: int) -> float:
    return inf if interval is None else (now // interval + 1) * interval


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
