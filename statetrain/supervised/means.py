"""Eval mode and back, and metrics as means weighted by samples: what every evaluation shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from statetrain.errors import TrainingError

__all__ = ["add", "as_metrics", "enter_eval", "leave_eval", "means"]


def enter_eval(module: nn.Module) -> list[bool]:
    """Put the module into eval mode, and return the mode that each submodule was in."""
    modes = [each.training for each in module.modules()]
    module.eval()
    return modes


def leave_eval(module: nn.Module, modes: list[bool] | None) -> None:
    """Put each submodule back into its mode."""
    if modes is not None:
        for each, training in zip(module.modules(), modes, strict=True):
            each.training = training


def as_metrics(returned: Any, *, hook: str, name: str) -> Mapping[str, Any]:
    """Return what a hook returned as a dict; a scalar tensor is the metric `name`.

    Raises:
        TrainingError: it is neither, nor None.
    """
    if isinstance(returned, torch.Tensor):
        return {name: returned}
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise TrainingError(f"{hook} returned {returned!r}: return a dict of metrics")
    return returned


def add(totals: dict[str, list[Any]], metrics: Mapping[str, Any], weight: int) -> None:
    """Add the metrics of a batch of `weight` samples to `totals`, in double precision."""
    for name, value in metrics.items():
        total = totals.setdefault(name, [0.0, 0])
        total[0] = total[0] + _scalar(name, value) * weight
        total[1] += weight


def means(totals: dict[str, list[Any]]) -> dict[str, float]:
    """Return the weighted mean of each metric."""
    return {name: float(total / weight) for name, (total, weight) in totals.items()}


def _scalar(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        if hasattr(value, "__float__"):
            return float(value)
        raise TrainingError(f"metric {name!r} is {value!r}: give a number or a scalar tensor")
    if value.numel() != 1:
        raise TrainingError(
            f"metric {name!r} has shape {tuple(value.shape)}: reduce it to a scalar, for example "
            "with .mean()"
        )
    return value.detach().double().reshape(())
