"""What is checked before the first batch: the options of the loop, and the hooks of the module."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from statetrain.data.loader import resumable
from statetrain.errors import TrainingError
from statetrain.supervised.batches import limited
from statetrain.supervised.module import Module

if TYPE_CHECKING:
    from statetrain.supervised.loop import SupervisedRun

__all__ = ["Options", "check_module", "overfit", "overrides", "set_limits"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings that belong to the mathematics of the loop: see `supervised`.

    Raises:
        TrainingError: one has no meaning; the message says which values have one.
    """

    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    val_check_interval: int | float | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    overfit_batches: int | None = None

    def __post_init__(self) -> None:
        clip = self.gradient_clip_val
        if clip is not None and not (type(clip) in (int, float) and clip > 0):
            raise TrainingError(f"gradient_clip_val={clip!r}: give a norm above 0, or None")
        _check_number(self, "accumulate_grad_batches", least=1)
        for name, least in (("limit_train_batches", 0), ("limit_val_batches", 0)):
            _check_number(self, name, least=least, optional=True, fractional=True)
        _check_number(self, "val_check_interval", least=1, optional=True, fractional=True)
        _check_number(self, "overfit_batches", least=1, optional=True)


def _check_number(
    options: Options, name: str, *, least: int, optional: bool = False, fractional: bool = False
) -> None:
    value = getattr(options, name)
    if (value is None and optional) or (type(value) is int and value >= least):
        return
    if fractional and type(value) is float and 0 < value <= 1:
        return
    fraction = ", or a fraction of the epoch as a float up to 1.0" if fractional else ""
    raise TrainingError(f"{name}={value!r}: give a whole number from {least}{fraction}")


def check_module(run: SupervisedRun) -> None:
    """Check that the hooks are written, and take what the loop calls them with.

    Raises:
        TrainingError: one is missing or has other parameters; the message says what to write.
    """
    module = run.module
    turn, why = ((0,), ": there are several optimizers") if len(run.optimizers) > 1 else ((), "")
    _check_written(module, "training_step")
    _check_hook(module, "training_step", (None, 0, *turn), "batch, batch_nb, optimizer_i", why)
    if run.val_loader is not None:
        _check_written(module, "validation_step")
        _check_hook(module, "validation_step", (None, 0), "batch, batch_nb")
    run.batch_hook_takes_batch = bool(inspect.signature(module.on_batch_start).parameters)
    _check_hook(module, "on_batch_start", (None,) * run.batch_hook_takes_batch, "batch")
    names = "current_epoch, batch_nb, optimizer, optimizer_i, second_order_closure"
    _check_hook(module, "optimizer_step", (0, 0, None, 0, None), names)


def overrides(module: Module, name: str) -> bool:
    """Whether the module has a hook of its own instead of `Module`'s."""
    return getattr(type(module), name) is not getattr(Module, name) or name in vars(module)


def overfit(run: SupervisedRun) -> None:
    """Read the first batches once, and train and validate on them alone."""
    count = run.options.overfit_batches
    if count is None:
        return
    run.train_loader.start(0)
    batches = list(islice(run.train_loader, count))
    run.train_loader = resumable(batches)
    if run.val_loader is not None:
        run.val_loader = resumable(batches)


def set_limits(run: SupervisedRun) -> None:
    """Turn fractions of an epoch into batches, now that the loaders are known."""
    options, length = run.options, run.train_loader.length
    limit = limited(options.limit_train_batches, length, name="limit_train_batches")
    run.train_limit = limit
    if limit is not None and length is not None:
        length = min(length, limit)
    run.interval = limited(options.val_check_interval, length, name="val_check_interval")
    if run.val_loader is not None:
        found = limited(options.limit_val_batches, run.val_loader.length, name="limit_val_batches")
        run.val_limit = found


def _check_written(module: Module, name: str) -> None:
    if not overrides(module, name):
        getattr(module, name)(None, 0)  # raises, and says what to write


def _check_hook(
    module: Module, name: str, arguments: tuple[Any, ...], names: str, why: str = ""
) -> None:
    try:
        inspect.signature(getattr(module, name)).bind(*arguments)
    except TypeError:
        names = ", ".join(["self", *names.split(", ")[: len(arguments)]])
        raise TrainingError(
            f"{type(module).__name__}.{name} must be def {name}({names}){why}"
        ) from None
