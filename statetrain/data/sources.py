"""Where a loader's batches come from: indexed data, ready batches, or somebody else's iterator."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from statetrain.persist.randomness import Lane, Rng, generators, reseed, set_state, state_of

__all__ = ["Batches", "Indexed", "Key", "PassedThrough", "Source", "Stateful", "obstacles"]

AHEAD = 256  # batches of indices that are drawn at a time

Key: TypeAlias = tuple[int | str, ...]


class Source(Protocol):
    """One epoch after another of batches."""

    length: int | None
    facts: dict[str, Any]
    """What must be the same when a position is found again."""
    problems: list[str]
    replayed: bool
    """Whether `skip` leads to the same `state`, so that a difference is an error."""

    @property
    def has_next(self) -> bool:
        """Whether the epoch goes on."""

    def begin(self, key: Key, epoch: int) -> None:
        """Start an epoch, whose order depends on the key."""

    def skip(self, count: int) -> None:
        """Pass over the first batches without loading them, where that can be."""

    def fetch(self, key: Key) -> Any:
        """Load the next batch; what it draws depends on the key."""

    def state(self) -> dict[str, Any]:
        """Return what is needed besides the position."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Take `state` over, before `begin` and `skip`."""


class Batches:
    """A sequence of ready batches, handed out as they are."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches
        self.length: int | None = len(batches)
        self.facts = {"number of batches": self.length}
        self.problems: list[str] = []
        self.replayed = False
        self._next = 0

    @property
    def has_next(self) -> bool:
        """Whether there is another batch."""
        return self._next < len(self.batches)

    def begin(self, key: Key, epoch: int) -> None:  # noqa: ARG002 - the order is always the same
        """Start at the first batch."""
        self._next = 0

    def skip(self, count: int) -> None:
        """Go to the batch with this index."""
        self._next = count

    def fetch(self, key: Key) -> Any:  # noqa: ARG002
        """Return the next batch."""
        self._next += 1
        return self.batches[self._next - 1]

    def state(self) -> dict[str, Any]:
        """Return nothing: the position says it all."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""


