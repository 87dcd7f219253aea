"""Batches on their way to a device: copied beside the work that is still going on there.

It reads no batch ahead. The program runs ahead of a cuda device, so a copy that need not wait for
the kernels of the batch before overlaps with them, and the position stays what was handed out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any

import torch

__all__ = ["moved"]

LARGE = 2**20  # bytes; what is smaller is copied in less time than the stream's exchange takes


def moved(batch: Any, device: torch.device | None) -> Any:
    """Return the batch with its tensors on `device`; None leaves it as it is.

    Lists, tuples, named tuples and mappings are gone through, and stay of their type; what has a
    `to` method is asked. The batch itself is not changed. Copies do not block; they overlap with
    the device's work where the batch is pinned: `DataLoader(..., pin_memory=True)`.
    """
    if device is None:
        return batch
    if device.type == "cuda" and _worth_a_stream(batch):
        return _copied_beside(batch, device)
    return _sent(batch, device)


def _copied_beside(batch: Any, device: torch.device) -> Any:
    """Copy on a stream of its own, which what comes next on the current one waits for."""
    side, current = _side_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):
        found = _sent(batch, device)
    current.wait_stream(side)
    for tensor in _tensors(found):  # its memory is the side stream's, and is used on this one
        tensor.record_stream(current)
    return found


def _sent(batch: Any, device: torch.device) -> Any:
    if _moves_itself(batch):
        if isinstance(batch, torch.Tensor):
            return batch.to(device, non_blocking=True)
        alone: Any = copy.copy(batch) if isinstance(batch, Mapping) else batch
        return alone.to(device)  # `transformers` moves its mappings in place
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_sent(item, device) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_sent(item, device) for item in batch)
    if isinstance(batch, Mapping):
        return _like(batch, {key: _sent(item, device) for key, item in batch.items()})
    return batch


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(mapping) is dict:
        return items
    try:
        if isinstance(mapping, MutableMapping):
            found = copy.copy(mapping)  # with what it has besides its items: a default factory
            found.update(items)
            return found
        return type(mapping)(items)  # type: ignore[call-arg]  # most are made of a mapping
    except TypeError:
        return items


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for copies to a device: each stream keeps memory of its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no type for it


def _worth_a_stream(batch: Any) -> bool:
    """Whether it is large, and all of it is plain tensors on the CPU.

    A copy of what is on a device already would have to wait for that device's work, and the tensors
    inside other objects are not seen.
    """
    size = 0
    for leaf in _leaves(batch):
        if type(leaf) is torch.Tensor:
            if leaf.device.type != "cpu" or leaf.layout is not torch.strided or leaf.is_nested:
                return False
            size += leaf.nbytes
        elif _moves_itself(leaf):
            return False
    return size >= LARGE


def _moves_itself(item: Any) -> bool:
    return callable(getattr(item, "to", None))


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor))


def _leaves(batch: Any) -> Iterator[Any]:
    if _moves_itself(batch) or not isinstance(batch, (Mapping, list, tuple)):
        yield batch
        return
    for item in batch.values() if isinstance(batch, Mapping) else batch:
        yield from _leaves(item)
