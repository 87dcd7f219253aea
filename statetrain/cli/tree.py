"""The tree in a checkpoint as text, as JSON, and as a list of its tensors, with nothing built."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from statetrain.cli.text import printable
from statetrain.persist.container import Opaque, TensorInfo

__all__ = ["brief", "nbytes", "plain", "tensors", "tree_lines"]

SHOWN = 6  # values of a list of numbers that are printed
WIDE = 160  # characters of a text that are printed
SCALARS = (bool, int, float, complex, str, bytes, bytearray, type(None))
LISTS = (list, tuple, set, frozenset, deque)


def tensors(tree: object) -> dict[str, TensorInfo]:
    """Return the tensors and large arrays in `tree` by their paths, an object once."""
    return {path: node for path, node in _walked(tree, "", set()) if isinstance(node, TensorInfo)}


def nbytes(info: TensorInfo) -> int:
    """Return how many bytes the values of a tensor or array take."""
    if info.device.startswith("numpy"):
        return math.prod(info.shape) * np.dtype(info.dtype).itemsize
    dtype: torch.dtype = getattr(torch, info.dtype)
    return math.prod(info.shape) * dtype.itemsize


def brief(value: object) -> str:
    """Return one line for a value: itself if it is plain and short, else what it is."""
    if isinstance(value, TensorInfo):
        return f"{info_dtype(value)} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, Opaque):
        return printable(value.kind)
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, LISTS):
        return _list(value)
    text = printable(repr(value))
    return text if len(text) <= WIDE else f"{text[:WIDE]}… ({len(text)} characters)"


def info_dtype(info: TensorInfo) -> str:
    """Return a dtype's usual name; numpy's begin with a byte order in the file."""
    return np.dtype(info.dtype).name if info.device.startswith("numpy") else info.dtype


def tree_lines(tree: object) -> Iterator[str]:
    """Yield `tree` as indented lines; an object that stands there twice is told, not repeated."""
    yield from _lines(tree, "", "", {})


def plain(value: object) -> Any:
    """Return a value as JSON has it: tensors and classes as what is known of them."""
    if isinstance(value, (TensorInfo, np.ndarray, Opaque)):
        return _plain_object(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): plain(v) for key, v in value.items()}
    if isinstance(value, LISTS):
        return [plain(item) for item in value]
    finite = not isinstance(value, float) or math.isfinite(value)
    if value is None or (isinstance(value, (bool, int, float, str)) and finite):
        return value
    return repr(value)


def _plain_object(value: TensorInfo | np.ndarray[Any, Any] | Opaque) -> dict[str, Any]:
    if isinstance(value, TensorInfo):
        return {"dtype": info_dtype(value), "shape": list(value.shape), "nbytes": nbytes(value)}
    if isinstance(value, Opaque):
        return {"class": value.kind, "state": plain(_inside(value))}
    return {"dtype": str(value.dtype), "shape": list(value.shape), "values": plain(value.tolist())}


def _inside(value: Opaque) -> object:
    """Return the state of a registered class without its version; all parts of anything else."""
    registered = len(value.parts) == 2 and type(value.parts[0]) is int
    return value.parts[1] if registered else list(value.parts)


def _items(value: object) -> list[tuple[object, object]] | None:
    if isinstance(value, Opaque):
        inside = _inside(value)
        return _items(inside) if _items(inside) is not None else [("state", inside)]
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, LISTS):
        return list(enumerate(value))
    return None


def _walked(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, object]]:
    yield path, value
    items = _items(value)
    if items and id(value) not in seen:
        seen.add(id(value))
        for key, item in items:
            yield from _walked(item, f"{path}/{key}" if path else str(key), seen)


def _lines(value: object, path: str, indent: str, seen: dict[int, str]) -> Iterator[str]:
    for key, item in _items(value) or ():
        place = f"{path}/{key}" if path else str(key)
        label = f"{indent}{printable(key) if isinstance(key, str) else brief(key)}"
        inner = None if _is_flat(item) else _items(item)
        if inner and id(item) in seen:
            yield f"{label}: the same as {printable(seen[id(item)])}"
        elif inner:
            seen[id(item)] = place
            yield f"{label}: {brief(item)}"
            yield from _lines(item, place, f"{indent}  ", seen)
        else:
            yield f"{label}: {brief(item)}"


def _is_flat(value: object) -> bool:
    return isinstance(value, LISTS) and all(isinstance(item, SCALARS) for item in value)


def _list(value: Any) -> str:
    name = type(value).__name__
    if not _is_flat(value):
        return f"{name} of {len(value)}"
    first = ", ".join(brief(item) for _, item in zip(range(SHOWN), value, strict=False))
    rest = len(value) - SHOWN
    return f"{name} [{first}]" if rest <= 0 else f"{name} [{first}, … {rest} more]"
