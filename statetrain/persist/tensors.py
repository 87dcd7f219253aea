"""Tensors as bytes: the storages that a tree holds, and the same tensors over fresh storages.

Storages are kept, not tensors: ties, views and expanded tensors cost nothing extra and are the same
ties and views afterwards. Nothing here knows files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

__all__ = ["DTYPES", "Blob", "TensorTable", "UnstorableError", "byte_view", "check_row", "rebuild"]

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
ALIGN = 64  # a cache line, and what torch's own allocations start at
LIMIT = 1 << 62  # sizes, strides and offsets beyond it overflow torch's int64 arithmetic
REQUIRES_GRAD, PARAMETER, CONJ, NEG = 1, 2, 4, 8


class UnstorableError(Exception):
    """A tensor or array that has no bytes to store; the text says why and what to do."""


@dataclass(kw_only=True)
class Blob:
    """A run of bytes of the tree: a part of a storage, or an array."""

    source: torch.UntypedStorage | np.ndarray[Any, Any]
    start: int = 0
    nbytes: int = 0

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Yield the bytes in order, at most `size` at a time, copied only from other devices."""
        if isinstance(self.source, np.ndarray):
            view = _array_bytes(self.source)
            for at in range(0, self.nbytes, size):
                yield view[at : min(at + size, self.nbytes)].data
            return
        data = byte_view(self.source)[self.start : self.start + self.nbytes]
        for at in range(0, self.nbytes, size):
            yield data[at : at + size].cpu().numpy().data


@dataclass(kw_only=True)
class _Storage:
    storage: torch.UntypedStorage
    blob: int | None
    ranges: list[tuple[int, int]] = field(default_factory=list)
    start: int = 0
    nbytes: int = 0


class TensorTable:
    """Collect the tensors of a tree; `close` decides which bytes of their storages are kept."""

    def __init__(self) -> None:
        self.blobs: list[Blob] = []
        self._tensors: list[tuple[torch.Tensor, int]] = []
        self._storages: list[_Storage] = []
        self._numbers: dict[int, int] = {}
        self._places: dict[tuple[str, int, int], int] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Return the number of `tensor`; the same object has the same number."""
        number = self._numbers.get(id(tensor))
        if number is None:
            _check_storable(tensor)
            number = self._numbers[id(tensor)] = len(self._tensors)
            place = self._place(tensor.untyped_storage())
            self._storages[place].ranges.append(_range(tensor))
            self._tensors.append((tensor, place))  # kept: an id is only unique while it lives
        return number

    def add_array(self, array: np.ndarray[Any, Any]) -> int:
        """Return the number of the blob that holds the bytes of `array`."""
        self.blobs.append(Blob(source=array, nbytes=array.nbytes))
        return len(self.blobs) - 1

    def close(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """Return the rows of the storages and of the tensors, as an index holds them."""
        for storage in self._storages:
            _trim(storage)
            if storage.blob is not None:
                blob = self.blobs[storage.blob]
                blob.start, blob.nbytes = storage.start, storage.nbytes
        storages = [[s.blob, s.nbytes, str(s.storage.device)] for s in self._storages]
        return storages, [_row(t, self._storages[place], place) for t, place in self._tensors]

    def _place(self, storage: torch.UntypedStorage) -> int:
        nbytes, meta = storage.nbytes(), storage.device.type == "meta"
        key = (str(storage.device), 0 if meta else storage.data_ptr(), nbytes)
        if nbytes == 0 or meta:  # no address to know it by, and no bytes to keep
            self._storages.append(_Storage(storage=storage, blob=None))
            return len(self._storages) - 1
        if key not in self._places:
            self._places[key] = len(self._storages)
            self.blobs.append(Blob(source=storage, nbytes=nbytes))
            self._storages.append(_Storage(storage=storage, blob=len(self.blobs) - 1))
        return self._places[key]


def byte_view(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of `storage` as a uint8 tensor over the same memory."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def check_row(row: list[Any], storages: list[list[Any]]) -> None:
    """Check a tensor's row before anything is built: `set_` would grow a storage without a word.

    Raises:
        ValueError: the row is no tensor over its storage.
    """
    place, dtype, size, stride, offset, flags, extra = row
    ints = [place, offset, flags, *size, *stride]
    if any(type(number) is not int or not 0 <= number < LIMIT for number in ints):
        raise ValueError("a tensor's row holds a number out of range")
    if dtype not in DTYPES or len(size) != len(stride) or len(size) > 64 or extra is not None:
        raise ValueError("a tensor's row has an unknown dtype or shape")
    if flags > 15 or (flags & CONJ and not DTYPES[dtype].is_complex):
        raise ValueError("a tensor's row has unknown flags")
    count, last = 1, offset
    for length, step in zip(size, stride, strict=True):
        count *= length
        last += (length - 1) * step
    need = offset if count == 0 else last + 1
    if count >= LIMIT or need > storages[place][1] // DTYPES[dtype].itemsize:
        raise ValueError("a tensor reaches beyond its storage")


def rebuild(row: list[Any], storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the tensor that `row` describes over `storage`; `check_row` comes first."""
    _, dtype, size, stride, offset, flags, _ = row
    with warnings.catch_warnings():
        if dtype == "complex32":
            warnings.simplefilter("ignore", UserWarning)  # "experimental": it was chosen before
        tensor = torch.empty(0, dtype=DTYPES[dtype], device=storage.device)
    tensor.set_(storage, offset, tuple(size), tuple(stride))
    if flags & CONJ:
        tensor = torch.conj(tensor)
    if flags & NEG:
        tensor = torch._neg_view(tensor)  # noqa: SLF001  # the only way to set the bit
    return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor


