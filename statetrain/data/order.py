"""Which indices come next: a sampler's order, drawn ahead in a random lane of its own.

It reads no sample. When it draws depends on the position alone, so an order is found again by
drawing it again from its start; a checksum says whether it is the same.
"""

from __future__ import annotations

import copy
import re
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice, repeat
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from statetrain.persist.randomness import Lane, Rng, generators, set_state, state_of

__all__ = ["Key", "Order", "length_of", "named", "set_epoch"]

AHEAD = 256  # batches of indices that are drawn at a time
_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)  # of a repr: another in each process

Key: TypeAlias = tuple[int | str, ...]


class Order:
    """The batches of indices of a `DataLoader`'s sampler, one epoch after another.

    Attributes:
        single: whether an index stands alone, as with `batch_size=None`.
        stateful: the sampler, where it has `state_dict` and `load_state_dict`.
        rngs: the generators that the order is drawn from, by name.
        crc: the checksum of the indices taken in this epoch. samples: how many they are.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        batches, sampler = loader.batch_sampler, loader.sampler
        self.loader = loader
        self.single = batches is None
        self.sampler: Any = sampler if batches is None else batches
        self.length = length_of(self.sampler)
        self.stateful = _with_state(self.sampler)
        found = generators([self.sampler, sampler, loader.generator], skip=[loader.dataset])
        self.rngs: dict[str, Rng] = named("order", found)
        self.crc = self.samples = 0
        self._cut = type(self.sampler) is BatchSampler  # it says no more than where to cut
        self._lane = Lane()
        self._start: dict[str, Any] = {}
        self._sampler_start: Any = None
        self._indices: Iterator[Any] = iter(())
        self._block: deque[tuple[Any, memoryview | None]] = deque()
        self._exhausted = True

    @property
    def has_next(self) -> bool:
        """Whether the sampler has another batch."""
        return bool(self._block)

    @property
    def ahead(self) -> tuple[Any, memoryview | None]:
        """The indices that are next, and their bytes as 64-bit integers where known already."""
        return self._block[0]

    def begin(self, key: Key, epoch: int, *, sampler_state: Any = None) -> None:
        """Ask the sampler for this epoch's order, in the lane."""
        self._start = {path: state_of(rng) for path, rng in self.rngs.items()}
        self._block.clear()
        self._exhausted, self.crc, self.samples = False, 0, 0
        self._lane.seed(*key)
        with self._lane:
            set_epoch(self.loader, epoch)
            if sampler_state is not None:
                self.stateful.load_state_dict(copy.deepcopy(sampler_state))
            if self.stateful is not None:
                self._sampler_start = copy.deepcopy(self.stateful.state_dict())
                self._lane.seed(*key)  # loading and saving may have drawn
            self._indices = iter(self.sampler.sampler if self._cut else self.sampler)
        self._draw()

    def take(self) -> None:
        """Go on to the next batch."""
        if len(self._block) == 1 and not self._exhausted:
            self._draw()
        indices, data = self._block.popleft()
        self.crc = _checksum(indices, data, self.crc)
        self.samples += 1 if self.single else len(indices)

    def state(self, *, running: bool) -> dict[str, Any]:
        """Return the checksums up to here and with the next batch, and what the start was."""
        state: dict[str, Any] = {
            "crc": self.crc if running else 0,
            "next": self._with_next() if running else 0,
            "start": dict(self._start) if running else {},
        }
        if self.stateful is not None and running:
            state["sampler"] = copy.deepcopy(self._sampler_start)
        return state

    def resume(self, state: Mapping[str, Any], key: Key, epoch: int, position: int) -> bool:
        """Draw the order again from its start; false if that does not lead to `state`.

        A sampler with a state of its own is given the one it had at the epoch's start. Where that
        does not lead there it is drawn again without: its state may say where in an epoch it is,
        and it was still that of the epoch before.
        """
        found = False
        if self.stateful is not None and state.get("sampler") is not None:
            found = self._replayed(state, key, epoch, position, state["sampler"])
        return found or self._replayed(state, key, epoch, position, None)

    def _replayed(
        self, state: Mapping[str, Any], key: Key, epoch: int, position: int, sampler_state: Any
    ) -> bool:
        for path, rng in self.rngs.items():
            set_state(rng, state["start"][path])
        self.begin(key, epoch, sampler_state=sampler_state)
        for _ in range(position):
            if not self._block:
                return False
            self.take()
        return bool((self.crc, self._with_next()) == (state["crc"], state["next"]))

    def _with_next(self) -> int:
        return _checksum(*self._block[0], self.crc) if self._block else self.crc

    def _draw(self) -> None:
        """Draw the next indices. When that happens depends on the position alone."""
        if self._cut:
            self._draw_and_cut()
            return
        with self._lane:
            drawn = [_owned(found, self.single) for found in islice(self._indices, AHEAD)]
        self._block.extend(zip(drawn, repeat(None)))
        self._exhausted = len(drawn) < AHEAD

    def _draw_and_cut(self) -> None:
        """Do what a `BatchSampler` does, for many batches at once."""
        size = self.sampler.batch_size
        with self._lane:
            drawn = list(islice(self._indices, AHEAD * size))
        self._exhausted = len(drawn) < AHEAD * size
        end = len(drawn) - len(drawn) % size if self.sampler.drop_last else len(drawn)
        data = _whole_numbers(drawn)
        view = None if data is None else memoryview(data).cast("B")
        for i in range(0, end, size):
            part = None if view is None else view[8 * i : 8 * (i + size)]
            self._block.append((drawn[i : i + size], part))


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of a loader which epoch begins, where they ask to be told."""
    batches, sampler = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    told: list[Any] = []
    for found in (batches, getattr(batches, "sampler", None), sampler):
        tell = getattr(found, "set_epoch", None)
        if callable(tell) and not any(found is it for it in told):
            told.append(found)
            tell(epoch)


def named(what: str, found: list[tuple[str, Rng]]) -> dict[str, Rng]:
    """Return generators by names that are the same in every process."""
    names: dict[str, Rng] = {}
    for path, rng in found:
        name = what + _ADDRESS.sub("", path)
        while name in names:
            name += "'"
        names[name] = rng
    return names


def length_of(value: Any) -> int | None:
    """Return `len(value)`, or None where it has none."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _with_state(sampler: Any) -> Any:
    """Return what has `state_dict` and `load_state_dict`: the batch sampler, or its sampler."""
    for found in (sampler, getattr(sampler, "sampler", None)):
        if all(callable(getattr(found, name, None)) for name in ("state_dict", "load_state_dict")):
            return found
    return None


def _owned(indices: Any, single: bool) -> Any:
    """Return indices that stay what they are when the sampler goes on, and have a length."""
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    if isinstance(indices, (list, np.ndarray)):
        return indices.copy()
    return indices if single or hasattr(indices, "__len__") else list(indices)


def _checksum(indices: Any, data: memoryview | None, crc: int) -> int:
    found: Any = data
    if found is None:
        found = _whole_numbers(indices if isinstance(indices, list) else [indices])
        found = _bytes(indices) if found is None else found.tobytes()
    return zlib.crc32(found, crc ^ len(found))  # with its length: batches may be cut otherwise


def _whole_numbers(indices: list[Any]) -> array[int] | None:
    try:
        return array("q", indices)
    except (TypeError, OverflowError):  # keys of another kind
        return None


def _bytes(indices: Any) -> bytes:
    if isinstance(indices, torch.Tensor):
        indices = indices.numpy(force=True)
    if isinstance(indices, np.ndarray) and indices.dtype != object:
        return indices.tobytes()
    return _ADDRESS.sub("", repr(indices)).encode()
