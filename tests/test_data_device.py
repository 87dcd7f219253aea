"""A batch goes to a device as what it is."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import statetrain as st
from statetrain.data import device
from statetrain.data.device import moved

META = torch.device("meta")  # a device that each machine has
Pair = namedtuple("Pair", ["x", "to"])  # a field has a method's name


class Frozen(Mapping[str, Any]):
    """A mapping that is made of one, and stays as it is."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Odd(Frozen):
    """A mapping that is not made of one."""

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__({"x": a, "y": b})


class Encoding(UserDict[str, Any]):
    """As in `transformers`: it has items, and more, and moves itself in place."""

    def __init__(self, items: Any = None, text: str = "") -> None:
        super().__init__(items)
        self.text = text

    def to(self, where: Any) -> Encoding:
        self.data = {key: value.to(where) for key, value in self.data.items()}
        return self


class Own:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, where: Any) -> Own:
        return Own(self.x.to(where))


def x() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": x(), "y": [x(), "text"]},
        OrderedDict(x=x(), y=x()),
        UserDict(x=x(), y={"z": (x(), 3)}),
        Frozen({"x": x(), "y": x()}),
        [x(), (x(), None)],
        Pair(x(), x()),
        Encoding({"x": x()}),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_containers_stay_of_their_type(batch: Any) -> None:
    found = moved(batch, META)
    assert type(found) is type(batch)
    assert found is not batch
    assert devices(found) == {"meta"}
    assert devices(batch) == {"cpu"}, "the batch itself stays where it was"
    assert moved(batch, None) is batch


def devices(batch: Any) -> set[str]:
    if isinstance(batch, torch.Tensor):
        return {batch.device.type}
    items: Any = batch.values() if isinstance(batch, Mapping) else batch
    items = items if isinstance(batch, (Mapping, list, tuple)) else ()
    return set().union(*(devices(item) for item in items))


def test_what_a_mapping_has_besides_its_items_is_kept() -> None:
    batch: Any = defaultdict(list, x=x())
    assert moved(batch, META)["missing"] == []
    assert "missing" not in batch
    assert moved(Encoding({"x": x()}, text="as it was"), META).text == "as it was"


def test_a_mapping_that_cannot_be_made_of_one_becomes_a_dict() -> None:
    for batch in (Odd(x(), x()), MappingProxyType({"x": x(), "y": x()})):
        found = moved(batch, META)
        assert dict(found).keys() == {"x", "y"}
        assert devices(found) == {"meta"}


def test_what_moves_itself_is_asked() -> None:
    assert moved([Own(x())], META)[0].x.device == META
    packed = moved(pack_sequence([torch.ones(3), torch.ones(2)]), META)
    assert type(packed) is PackedSequence
    assert packed.data.device == META


@pytest.mark.parametrize(
    ("batch", "worth"),
    [
        ([torch.empty(2**18)], True),
        ({"x": torch.empty(2**17), "y": (torch.empty(2**17), "text")}, True),
        ([torch.empty(2**18 - 1)], False),
        ([torch.empty(2**18), torch.empty(2, device=META)], False),
        ([torch.empty(2**18), Own(x())], False),
        ([torch.empty(2**18), torch.eye(3).to_sparse()], False),
        ([torch.empty(2**18), torch.nn.Parameter(x())], False),
        (["text", None, 3], False),
    ],
)
def test_a_stream_is_worth_it_for_what_is_large_and_seen(batch: Any, worth: bool) -> None:
    assert device._worth_a_stream(batch) == worth


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no cuda device")
def test_large_batches_arrive_whole_while_the_device_works() -> None:
    cuda = torch.device("cuda", torch.cuda.current_device())
    data = torch.randn(640, 32, 1024)
    weight = torch.randn(1024, 1024, device=cuda)
    for pinned in (False, True):
        loader = st.resumable(
            DataLoader(TensorDataset(data), 64, shuffle=True, pin_memory=pinned), seed=1
        )
        plain = st.resumable(DataLoader(TensorDataset(data), 64, shuffle=True), seed=1)
        sums = []
        for batch, same in zip(loader, plain, strict=True):
            (rows,) = moved(batch, cuda)
            for _ in range(20):
                weight = torch.nn.functional.normalize(weight @ weight)
            sums.append((torch.equal(rows.cpu(), same[0]), (rows @ weight).sum()))
            del rows  # its memory may be given to the next batch
        assert all(equal for equal, _ in sums)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no cuda device")
def test_a_batch_waits_for_its_copy_and_its_memory_for_its_use() -> None:
    cuda = torch.device("cuda", torch.cuda.current_device())
    sent = [torch.full((2**22,), float(i)).pin_memory() for i in range(20)]
    found = []
    for batch in sent:  # nothing here waits for the device
        rows = moved(batch, cuda)
        torch.cuda._sleep(10_000_000)
        found.append(rows.sum())
        del rows
    assert [int(value) // 2**22 for value in found] == list(range(20))
