"""What is checked before the first batch: the options of the loop, and the hooks of the module."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from statetrain.data.loader import resumable
from statetrain.errors import TrainingError
from statetrain.supervised.batches import limited
from statetrain.supervised.hooks import unnoticed
from statetrain.supervised.module import Module

if TYPE_CHECKING:
    from statetrain.supervised.loop import SupervisedRun

log = logging.getLogger("statetrain")

__all__ = ["Hooks", "Options", "check_module", "hooks_of", "overfit", "overrides", "set_limits"]


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
    compile: bool = False

    def __post_init__(self) -> None:
        if type(self.compile) is not bool:
            raise TrainingError(f"compile={self.compile!r}: give True or False")
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
    taken = (None,) if _takes_batch(module) else ()
    _check_hook(module, "on_batch_start", taken, "batch")
    names = "current_epoch, batch_nb, optimizer, optimizer_i, second_order_closure"
    _check_hook(module, "optimizer_step", (0, 0, None, 0, None), names)
    for line in unnoticed(module):
        log.warning("%s", line)


@dataclass(kw_only=True)
class Hooks:
    """The module's hooks of every batch, looked up once; None where it leaves one as it is.

    `nn.Module` looks its attributes up slowly, and what does nothing need not be called.
    """

    training_step: Any = None  # always one's own
    on_batch_start: Callable[[Any], int | None] | None = None
    backward: Callable[[bool, torch.Tensor, torch.optim.Optimizer], None] | None = None
    on_after_backward: Callable[[], None] | None = None
    optimizer_step: Callable[..., None] | None = None
    on_before_zero_grad: Callable[[torch.optim.Optimizer], None] | None = None
    on_batch_end: Callable[[], None] | None = None


def hooks_of(module: Module, *, compiled: bool) -> Hooks:
    """Look up the hooks that the module overrides; `training_step` may be compiled by torch."""
    names = [each.name for each in fields(Hooks)]
    own = {name: getattr(module, name) for name in names if overrides(module, name)}
    hook = own.get("on_batch_start")
    if hook is not None and not _takes_batch(module):
        own["on_batch_start"] = lambda _batch: hook()
    if compiled:
        own["training_step"] = torch.compile(module.training_step)
    return Hooks(**own)


def _takes_batch(module: Module) -> bool:
    return bool(inspect.signature(module.on_batch_start).parameters)


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
