"""Whatever the loader and wherever it is stopped, it goes on at the next batch."""

from __future__ import annotations

import copy
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import statetrain as st
from statetrain.data import order
from statetrain.persist import container, randomness
from statetrain.persist.compare import unequal

N = 11
SEEDINGS = ("batch", "sample", "main")


class Numbers(Dataset):
    """What it holds at i is i; it draws nothing."""

    def __init__(self, length: int = N) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: Any) -> Any:
        self.read.append(i)
        return i


class Noisy(Dataset):
    """It draws from each stream there is, and from generators of its own."""

    def __init__(self, length: int = N) -> None:
        self.length = length
        self.numpy = np.random.default_rng(1)
        self.legacy = np.random.RandomState(1)
        self.transforms = [types.SimpleNamespace(rng=random.Random(1))]
        self.torch = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> torch.Tensor:
        own = [
            self.numpy.normal(),
            self.legacy.randn(),
            self.transforms[0].rng.gauss(),
            float(torch.randn((), generator=self.torch)),
        ]
        return torch.tensor([i, *drawn(), *own], dtype=torch.float64)


class Fetched(Noisy):
    """As Hugging Face's: a whole batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[i] + drawn()[0] for i in indices]


def drawn() -> list[float]:
    """Draw an odd number of normals too: half a pair is kept for the next call."""
    return [random.gauss(), random.random(), np.random.randn(), float(torch.randn(()))]


def noisy_collate(samples: list[Any]) -> tuple[torch.Tensor, list[float]]:
    return default_collate(samples), drawn()


class PythonRandom(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        for _ in range(N):
            yield random.randrange(N)

    def __len__(self) -> int:
        return N


class OwnBatches(Sampler[list[int]]):
    """Draws when it is asked, and hands out one list again and again."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for _ in range(5):
            batch.clear()
            batch.extend(int(i) for i in self.rng.integers(N, size=self.rng.integers(1, 4)))
            yield batch

    def __len__(self) -> int:
        return 5


class ShuffledKeys(Sampler[Any]):
    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Any]:
        yield from (self.keys[i] for i in torch.randperm(len(self.keys)))

    def __len__(self) -> int:
        return len(self.keys)


class Mine:
    """A loader of somebody's own, which says where it is."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.order: list[int] = []
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        if self.at == 0:
            self.order = [int(i) for i in self.rng.permutation(5)]
        while self.at < 5:
            self.at += 1
            yield self.order[self.at - 1], drawn()
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        state = {"rng": self.rng.bit_generator.state, "order": self.order, "at": self.at}
        return {**state, "global": drawn()}  # it may draw: an iterator's seed, say

    def load_state_dict(self, state: dict[str, Any]) -> None:
        drawn()
        self.rng.bit_generator.state = state["rng"]
        self.order, self.at = list(state["order"]), state["at"]


class Table:
    """A sequence that makes its batches when asked."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        if i >= 4:
            raise IndexError(i)
        return i, drawn()


def shared_with_the_sampler() -> DataLoader[Any]:
    g = torch.Generator().manual_seed(2)
    sampler = RandomSampler(range(N), replacement=True, num_samples=40, generator=g)
    return DataLoader(Numbers(), 3, sampler=sampler, generator=g)


def shared_with_the_dataset() -> DataLoader[Any]:
    dataset = Noisy()
    return DataLoader(dataset, batch_sampler=OwnBatches(dataset.numpy))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


LOADERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: DataLoader(Numbers(), 3),
    "shuffle": lambda: DataLoader(Numbers(), 3, shuffle=True),
    "shuffle of a generator": lambda: DataLoader(Numbers(), 3, shuffle=True, generator=generator()),
    "a generator for loader and sampler": shared_with_the_sampler,
    "a generator for sampler and dataset": shared_with_the_dataset,
    "with replacement": lambda: DataLoader(
        Numbers(), 3, sampler=RandomSampler(range(N), replacement=True, num_samples=70)
    ),
    "weighted": lambda: DataLoader(
        Numbers(), 2, sampler=WeightedRandomSampler([0.1 + i for i in range(N)], 9)
    ),
    "subset": lambda: DataLoader(Numbers(), 2, sampler=SubsetRandomSampler(range(3, 10))),
    "own batches": lambda: DataLoader(
        Numbers(), batch_sampler=OwnBatches(np.random.default_rng(4)), collate_fn=list
    ),
    "own batches of MT19937": lambda: DataLoader(
        Numbers(), batch_sampler=OwnBatches(np.random.Generator(np.random.MT19937(4)))
    ),
    "no batches": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "no batches, own sampler": lambda: DataLoader(
        Numbers(), batch_size=None, sampler=PythonRandom()
    ),
    "batches as samples": lambda: DataLoader(
        Numbers(), batch_size=None, sampler=BatchSampler(PythonRandom(), 4, drop_last=False)
    ),
    "drop last": lambda: DataLoader(Numbers(), 3, shuffle=True, drop_last=True),
    "python": lambda: DataLoader(Numbers(), 3, sampler=PythonRandom()),
    "distributed": lambda: DataLoader(
        Numbers(), 3, sampler=DistributedSampler(range(N), num_replicas=1, rank=0)
    ),
    "distributed in batches": lambda: DataLoader(
        Numbers(),
        batch_sampler=BatchSampler(
            DistributedSampler(range(N), num_replicas=1, rank=0), 3, drop_last=False
        ),
    ),
    "tensors": lambda: DataLoader(TensorDataset(torch.arange(N)), 4, shuffle=True),
    "noisy": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "noisy, collated": lambda: DataLoader(Noisy(), 4, shuffle=True, collate_fn=noisy_collate),
    "noisy, no batches": lambda: DataLoader(
        Noisy(5), batch_size=None, shuffle=True, collate_fn=lambda sample: (sample, drawn())
    ),
    "noisy, fetched": lambda: DataLoader(Fetched(), 4, shuffle=True),
    "noisy subset": lambda: DataLoader(Subset(Noisy(), range(1, 9)), 3, shuffle=True),
    "list": lambda: [1, 2, 3],
    "tuple": lambda: ("a", torch.ones(2)),
    "deque": lambda: deque([1, 2, 3]),
    "table": Table,
    "own": Mine,
    "empty list": list,
    "empty": lambda: DataLoader(Numbers(0), 3),
    "empty, dropped": lambda: DataLoader(Numbers(2), 3, shuffle=True, drop_last=True),
    "one batch": lambda: DataLoader(Numbers(3), 3, shuffle=True),
    "one in a list": lambda: [0],
}
FIXED = {"sequential", "list", "tuple", "deque", "one in a list", "empty list", "empty"}
FIXED |= {"empty, dropped", "one batch"}


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    before = randomness.capture()
    randomness.seed_everything(7)
    yield
    randomness.restore(before)


def made(loader: Any, seeding: str = "batch") -> st.Loader:
    found = st.resumable(loader, seeding=seeding, seed=5)
    found.name = "data"
    return found


def epoch(loader: st.Loader) -> list[Any]:
    """Return what is left of the running epoch."""
    return list(iter(lambda: next(loader, END), END))


END = object()


def events(loader: st.Loader, count: int) -> list[Any]:
    """Return the next batches, and "end" for each end of an epoch."""
    return [next(loader, "end") for _ in range(count)]


def same(a: Any, b: Any) -> bool:
    return unequal(a, b) == []


def saved(loader: st.Loader) -> Any:
    """Return what a checkpoint keeps, apart from what lives on."""
    state = loader.state_dict()
    container.check(state)
    return copy.deepcopy(state)


# --- stopped anywhere


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("looking", [False, True], ids=["", "looking"])
def test_stopped_at_any_position_it_goes_on_the_same(name: str, looking: bool) -> None:
    golden = made(LOADERS[name]())
    until = len(epoch(made(LOADERS[name]()))) + 1
    whole = events(golden, 4 * until)
    assert [i for i, event in enumerate(whole) if event == "end"] == [
        until * k - 1 for k in range(1, 5)
    ] or name in {"own batches", "own batches of MT19937"}
    for stop in range(2 * until + 1):
        first = made(LOADERS[name]())
        begun = events(first, stop)
        if looking:
            _ = first.has_next
        second = made(LOADERS[name]())
        second.load_state_dict(saved(first))
        assert (second.epoch, second.position) == (first.epoch, first.position)
        if looking:
            assert second.has_next == first.has_next
        rest = events(second, 2 * until)
        assert same(begun + rest, whole[: stop + 2 * until]), f"stopped after {stop}"


