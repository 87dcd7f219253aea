"""Where two trees differ, to the last bit: what `exact` is measured with."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from statetrain.persist.values import split_sparse

__all__ = ["leaves", "unequal"]

MISSING = object()


def unequal(a: Any, b: Any) -> list[str]:
    """Return the paths of the leaves that are not the same, bit for bit, in both trees.

    NaNs with the same bits are the same, 0.0 and -0.0 are not; tensors are compared with their
    dtype, shape and strides.
    """
    left, right = dict(leaves(a)), dict(leaves(b))
    return [
        path
        for path in dict.fromkeys([*left, *right])
        if not _same(left.get(path, MISSING), right.get(path, MISSING))
    ]


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of everything in a tree that is no container."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        yield f"{path}.type", type(tree).__name__
        for field in dataclasses.fields(tree):
            yield from leaves(getattr(tree, field.name), f"{path}.{field.name}".lstrip("."))
    elif isinstance(tree, dict):
        yield f"{path}.type", type(tree).__name__
        for key, item in tree.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        yield f"{path}.type", type(tree).__name__
        for index, item in enumerate(tree):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, tree


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _same_tensors(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, (float, complex)):
        return struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag)
    return bool(a == b)


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if torch.strided not in {a.layout, b.layout}:
        return unequal(split_sparse(a), split_sparse(b)) == []
    if a.layout is not b.layout:
        return False
    facts = [(t.dtype, t.shape, t.stride(), t.requires_grad) for t in (a, b)]
    return facts[0] == facts[1] and _bytes(a) == _bytes(b)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
