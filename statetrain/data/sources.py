"""Where a loader's batches come from: indexed data, ready batches, or somebody else's iterator."""

from __future__ import annotations

import copy
import re
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from statetrain.persist.randomness import Lane, Rng, generators, reseed, set_state, state_of

__all__ = ["Batches", "Indexed", "Key", "PassedThrough", "Source", "Stateful", "obstacles"]

AHEAD = 256  # batches of indices that are drawn at a time
_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)  # of a repr: another in each process

Key: TypeAlias = tuple[int | str, ...]


class Source(Protocol):
    """One epoch after another of batches."""

    length: int | None
    facts: dict[str, Any]
    """What must be the same when a position is found again."""
    problems: list[str]
    begun_to_save: bool
    """Whether `state` can be taken in a running epoch only."""

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
        self.begun_to_save = False
        self._next = 0

    @property
    def has_next(self) -> bool:
        """Whether there is another batch."""
        return self._next < len(self.batches)

    def begin(self, key: Key, epoch: int) -> None:
        """Start at the first batch: the order is always the same."""
        self._next = 0

    def fetch(self, key: Key) -> Any:
        """Return the next batch."""
        batch = self.batches[self._next]
        self._next += 1
        return batch

    def state(self, *, running: bool) -> dict[str, Any]:
        """Return nothing: the position says it all."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""

    def resume(self, state: Mapping[str, Any], key: Key, epoch: int, position: int) -> bool:
        """Go to the batch with this index."""
        self._next = position
        return True


class Indexed:
    """A `DataLoader` over map-style data, read in this process from its public arguments."""

    def __init__(self, loader: DataLoader[Any], seeding: str) -> None:
        batches, sampler, dataset = loader.batch_sampler, loader.sampler, loader.dataset
        self.loader = loader
        self.seeding = seeding
        self.single = batches is None
        self.order: Any = sampler if batches is None else batches
        self._fresh = type(self.order) is BatchSampler  # it hands out no list twice
        self.length = _length(self.order)
        self.problems: list[str] = []
        self.begun_to_save = False
        self._draws = seeding != "main" and not _draws_nothing(loader)
        self._find_generators()
        self.facts = {
            "kind": "indexed",
            "dataset length": _length(dataset),
            "batch size": _whole(loader.batch_size, getattr(self.order, "batch_size", None)),
            "number of batches": self.length,
            "seeding": seeding,
            "generators": ", ".join([*self._order_rngs, *self._rngs]),
        }
        self._pins = loader.pin_memory and torch.cuda.is_available()
        self._start: dict[str, Any] = {}
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
        return bool(self._block)

    def begin(self, key: Key, epoch: int) -> None:
        """Ask the sampler for this epoch's order, in a lane of its own."""
        self._start = {path: state_of(rng) for path, rng in self._order_rngs.items()}
        self._block.clear()
        self._exhausted, self._crc, self._samples = False, 0, 0
        self._lane.seed(*key)
        with self._lane:
            _set_epoch(self.loader, epoch)
            self._indices = iter(self.order)
        self._draw()

    def fetch(self, key: Key) -> Any:
        """Load the samples of the next indices and collate them; an error leaves them the next."""
        indices = self._block[0]
        order = [state_of(rng) for rng in self._shared]
        try:
            batch = self._loaded(indices, key)
        finally:
            for rng, state in zip(self._shared, order, strict=True):
                set_state(rng, state)
        self._take()
        return _pinned(batch) if self._pins else batch

    def state(self, *, running: bool) -> dict[str, Any]:
        """Return the checksum of the order so far, and the generators now and at its start."""
        return {
            "crc": self._crc if running else 0,
            "start": dict(self._start) if running else {},
            "now": {path: state_of(rng) for path, rng in self._all_rngs()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the generators to where they were."""
        for path, rng in self._all_rngs():
            set_state(rng, state["now"][path])

    def resume(self, state: Mapping[str, Any], key: Key, epoch: int, position: int) -> bool:
        """Draw the order again from its start, up to there; nothing is loaded."""
        for path, rng in self._order_rngs.items():
            set_state(rng, state["start"][path])
        self.begin(key, epoch)
        for _ in range(position):
            if not self._block:
                return False
            self._take()
        self.load(state)
        return bool(self._crc == state["crc"])

    def _find_generators(self) -> None:
        loader = self.loader
        order = generators([self.order, loader.sampler, loader.generator], skip=[loader.dataset])
        own = generators([loader.dataset, loader.collate_fn])
        self._order_rngs = _named("order", order)
        self._rngs = _named("dataset", own if self._draws or self.seeding == "main" else [])
        ids = {id(rng) for rng in self._rngs.values()}
        self._shared = [rng for rng in self._order_rngs.values() if id(rng) in ids and self._draws]

    def _all_rngs(self) -> list[tuple[str, Rng]]:
        return [*self._order_rngs.items(), *self._rngs.items()]

    def _draw(self) -> None:
        """Draw the next indices. When that happens depends on the position alone."""
        with self._lane:
            drawn = list(islice(self._indices, AHEAD)) if self._fresh else self._drawn_apart()
        self._block.extend(drawn)
        self._exhausted = len(drawn) < AHEAD

    def _drawn_apart(self) -> list[Any]:
        return [_owned(indices, self.single) for indices in islice(self._indices, AHEAD)]

    def _take(self) -> None:
        if len(self._block) == 1 and not self._exhausted:
            self._draw()
        indices = self._block.popleft()
        self._crc = _checksum(indices, self._crc)
        self._samples += 1 if self.single else len(indices)

    def _loaded(self, indices: Any, key: Key) -> Any:
        if not self._draws:
            return self._read(indices)
        if self.seeding == "sample":
            key = (*key[:2], "sample", key[3], self._samples)
        self._seed(key)
        with self._fetching:
            if self.seeding == "batch" or self.single:
                return self._read(indices)
            return self._read_apart(indices, key)

    def _read(self, indices: Any) -> Any:
        dataset: Any = self.loader.dataset
        if self.single:
            return self.loader.collate_fn(dataset[indices])
        if getattr(dataset, "__getitems__", None):
            return self.loader.collate_fn(dataset.__getitems__(indices))
        return self.loader.collate_fn([dataset[i] for i in indices])

    def _read_apart(self, indices: Any, key: Key) -> Any:
        """Seed for each sample by its number in the epoch, whatever the batch size."""
        samples = []
        for number, index in enumerate(indices, start=self._samples):
            self._seed((*key[:-1], number))
            samples.append(self.loader.dataset[index])
        self._seed((*key, "collate"))
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
        self.facts: dict[str, Any] = {"kind": "iterator"}
        self.problems = problems
        self.begun_to_save = False
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
            _set_epoch(self.iterable, epoch)
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
        self.length = _length(loader)
        self.facts: dict[str, Any] = {"kind": "stateful"}
        self.problems: list[str] = []
        self.begun_to_save = True  # what a loader does with the state of an ended epoch is its own
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
            _set_epoch(self.loader, epoch)
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


def _draws_nothing(loader: DataLoader[Any]) -> bool:
    dataset: Any = loader.dataset
    if not any(loader.collate_fn is known for known in (default_collate, default_convert)):
        return False
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset or getattr(dataset, "deterministic", False) is True


def _set_epoch(loader: Any, epoch: int) -> None:
    batches, sampler = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    told: list[Any] = []
    for found in (batches, getattr(batches, "sampler", None), sampler):
        tell = getattr(found, "set_epoch", None)
        if callable(tell) and not any(found is it for it in told):
            told.append(found)
            tell(epoch)


def _named(what: str, found: list[tuple[str, Rng]]) -> dict[str, Rng]:
    named: dict[str, Rng] = {}
    for path, rng in found:
        name = what + _ADDRESS.sub("", path)
        while name in named:
            name += "'"
        named[name] = rng
    return named


def _whole(*found: Any) -> int | None:
    return next((value for value in found if type(value) is int), None)


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _owned(indices: Any, single: bool) -> Any:
    """Return indices that stay what they are when the sampler goes on, and have a length."""
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    if isinstance(indices, (list, np.ndarray)):
        return indices.copy()
    return indices if single or hasattr(indices, "__len__") else list(indices)


def _checksum(indices: Any, crc: int) -> int:
    try:
        data = array("q", indices if isinstance(indices, list) else [indices]).tobytes()
    except (TypeError, OverflowError):  # keys of another kind
        data = _bytes(indices)
    return zlib.crc32(data, crc ^ len(data))  # with its length: batches may be cut otherwise


def _bytes(indices: Any) -> bytes:
    if isinstance(indices, torch.Tensor):
        indices = indices.numpy(force=True)
    if isinstance(indices, np.ndarray) and indices.dtype != object:
        return indices.tobytes()
    return _ADDRESS.sub("", repr(indices)).encode()


def _pinned(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    pin: Callable[[Any], Any] = pin_memory
    return pin(batch)
