"""Data in memory: a batch of it is one indexed read, the same to the bit as collated samples."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate, default_convert
from torch.utils.data._utils import collate

__all__ = ["draws_nothing", "in_memory", "rows"]

_ARRAYS = (torch.Tensor, np.ndarray, np.memmap)
_WHOLE = {int, np.int32, np.int64}  # a bool is an index of another kind
_COLLATED = {
    *(torch.Tensor, np.ndarray, (np.bool_, np.number, np.object_)),
    *(float, int, str, bytes),
}


def draws_nothing(loader: DataLoader[Any]) -> bool:
    """Whether its data is known to draw no random number."""
    if not any(loader.collate_fn is known for known in (default_collate, default_convert)):
        return False
    dataset = _innermost(loader.dataset)
    if type(dataset) in {*_ARRAYS, TensorDataset, list, tuple, range}:
        return True
    return getattr(dataset, "deterministic", False) is True


def in_memory(loader: DataLoader[Any]) -> bool:
    """Whether it collates rows of tensors or arrays in the default way, which `rows` may do."""
    if loader.batch_sampler is None or loader.collate_fn is not default_collate:
        return False
    return type(_innermost(loader.dataset)) in {*_ARRAYS, TensorDataset}


def rows(dataset: Any, indices: Any, data: memoryview | None) -> Any:
    """Return what `default_collate` makes of these samples; None where it might be different.

    That is checked for each batch: the data may be changed meanwhile. `data` are the indices as
    64-bit integers, where that is known. The batch shares no memory with the dataset.
    """
    if not _collates_as_usual():
        return None
    try:
        while type(dataset) is Subset:
            indices, data = _inner(dataset.indices, indices), None
            dataset = dataset.dataset
        index = _index(indices, data)
        if index is None:
            return None
        if type(dataset) is not TensorDataset:
            return _read(dataset, index)
        batch = [_read(tensor, index) for tensor in dataset.tensors]
    except (IndexError, NotImplementedError, OverflowError, TypeError):  # let the usual way try
        return None
    return None if any(read is None for read in batch) else batch


def _innermost(dataset: Any) -> Any:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def _collates_as_usual() -> bool:
    known = collate.default_collate_fn_map  # users may add to it
    return known.keys() == _COLLATED and known[torch.Tensor] is collate.collate_tensor_fn


def _inner(own: Any, indices: Any) -> Any:
    """Return a subset's indices of the indices."""
    if type(own) in {list, tuple, range}:
        return [own[i] for i in indices] if _whole(indices) else None
    if type(own) is torch.Tensor and own.device.type == "cpu":
        own = own.numpy()
    if type(own) is np.ndarray and own.ndim == 1 and own.dtype.type in _WHOLE:
        return own[indices].tolist() if _whole(indices) else None
    return None


def _whole(indices: Any) -> bool:
    return type(indices) is list and set(map(type, indices)) <= _WHOLE


def _index(indices: Any, data: memoryview | None) -> torch.Tensor | None:
    if not indices or not _whole(indices):
        return None
    return torch.frombuffer(array("q", indices) if data is None else data, dtype=torch.int64)


def _read(source: Any, index: torch.Tensor) -> torch.Tensor | None:
    if type(source) is torch.Tensor:
        return source.index_select(0, index) if _plain(source) else None
    rows_only = type(source) in _ARRAYS and source.ndim > 1 and source.size > 0
    if not (rows_only and source.flags.c_contiguous):  # a number's type is lost in a tensor
        return None
    return torch.from_numpy(np.asarray(source).take(index.numpy(), axis=0))


def _plain(source: torch.Tensor) -> bool:
    """Whether its rows, stacked, have the strides of the whole, and nothing else is to be kept."""
    return (
        source.layout is torch.strided
        and source.device.type == "cpu"
        and not (source.requires_grad or source.is_nested or source.is_quantized)
        and not (source.is_conj() or source.is_neg())
        and source.dim() > 0
        and source.numel() > 0
        and source.is_contiguous()
    )
