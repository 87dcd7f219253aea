"""What a resume costs: the time from `fit` to the first batch, and the replay of an index stream.

    python bench/resume.py [--json FILE] [--quick]

A dataset whose `__getitem__` takes 1 ms is trained on in shuffled batches of 8, and stopped after
10, 1,000 and 100,000 batches (it sleeps only once it is resumed). Reading what was consumed would
take 800 s at the last stop. The time to the first batch holds 8 ms of samples. Then an index stream
of 10⁶ is drawn again, as a resume does it.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compare import Contender, Table, against, compare, main
from tiny import Job
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import statetrain as st

BATCH = 8


@dataclass
class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Samples that may take a millisecond each."""

    length: int
    seconds: float = 0
    sample = torch.randn(32), torch.randn(1)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.seconds:
            time.sleep(self.seconds)
        return self.sample


class FirstBatchError(Exception):
    """The first batch is there; nothing is saved."""


class Resumed(Job):
    """The tiny job, which goes no further than its first batch."""

    def training_step(self, *_: Any) -> Tensor:
        """Raise."""
        raise FirstBatchError


def loader(dataset: Dataset[Any], batch_size: int = BATCH) -> DataLoader[Any]:
    """Return a shuffled loader."""
    return DataLoader(dataset, batch_size, shuffle=True)


def fit(url: Path, job: Job, dataset: Dataset[Any], *, stop: int | None = None) -> None:
    """Train, with all saves asked for."""
    checkpoints = st.Checkpoints(url, every=None)
    trainer = st.Trainer(max_epochs=1, seed=0, checkpoints=checkpoints, loggers=[], progress=False)
    trainer.on("batch_end", at=stop)(st.Run.stop)
    trainer.fit(job, loader(dataset))


def resuming(folder: Path, stop: int, length: int) -> Contender:
    """Measure the ms from `fit` to the first batch, after a stop; 0 is a fresh start."""
    url = folder / str(stop)
    if stop:
        fit(url, Job(), Slow(length), stop=stop)

    def measure() -> float:
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        if stop:
            shutil.copytree(url, copy)
        start = time.perf_counter()
        try:
            fit(copy, Resumed(), Slow(length, 0.001), stop=1)
        except FirstBatchError:
            return (time.perf_counter() - start) * 1000
        raise RuntimeError("no batch came")

    name = f"after {stop:,} batches" if stop else "fresh start"
    return Contender(name=name, does=f"of {length:,} samples", measure=measure)


def replaying(indices: int, batch_size: int) -> Contender:
    """Measure the ms to load a loader's state where so many indices are consumed."""
    dataset = Slow(indices + 64)
    walked = st.resumable(loader(dataset, batch_size), seed=0)
    for _ in range(indices // batch_size):
        next(walked)
    state = walked.state_dict()

    def measure() -> float:
        start = time.perf_counter()
        st.resumable(loader(dataset, batch_size), seed=0).load_state_dict(state)
        return (time.perf_counter() - start) * 1000

    return Contender(name=f"{indices:,} indices", does=f"batches of {batch_size}", measure=measure)


def tables(quick: bool) -> Iterator[Table]:
    """Measure resumes over the one after 10 batches, and replays over those of 64 indices."""
    logging.getLogger("statetrain").setLevel(logging.ERROR)
    rounds, most = (5, 10_000) if quick else (15, 100_000)
    with tempfile.TemporaryDirectory() as name:
        stops = [resuming(Path(name), n, BATCH * (most + 10)) for n in (10, 0, 1000, most)]
        yield compare("time to the first batch", against(*stops), rounds=rounds, unit="ms")
    for size in (8, 64):
        replays = [replaying(indices, size) for indices in (64, 1_000_000)]
        title = f"an index stream drawn again, in batches of {size}"
        yield compare(title, against(*replays), rounds=rounds, unit="ms")


if __name__ == "__main__":
    main("resume", tables)
