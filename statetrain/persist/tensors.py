"""Tensors as bytes: the storages that a tree holds, and the same tensors over fresh storages.

Storages are kept, not tensors: ties, views and expanded tensors cost nothing extra and are the same
ties and views afterwards. Nothing here knows files.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

__all__ = [
    "DTYPES",
    "Blob",
    "TensorTable",
    "UnstorableError",
    "byte_view",
    "check_row",
    "memory",
    "rebuild",
]

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
ALIGN = 64  # a cache line, and what torch's own allocations start at
LIMIT = 1 << 62  # sizes, strides and offsets beyond it overflow torch's int64 arithmetic
REQUIRES_GRAD, PARAMETER, CONJ, NEG = 1, 2, 4, 8
WRITABLE = 0x200  # PyBUF_WRITE

_CPU = torch.device("cpu")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class UnstorableError(Exception):
    """A tensor or array that has no bytes to store; the text says why and what to do."""


@dataclass(kw_only=True, slots=True)
class Blob:
    """A run of bytes of the tree: a storage or the part of it that is referred to, or an array."""

    source: torch.UntypedStorage | np.ndarray[Any, Any]
    nbytes: int
    start: int = 0
    address: int = 0  # of the source, where the CPU can read it
    whole: bool = False
    ranges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where its bytes are."""
        return _CPU if isinstance(self.source, np.ndarray) else self.source.device

    def bytes(self) -> torch.Tensor:
        """Return the bytes of a storage where they are, as a uint8 tensor over the same memory."""
        assert not isinstance(self.source, np.ndarray)  # noqa: S101
        return byte_view(self.source, self.start, self.nbytes)

    def view(self) -> memoryview | None:
        """Return the bytes of a storage where they are, if the CPU can write them."""
        return _memory(self.address + self.start, self.nbytes) if self.address else None

    def array(self) -> np.ndarray[Any, Any]:
        """Return the bytes of an array."""
        assert isinstance(self.source, np.ndarray)  # noqa: S101
        return _array_bytes(self.source)

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Return the bytes in order; from other devices they are copied, `size` at a time."""
        if self.address:
            return iter((_memory(self.address + self.start, self.nbytes),))
        if isinstance(self.source, np.ndarray):
            return iter((self.array().data,))
        data = self.bytes()
        return (data[at : at + size].cpu().numpy().data for at in range(0, self.nbytes, size))

    def trim(self) -> None:
        """Keep only the bounding range when less than half of a storage is referred to."""
        used, end = 0, 0
        ranges = sorted(self.ranges)
        for low, high in ranges:
            used += max(0, high - max(low, end))
            end = max(end, high)
        if used * 2 < self.nbytes:  # start on a cache line: tensors keep their own alignment
            self.start = ranges[0][0] // ALIGN * ALIGN if ranges else 0
            self.nbytes = end - self.start


class TensorTable:
    """Collect the tensors of a tree; `close` decides which bytes of their storages are kept.

    It is on the way of every save, with thousands of tensors: hence no more calls than needed.
    """

    def __init__(self) -> None:
        self.blobs: list[Blob] = []
        self._tensors: list[torch.Tensor] = []
        self._rows: list[list[Any]] = []
        self._numbers: dict[int, int] = {}
        self._storages: list[list[Any]] = []
        self._places: dict[tuple[int, int, str], int] = {}
        self._devices: dict[torch.device, str] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Return the number of `tensor`; the same object has the same number."""
        number = self._numbers.get(id(tensor))
        if number is not None:
            return number
        _check_storable(tensor)
        number = self._numbers[id(tensor)] = len(self._tensors)
        self._tensors.append(tensor)  # kept: an id is only unique while it lives
        place = self._place(tensor.untyped_storage())
        blob = self._storages[place][0]
        if blob is not None and not self.blobs[blob].whole:
            low, high = _range(tensor)
            self.blobs[blob].whole = (high - low) * 2 >= self.blobs[blob].nbytes
            self.blobs[blob].ranges.append((low, high))
        flags = (
            REQUIRES_GRAD * tensor.requires_grad
            | PARAMETER * (type(tensor) is torch.nn.Parameter)
            | CONJ * tensor.is_conj()
            | NEG * tensor.is_neg()
        )
        size, stride = list(tensor.shape), list(tensor.stride())
        dtype, offset = _NAMES[tensor.dtype], tensor.storage_offset()
        self._rows.append([place, dtype, size, stride, offset, flags, None])
        return number

    def add_array(self, array: np.ndarray[Any, Any]) -> int:
        """Return the number of the blob that holds the bytes of `array`."""
        self.blobs.append(Blob(source=array, nbytes=array.nbytes, whole=True))
        return len(self.blobs) - 1

    def close(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """Return the rows of the storages and of the tensors, as an index holds them."""
        for blob in self.blobs:
            if not blob.whole:
                blob.trim()
        for storage in self._storages:
            if storage[0] is not None:
                storage[1] = self.blobs[storage[0]].nbytes
        for row, tensor in zip(self._rows, self._tensors, strict=True):
            number, nbytes, _ = self._storages[row[0]]
            start = 0 if number is None else self.blobs[number].start
            if start:
                row[4] -= start // tensor.itemsize
            if tensor.numel() == 0:  # it refers to no byte: its offset need not lie in what is kept
                row[4] = min(max(row[4], 0), nbytes // tensor.itemsize)
        return self._storages, self._rows

    def _place(self, storage: torch.UntypedStorage) -> int:
        nbytes, device = storage.nbytes(), storage.device
        name = self._devices.get(device) or self._devices.setdefault(device, str(device))
        if nbytes == 0 or name == "meta":  # no address to know it by, and no bytes to keep
            self._storages.append([None, nbytes, name])
            return len(self._storages) - 1
        address = storage.data_ptr()
        key = (address, nbytes, name)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._storages)
            self._storages.append([len(self.blobs), nbytes, name])
            here = address if name == "cpu" else 0
            self.blobs.append(Blob(source=storage, nbytes=nbytes, address=here))
        return place


def byte_view(
    storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None
) -> torch.Tensor:
    """Return the bytes of `storage` as a uint8 tensor over the same memory."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (storage.nbytes() if nbytes is None else nbytes,), (1,))


def memory(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a storage on the CPU, to be used while it lives."""
    return _memory(storage.data_ptr(), storage.nbytes())


def _memory(address: int, nbytes: int) -> memoryview:
    """Return memory as bytes; a tensor over it would take ten times as long to make."""
    view: memoryview = _memory_at(address, nbytes, WRITABLE) if nbytes else memoryview(bytearray())
    return view


def check_row(row: list[Any], storages: list[list[Any]]) -> None:
    """Check a tensor's row before anything is built: `set_` would grow a storage without a word.

    Raises:
        ValueError: the row is no tensor over its storage.
    """
    place, dtype, size, stride, offset, flags, extra = row
    for number in (place, offset, flags, *size, *stride):
        if type(number) is not int or not 0 <= number < LIMIT:
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
    with warnings.catch_warnings() if dtype == "complex32" else nullcontext():
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
    if tensor.requires_grad and tensor.grad_fn is not None:
        raise UnstorableError("it is part of an autograd graph: store tensor.detach()")


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte and the byte after the last that `tensor` refers to."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    if tensor.numel() == 0:
        return (0, 0)
    last = sum((n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize
