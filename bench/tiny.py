"""The job that is nearly nothing, Linear 32 -> 1 with SGD on ready batches of 8, and its clock.

A run trains on 300 batches; what counts is the time from batch 50 to batch 298, told by these two,
which note when they are unpacked. So nobody's start and end count, and nothing is added to the
batches between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from compare import Contender, clock
from torch import Tensor, nn

import statetrain as st

BATCHES, FIRST, LAST = 300, 50, 298

Train = Callable[[list[Any]], object]


class Mark(tuple[Any, ...]):
    """A batch that notes the time when it is first unpacked."""

    seen: int | None = None

    def __iter__(self) -> Iterator[Any]:
        kind = type(self)  # not the object: some trainers hand on a copy of a batch
        if kind.seen is None:
            kind.seen = clock()
        return super().__iter__()


class First(Mark):
    """The batch at which the clock starts."""


class Last(Mark):
    """The batch at which it stops."""


class Job(st.Module):
    """The tiny job."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(32, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_nb: int, *_: int) -> Tensor:
        """Return the mean squared error."""
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def raw(batches: list[Any]) -> None:
    """Train as people write it."""
    net = nn.Linear(32, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()


def raw_alike(batches: list[Any]) -> None:
    """Train with gradients cleared as statetrain does, and the same `training_step`."""
    job = Job()
    optimizer = job.configure_optimizers()
    for number, batch in enumerate(batches):
        loss = job.training_step(batch, number)
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def contender(name: str, does: str, train: Train) -> Contender:
    """Measure µs a batch of `train(batches)`."""
    batches: list[Any] = [(torch.randn(8, 32), torch.randn(8, 1)) for _ in range(BATCHES)]
    batches[FIRST], batches[LAST] = First(batches[FIRST]), Last(batches[LAST])

    def measure() -> float:
        First.seen = Last.seen = None
        train(batches)
        if First.seen is None or Last.seen is None:
            raise RuntimeError(f"{name} did not train on all batches")
        return (Last.seen - First.seen) / 1000 / (LAST - FIRST)

    return Contender(name=name, does=does, measure=measure)