@pytest.mark.parametrize("name", [name for name in LOADERS if name.startswith(("noisy", "a gen"))])
@pytest.mark.parametrize("seeding", SEEDINGS)
def test_what_is_drawn_is_the_same_for_every_seeding(name: str, seeding: str) -> None:
    whole = events(made(LOADERS[name](), seeding), 14)
    for stop in range(12):
        randomness.seed_everything(7)
        first = made(LOADERS[name](), seeding)
        begun = events(first, stop)
        state, streams = saved(first), randomness.capture()
        drawn()
        second = made(LOADERS[name](), seeding)
        second.load_state_dict(state)
        if seeding == "main":
            randomness.restore(streams)
        assert same(begun + events(second, 14 - stop), whole), f"stopped after {stop}"


@pytest.mark.parametrize("name", sorted(set(LOADERS) - FIXED))
def test_no_order_is_repeated(name: str) -> None:
    loader = made(LOADERS[name]())
    first, second, third = epoch(loader), epoch(loader), epoch(loader)
    assert unequal(first, second) != []
    assert unequal(second, third) != []


@pytest.mark.parametrize("name", LOADERS)
def test_loading_at_once_after_loading_is_the_same(name: str) -> None:
    first = made(LOADERS[name]())
    events(first, 2)
    second, third = made(LOADERS[name]()), made(LOADERS[name]())
    second.load_state_dict(saved(first))
    third.load_state_dict(saved(second))
    assert same(events(third, 6), events(first, 6))


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_that_was_used_goes_back(name: str) -> None:
    loader = made(LOADERS[name]())
    begun = events(loader, 1)
    state = saved(loader)
    rest = events(loader, 6)
    loader.load_state_dict(state)
    assert same(events(loader, 6), rest)
    assert len(begun) == 1


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "own"])
def test_an_epoch_left_in_its_middle_is_left_the_same(name: str) -> None:
    def life(stop: int | None, looking: bool) -> list[Any]:
        loader = made(LOADERS[name]())
        found = []
        for step, work in enumerate((take, take, leave, take, take, leave, take)):
            found.append(work(loader))
            if step == stop:
                state = saved(loader)
                loader = made(LOADERS[name]())
                loader.load_state_dict(state)
            if looking:
                _ = loader.has_next
        return found

    def take(loader: st.Loader) -> Any:
        return next(loader, "end")

    def leave(loader: st.Loader) -> None:
        loader.start(loader.epoch + 1)

    for looking in (False, True):
        golden = life(None, looking)
        for stop in range(6):
            assert same(life(stop, looking), golden), f"stopped after {stop}"


def test_indices_are_drawn_ahead_the_same_wherever_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order, "AHEAD", 2)
    for looking in (False, True):
        test_stopped_at_any_position_it_goes_on_the_same("own batches", looking)
        test_stopped_at_any_position_it_goes_on_the_same("shuffle of a generator", looking)
        test_stopped_at_any_position_it_goes_on_the_same(
            "a generator for loader and sampler", looking
        )
    test_an_epoch_left_in_its_middle_is_left_the_same("own batches")
    test_an_epoch_left_in_its_middle_is_left_the_same("a generator for loader and sampler")


@pytest.mark.parametrize(
    "left_out",
    [("position",), ("epoch",), ("begun",), ("over",), ("source", "start"), ("source", "now")],
)
def test_each_part_of_the_state_is_needed(left_out: tuple[str, ...]) -> None:
    def new() -> st.Loader:
        return made(LOADERS["shuffle" if left_out == ("epoch",) else "shuffle of a generator"]())

    noticed = False
    for stop in range(10):
        first = new()
        events(first, stop)
        state, fresh = saved(first), saved(new())
        kept, place = state, fresh
        for key in left_out[:-1]:
            kept, place = kept[key], place[key]
        kept[left_out[-1]] = place[left_out[-1]]
        second = new()
        try:
            second.load_state_dict(state)
            noticed |= not same(events(second, 10), events(first, 10))
        except (st.DataError, KeyError):
            noticed = True
    assert noticed


