"""Which checkpoints stay: a policy over their commit records, so that it survives any resume."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from statetrain.errors import CheckpointError
from statetrain.persist.record import Record

__all__ = ["Keep"]

MODES = ("min", "max")
METRIC = "metric:"  # the tag of a record that holds a metric's value


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Say which checkpoints stay; those of one rule stay whatever the others say.

    In any case the newest two stay, the one that the run went on from, and pinned ones.

    Attributes:
        last: how many of the newest stay.
        steps: of every so many optimizer steps, the first checkpoint stays for good.
        best: how many stay of those whose `metric` was best.
        metric: a logged name, such as `"val_loss"`. It counts for a checkpoint that is saved at the
            step at which it was logged: a save later in training has other weights.
        mode: `"min"` if small values of the metric are better, or `"max"`.

    Raises:
        CheckpointError: one of these has no meaning.
    """

    last: int = 2
    steps: int | None = None
    best: int = 0
    metric: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        _check_whole("keep", self.last, 1)
        _check_whole("best", self.best, 0)
        if self.steps is not None:
            _check_whole("steps", self.steps, 1)
        if self.mode not in MODES:
            raise CheckpointError(f'Keep(mode={self.mode!r}): give "min" or "max"')
        if (self.best > 0) != (self.metric is not None):
            raise CheckpointError("give best and metric together, as in Keep(best=3, metric=...)")

    def __str__(self) -> str:
        rules = [f"the newest {self.last}"]
        rules += [f"one of every {self.steps} steps"] if self.steps is not None else []
        rules += [f"the best {self.best} by {self.metric} ({self.mode})"] if self.best else []
        return ", ".join(rules)

    def chosen(self, whole: Sequence[Record]) -> set[str]:
        """Return the ids of those that stay of `whole`, the newest first."""
        kept = [*whole[: self.last], *self._first_of_steps(whole), *self._best(whole)]
        return {record.id for record in kept}

    def _first_of_steps(self, whole: Sequence[Record]) -> Iterable[Record]:
        if self.steps is None:
            return ()
        first: dict[int, Record] = {}
        for record in whole:  # the oldest comes last
            first[record.step // self.steps] = record
        return (record for interval, record in first.items() if interval > 0)

    def _best(self, whole: Sequence[Record]) -> Iterable[Record]:
        sign = -1.0 if self.mode == "max" else 1.0
        ranked = [
            (sign * value, record)
            for record in whole
            if (value := metrics_in(record.tags).get(self.metric or "")) is not None
        ]
        ranked.sort(key=lambda each: each[0])  # the newer first where they are the same
        return (record for _, record in ranked[: self.best])


def metric_tags(metrics: dict[str, float]) -> tuple[str, ...]:
    """Return the tags of a record that hold these values; what is not finite is left out."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return tuple(f"{METRIC}{name}={value!r}" for name, value in finite.items())


def metrics_in(tags: Collection[str]) -> dict[str, float]:
    """Return the values that the tags of a record hold."""
    found = {}
    for tag in tags:
        name, _, value = tag.removeprefix(METRIC).rpartition("=")
        if tag.startswith(METRIC):
            found[name] = float(value)
    return found


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CheckpointError(f"{name}={value!r}: give a whole number from {least}")
