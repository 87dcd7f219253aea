"""What the supervised loop asks of a batch: to move to a device, and how many samples it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from statetrain.errors import DataError

__all__ = ["limited", "moved", "samples"]


def limited(limit: int | float | None, length: int | None, *, name: str) -> int | None:
    """Return a limit in batches: a float is a fraction of an epoch's `length`, at least one batch.

    Raises:
        DataError: it is a fraction of an unknown length.
    """
    if not isinstance(limit, float):
        return limit
    if length is None:
        raise DataError(
            f"{name}={limit} is a fraction of an epoch of unknown length: give a number of batches"
        )
    return max(1, int(length * limit))


def moved(batch: Any, device: torch.device | None) -> Any:
    """Return the batch with its tensors on `device`; None leaves it as it is.

    Lists, tuples, named tuples and dicts are gone through; what has a `to` method is asked.
    """
    if device is None:
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(item, device) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(item, device) for item in batch)
    if type(batch) is dict:
        return {key: moved(item, device) for key, item in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch


def samples(batch: Any) -> int:
    """Return the length of the first dimension of the first tensor in the batch, or 1."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else 1
    items: Any = ()
    if isinstance(batch, Mapping):
        items = batch.values()
    elif isinstance(batch, (list, tuple)):
        items = batch
    for item in items:
        if isinstance(item, (torch.Tensor, Mapping, list, tuple)):
            return samples(item)
    return 1