# --- how it is used


@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_ends_once_and_the_next_begins(name: str) -> None:
    loader = made(LOADERS[name]())
    length = len(epoch(loader))
    assert (loader.epoch, loader.position, loader.has_next) == (0, length, False)
    if name not in {"empty list", "empty", "empty, dropped"}:
        next(loader)
        assert (loader.epoch, loader.position) == (1, 1)
    else:
        assert next(loader, None) is None
        assert (loader.epoch, loader.position) == (1, 0)


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "own"])
def test_its_length_is_that_of_the_loader_and_says_how_many_batches_come(name: str) -> None:
    loader = made(LOADERS[name]())
    state = saved(loader)
    assert len(loader) == loader.length == len(LOADERS[name]())
    assert same(saved(loader), state)
    assert len(epoch(loader)) == len(loader)


def test_a_loader_of_unknown_length_has_none() -> None:
    class Forever(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield 1

    loader = made(DataLoader(Numbers(), 2, sampler=Forever()))
    assert loader.length is None
    with pytest.raises(TypeError, match="unknown"):
        len(loader)
    assert [batch.tolist() for batch in events(loader, 3)] == [[1, 1]] * 3


def test_starting_an_epoch_that_is_at_its_start_draws_no_new_order() -> None:
    first, second = (made(LOADERS["shuffle of a generator"]()) for _ in range(2))
    assert second.has_next
    second.start(0)
    assert same(epoch(first), epoch(second))


def test_an_epochs_order_does_not_depend_on_what_was_before() -> None:
    first, second = made(LOADERS["noisy"]()), made(LOADERS["noisy"]())
    events(first, 2)
    first.start(3)
    epoch(second)
    second.start(3)
    assert same(epoch(first), epoch(second))
    assert first.epoch == 3


def test_seed_name_and_epoch_each_change_the_order() -> None:
    def order(seed: Any, name: str, number: int) -> Any:
        loader = st.resumable(DataLoader(Numbers(30), 30, shuffle=True), seed=seed)
        loader.name = name
        loader.start(number)
        return next(loader).tolist()

    orders = [order(*key) for key in ((1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1))]
    assert len({tuple(found) for found in orders}) == 4
    assert order(np.int64(1), "a", 0) == orders[0]


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 + 1, 2**200])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    first, second, other = (
        st.resumable(DataLoader(Noisy(), 4, shuffle=True), seed=s) for s in (seed, seed, 0)
    )
    found = epoch(first)
    assert same(found, epoch(second))
    assert not same(found, epoch(other))


def test_a_sampler_is_asked_once_an_epoch() -> None:
    asked = []

    class Asked(PythonRandom):
        def __iter__(self) -> Iterator[int]:
            asked.append(1)
            return super().__iter__()

    loader = made(DataLoader(Numbers(), 3, sampler=Asked()))
    for _ in range(3):
        _ = loader.has_next
        epoch(loader)
    assert len(asked) == 3


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 6])
def test_what_was_consumed_is_not_read_again(stop: int) -> None:
    first = made(DataLoader(Numbers(), 3, shuffle=True))
    events(first, stop)
    dataset = Numbers()
    second = made(DataLoader(dataset, 3, shuffle=True))
    second.load_state_dict(saved(first))
    _ = second.has_next, len(second), saved(second)
    assert dataset.read == []
    batch = next(second, None)
    assert dataset.read == ([] if batch is None else batch.tolist())


def test_other_samplers_hear_of_the_epoch_too() -> None:
    for name in ("distributed", "distributed in batches"):
        loader = made(LOADERS[name]())
        plain = LOADERS[name]()
        sampler = plain.sampler if name == "distributed" else plain.batch_sampler.sampler
        for number in range(3):
            sampler.set_epoch(number)
            assert same(epoch(loader), list(plain))