class Indexed:
    """A `DataLoader` over map-style data, read in this process from its public arguments."""

    def __init__(self, loader: DataLoader[Any], seeding: str) -> None:
        self.loader = loader
        self.seeding = seeding
        self.order: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        self.single = loader.batch_sampler is None
        self.length = _length(self.order)
        self.facts = {"dataset length": _length(loader.dataset), "batch size": loader.batch_size}
        self.problems: list[str] = []
        self.replayed = True
        self._draws = seeding != "main" and not _draws_nothing(loader)
        self._rngs = dict(generators([loader.dataset, loader.collate_fn])) if seeding == "main" or self._draws else {}
        found = generators([self.order, loader.sampler, loader.generator])
        self._order_rngs = {path: rng for path, rng in found if rng not in self._rngs.values()}
        self._order_states: dict[str, Any] | None = None
        self._lane = Lane()
        self._fetching = Lane(lasting=False)
        self._indices: Iterator[Any] = iter(())
        self._block: deque[Any] = deque()
        self._exhausted = True
        self._crc = 0
        self._samples = 0

    @property
    def has_next(self) -> bool:
        """Whether the sampler has another batch; no sample is loaded to know it."""
        if not self._block and not self._exhausted:
            with self._lane:
                self._block.extend(islice(self._indices, AHEAD))
            self._exhausted = len(self._block) < AHEAD
        return bool(self._block)

    def begin(self, key: Key, epoch: int) -> None:
        """Ask the sampler for this epoch's order, in a lane of its own."""
        for sampler in (self.order, self.loader.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        self._order_states = {path: state_of(rng) for path, rng in self._order_rngs.items()}
        self._lane.seed(*key)
        with self._lane:
            self._indices = iter(self.order)
        self._block.clear()
        self._exhausted, self._crc, self._samples = False, 0, 0

    def skip(self, count: int) -> None:
        """Draw the order again up to there; nothing is loaded."""
        for _ in range(count):
            if not self.has_next:
                return  # the checksum tells
            self._take()

    def fetch(self, key: Key) -> Any:
        """Load the samples of the next indices and collate them."""
        first = self._samples
        indices = self._take()
        if self.seeding == "main" or not self._draws:
            batch = self._loaded(indices)
        elif self.seeding == "batch" or self.single:
            self._seed(key)
            with self._fetching:
                batch = self._loaded(indices)
        else:
            batch = self._loaded_apart(indices, (*key[:2], "sample", key[3]), first)
        return _pinned(batch) if self.loader.pin_memory else batch

    def state(self) -> dict[str, Any]:
        """Return the checksum of the order so far, and the generators it is drawn from."""
        now = {path: state_of(rng) for path, rng in self._order_rngs.items()}
        states = now if self._order_states is None else self._order_states
        own = {path: state_of(rng) for path, rng in self._rngs.items()}
        return {
            "crc": self._crc,
            "order": {path: _plain(state) for path, state in states.items()},
            "dataset": {path: _plain(state) for path, state in own.items()} if self.seeding == "main" else {},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the generators to where they were at the epoch's start."""
        for path, rng in self._order_rngs.items():
            if path in state["order"]:
                set_state(rng, _tensor(rng, state["order"][path]))
        for path, rng in self._rngs.items():
            if path in state["dataset"]:
                set_state(rng, _tensor(rng, state["dataset"][path]))
        self._order_states = None
        self._crc = state["crc"]

    def _take(self) -> Any:
        indices = self._block.popleft()
        self._crc = zlib.crc32(_bytes(indices), self._crc)
        self._samples += 1 if self.single else len(indices)
        return indices

    def _loaded(self, indices: Any) -> Any:
        dataset: Any = self.loader.dataset
        if self.single:
            return self.loader.collate_fn(dataset[indices])
        if callable(getattr(dataset, "__getitems__", None)):
            return self.loader.collate_fn(dataset.__getitems__(indices))
        return self.loader.collate_fn([dataset[i] for i in indices])

    def _loaded_apart(self, indices: Any, key: Key, first: int) -> Any:
        samples = []
        for number, index in enumerate(indices, start=first):
            self._seed((*key, number))
            with self._fetching:
                samples.append(self.loader.dataset[index])
        self._seed((*key, first, "collate"))
        with self._fetching:
            return self.loader.collate_fn(samples)

    def _seed(self, key: Key) -> None:
        digest = self._fetching.seed(*key)
        for number, rng in enumerate(self._rngs.values()):
            reseed(rng, (int.from_bytes(digest[20:28], "little") >> 1) ^ number)


class PassedThrough:
    """Somebody's iterable, read as it is: it trains, but cannot be resumed exactly."""

    def __init__(self, iterable: Any, problems: list[str]) -> None:
        self.iterable = iterable
        self.length = _length(iterable)
        self.facts: dict[str, Any] = {}
        self.problems = problems
        self.replayed = False
        self._lane = Lane()
        self._iterator: Iterator[Any] = iter(())
        self._ahead: deque[Any] = deque()

    @property
    def has_next(self) -> bool:
        """Whether there is another batch: it looks one ahead."""
        if not self._ahead:
            with self._lane:
                self._ahead.extend(islice(self._iterator, 1))
        return bool(self._ahead)

    def begin(self, key: Key, epoch: int) -> None:
        """Make a new iterator; what it draws does not move the global streams."""
        self._ahead.clear()
        if hasattr(getattr(self.iterable, "sampler", None), "set_epoch"):
            self.iterable.sampler.set_epoch(epoch)
        self._lane.seed(*key)
        with self._lane:
            self._iterator = iter(self.iterable)

    def skip(self, count: int) -> None:
        """Read the first batches again."""
        for _ in range(count):
            if self.has_next:
                self._ahead.popleft()

    def fetch(self, key: Key) -> Any:  # noqa: ARG002
        """Return the batch ahead."""
        return self._ahead.popleft()

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""


class Stateful:
    """A loader with `state_dict` and `load_state_dict`: as exact as its author made it."""

    def __init__(self, loader: Any) -> None:
        self._inner = PassedThrough(loader, [])
        self.loader = loader
        self.length = self._inner.length
        self.facts: dict[str, Any] = {}
        self.problems: list[str] = []
        self.replayed = False
        self._before: Any = None
        self._resumed = False

    @property
    def has_next(self) -> bool:
        """Whether there is another batch; the state is taken before looking ahead."""
        if not self._inner._ahead:  # noqa: SLF001 - both are this file's
            self._before = self.loader.state_dict()
        return self._inner.has_next

    def begin(self, key: Key, epoch: int) -> None:
        """Make a new iterator, which goes on where a loaded state says."""
        self._inner.begin(key, epoch)
        self._resumed = False

    def skip(self, count: int) -> None:
        """Pass over nothing: the loader's own state has the position."""

    def fetch(self, key: Key) -> Any:
        """Return the batch ahead."""
        return self._inner.fetch(key)

    def state(self) -> dict[str, Any]:
        """Return the loader's state, as it was before the batch that was read ahead."""
        ahead = self._inner._ahead  # noqa: SLF001
        return {"loader": self._before if ahead else self.loader.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Give the loader its state."""
        self._inner._ahead.clear()  # noqa: SLF001
        self.loader.load_state_dict(state["loader"])


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
            f"num_workers={loader.num_workers} cannot be resumed exactly yet: use num_workers=0, or "
            "train without checkpoints"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        found.append(
            f"{type(loader).__name__} overrides DataLoader.__iter__: give it state_dict and "
            "load_state_dict, or use a plain DataLoader"
        )
    return found


def _draws_nothing(loader: DataLoader[Any]) -> bool:
    dataset: Any = loader.dataset
    if loader.collate_fn is not default_collate:
        return False
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return type(dataset) is TensorDataset or getattr(dataset, "deterministic", False) is True


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _bytes(indices: Any) -> bytes:
    try:
        return array("q", indices if isinstance(indices, list) else [indices]).tobytes()
    except (TypeError, OverflowError):  # keys of another kind
        return repr(indices).encode()


def _plain(state: Any) -> Any:
    return state.tolist() if isinstance(state, torch.Tensor) else state


def _tensor(rng: Rng, state: Any) -> Any:
    return torch.tensor(state, dtype=torch.uint8) if isinstance(rng, torch.Generator) else state


def _pinned(batch: Any) -> Any:
    if not torch.cuda.is_available():
        return batch
    from torch.utils.data._utils.pin_memory import pin_memory

    pin: Callable[[Any], Any] = pin_memory
    return pin(batch)
