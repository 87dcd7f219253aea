"""Where two arrays of the same dtype and shape differ, bit for bit, and by how much as numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from statetrain.persist.tensors import DTYPES

__all__ = ["Apart", "Element", "apart", "bits_of"]

STEP = 1 << 20  # elements that are compared at a time
NUMPY = frozenset(f"{sort}{size}" for sort in ("int", "uint") for size in (8, 16, 32, 64)) | {
    "bool",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
}  # torch's dtypes that numpy has by the same name

Bits = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Element:
    """A differing element; equal numbers, and what is no number, have their bits beside them."""

    index: tuple[int, ...]
    a: object
    b: object


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How two arrays differ.

    `largest` is the largest absolute difference of two numbers, None where there are none; `nans`
    counts the elements that are NaN in one of the two; `alike` those that are the same as numbers
    and differ in their bits: 0.0 and -0.0, or two NaNs.
    """

    elements: int
    differing: int
    largest: float | None
    nans: int
    alike: int
    first: tuple[Element, ...]


def bits_of(array: np.ndarray[Any, Any]) -> Bits:
    """Return the bits of an array as `persist.container.Values` has those of tensors."""
    unit = math.gcd(array.itemsize, 8)
    shape = (*array.shape, array.itemsize // unit)
    return np.ndarray(shape, f"<u{unit}", array.tobytes()) if array.nbytes else np.empty(shape)


def apart(a: Bits, b: Bits, dtype: str, *, numpy: bool, shown: int = 0) -> Apart | None:
    """Return how two arrays of bits differ, None if they do not.

    `dtype` is torch's name, or what `numpy` calls it. The first `shown` differing elements are
    listed.
    """
    elements = math.prod(a.shape[:-1])
    a, b = _without_repeats(a, b)
    if not a.size:
        return None
    shape, width = a.shape[:-1], a.shape[-1]
    flat = a.reshape(-1, width), b.reshape(-1, width)
    repeats = elements // len(flat[0])
    found: list[tuple[float | None, int, int]] = []
    first: list[Element] = []
    differing = 0
    for start in range(0, len(flat[0]), STEP):
        x, y = (each[start : start + STEP] for each in flat)
        where = np.flatnonzero((x != y).any(1))
        if len(where):
            differing += len(where)
            x, y = x[where], y[where]
            found.append(_far(x, y, dtype, numpy=numpy))
            for place, *pair in zip(where[: shown - len(first)], x, y, strict=False):
                index = tuple(map(int, np.unravel_index(start + place, shape)))
                first.append(_element(index, pair[0], pair[1], dtype, numpy=numpy))
    if not differing:
        return None
    return Apart(
        elements=elements,
        differing=differing * repeats,
        largest=max((far for far, _, _ in found if far is not None), default=None),
        nans=sum(nans for _, nans, _ in found) * repeats,
        alike=sum(alike for _, _, alike in found) * repeats,
        first=tuple(first),
    )


def _without_repeats(a: Bits, b: Bits) -> tuple[Bits, Bits]:
    """Return what both hold once: an expanded dimension repeats the same bytes."""
    once = tuple(
        slice(None, 1) if step == other == 0 else slice(None)
        for step, other in zip(a.strides, b.strides, strict=True)
    )
    return a[once], b[once]


def _far(x: Bits, y: Bits, dtype: str, *, numpy: bool) -> tuple[float | None, int, int]:
    """Return the largest difference of differing elements, and how many are NaN, and alike."""
    a, b = (_numbers(bits, dtype, numpy=numpy) for bits in (x, y))
    if a is None or b is None:
        return None, 0, 0
    if a.dtype.kind in "iu":  # exact, and modulo 2**64 it cannot overflow
        high, low = (each.astype(np.uint64) for each in (np.maximum(a, b), np.minimum(a, b)))
        return int((high - low).max()), 0, 0
    nans = np.isnan(a), np.isnan(b)
    alike = (a == b) | (nans[0] & nans[1])
    with np.errstate(all="ignore"):
        far = np.abs(a - b)[~(alike | nans[0] | nans[1])]
    largest = float(far.max()) if far.size else None
    return largest, int((nans[0] ^ nans[1]).sum()), int(alike.sum())


def _numbers(bits: Bits, dtype: str, *, numpy: bool) -> np.ndarray[Any, Any] | None:
    """Return elements as numbers that can be subtracted; None for what is no number."""
    flat = np.ascontiguousarray(bits).reshape(-1)
    if not numpy and dtype == "complex32":
        pairs = flat.view(np.float16).reshape(-1, 2).astype(np.float64)
        return np.asarray(pairs[:, 0] + 1j * pairs[:, 1])
    if not numpy and dtype not in NUMPY:
        return _only_in_torch(flat, dtype)
    known = np.dtype(dtype)
    if known.kind in "SUV":
        return None
    if known.kind in "bmM":
        return flat.view(np.uint8 if known.kind == "b" else known.byteorder + "i8")
    wide = {"f": np.float64, "c": np.complex128}.get(known.kind, known.newbyteorder("="))
    return flat.view(known).astype(wide)


def _only_in_torch(flat: Bits, dtype: str) -> np.ndarray[Any, Any] | None:
    values = torch.from_numpy(flat.view(np.uint8))
    try:
        return values.view(DTYPES[dtype]).to(torch.float64).numpy()
    except RuntimeError:  # a dtype that holds bits and is no number to torch
        return None


def _element(index: tuple[int, ...], x: Bits, y: Bits, dtype: str, *, numpy: bool) -> Element:
    values = [_value(bits, dtype, numpy=numpy) for bits in (x, y)]
    if repr(values[0]) == repr(values[1]):
        values = [f"{value} ({_hex(bits)})" for value, bits in zip(values, (x, y), strict=True)]
    return Element(index=index, a=values[0], b=values[1])


def _value(bits: Bits, dtype: str, *, numpy: bool) -> object:
    if numpy:
        return np.ascontiguousarray(bits).reshape(-1).view(dtype)[0].item()
    numbers = _numbers(bits, dtype, numpy=numpy)
    if numbers is None:
        return _hex(bits)
    return bool(numbers[0]) if dtype == "bool" else numbers[0].item()


def _hex(bits: Bits) -> str:
    return f"0x{bits.tobytes()[::-1].hex()}"
