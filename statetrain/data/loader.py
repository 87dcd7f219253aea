"""A loader that goes on at the next batch, in the same order, with the same augmentation.

The index order and what a dataset draws come from private random streams keyed by (seed, name,
epoch, batch). So a position is a number, nothing consumed is read again, and the global streams of
python, numpy and torch stay where they are. It knows no loops and no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from statetrain.data.indexed import Indexed
from statetrain.data.order import Key
from statetrain.data.sources import Batches, PassedThrough, Source, Stateful, obstacles
from statetrain.errors import DataError

__all__ = ["SEEDINGS", "Loader", "resumable"]

SEEDINGS = ("batch", "sample", "main")
VERSION = 2
PROTOCOL = ("state_dict", "load_state_dict")
INSTEAD = "give a DataLoader or a list of batches"


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
        """Whether this epoch has another batch; of a map-style dataset nothing is loaded."""
        if not self._begun:
            self._begin()
        return self.source.has_next

    def start(self, epoch: int) -> None:
        """Go to the first batch of `epoch`; where it is there already, nothing happens."""
        if self._begun and (self.epoch, self.position, self._over) == (epoch, 0, False):
            return
        self.epoch, self.position = epoch, 0
        self._begun = self._over = False

    def problems(self) -> list[str]:
        """Say why it cannot be resumed exactly, and what to do; empty where it can."""
        return self.source.problems

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what it takes to find it again."""
        if self.source.begun_to_save and not self._begun:
            self._begin()
        return {
            "version": VERSION,
            "seed": None if self.seed is None else int(self.seed),
            "name": self.name,
            "epoch": self.epoch,
            "position": self.position,
            "begun": self._begun,
            "over": self._over,
            "facts": dict(self.source.facts),
            "source": self.source.state(running=self._begun),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the saved position; of a map-style dataset no sample is read.

        Raises:
            DataError: the data or its order is not what it was.
        """
        self._check(state)
        self.seed, self.name = state["seed"], state["name"]
        self.epoch, self.position = state["epoch"], state["position"]
        self._begun, self._over = state["begun"], state["over"]
        if not self._begun:
            self.source.load(state["source"])
        elif not self.source.resume(
            state["source"], self._key("order", self.epoch), self.epoch, self.position
        ):
            raise DataError(
                f"the order of loader {self.name!r} is another than in the checkpoint, within the "
                f"first {self.position} batches of epoch {self.epoch} or the next one: it must "
                "depend on the arguments of its sampler, the random streams, set_epoch and what "
                "the sampler's state_dict says alone"
            )

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        if self._over:
            self.start(self.epoch + 1)
        if not self._begun:
            self._begin()
        source = self.source
        if not source.has_next:
            self._over = True
            raise StopIteration
        key = self._key("batch", self.epoch, self.position) if source.keyed else ()
        try:
            batch = source.fetch(key)
        except StopIteration as error:  # it would end the epoch without a word
            raise DataError(
                f"loading batch {self.position} of epoch {self.epoch} of loader {self.name!r} "
                "raised StopIteration: only the end of the data may"
            ) from error
        self.position += 1
        return batch

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the length of this loader is unknown")
        return self.length

    def _begin(self) -> None:
        self.source.begin(self._key("order", self.epoch), self.epoch)
        self._begun = True

    def _key(self, *what: int | str) -> Key:
        return (int(torch.initial_seed() if self.seed is None else self.seed), self.name, *what)

    def _check(self, state: Mapping[str, Any]) -> None:
        if state["version"] != VERSION:
            raise DataError(
                f"the state of loader {state['name']!r} has version {state['version']!r}, known is "
                f"{VERSION}: resume with the statetrain that saved it"
            )
        facts = self.source.facts
        for name in dict.fromkeys([*state["facts"], *facts]):
            was, now = state["facts"].get(name), facts.get(name)
            if was != now:
                raise DataError(
                    f"loader {state['name']!r} has {name} {now!r}, in the checkpoint it is "
                    f"{was!r}: give the run the data it had, or start another run"
                )


def resumable(loader: Any, *, seeding: str = "batch", seed: int | None = None) -> Loader:
    """Make a loader resumable: a `DataLoader`, or any sequence of ready batches.

    Ready batches are handed out as they are: what changes one in place changes it for later epochs,
    and a resumed process has it unchanged.

    `seeding="batch"` seeds what the dataset draws from (python, numpy, torch, and generator objects
    in the dataset or its transforms) for each batch, `"sample"` for each sample, both independently
    of everything else; `"main"` lets the dataset draw from the global streams. With the default
    `collate_fn`, data in memory (a TensorDataset, tensor, array or list, or a Subset of one), or a
    dataset with an attribute `deterministic = True`, is taken
    to draw nothing, which is faster; tensors and arrays in memory are read a batch at a time. A
    loader that is resumable already is returned as it is.

    A sampler with `state_dict` and `load_state_dict` is given the state that it had at the epoch's
    start, and is then replayed to the position, as every sampler is.

    Raises:
        DataError: it is no loader, or can be read only once; the message says what to give instead.
    """
    if isinstance(loader, Loader):
        return loader
    if seeding not in SEEDINGS:
        raise DataError(f'seeding={seeding!r}: give "batch", "sample" or "main"')
    return Loader(_source(loader, seeding), seed=seed)


def _source(loader: Any, seeding: str) -> Source:
    kind = type(loader).__name__
    refused = _refused(loader, kind)
    if refused:
        raise DataError(refused)
    if all(callable(getattr(loader, name, None)) for name in PROTOCOL):
        return Stateful(loader)
    if isinstance(loader, DataLoader):
        found = obstacles(loader)
        return PassedThrough(loader, found) if found else Indexed(loader, seeding)
    if isinstance(loader, (list, tuple)):
        return Batches(loader)
    if _indexed(loader):  # it may draw
        one_by_one = DataLoader(loader, batch_size=None, collate_fn=_as_it_is)
        return Indexed(one_by_one, seeding)
    if hasattr(loader, "__next__"):
        raise DataError(f"{kind} is an iterator and can be read only once: {INSTEAD}")
    return PassedThrough(loader, [f"{kind} is an iterable of unknown kind: {INSTEAD}"])


def _refused(loader: Any, kind: str) -> str | None:
    if isinstance(loader, Dataset) or hasattr(loader, "__getitems__"):
        return f"{kind} is a dataset: give DataLoader(dataset, batch_size=...)"
    if isinstance(loader, (str, bytes, Mapping, torch.Tensor, np.ndarray)):
        return f"a {kind} is no loader: {INSTEAD}"
    if isinstance(loader, type) or not (_indexed(loader) or hasattr(loader, "__iter__")):
        return f"{loader!r} is no loader: {INSTEAD}"
    return None


def _indexed(loader: Any) -> bool:
    return hasattr(loader, "__getitem__") and hasattr(loader, "__len__")


def _as_it_is(batch: Any) -> Any:
    return batch
