"""A `DataLoader` over map-style data, read in this process from its public arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from statetrain.data.memory import draws_nothing, in_memory, rows
from statetrain.data.order import Key, Order, length_of, named
from statetrain.persist.randomness import Lane, Rng, generators, reseed, set_state, state_of

__all__ = ["Indexed"]


class Indexed:
    """A `DataLoader` over map-style data, read in this process from its public arguments."""

    def __init__(self, loader: DataLoader[Any], seeding: str) -> None:
        self.loader = loader
        self.order = Order(loader)
        self.seeding = seeding
        self.length = self.order.length
        self.problems: list[str] = []
        self.begun_to_save = self.order.stateful is not None  # between epochs it may say anything
        self.keyed = self._draws = seeding != "main" and not draws_nothing(loader)
        own = generators([loader.dataset, loader.collate_fn])
        self._rngs = named("dataset", own if self._draws or seeding == "main" else [])
        ids = {id(rng) for rng in self._rngs.values()}
        shared = [rng for rng in self.order.rngs.values() if id(rng) in ids]
        self._shared = shared if self._draws else []
        self._lane = Lane(lasting=False)
        self._in_memory = in_memory(loader)
        self._pins = loader.pin_memory and torch.cuda.is_available()
        size = getattr(self.order.sampler, "batch_size", None)
        self.facts = {
            "kind": "indexed",
            "dataset length": length_of(loader.dataset),
            "batch size": next((s for s in (loader.batch_size, size) if type(s) is int), None),
            "number of batches": self.length,
            "seeding": seeding,
            "generators": ", ".join([*self.order.rngs, *self._rngs]),
        }

    @property
    def has_next(self) -> bool:
        """Whether the sampler has another batch; no sample is loaded to know it."""
        return self.order.has_next

    def begin(self, key: Key, epoch: int) -> None:
        """Ask the sampler for this epoch's order."""
        self.order.begin(key, epoch)

    def fetch(self, key: Key) -> Any:
        """Load the samples of the next indices and collate them; an error leaves them the next."""
        batch = self._drawn(key) if self._draws else self._read()
        self.order.take()
        return _pinned(batch) if self._pins else batch

    def state(self, *, running: bool) -> dict[str, Any]:
        """Return what it takes to find the order again, and the generators as they are now."""
        return {
            **self.order.state(running=running),
            "now": {path: state_of(rng) for path, rng in self._all_rngs()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the generators to where they were."""
        for path, rng in self._all_rngs():
            set_state(rng, state["now"][path])

    def resume(self, state: Mapping[str, Any], key: Key, epoch: int, position: int) -> bool:
        """Draw the order again from its start, up to there; nothing is loaded."""
        found = self.order.resume(state, key, epoch, position)
        self.load(state)
        return found

    def _all_rngs(self) -> list[tuple[str, Rng]]:
        return [*self.order.rngs.items(), *self._rngs.items()]

    def _drawn(self, key: Key) -> Any:
        shared = [(rng, state_of(rng)) for rng in self._shared]
        if self.seeding == "sample":
            key = (*key[:2], "sample", key[3], self.order.samples)
        try:
            self._seed(key)
            with self._lane:
                if self.seeding == "batch" or self.order.single:
                    return self._read()
                return self._read_apart(key)
        finally:
            for rng, state in shared:
                set_state(rng, state)

    def _read(self) -> Any:
        dataset: Any = self.loader.dataset
        indices, data = self.order.ahead
        if self._in_memory:
            batch = rows(dataset, indices, data)
            if batch is not None:
                return batch
        if self.order.single:
            return self.loader.collate_fn(dataset[indices])
        if getattr(dataset, "__getitems__", None):
            return self.loader.collate_fn(dataset.__getitems__(indices))
        return self.loader.collate_fn([dataset[i] for i in indices])

    def _read_apart(self, key: Key) -> Any:
        """Seed for each sample by its number in the epoch, whatever the batch size."""
        samples = []
        for number, index in enumerate(self.order.ahead[0], start=self.order.samples):
            self._seed((*key[:-1], number))
            samples.append(self.loader.dataset[index])
        self._seed((*key, "collate"))
        return self.loader.collate_fn(samples)

    def _seed(self, key: Key) -> None:
        digest = self._lane.seed(*key)
        for number, rng in enumerate(self._rngs.values()):
            reseed(rng, (int.from_bytes(digest[20:28], "little") >> 1) ^ number)


def _pinned(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    pin: Callable[[Any], Any] = pin_memory
    return pin(batch)