def test_batches_are_those_of_the_plain_loader() -> None:
    for name in ("sequential", "list", "tuple", "deque"):
        assert same(epoch(made(LOADERS[name]())), list(LOADERS[name]()))
    for shuffled in (DataLoader(Numbers(), 4, shuffle=True), LOADERS["tensors"]()):
        found = [batch[0] if isinstance(batch, list) else batch for batch in epoch(made(shuffled))]
        assert [len(batch) for batch in found] == [4, 4, 3]
        assert sorted(torch.cat(found).tolist()) == list(range(N))
    fetched = made(DataLoader(Fetched(), 4))
    assert [batch[:, 0].round().shape for batch in epoch(fetched)] == [(4,), (4,), (3,)]


# --- the streams of others


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_the_global_streams_stay_where_they_are(name: str, seeding: str) -> None:
    drawn()
    loader, other = made(LOADERS[name](), seeding), made(LOADERS[name](), seeding)
    before = randomness.capture()
    for _ in range(2):
        _ = loader.has_next
        epoch(loader)
        saved(loader)
    events(loader, 1)
    other.load_state_dict(saved(loader))
    _ = other.has_next
    events(other, 2)
    assert same(randomness.capture(), before)


def test_the_main_seeding_draws_from_the_global_streams() -> None:
    loader = made(DataLoader(Noisy(), 4, shuffle=True), "main")
    before = randomness.capture()
    assert loader.has_next
    assert same(randomness.capture(), before)
    next(loader)
    assert unequal(randomness.capture(), before) != []


@pytest.mark.parametrize("name", LOADERS)
def test_what_the_training_draws_changes_nothing(name: str) -> None:
    first, second = made(LOADERS[name]()), made(LOADERS[name]())
    for _ in range(8):
        drawn()
        assert same(next(first, "end"), next(second, "end"))


def test_sample_seeding_does_not_depend_on_the_batch_size() -> None:
    ones = [
        made(DataLoader(Noisy(), size, shuffle=True, collate_fn=collate), "sample")
        for size, collate in ((1, list), (4, list), (N, list), (None, lambda sample: [sample]))
    ]
    found = [[sample for batch in epoch(loader) for sample in batch] for loader in ones]
    assert all(same(samples, found[0]) for samples in found)
    other = [made(DataLoader(Noisy(), size, shuffle=True, collate_fn=list)) for size in (1, 4)]
    assert not same(*([s for batch in epoch(loader) for s in batch] for loader in other))


def test_where_nothing_is_drawn_the_fast_way_gives_the_same() -> None:
    class Fixed(Numbers):
        deterministic = True

    for dataset, slow in (
        (TensorDataset(torch.arange(N)), StackDataset(torch.arange(N))),
        (Subset(TensorDataset(torch.arange(N)), range(2, 9)), StackDataset(torch.arange(2, 9))),
        (Fixed(), Numbers()),
    ):
        fast_loader, slow_loader = (made(DataLoader(d, 3, shuffle=True)) for d in (dataset, slow))
        assert (fast_loader.source._draws, slow_loader.source._draws) == (False, True)
        for _ in range(2):
            found = [epoch(fast_loader), epoch(slow_loader)]
            flat = [
                [torch.as_tensor(b[0] if isinstance(b, (list, tuple)) else b) for b in f]
                for f in found
            ]
            assert same(*flat)


def test_a_subset_that_draws_is_not_taken_the_fast_way() -> None:
    class Augmented(Subset[Any]):
        def __getitem__(self, i: Any) -> Any:
            return super().__getitem__(i)[0], random.random()

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[i] for i in indices]

    def new() -> st.Loader:
        return made(DataLoader(Augmented(TensorDataset(torch.arange(N)), range(N)), 3))

    before = randomness.capture()
    assert same(epoch(new()), epoch(new()))
    assert same(randomness.capture(), before)


# --- what goes wrong


class Faulty(Noisy):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error

    def __getitem__(self, i: int) -> torch.Tensor:
        found = super().__getitem__(i)
        if i == 4 and self.error is not None:
            raise self.error
        return found


