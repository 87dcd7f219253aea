"""What `configure_optimizers` returned, in one form; and gradients scaled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from statetrain.errors import TrainingError

__all__ = ["Schedule", "configured", "parameters", "scale"]

FORMS = (
    "return an optimizer, a list of optimizers, ([optimizers], [schedulers]), or "
    '{"optimizer": ..., "lr_scheduler": ...}'
)
OPTIMIZER_KEYS = {"optimizer", "lr_scheduler", "monitor"}
SCHEDULE_KEYS = {"scheduler", "interval", "frequency", "monitor", "name", "strict"}


@dataclass(kw_only=True)
class Schedule:
    """A scheduler, and when it is stepped: every `frequency` epochs, or steps of its optimizer."""

    scheduler: Any
    optimizer_i: int
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None

    def __post_init__(self) -> None:
        if self.interval not in ("epoch", "step"):
            raise TrainingError(f'interval={self.interval!r}: give "epoch" or "step"')
        if not isinstance(self.frequency, int) or self.frequency < 1:
            raise TrainingError(f"frequency={self.frequency!r}: give a whole number from 1")

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Step the scheduler, with its metric where it looks at one.

        Raises:
            TrainingError: the metric has not been logged yet.
        """
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
            return
        name = self.monitor or "val_loss"
        if name not in metrics:
            raise TrainingError(
                f"ReduceLROnPlateau looks at the metric {name!r}, which is not logged: log it, or "
                f'give {{"scheduler": ..., "monitor": name}} with one of {sorted(metrics)}'
            )
        self.scheduler.step(float(metrics[name]))


def configured(returned: Any) -> tuple[list[Optimizer], list[Schedule]]:
    """Bring what `configure_optimizers` returned into one form.

    Raises:
        TrainingError: it has none of the customary forms.
    """
    optimizers, schedulers = _taken_apart(returned)
    if not optimizers:
        raise TrainingError(f"configure_optimizers returned no optimizer: {FORMS}")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TrainingError(f"configure_optimizers returned {optimizer!r}: {FORMS}")
    return optimizers, [_schedule(item, optimizers) for item in schedulers]


def _taken_apart(returned: Any) -> tuple[list[Any], list[Any]]:
    if returned is None:
        return [], []
    if isinstance(returned, Mapping):
        return _taken_apart([returned])
    if not isinstance(returned, (list, tuple)):
        return [returned], []
    if len(returned) == 2 and all(isinstance(item, (list, tuple)) for item in returned):
        return list(returned[0]), list(returned[1])
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    for item in returned:
        if isinstance(item, Mapping):
            optimizers.append(_optimizer_of(item))
            schedulers += _scheduler_of(item)
        else:
            optimizers.append(item)
    return optimizers, schedulers


def _optimizer_of(settings: Mapping[str, Any]) -> Any:
    unknown = set(settings) - OPTIMIZER_KEYS
    if unknown or "optimizer" not in settings:
        raise TrainingError(f"configure_optimizers returned {dict(settings)!r}: {FORMS}")
    return settings["optimizer"]


def _scheduler_of(settings: Mapping[str, Any]) -> list[Any]:
    scheduler = settings.get("lr_scheduler")
    if scheduler is None:
        return []
    chosen = scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
    return [{"monitor": settings.get("monitor"), **chosen}]


def _schedule(item: Any, optimizers: list[Optimizer]) -> Schedule:
    settings = dict(item) if isinstance(item, Mapping) else {"scheduler": item}
    unknown = set(settings) - SCHEDULE_KEYS
    if unknown or "scheduler" not in settings:
        raise TrainingError(
            f"a scheduler's dict takes {sorted(SCHEDULE_KEYS)} and needs 'scheduler': {settings!r}"
        )
    scheduler = settings["scheduler"]
    if not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
        raise TrainingError(
            f"configure_optimizers returned the scheduler {scheduler!r}: give one of "
            "torch.optim.lr_scheduler"
        )
    owners = [i for i, optimizer in enumerate(optimizers) if scheduler.optimizer is optimizer]
    if not owners:
        kind = type(scheduler).__name__
        raise TrainingError(
            f"{kind} schedules an optimizer that configure_optimizers did not return: return both"
        )
    chosen = {k: v for k, v in settings.items() if k in ("interval", "frequency", "monitor")}
    return Schedule(scheduler=scheduler, optimizer_i=owners[0], **chosen)


def parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters in the optimizer's groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def scale(tensors: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiply the gradients by `factor`."""
    for parameter in tensors:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
