"""An order is drawn ahead, cut as torch cuts it, and found again with a sampler's own state."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

import statetrain as st
from statetrain.data import order
from statetrain.persist import container, randomness
from statetrain.persist.compare import unequal

N = 11


class Counted(Sampler[int]):
    """Another order each time it is asked; its state says how often it was."""

    def __init__(self) -> None:
        self.counts = {"asked": 0}

    def __iter__(self) -> Iterator[int]:
        self.counts["asked"] += 1
        asked = self.counts["asked"]
        yield from ((i * (1 + asked)) % N for i in range(N))

    def __len__(self) -> int:
        return N

    def state_dict(self) -> dict[str, Any]:
        return self.counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state


class Forgetful(Counted):
    """One that has no state: the negative control."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


class Skipping(DistributedSampler[int]):
    """Its state says how far it is, and it goes on there: as torchdata's."""

    def __init__(self) -> None:
        super().__init__(range(N), num_replicas=1, rank=0)  # type: ignore[arg-type]
        self.at = 0
        self.skip = 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.skip = self.skip, 0
        for index in list(super().__iter__())[self.at :]:
            self.at += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skip = state["at"]


class Drawing(Counted):
    """It draws whatever it does."""

    def __iter__(self) -> Iterator[int]:
        return (index for index in sorted(super().__iter__(), key=lambda _: random.random()))

    def state_dict(self) -> dict[str, Any]:
        random.random()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.randperm(3), random.random()
        super().load_state_dict(state)


class CountedBatches(Counted):
    def __iter__(self) -> Iterator[Any]:
        found = list(super().__iter__())
        yield from (found[i : i + 3] for i in range(0, N, 3))

    def __len__(self) -> int:
        return 4


def indices(sampler: Any = None, batches: Any = None, size: int = 3) -> DataLoader[Any]:
    data: Any = range(N)
    if batches is not None:
        return DataLoader(data, batch_sampler=batches)
    return DataLoader(data, size, sampler=sampler)


STATEFUL: dict[str, Callable[[], DataLoader[Any]]] = {
    "a sampler": lambda: indices(Counted()),
    "a sampler of single samples": lambda: DataLoader(
        range(N),  # type: ignore[arg-type]  # it has what it takes
        batch_size=None,
        sampler=Counted(),
    ),
    "a sampler in a batch sampler": lambda: indices(
        batches=BatchSampler(Counted(), 4, drop_last=True)
    ),
    "a batch sampler": lambda: indices(batches=CountedBatches()),
    "one that skips": lambda: indices(Skipping()),
    "one that draws": lambda: indices(Drawing()),
}


def made(loader: DataLoader[Any]) -> st.Loader:
    found = st.resumable(loader, seed=5)
    found.name = "data"
    return found


def events(loader: st.Loader, count: int) -> list[Any]:
    found = (next(loader, "end") for _ in range(count))
    return [event.tolist() if isinstance(event, torch.Tensor) else event for event in found]


def saved(loader: st.Loader) -> Any:
    state = loader.state_dict()
    container.check(state)
    return copy.deepcopy(state)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("ahead", [1, 2, 256])
def test_a_sampler_with_a_state_goes_on_the_same(
    name: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "AHEAD", ahead)
    until = len(list(STATEFUL[name]())) + 1
    golden = made(STATEFUL[name]())
    whole = events(golden, 4 * until)
    assert [i for i, event in enumerate(whole) if event == "end"] == [
        until * k - 1 for k in range(1, 5)
    ]
    assert whole[:until] != whole[until : 2 * until], "another order in each epoch"
    for stop in range(2 * until + 1):
        for left in (False, True):
            first, second = made(STATEFUL[name]()), made(STATEFUL[name]())
            events(first, stop)
            if left:
                first.start(first.epoch + 1)
            before = randomness.capture()
            second.load_state_dict(saved(first))
            assert unequal(randomness.capture(), before) == []
            assert events(second, 2 * until) == events(first, 2 * until), f"stopped after {stop}"


def test_without_its_state_such_a_sampler_is_refused() -> None:
    first = made(indices(Forgetful()))
    events(first, 7)
    with pytest.raises(st.DataError, match="what the sampler's state_dict says"):
        made(indices(Forgetful())).load_state_dict(saved(first))


@pytest.mark.parametrize("stop", range(7))
def test_a_state_that_is_left_out_is_noticed_at_every_position(stop: int) -> None:
    first = made(indices(Counted()))
    events(first, 6 + stop)
    state = saved(first)
    del state["source"]["sampler"]
    with pytest.raises(st.DataError, match="order of loader 'data' is another"):
        made(indices(Counted())).load_state_dict(state)


def test_an_order_that_no_state_tells_is_refused() -> None:
    class Entropy(Counted):
        def __iter__(self) -> Iterator[int]:
            yield from sorted(range(N), key=lambda _: os.urandom(8))

    first = made(indices(Entropy()))
    for stop in range(3):
        with pytest.raises(st.DataError, match="order of loader 'data' is another"):
            made(indices(Entropy())).load_state_dict(saved(first))
        events(first, 1 + stop)


def test_the_next_batch_is_checked_too() -> None:
    first = made(indices(list(range(N))))
    events(first, 2)
    other = list(range(N))
    other[8] = 0
    with pytest.raises(st.DataError, match="first 2 batches of epoch 0 or the next one"):
        made(indices(other)).load_state_dict(saved(first))
    second = made(indices([*range(9), 0, 0]))  # what comes later may be anything
    second.load_state_dict(saved(first))
    assert events(second, 1) == [[6, 7, 8]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, N, 20])
@pytest.mark.parametrize("ahead", [1, 2, 256])
def test_indices_are_cut_as_by_torch(
    drop_last: bool, size: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(BatchSampler):
        """It is asked for its batches, since it might cut otherwise."""

    monkeypatch.setattr(order, "AHEAD", ahead)
    samplers: list[Callable[[], Any]] = [
        lambda: range(N),
        lambda: RandomSampler(range(N), generator=torch.Generator().manual_seed(1)),
        lambda: RandomSampler(range(N), replacement=True, num_samples=70),
        lambda: list("abcdefghijk"),
        lambda: [0, 2**70, "a", True, 4],
    ]
    for sampler in samplers:
        cut, asked = (
            order.Order(indices(batches=kind(sampler(), size, drop_last)))
            for kind in (BatchSampler, Plain)
        )
        for epoch in range(2):
            for each in (cut, asked):
                each.begin(("key", epoch), epoch)
            while asked.has_next:
                assert cut.has_next
                assert cut.ahead[0] == asked.ahead[0]
                cut.take(), asked.take()
                both = [each.state(running=True) for each in (cut, asked)]
                assert unequal(*both) == []
                assert cut.samples == asked.samples
            assert not cut.has_next


def test_the_bytes_ahead_are_the_indices() -> None:
    found = order.Order(indices(list(range(N))))
    found.begin(("key",), 0)
    while found.has_next:
        ahead, data = found.ahead
        assert data is not None
        assert torch.frombuffer(data, dtype=torch.int64).tolist() == ahead
        found.take()