@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_a_batch_that_fails_is_not_counted_and_is_the_next(seeding: str) -> None:
    dataset = Faulty(KeyError("gone"))
    loader, golden = made(DataLoader(dataset, 3), seeding), made(DataLoader(Noisy(), 3), seeding)
    whole = epoch(golden)
    before = randomness.capture()
    begun = events(loader, 1)
    for _ in range(2):
        with pytest.raises(KeyError, match="gone"):
            next(loader)
    assert same(randomness.capture(), before)
    assert loader.position == 1
    state = saved(loader)
    dataset.error = None
    assert same(begun + epoch(loader), whole)
    again = made(DataLoader(Noisy(), 3), seeding)
    again.load_state_dict(state)
    assert same(epoch(again), whole[1:])


def test_a_dataset_that_raises_stop_iteration_does_not_end_the_epoch() -> None:
    loader = made(DataLoader(Faulty(StopIteration()), 3))
    next(loader)
    with pytest.raises(st.DataError, match=r"loading batch 1 of epoch 0 of loader 'data' raised"):
        next(loader, None)


def test_a_sampler_that_fails_leaves_the_streams_and_is_not_begun() -> None:
    class Broken(PythonRandom):
        def __iter__(self) -> Iterator[int]:
            random.random()
            raise KeyError("broken")
            yield 0

    loader = made(DataLoader(Numbers(), 3, sampler=Broken()))
    before = randomness.capture()
    for _ in range(2):
        with pytest.raises(KeyError, match="broken"):
            _ = loader.has_next
    assert same(randomness.capture(), before)


