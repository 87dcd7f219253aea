"""The character GPT of `examples/chargpt.py`: statetrain against the loop one writes by hand.

    python bench/realistic.py [--json FILE] [--quick]

Both train the same model on the same data, with windows of two batches, clipped gradients and a
schedule, and take turns after each window: while one trains, the other waits, so a pair of windows
lies milliseconds apart. Where a model's tensors lie in memory makes it faster or slower for as long
as it lives, and the one made first is slower by some 15 µs; so models are made anew many times, in
either order. A pair of the table is two lives of two models, one in each order: the mean of the
medians of their windows' differences. The loop by hand against itself, in the same turns, says what
the noise is. At the example's size it is larger than what the loops differ by, so a small model is
measured first. There is no validation.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from compare import Table, clock, main, row
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Subset

import statetrain as st

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from chargpt import GPT, Settings, loaders

WARM = 10  # windows
FULL = Settings(steps=10**9)
SMALL = Settings(steps=10**9, layers=1, heads=2, width=32, block=16, batch=4)

Turn = Callable[[], object]


def by_hand(given: Settings, batches: Any) -> Iterator[None]:
    """Train, pausing after each window."""
    module = GPT(given)
    made = module.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for number, batch in enumerate(batches):
        loss = module.training_step(batch, number)["loss"]
        (loss / given.accumulate).backward()
        if number % given.accumulate == given.accumulate - 1:
            clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield


def hand_against_hand(given: Settings, batches: Any, other: Turn) -> None:
    """Train by hand, and let the other have its turn."""
    for _ in by_hand(given, batches):
        other()


def statetrain_against_hand(given: Settings, batches: Any, other: Turn) -> None:
    """Train by statetrain, and let the other have its turn when a window is over."""
    loop = st.supervised(accumulate_grad_batches=given.accumulate, gradient_clip_val=1.0)
    trainer = st.Trainer(loop, max_epochs=1, seed=0, loggers=[], progress=False)
    trainer.on("batch_end", every=given.accumulate, name="turn")(lambda _run: other())
    trainer.fit(GPT(given), batches)


MATCHES = (
    ("by hand, against itself", "optimizer.zero_grad()", hand_against_hand),
    ("statetrain", "p.grad = None; all hooks", statetrain_against_hand),
)


def life(train: Any, given: Settings, batches: Any, *, rival_first: bool) -> tuple[float, float]:
    """Return the medians, in µs a batch, of the windows by hand and of `train`'s differences."""
    rival = by_hand(given, batches)
    if rival_first:
        next(rival)
    gc.collect()
    marks = [clock()]

    def other() -> None:
        marks.append(clock())
        next(rival, None)
        marks.append(clock())

    train(given, batches, other)
    each = [(b - a) / 1000 / given.accumulate for a, b in pairwise(marks)]
    pairs = list(zip(each[1::2], each[::2], strict=False))[WARM:-1]
    return median(hand for hand, _ in pairs), median(own - hand for hand, own in pairs)


def pair(train: Any, given: Settings, batches: Any) -> tuple[float, float]:
    """Return µs a batch by hand, and by `train`."""
    lives = [life(train, given, batches, rival_first=first) for first in (False, True)]
    hand, difference = (mean(values) for values in zip(*lives, strict=True))
    return hand, hand + difference


def cut(given: Settings, windows: int) -> DataLoader[Any]:
    """Return a loader of so many windows, and some to warm up."""
    whole, _ = loaders(given)
    samples = (WARM + windows) * given.accumulate * given.batch
    return DataLoader(Subset(whole.dataset, range(samples)), given.batch, shuffle=True)


def tables(quick: bool) -> Iterator[Table]:
    """Measure a small model, and that of the example, on ready batches and on a DataLoader."""
    logging.getLogger("statetrain").setLevel(logging.ERROR)
    rounds = 3 if quick else 16
    small, full = cut(SMALL, 50 if quick else 200), cut(FULL, 8 if quick else 12)
    for title, given, batches in (
        ("one layer, width 32, ready batches", SMALL, list(small)),
        ("one layer, width 32, shuffled DataLoader", SMALL, small),
        ("three layers, width 128, ready batches", FULL, list(full)),
        ("three layers, width 128, shuffled DataLoader", FULL, full),
    ):
        found: list[list[tuple[float, float]]] = [[] for _ in MATCHES]
        for pairs, (_, _, train) in [*zip(found, MATCHES, strict=True)] * rounds:
            pairs.append(pair(train, given, batches))
        rows = [row(*match[:2], pairs) for match, pairs in zip(MATCHES, found, strict=True)]
        yield Table(title=f"character GPT, {title}", unit="µs a batch", rows=rows)


if __name__ == "__main__":
    main("realistic", tables)
