"""Data in memory is read a batch at a time, and gives what samples give one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, Subset, TensorDataset
from torch.utils.data._utils import collate

import statetrain as st

N = 11


class Reads:
    """How many samples were read one by one."""

    def __init__(self) -> None:
        self.count = 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads()
    stack = torch.stack

    def counted(samples: Any, *args: Any, **kwargs: Any) -> Any:
        found.count += len(samples)
        return stack(samples, *args, **kwargs)

    monkeypatch.setattr(torch, "stack", counted)
    return found


class Listed(Sampler[Any]):
    """The indices of a list, as they are."""

    def __init__(self, indices: list[Any]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(1))


def with_nans() -> torch.Tensor:
    data = floats(3)
    data[::2] = float("nan")
    return data


def channels_last(*shape: int) -> torch.Tensor:
    return floats(*shape).to(memory_format=torch.channels_last)


def dataset(*tensors: torch.Tensor) -> TensorDataset:
    return TensorDataset(*tensors)


def read_only() -> np.ndarray:
    data = floats(3).numpy().copy()
    data.flags.writeable = False
    return data


AT_ONCE: dict[str, Callable[[], DataLoader[Any]]] = {
    "one tensor": lambda: DataLoader(dataset(floats(3)), 4),
    "two tensors": lambda: DataLoader(dataset(floats(3), torch.arange(N)), 4),
    "three tensors": lambda: DataLoader(dataset(floats(2, 3), torch.arange(N), floats(1)), 4),
    "numbers": lambda: DataLoader(dataset(floats()), 4),
    "images": lambda: DataLoader(dataset(floats(3, 4, 5)), 4),
    "images of one channel": lambda: DataLoader(dataset(floats(1, 4, 5)), 4),
    "images of one pixel": lambda: DataLoader(dataset(floats(3, 1, 1)), 4),
    "images of one number": lambda: DataLoader(dataset(floats(1, 1, 1)), 4),
    "videos": lambda: DataLoader(dataset(floats(2, 1, 3, 1)), 4),
    "nan": lambda: DataLoader(dataset(with_nans()), 4),
    **{
        f"{dtype}": lambda dtype=dtype: DataLoader(dataset(floats(3).mul(9).to(dtype)), 4)
        for dtype in (
            *(torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
            *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
        )
    },
    "part of a storage": lambda: DataLoader(dataset(torch.arange(4.0 * N).view(-1, 2)[3 : N + 3])),
    "drop_last": lambda: DataLoader(dataset(floats(3)), 4, drop_last=True),
    "larger than the data": lambda: DataLoader(dataset(floats(3)), 40),
    "one sample": lambda: DataLoader(dataset(floats(3)), 1),
    "tensor": lambda: DataLoader(floats(3), 4),  # type: ignore[arg-type]  # it has what it takes
    "tensor of numbers": lambda: DataLoader(floats(), 4),  # type: ignore[arg-type]
    "array": lambda: DataLoader(floats(3).numpy(), 4),  # type: ignore[arg-type]
    "array of truths": lambda: DataLoader(floats(3).numpy() > 0, 4),
    "array of int16": lambda: DataLoader(floats(3).numpy().astype(np.int16), 4),
    "subset": lambda: DataLoader(Subset(dataset(floats(3)), [3, 1, 4, 1, 5]), 2),
    "subset of a range": lambda: DataLoader(Subset(dataset(floats(3)), range(2, 9)), 2),
    "subset of a tensor": lambda: DataLoader(
        Subset(dataset(floats(3)), torch.tensor([3, 1, 4, 1])),  # type: ignore[arg-type]
        2,
    ),
    "subset of an array": lambda: DataLoader(
        Subset(dataset(floats(3)), np.array([3, 1, 4, 1])),  # type: ignore[arg-type]
        2,
    ),
    "subset of numpy's": lambda: DataLoader(
        Subset(dataset(floats(3)), list(np.array([3, 1, 4, 1]))), 2
    ),
    "subset of subset": lambda: DataLoader(
        Subset(Subset(dataset(floats(3)), [9, 8, 7, 3, 2]), torch.tensor([4, 0, 1])),  # type: ignore[arg-type]
        2,
    ),
    "subset of an array of data": lambda: DataLoader(Subset(floats(3).numpy(), [3, 1, 2]), 2),  # type: ignore[arg-type]
    "numpy's indices": lambda: DataLoader(
        dataset(floats(3)), 2, sampler=Listed(list(np.array([3, 1, 4])))
    ),
    "own batches": lambda: DataLoader(
        dataset(floats(3)), batch_sampler=Listed([[3, 1], [4], [1, 5, 9]])
    ),
}

ONE_BY_ONE: dict[str, Callable[[], DataLoader[Any]]] = {
    "uint16": lambda: DataLoader(dataset(torch.arange(N).to(torch.uint16)), 4),
    "transposed": lambda: DataLoader(dataset(floats(3, 4).transpose(1, 2)), 4),
    "every other row": lambda: DataLoader(dataset(torch.randn(2 * N, 3)[::2]), 4),
    "expanded": lambda: DataLoader(dataset(torch.randn(1, 3).expand(N, 3)), 4),
    "channels last": lambda: DataLoader(dataset(channels_last(3, 4, 5)), 4),
    "gradients": lambda: DataLoader(dataset(floats(3).requires_grad_()), 4),
    "parameter": lambda: DataLoader(dataset(torch.nn.Parameter(floats(3))), 4),
    "conjugated": lambda: DataLoader(dataset(floats(3).to(torch.complex64).conj()), 4),
    "nothing in a row": lambda: DataLoader(dataset(floats(0)), 4),
    "one of two": lambda: DataLoader(dataset(floats(3), floats(3, 4).transpose(1, 2)), 4),
    "negative": lambda: DataLoader(dataset(floats(3)), 2, sampler=Listed([-1, 3, -11])),
    "negative in a subset": lambda: DataLoader(Subset(dataset(floats(3)), [-1, 3, -2]), 2),
    "truths in a subset": lambda: DataLoader(Subset(dataset(floats(3)), [True, True]), 2),
    "truths": lambda: DataLoader(dataset(floats(3)), 2, sampler=Listed([True, True])),
    "tensors as indices": lambda: DataLoader(
        dataset(floats(3)), 2, sampler=Listed(list(torch.tensor([3, 1, 4])))
    ),
    "tuples": lambda: DataLoader(dataset(floats(3)), batch_sampler=Listed([(3, 1), (4,)])),
    "array in another order": lambda: DataLoader(np.asfortranarray(floats(3, 2).numpy()), 4),  # type: ignore[arg-type]
    "subclass": lambda: DataLoader(Doubled(floats(3)), 4),
    "subclass of Subset": lambda: DataLoader(Reversed(dataset(floats(3)), range(N)), 4),
    "list": lambda: DataLoader([(row, i) for i, row in enumerate(floats(3))], 4),  # type: ignore[arg-type]
}

WITHOUT_A_STACK: dict[str, Callable[[], DataLoader[Any]]] = {
    "no batches": lambda: DataLoader(dataset(floats(3)), batch_size=None),
    "no batches of an array": lambda: DataLoader(floats(3).numpy(), batch_size=None),  # type: ignore[arg-type]
    "batches as samples": lambda: DataLoader(
        dataset(floats(3)), batch_size=None, sampler=BatchSampler(range(N), 4, drop_last=False)
    ),
    "own collate": lambda: DataLoader(dataset(floats(3)), 4, collate_fn=list),
    **{
        f"array of numbers, {dtype}": lambda dtype=dtype: DataLoader(
            np.arange(N).astype(dtype),  # type: ignore[arg-type]
            4,
        )
        for dtype in ("float32", "float64", "int16", "int64", "bool")
    },
    "range": lambda: DataLoader(range(N), 4),  # type: ignore[arg-type]
}


class Doubled(TensorDataset):
    def __getitem__(self, i: Any) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(i))


class Reversed(Subset[Any]):
    def __getitem__(self, i: Any) -> Any:
        return super().__getitem__(N - 1 - i)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class Look(NamedTuple):
    """All there is to see of a tensor."""

    kind: type
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    grads: bool
    conjugated: bool
    bits: bytes


def look(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        plain = batch.detach().resolve_conj().contiguous().view(-1)
        return Look(
            type(batch),
            batch.dtype,
            tuple(batch.shape),
            batch.stride(),
            batch.storage_offset(),
            batch.requires_grad,
            batch.is_conj(),
            plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"",
        )
    if isinstance(batch, (list, tuple)):
        return type(batch), [look(item) for item in batch]
    return type(batch), batch


def looks(batches: Any) -> list[Any]:
    return [look(batch) for batch in batches]


def epoch(loader: DataLoader[Any]) -> list[Any]:
    ours = st.resumable(loader, seed=5)
    return list(iter(lambda: next(ours, None), None))


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_batch_is_one_read_and_the_same_to_the_bit(name: str, reads: Reads) -> None:
    loader = AT_ONCE[name]()
    found = epoch(loader)
    assert reads.count == 0
    assert looks(found) == looks(loader)
    assert reads.count > 0


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_might_be_different_at_once_is_read_one_by_one(name: str, reads: Reads) -> None:
    loader = ONE_BY_ONE[name]()
    found = epoch(loader)
    assert reads.count > 0
    assert looks(found) == looks(loader)


@pytest.mark.parametrize("name", WITHOUT_A_STACK)
def test_what_is_never_stacked_is_the_same_too(name: str) -> None:
    loader = WITHOUT_A_STACK[name]()
    assert looks(epoch(loader)) == looks(loader)


def test_an_array_that_is_read_only_is_read_at_once(reads: Reads) -> None:
    found = epoch(DataLoader(read_only(), 4))  # type: ignore[arg-type]
    assert reads.count == 0
    assert looks(found) == looks(DataLoader(read_only().copy(), 4))  # type: ignore[arg-type]


def test_a_shuffled_epoch_holds_each_sample_once(reads: Reads) -> None:
    found = epoch(DataLoader(dataset(torch.arange(N)), 4, shuffle=True))
    assert reads.count == 0
    assert [len(batch) for (batch,) in found] == [4, 4, 3]
    assert sorted(torch.cat([batch for (batch,) in found]).tolist()) == list(range(N))


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_batch_that_is_changed_changes_no_data(name: str) -> None:
    loader = AT_ONCE[name]()
    before = looks(loader)
    for batch in epoch(loader):
        for tensor in batch if isinstance(batch, list) else [batch]:
            tensor.zero_()
    assert looks(loader) == before


@pytest.mark.parametrize(
    ("batch", "error"), [([0, N], IndexError), ([], IndexError), ([0, 2**70], OverflowError)]
)
def test_an_index_that_does_not_exist_is_the_error_it_is_one_by_one(
    batch: list[int], error: type[Exception]
) -> None:
    loader = DataLoader(dataset(floats(3)), batch_sampler=Listed([batch]))
    with pytest.raises(Exception) as plain:  # noqa: PT011 - whatever torch raises
        list(loader)
    with pytest.raises(type(plain.value)) as ours:
        epoch(loader)
    assert str(ours.value) == str(plain.value)


def test_data_that_changes_meanwhile_is_read_as_it_is(reads: Reads) -> None:
    data = dataset(floats(3))
    loader = DataLoader(data, 4)
    ours = st.resumable(loader, seed=5)
    next(ours)
    assert reads.count == 0
    data.tensors[0].requires_grad_()
    assert next(ours)[0].requires_grad
    data.tensors = (torch.arange(N),)
    assert next(ours)[0].tolist() == [8, 9, 10]


def test_a_collating_that_users_changed_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def negative(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return -torch.stack(batch)

    loader = DataLoader(dataset(floats(3)), 4)
    plain = looks(loader)
    monkeypatch.setitem(collate.default_collate_fn_map, torch.Tensor, negative)
    assert looks(epoch(loader)) == looks(loader) != plain
    monkeypatch.undo()

    def first(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return batch[0]

    monkeypatch.setitem(collate.default_collate_fn_map, tuple, first)
    assert looks(epoch(loader)) == looks(loader) != plain


def test_a_dataset_with_getitems_is_asked_once_a_batch() -> None:
    class Table(Dataset[Any]):
        def __init__(self) -> None:
            self.asked: list[list[int]] = []

        def __len__(self) -> int:
            return N

        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.asked.append(indices)
            return [{"x": i} for i in indices]

    table = Table()
    found = epoch(DataLoader(table, 4))
    assert table.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert [batch["x"].tolist() for batch in found] == table.asked


@pytest.mark.parametrize("name", [*AT_ONCE, "list", "range"])
def test_what_is_in_memory_draws_nothing(name: str) -> None:
    loader = {**AT_ONCE, **ONE_BY_ONE, **WITHOUT_A_STACK}[name]()
    assert not st.resumable(loader).source.keyed
    loader.collate_fn = lambda samples: samples
    assert st.resumable(loader).source.keyed