class Counting(Sampler[int]):
    """Its order depends on how often it was asked: that cannot be replayed."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        yield from ((i * (1 + self.asked)) % N for i in range(N))

    def __len__(self) -> int:
        return N


def test_a_sampler_that_cannot_be_replayed_is_found_out() -> None:
    def new() -> st.Loader:
        return made(DataLoader(Numbers(), 3, sampler=Counting()))

    first = new()
    events(first, 2)
    new().load_state_dict(saved(first))  # asked once, as then
    events(first, 5)
    with pytest.raises(st.DataError, match=r"order of loader 'data' .* first 2 batches of epoch 1"):
        new().load_state_dict(saved(first))
    state = saved(first)
    state["source"]["crc"] = 0
    with pytest.raises(st.DataError, match="order"):
        new().load_state_dict(state)


@pytest.mark.parametrize("cut", [[[0, 1], [2]], [[0], [1, 2]], [[0, 1, 2], []], [[0, 1], [2], [3]]])
def test_batches_that_are_cut_otherwise_are_found_out(cut: list[list[int]]) -> None:
    def new(batches: Any) -> st.Loader:
        return made(DataLoader(Numbers(), batch_sampler=batches, collate_fn=list))

    first = new([[0, 1, 2], [3]])
    events(first, 2)
    with pytest.raises(st.DataError, match=r"order|number of batches"):
        new(cut).load_state_dict(saved(first))


def test_an_order_that_is_shorter_now_is_found_out() -> None:
    class Cut(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    first = made(DataLoader(Numbers(), 3))
    events(first, 3)
    with pytest.raises(st.DataError, match="order"):
        made(DataLoader(Numbers(), 3, sampler=Cut(range(N)))).load_state_dict(saved(first))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: DataLoader(Noisy(9), 3), r"dataset length 9, in the checkpoint it is 11"),
        (lambda: DataLoader(Noisy(), 4), r"batch size 4, in the checkpoint it is 3"),
        (
            lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(range(N), 4, drop_last=False)),
            r"batch size 4, in the checkpoint it is 3",
        ),
        (lambda: DataLoader(Noisy(), 3, drop_last=True), r"number of batches 3, .* it is 4"),
        (lambda: st.resumable(DataLoader(Noisy(), 3), seeding="sample"), r"seeding 'sample', in"),
        (lambda: DataLoader(Numbers(), 3), r"generators '', .*dataset.numpy|generators"),
        (lambda: DataLoader(Noisy(), 3, num_workers=1), r"kind 'iterator', .* it is 'indexed'"),
        (lambda: [1, 2, 3, 4], r"kind 'batches', .* it is 'indexed'"),
        (Mine, r"kind 'stateful', .* it is 'indexed'"),
    ],
)
def test_other_data_than_in_the_checkpoint_is_an_error(
    other: Callable[[], Any], message: str
) -> None:
    first = made(DataLoader(Noisy(), 3))
    next(first)
    with pytest.raises(st.DataError, match=rf"loader 'data' has {message}"):
        st.resumable(other()).load_state_dict(saved(first))


def test_a_list_of_another_length_is_an_error() -> None:
    with pytest.raises(st.DataError, match=r"number of batches 2, in the checkpoint it is 3"):
        made([1, 2]).load_state_dict(saved(made([1, 2, 3])))


def test_a_state_of_another_version_is_an_error() -> None:
    state = {**saved(made([1])), "version": 1}
    with pytest.raises(st.DataError, match="has version 1, known is 2"):
        made([1]).load_state_dict(state)


KEYS: dict[str, list[Any]] = {
    "numpy": [np.int64(i) for i in range(6)],
    "tensor": [torch.tensor(i) for i in range(6)],
    "string": list("abcdef"),
    "tuple": [(i, "x") for i in range(6)],
    "big": [2**70 + i for i in range(6)],
    "array": [np.array([i, i + 1]) for i in range(6)],
    "tensors": [torch.full((2000,), i) for i in range(6)],
    "slice": [slice(i, i + 1) for i in range(6)],
    "object": [types.SimpleNamespace(i=i, f=object()) for i in range(6)],
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("size", [None, 2])
def test_an_index_may_be_of_any_kind(kind: str, size: int | None) -> None:
    def new(keys: list[Any]) -> st.Loader:
        sampler = ShuffledKeys(copy.deepcopy(keys))
        return made(DataLoader(Numbers(), size, sampler=sampler, collate_fn=repr))

    def stopped(keys: list[Any]) -> tuple[list[Any], st.Loader]:
        first = new(keys)
        begun = events(first, 2)
        second = new(keys)
        second.load_state_dict(saved(first))
        return begun, second

    begun, second = stopped(KEYS[kind])
    if kind != "object":  # its repr has an address
        assert begun + epoch(second) == epoch(new(KEYS[kind]))
    other = KEYS[kind][1:] + KEYS[kind][:1]
    with pytest.raises(st.DataError, match="order"):
        new(other).load_state_dict(saved(second) if second.position == 2 else moved(kind, new))


def moved(kind: str, new: Callable[[list[Any]], st.Loader]) -> Any:
    loader = new(KEYS[kind])
    events(loader, 2)
    return saved(loader)


@pytest.mark.parametrize("form", [tuple, torch.tensor, np.array, iter, set])
def test_a_batch_of_indices_may_be_of_any_form(form: Any) -> None:
    class Formed(OwnBatches):
        def __iter__(self) -> Iterator[Any]:
            yield from (form(list(batch)) for batch in super().__iter__())

    def new() -> st.Loader:
        sampler: Any = Formed(np.random.default_rng(4))
        return made(DataLoader(Numbers(), batch_sampler=sampler, collate_fn=list))

    first, second = new(), new()
    events(first, 7)
    second.load_state_dict(saved(first))
    assert events(second, 3) == events(first, 3)


# --- what is no loader, and what cannot be exact


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((i for i in range(3)), "generator is an iterator and can be read only once: give a D"),
        (iter([1]), "list_iterator is an iterator"),
        (zip([1], [2], strict=True), "zip is an iterator"),
        (Numbers(), r"Numbers is a dataset: give DataLoader\(dataset, batch_size=...\)"),
        (torch.ones(3), "a Tensor is no loader: give a DataLoader or a list of batches"),
        (np.ones(3), "a ndarray is no loader"),
        ("train", "a str is no loader"),
        (b"train", "a bytes is no loader"),
        ({"x": 1}, "a dict is no loader"),
        (None, "None is no loader"),
        (3, "3 is no loader"),
        (DataLoader, "DataLoader'> is no loader"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_loader_is_refused(given: Any, message: str) -> None:
    with pytest.raises(st.DataError, match=message):
        st.resumable(given)


def test_a_seeding_that_does_not_exist_is_refused() -> None:
    with pytest.raises(st.DataError, match='seeding=\'x\': give "batch", "sample" or "main"'):
        st.resumable([1], seeding="x")


def test_a_loader_that_is_resumable_stays_what_it_is() -> None:
    loader = st.resumable([1])
    assert st.resumable(loader) is loader
    assert iter(loader) is loader


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ((i, drawn()) for i in range(5))


class Overridden(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch * 2 for batch in super().__iter__())


PASSED: dict[str, tuple[Callable[[], Any], str]] = {
    "workers": (
        lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
        "num_workers=2 cannot be resumed exactly yet: use num_workers=0",
    ),
    "stream": (lambda: DataLoader(Stream(), 2), "its dataset is an IterableDataset"),
    "overridden": (
        lambda: Overridden(Numbers(), 4, shuffle=True),
        "Overridden overrides DataLoader.__iter__: give it state_dict",
    ),
    "unknown": (lambda: {1, 2, 3}, "set is an iterable of unknown kind: give a DataLoader"),
}


@pytest.mark.parametrize("name", PASSED)
def test_what_cannot_be_exact_is_said_and_trains(name: str) -> None:
    make, message = PASSED[name]
    loader, other = made(make()), made(make())
    assert len(loader.problems()) == 1
    assert message in loader.problems()[0]
    drawn()
    before = randomness.capture()
    first, second = epoch(loader), epoch(loader)
    assert same(randomness.capture(), before)
    assert len(first) == len(second) == 3
    assert (loader.epoch, loader.has_next) == (1, False)
    assert same(first, epoch(other)), "the same seed gives the same batches"
    if name == "workers":
        assert not same(first, second)


def test_what_is_passed_through_goes_on_at_its_position() -> None:
    for name in ("stream", "overridden", "unknown"):
        make = PASSED[name][0]
        first, second = made(make()), made(make())
        events(first, 5)
        second.load_state_dict(saved(first))
        assert same(events(second, 5), events(first, 5))


def test_an_iterator_that_starts_over_is_not_asked_again() -> None:
    class Again:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[int]:
            return iter(self.step, None)  # type: ignore[arg-type]

        def step(self) -> int:
            self.at += 1
            if self.at % 3 == 0:
                raise StopIteration
            return self.at

    loader = made(Again())
    assert [len(epoch(loader)) for _ in range(3)] == [2, 2, 2]
    assert not loader.has_next


@pytest.mark.parametrize("name", LOADERS)
def test_what_can_be_exact_has_no_problems(name: str) -> None:
    assert made(LOADERS[name]()).problems() == []


# --- loaders with a state of their own


def test_the_state_of_an_own_loader_is_that_before_the_batch_ahead() -> None:
    loader = made(Mine())
    next(loader)
    before = saved(loader)["source"]["loader"]["at"]
    assert loader.has_next
    assert (before, saved(loader)["source"]["loader"]["at"]) == (1, 1)


def test_saving_changes_no_batch_of_an_own_loader() -> None:
    first, second = made(Mine()), made(Mine())
    found = []
    for step in range(15):
        if step % 6 == 0:
            saved(second)
            second.start(step // 6)
            first.start(step // 6)
        found.append((next(first, "end"), next(second, "end")))
        saved(second)
    assert same([a for a, _ in found], [b for _, b in found])


def stateful(make: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    return {
        "sequential": lambda: make(Numbers(), 3),
        "shuffle": lambda: make(Numbers(), 3, shuffle=True),
        "weighted": lambda: make(Numbers(), 3, sampler=WeightedRandomSampler([1.0] * N, N)),
        "python": lambda: make(Numbers(), 3, sampler=ShuffledKeys(list(range(N)))),
        "fetched": lambda: make(TensorDataset(torch.arange(N)), 3, shuffle=True),
    }


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # it calls that
@pytest.mark.parametrize("name", stateful(DataLoader))
def test_torchdatas_stateful_loader_goes_on_too(name: str) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    new = stateful(torchdata.StatefulDataLoader)[name]

    def make() -> Any:
        randomness.seed_everything(7)  # it draws its order's seed when it is made
        return new()

    whole = events(made(make()), 20)
    assert [i for i, event in enumerate(whole) if isinstance(event, str)] == [4, 9, 14, 19]
    for stop in range(11):
        first, second = made(make()), made(make())
        begun = events(first, stop)
        second.load_state_dict(saved(first))
        assert same(begun + events(second, 9), whole[: stop + 9]), f"stopped after {stop}"