def _array_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return np.ascontiguousarray(array.T if fortran else array).reshape(-1).view(np.uint8)


def _check_storable(tensor: torch.Tensor) -> None:
    if tensor.is_quantized:
        raise UnstorableError("it is quantised: store int_repr(), scale and zero point instead")
    if tensor.is_nested:
        raise UnstorableError("it is a nested tensor: store its parts, tensor.unbind()")
    if tensor.layout is not torch.strided:
        raise UnstorableError(f"its layout is {tensor.layout}: store tensor.to_dense()")
    if tensor.grad_fn is not None and tensor.requires_grad:
        raise UnstorableError("it is part of an autograd graph: store tensor.detach()")


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte and the byte after the last that `tensor` refers to."""
    first = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return (0, 0)
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _trim(storage: _Storage) -> None:
    """Keep only the bounding range when less than half of a storage is referred to."""
    whole = storage.storage.nbytes()
    used, end = 0, 0
    ranges = sorted(r for r in storage.ranges if r[0] < r[1])
    for low, high in ranges:
        used += max(0, high - max(low, end))
        end = max(end, high)
    if used * 2 >= whole or storage.blob is None:
        storage.start, storage.nbytes = 0, whole
    else:  # start on a cache line, so that each tensor keeps its own alignment
        storage.start = ranges[0][0] // ALIGN * ALIGN if ranges else 0
        storage.nbytes = end - storage.start


def _row(tensor: torch.Tensor, storage: _Storage, place: int) -> list[Any]:
    flags = (
        REQUIRES_GRAD * tensor.requires_grad
        | PARAMETER * isinstance(tensor, torch.nn.Parameter)
        | CONJ * tensor.is_conj()
        | NEG * tensor.is_neg()
    )
    offset = tensor.storage_offset() - storage.start // tensor.itemsize
    if tensor.numel() == 0:  # it refers to no byte, so its offset need not lie in what is kept
        offset = min(max(offset, 0), storage.nbytes // tensor.itemsize)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [place, dtype, list(tensor.shape), list(tensor.stride()), offset, flags, None]
