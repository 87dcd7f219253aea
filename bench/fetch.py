"""What a batch costs to load: `st.resumable(loader)` against the `DataLoader` it reads.

    python bench/fetch.py [--json FILE] [--quick]

A run reads 200 batches of 64 from the middle of an epoch. Ready batches are read against a plain
`for`. At the end a tiny job trains on a TensorDataset, by hand and by statetrain, loading included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from compare import Contender, Table, against, clock, compare, main
from tiny import Job
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import statetrain as st

BATCH, WARM, BATCHES = 64, 20, 200
SAMPLES = BATCH * (WARM + BATCHES + 1)
UNIT = "µs a batch"


class Rows(Dataset[Tensor]):
    """Rows of a matrix, one at a time."""

    rows = torch.randn(SAMPLES, 32)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Augmented(Rows):
    """Rows with noise: it draws random numbers."""

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + torch.randn(32)


class AtOnce(Rows):
    """Rows, a batch of them at a time."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        """Return a batch's rows."""
        return list(self.rows[indices])


def saying_so(dataset: Dataset[Any]) -> Dataset[Any]:
    """Let a dataset say that it draws nothing."""
    dataset.deterministic = True
    return dataset


TENSORS = TensorDataset(Rows.rows, torch.randn(SAMPLES, 1))
DATASETS: dict[str, Dataset[Any]] = {
    "TensorDataset": TENSORS,
    "draws random numbers": Augmented(),
    "may draw": Rows(),
    "deterministic = True": saying_so(Rows()),
    "may draw, __getitems__": AtOnce(),
    "deterministic = True, __getitems__": saying_so(AtOnce()),
}


def reading(name: str, does: str, loader: Any) -> Contender:
    """Measure reading from a loader."""

    def measure() -> float:
        batches = iter(loader)
        for _ in islice(batches, WARM):
            pass
        start = clock()
        for _ in islice(batches, BATCHES):
            pass
        passed = clock() - start
        for _ in batches:  # the next run begins an epoch
            pass
        return passed / 1000 / BATCHES

    return Contender(name=name, does=does, measure=measure)


class Timed(Job):
    """The tiny job, with a clock."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_nb: int, *_: int) -> Tensor:
        """Return the mean squared error."""
        if batch_nb == WARM:
            self.began = clock()
        elif batch_nb == WARM + BATCHES:
            self.took = (clock() - self.began) / 1000 / BATCHES
        return super().training_step(batch, batch_nb)


def training(name: str, does: str, train: Callable[[Timed, Any], object]) -> Contender:
    """Measure training on a shuffled TensorDataset."""

    def measure() -> float:
        job = Timed()
        train(job, DataLoader(TENSORS, batch_size=BATCH, shuffle=True))
        return job.took

    return Contender(name=name, does=does, measure=measure)


def by_hand(job: Timed, loader: Any) -> None:
    """Train as people write it."""
    optimizer = job.configure_optimizers()
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = job.training_step(batch, number)
        loss.backward()
        optimizer.step()


def by_statetrain(job: Timed, loader: Any) -> None:
    """Train one epoch."""
    st.Trainer(max_epochs=1, seed=0, loggers=[], progress=False).fit(job, loader)


def tables(quick: bool) -> Iterator[Table]:
    """Measure each dataset, in order and shuffled; ready batches; and training."""
    rounds = 8 if quick else 60
    matches = []
    for name, dataset in DATASETS.items():
        for order in ("in order", "shuffled"):
            loader = DataLoader(dataset, batch_size=BATCH, shuffle=order == "shuffled")
            plain = reading(name, order, loader)
            matches.append((plain, reading(name, order, st.resumable(loader, seed=0))))
    plain = matches[0][0]
    matches.insert(0, (plain, replace(plain, name="DataLoader itself")))
    title = "a batch of 64 from st.resumable(loader), over the DataLoader"
    yield compare(title, matches, rounds=rounds, unit=UNIT)

    batches = list(DataLoader(TENSORS, batch_size=BATCH))
    ready = reading("st.resumable(batches)", "", st.resumable(batches, seed=0))
    plain = reading("for batch in batches", "", batches)
    yield compare("a ready batch", against(plain, ready), rounds=rounds, unit=UNIT)

    plain = training("raw loop", "optimizer.zero_grad(); DataLoader", by_hand)
    ours = training("statetrain", "p.grad = None; the same DataLoader", by_statetrain)
    title = "training on a TensorDataset, batches of 64, shuffled"
    yield compare(title, against(plain, ours), rounds=rounds, unit=UNIT)


if __name__ == "__main__":
    main("fetch", tables)
