"""What a loop costs a batch: raw loops, statetrain and others on a job that is nearly nothing.

    python bench/overhead.py [--json FILE] [--quick]

`tiny.py` has the job and says what is timed; `peers.py` has the others, which take part where they
are installed.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterator
from typing import Any

from compare import Table, against, compare, main
from peers import peers
from tiny import Job, Train, contender, raw, raw_alike

import statetrain as st

PLACES = ("backward", "batch_start", "forward", "step", "zero_grad", "pass_end", "batch_end")


def statetrain(*, callbacks: int = 0, **settings: Any) -> Train:
    """Return training with so many callbacks that do nothing, at each place of a batch in turn."""

    def train(batches: list[Any]) -> None:
        trainer = st.Trainer(max_epochs=1, loggers=[], progress=False, **settings)
        for number, place in zip(range(callbacks), itertools.cycle(PLACES), strict=False):
            trainer.on(place, name=f"nothing {number}")(_nothing)
        trainer.fit(Job(), batches)

    return train


def saving(every: str | None) -> Train:
    """Return training with checkpoints on, none of which is due within the time measured."""

    def train(batches: list[Any]) -> None:
        with tempfile.TemporaryDirectory() as url:
            statetrain(checkpoints=st.Checkpoints(url, every=every))(batches)

    return train


OPTIONS = [
    ("1 callback", "at backward", statetrain(callbacks=1)),
    ("10 callbacks", "over the states of a batch", statetrain(callbacks=10)),
    ("100 callbacks", "over the states of a batch", statetrain(callbacks=100)),
    ("checkpoints", "every=None: none due", saving(None)),
    ("checkpoints", 'every="10 min": none due', saving("10 min")),
]


def tables(quick: bool) -> Iterator[Table]:
    """Measure against the raw loop, the raw loop that does the same, and plain statetrain."""
    logging.getLogger("statetrain").setLevel(logging.ERROR)
    rounds = 16 if quick else 160
    reference = contender("raw loop", "optimizer.zero_grad()", raw)
    alike = contender("raw loop, alike", "p.grad = None; training_step", raw_alike)
    plain = contender("statetrain", "p.grad = None; training_step, all hooks", statetrain())
    options = [contender(f"statetrain, {name}", does, train) for name, does, train in OPTIONS]
    others = [contender(*other) for other in peers()]

    for title, matches, pairs in (
        ("over a raw loop", against(reference, alike, plain), rounds),
        ("over a raw loop that does the same", against(alike, plain), rounds),
        ("over statetrain alone", against(plain, *options), rounds),
        ("others, over a raw loop", against(reference, plain, *others), rounds // 4),
    ):
        yield compare(title, matches, rounds=pairs, unit="µs a batch")


def _nothing(_run: st.SupervisedRun) -> None:
    """Do nothing."""


if __name__ == "__main__":
    main("overhead", tables)
