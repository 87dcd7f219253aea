"""Where a run is, how fast it goes and how long it will take, read from its plain fields.

Nothing here waits for a device, and any thread may look: a torn reading is right a moment later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from statetrain.data.loader import Loader
from statetrain.run import Run

__all__ = ["Count", "Look", "Pace", "in_words"]

METRICS = 8  # how many are shown at most


class Count(NamedTuple):
    """Batches done of an epoch or a validation; `total` is None where it is unknown."""

    done: int
    total: int | None


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a run's fields said at one moment."""

    epoch: int | None  # from 1; None where the loop has no epochs
    epochs: int | None
    batch: Count | None
    validation: Count | None  # while the run validates
    step: int
    state: str
    loss: float | None
    numbers: dict[str, float]


@dataclass(kw_only=True)
class Pace:
    """Where a run is, how fast it has been since `begin`, and how long it will take."""

    run: Run
    clock: Callable[[], float]
    epochs: bool  # whether the loop has epochs
    _totals: dict[int, int | None] = field(default_factory=dict)
    _began: float = 0.0
    _batches: int | None = None
    _steps: int = 0

    def begin(self) -> None:
        """Count from here. Lengths are asked for once: a sampler's may take long to compute."""
        run, main = self.run, self.loader
        for loader, name in (
            (main, "train_limit"), (main, "limit"), (getattr(run, "val_loader", None), "val_limit")
        ):  # fmt: skip
            if isinstance(loader, Loader):
                found = (self._totals.get(id(loader), loader.length), getattr(run, name, None))
                self._totals[id(loader)] = min((n for n in found if type(n) is int), default=None)
        self._began, self._batches, self._steps = self.clock(), self.batches, run.step

    def look(self) -> Look:
        """Read the fields."""
        run = self.run
        newest = list(dict(run.metrics).items())[-METRICS:]  # the run may log meanwhile
        found = {name: _number(value) for name, value in newest}
        validating = run.state.startswith("validation")
        return Look(
            epoch=self.epoch,
            epochs=run.limits.max_epochs,
            batch=self._count(self.loader),
            validation=self._count(getattr(run, "val_loader", None)) if validating else None,
            step=run.step,
            state=run.state,
            loss=_number(getattr(run, "loss", None)),
            numbers={name: value for name, value in found.items() if value is not None},
        )

    @property
    def loader(self) -> Loader | None:
        """The loader that is trained on: `run.train_loader`, or the run's first one."""
        fields = dict(vars(self.run))
        found = (fields.get("train_loader"), *fields.values())
        return next((each for each in found if isinstance(each, Loader)), None)

    @property
    def epoch(self) -> int | None:
        """The running epoch from 1; without a loader, the run's own number.

        A loop may raise `run.epoch` when an epoch is over: until its loader starts the next one,
        it is the number of the one that is over.
        """
        if not self.epochs:
            return None
        run, loader = self.run, self.loader
        counted = loader is None or run.epoch == loader.epoch + 1
        number = run.epoch if counted else run.epoch + 1
        return min(number, run.limits.max_epochs or number)

    @property
    def batches(self) -> int | None:
        """Batches done in all epochs, where the length of one is known."""
        loader = self.loader
        total = self._totals.get(id(loader))
        return None if loader is None or total is None else loader.epoch * total + loader.position

    def rate(self) -> str:
        """Return batches a second in words, or steps where an epoch's length is unknown."""
        if self.batches is None:
            rate, one, many = self._step_speed(), "step", "steps"
        else:
            rate, one, many = self._batch_speed(), "batch", "batches"
        if not rate:
            return ""
        if rate < 1:
            return f"{1 / rate:#.3g} s/{one}"
        return f"{in_words(rate)} {many}/s"

    def taken(self) -> str:
        """Return the time since `begin`."""
        return f"in {_clock_time(self.clock() - self._began)}"

    def left(self) -> str:
        """Return the time until the first of the limits, or nothing where it is unknown."""
        seconds = self.seconds_left()
        return "" if seconds is None else f"{_clock_time(seconds)} left"

    def seconds_left(self) -> float | None:
        """Return the seconds until the first of the limits is reached, as far as can be known."""
        run, limits, batches = self.run, self.run.limits, self.batches
        epochs, total = limits.max_epochs if self.epochs else 1, self._totals.get(id(self.loader))
        batch_speed, step_speed = self._batch_speed(), self._step_speed()
        found: list[float] = []
        if epochs and total and batches is not None and batch_speed:
            found.append((epochs * total - batches) / batch_speed)
        if limits.max_steps is not None and step_speed:
            found.append((limits.max_steps - run.step) / step_speed)
        if limits.max_time is not None:
            found.append(limits.max_time - run.elapsed)
        return max(0.0, min(found)) if found else None

    def _count(self, loader: Any) -> Count | None:
        if not isinstance(loader, Loader):
            return None
        return Count(loader.position, self._totals.get(id(loader)))

    def _batch_speed(self) -> float:
        now = self.batches
        return 0.0 if now is None or self._batches is None else self._speed(now - self._batches)

    def _step_speed(self) -> float:
        return self._speed(self.run.step - self._steps)

    def _speed(self, new: int) -> float:
        seconds = self.clock() - self._began
        return max(0, new) / seconds if seconds > 0 else 0.0


def _number(value: Any) -> float | None:
    """Return a value that is there without waiting for a device, else None."""
    if isinstance(value, torch.Tensor):
        here = value.device.type == "cpu" and value.numel() == 1
        value = value.item() if here else None
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None


def in_words(value: float) -> str:
    """Return a number in three digits, a whole one in all of its own."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:#.3g}".rstrip(".")


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
