"""A loader that goes on at the next batch, in the same order, with the same augmentation.

The index order and what a dataset draws come from private random streams keyed by (seed, name,
epoch, batch). So a position is a number, nothing consumed is read again, and the global streams of
python, numpy and torch stay where they are. It knows no loops and no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from statetrain.data.sources import (
    Batches,
    Indexed,
    Key,
    PassedThrough,
    Source,
    Stateful,
    obstacles,
)
from statetrain.errors import DataError

__all__ = ["SEEDINGS", "Loader", "resumable"]

SEEDINGS = ("batch", "sample", "main")
VERSION = 1


class Loader:
    """Hand out batches, epoch after epoch, from any position on. `st.resumable` makes one.

    `next(loader)` raises `StopIteration` once at an epoch's end, and then starts the next epoch: so
    `next(loader, None)` gives None once an epoch.

    Attributes:
        epoch: the running epoch. position: how many of its batches were handed out.
        length: batches in an epoch, None if unknown.
        seed, name: the key of its random streams; the trainer sets them where they are empty.
    """

    def __init__(self, source: Source, *, seed: int | None = None, name: str = "") -> None:
        self.source = source
        self.seed = seed
        self.name = name
        self.epoch = 0
        self.position = 0
        self._begun = False
        self._over = False

    @property
    def length(self) -> int | None:
        """The number of batches in an epoch; None if it is unknown."""
        return self.source.length

    @property
    def has_next(self) -> bool:
        """Whether this epoch has another batch; nothing is loaded to know it."""
        if not self._begun:
            self._begin()
        return self.source.has_next

    def start(self, epoch: int) -> None:
        """Go to the first batch of `epoch`."""
        self.epoch, self.position = epoch, 0
        self._begun = self._over = False

    def problems(self) -> list[str]:
        """Say why it cannot be resumed exactly, and what to do; empty where it can."""
        return self.source.problems

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what it takes to find it again."""
        return {
            "version": VERSION,
            "seed": self.seed,
            "name": self.name,
            "epoch": self.epoch,
            "position": self.position,
            "begun": self._begun,
            "over": self._over,
            "facts": self.source.facts,
            "source": self.source.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the saved position; of a map-style dataset no sample is read.

        Raises:
            DataError: the data or its order is not what it was.
        """
        for name, was in state["facts"].items():
            now = self.source.facts.get(name)
            if was != now:
                raise DataError(
                    f"the {name} of loader {self.name!r} is {now!r}, in the checkpoint it is "
                    f"{was!r}: give the run the data it had, or start another run"
                )
        self.seed, self.name = state["seed"], state["name"]
        self.start(state["epoch"])
        self.source.load(state["source"])
        if state["begun"]:
            self._begin(position=state["position"])
        self.position, self._over = state["position"], state["over"]
        if self.source.state() != state["source"] and self.source.replayed:
            raise DataError(
                f"the sampler of loader {self.name!r} gives another order than in the checkpoint, "
                f"within the first {self.position} batches of epoch {self.epoch}: its order must "
                "depend on its arguments, the random streams and set_epoch alone"
            )

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        if self._over:
            self.start(self.epoch + 1)
        if not self.has_next:
            self._over = True
            raise StopIteration
        batch = self.source.fetch(self._key("batch", self.epoch, self.position))
        self.position += 1
        return batch

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the length of this loader is unknown")
        return self.length

    def _begin(self, position: int = 0) -> None:
        self._begun = True
        self.source.begin(self._key("order", self.epoch), self.epoch)
        self.source.skip(position)

    def _key(self, *what: int | str) -> Key:
        return (self.seed or 0, self.name, *what)


def resumable(loader: Any, *, seeding: str = "batch", seed: int | None = None) -> Loader:
    """Make a loader resumable: a `DataLoader`, or any sequence of ready batches.

    `seeding="batch"` seeds what the dataset draws from (python, numpy, torch, and generator objects
    in the dataset or its transforms) for each batch, `"sample"` for each sample, both independently
    of everything else; `"main"` lets the dataset draw from the global streams. A loader that is
    resumable already is returned as it is.

    Raises:
        DataError: it is no loader, or can be read only once; the message says what to give instead.
    """
    if isinstance(loader, Loader):
        return loader
    if seeding not in SEEDINGS:
        raise DataError(f'seeding={seeding!r}: give "batch", "sample" or "main"')
    return Loader(_source(loader, seeding), seed=seed)


def _source(loader: Any, seeding: str) -> Source:
    if isinstance(loader, DataLoader):
        if callable(getattr(loader, "load_state_dict", None)):
            return Stateful(loader)
        found = obstacles(loader)
        return PassedThrough(loader, found) if found else Indexed(loader, seeding)
    kind = type(loader).__name__
    if isinstance(loader, Dataset):
        raise DataError(f"{kind} is a dataset: give DataLoader(dataset, batch_size=...)")
    if isinstance(loader, (str, bytes, Mapping, torch.Tensor)):
        raise DataError(f"a {kind} is no loader: give a DataLoader or a list of batches")
    if callable(getattr(loader, "state_dict", None)) and hasattr(loader, "load_state_dict"):
        return Stateful(loader)
    if isinstance(loader, Sequence) or (hasattr(loader, "__getitem__") and hasattr(loader, "__len__")):
        return Batches(loader)
    if not hasattr(loader, "__iter__"):
        raise DataError(f"{loader!r} is no loader: give a DataLoader or a list of batches")
    if hasattr(loader, "__next__"):
        raise DataError(
            f"{kind} is an iterator and can be read only once: give a DataLoader or a list of batches"
        )
    return PassedThrough(
        loader,
        [f"{kind} is an iterable of unknown kind: give a DataLoader or a list of batches"],
    )
