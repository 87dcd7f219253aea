"""Where a loader's batches come from: ready batches, or somebody else's iterator."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from statetrain.data.order import Key, length_of, set_epoch
from statetrain.persist.randomness import Lane

__all__ = ["Batches", "PassedThrough", "Source", "Stateful", "obstacles"]


class Source(Protocol):
    """One epoch after another of batches."""

    length: int | None
    facts: dict[str, Any]
    """What must be the same when a position is found again."""
    problems: list[str]
    begun_to_save: bool
    """Whether `state` can be taken in a running epoch only."""
    keyed: bool
    """Whether `fetch` needs its key."""

    @property
    def has_next(self) -> bool:
        """Whether the epoch goes on."""

    def begin(self, key: Key, epoch: int) -> None:
        """Start an epoch, whose order depends on the key."""

    def fetch(self, key: Key) -> Any:
        """Load the next batch; what it draws depends on the key."""

    def state(self, *, running: bool) -> dict[str, Any]:
        """Return what is needed besides the position; `running` is false between two epochs."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that was not running."""

    def resume(self, state: Mapping[str, Any], key: Key, epoch: int, position: int) -> bool:
        """Begin the epoch again and go to the position; false if it does not lead to `state`."""


class Batches:
    """A list of ready batches, handed out as they are."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches
        self.length: int | None = len(batches)
        self.facts: dict[str, Any] = {"kind": "batches", "number of batches": self.length}
        self.problems: list[str] = []
        self.begun_to_save = self.keyed = False
        self.has_next = self.length > 0  # no property: it is asked twice a batch
        self._next = 0

    def begin(self, key: Key, epoch: int) -> None:
        """Start at the first batch: the order is always the same."""
        self._go_to(0)

    def fetch(self, key: Key) -> Any:
        """Return the next batch."""
        batch = self.batches[self._next]
        self._next += 1
        self.has_next = self._next < len(self.batches)
        return batch

    def _go_to(self, position: int) -> None:
        self._next = position
        self.has_next = position < len(self.batches)

    def state(self, *, running: bool) -> dict[str, Any]:
        """Return nothing: the position says it all."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""

    def resume(self, state: Mapping[str, Any], key: Key, epoch: int, position: int) -> bool:
        """Go to the batch with this index."""
        self._go_to(position)
        return True


class PassedThrough:
    """Somebody's iterable, read as it is: it trains, but cannot be resumed exactly."""

    def __init__(self, iterable: Any, problems: list[str]) -> None:
        self.iterable = iterable
        self.length = length_of(iterable)
        self.facts: dict[str, Any] = {"kind": "iterator"}
        self.problems = problems
        self.begun_to_save = self.keyed = False
        self._lane = Lane()
        self._iterator: Iterator[Any] = iter(())
        self._ahead: deque[Any] = deque()
        self._ended = True

    @property
    def has_next(self) -> bool:
        """Whether there is another batch: it looks one ahead."""
        if not self._ahead and not self._ended:
            with self._lane:
                self._ahead.extend(islice(self._iterator, 1))
            self._ended = not self._ahead  # an iterator may start over when it is asked again
        return bool(self._ahead)

    def begin(self, key: Key, epoch: int) -> None:
        """Make a new iterator; what it draws does not move the global streams."""
        self._ahead.clear()
        self._lane.seed(*key)
        with self._lane:
            set_epoch(self.iterable, epoch)
            self._iterator = iter(self.iterable)
        self._ended = False

    def fetch(self, key: Key) -> Any:
        """Return the batch ahead."""
        return self._ahead.popleft()

    def state(self, *, running: bool) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""

    def resume(self, state: Mapping[str, Any], key: Key, epoch: int, position: int) -> bool:
        """Read the first batches again."""
        self.begin(key, epoch)
        for _ in range(position):
            if not self.has_next:
                return False
            self._ahead.popleft()
        return True


class Stateful:
    """A loader with `state_dict` and `load_state_dict`: as exact as its author made it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.length = length_of(loader)
        self.facts: dict[str, Any] = {"kind": "stateful"}
        self.problems: list[str] = []
        self.begun_to_save = True  # what a loader does with the state of an ended epoch is its own
        self.keyed = False
        self._lane = Lane()
        self._aside = Lane(lasting=False)  # what saving and loading draw moves no batch
        self._iterator: Iterator[Any] = iter(())
        self._ahead: deque[Any] = deque()
        self._before: dict[str, Any] | None = None

    @property
    def has_next(self) -> bool:
        """Whether there is another batch; the state is taken before looking ahead."""
        if self._before is None:
            self._look()
        return bool(self._ahead)

    def begin(self, key: Key, epoch: int) -> None:
        """Make a new iterator, which goes on where a loaded state says."""
        self._ahead.clear()
        self._before = None
        self._lane.seed(*key)
        with self._lane:
            set_epoch(self.loader, epoch)
            self._iterator = iter(self.loader)

    def fetch(self, key: Key) -> Any:
        """Return the batch ahead."""
        self._before = None
        return self._ahead.popleft()

    def state(self, *, running: bool) -> dict[str, Any]:
        """Return the loader's state, as it was before the batch that was read ahead."""
        state = self._now() if self._before is None else self._before
        return {**state, "looked": self._before is not None}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take nothing over: its state is that of a running epoch."""

    def resume(self, state: Mapping[str, Any], key: Key, epoch: int, position: int) -> bool:
        """Give the loader its state, and what it draws from where it was."""
        self._aside.seed(*key)
        with self._aside:
            self.loader.load_state_dict(state["loader"])
        self.begin(key, epoch)
        self._lane.load_state_dict(state["lane"])
        if state["looked"]:
            self._look()  # the loader may do its work for the epoch's end there
        return True

    def _look(self) -> None:
        self._before = self._now()
        with self._lane:
            self._ahead.extend(islice(self._iterator, 1))

    def _now(self) -> dict[str, Any]:
        self._aside.seed("state")
        with self._aside:
            state = copy.deepcopy(self.loader.state_dict())
        return {"loader": state, "lane": self._lane.state_dict()}


def obstacles(loader: DataLoader[Any]) -> list[str]:
    """Say why a `DataLoader` cannot be read by its indices; empty where it can."""
    found = []
    if isinstance(loader.dataset, IterableDataset):
        found.append(
            "its dataset is an IterableDataset, whose position is not saved yet: use a map-style "
            "dataset, or train without checkpoints"
        )
    if loader.num_workers > 0:
        found.append(
            f"num_workers={loader.num_workers} cannot be resumed exactly yet: use num_workers=0, "
            "or train without checkpoints"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        found.append(
            f"{type(loader).__name__} overrides DataLoader.__iter__: give it state_dict and "
            "load_state_dict, or use a plain DataLoader"
        )
    return found
