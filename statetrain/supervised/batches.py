"""What the supervised loop asks of a batch: how many samples it has, and how many it may use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from statetrain.errors import DataError

__all__ = ["limited", "samples"]


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
