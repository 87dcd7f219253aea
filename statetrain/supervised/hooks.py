"""Methods of a module that look like hooks and are none: a misspelt hook is never called."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from types import FunctionType
from typing import TYPE_CHECKING

import torch
from torch import nn

from statetrain.supervised.module import Module

if TYPE_CHECKING:
    from statetrain.supervised.loop import SupervisedRun

__all__ = ["unnoticed", "warn_of_epoch"]

log = logging.getLogger("statetrain")

PREFIXES = ("on_", "training_", "validation_", "configure_", "test_", "predict_", "optimizer_")
CLOSE, CLOSEST = 0.6, 0.85  # likeness: what to suggest, and what is a misspelling in itself
ELSEWHERE = {  # names of Lightning 2 whose nearest spelling is another hook than the same one
    "on_train_batch_end": "on_batch_end",
    "on_train_batch_start": "on_batch_start",
    "on_train_epoch_end": "on_epoch_end",
    "on_train_epoch_start": "on_epoch_start",
    "on_validation_end": "on_post_performance_check",
    "on_validation_epoch_end": "on_post_performance_check",
    "on_validation_epoch_start": "on_pre_performance_check",
    "on_validation_start": "on_pre_performance_check",
    "training_epoch_end": "on_epoch_end",
    "validation_epoch_end": "on_post_performance_check",
}


def unnoticed(module: Module) -> list[str]:
    """Say which methods are named like hooks, but are none, and are called by no other method."""
    hooks = [n for n, f in vars(Module).items() if isinstance(f, FunctionType) and n[0] != "_"]
    called = {name for _, f in _methods(module) for name in f.__code__.co_names}
    found = {}
    for name, _ in _methods(module):
        if hasattr(Module, name) or name in called or name.startswith("_"):
            continue
        like = difflib.get_close_matches(name, hooks, n=1, cutoff=CLOSE)
        hook = ELSEWHERE.get(name) or (like[0] if like else None)
        if name.startswith(PREFIXES) or difflib.get_close_matches(name, hooks, 1, CLOSEST):
            meant = f"did you mean {hook!r}?" if hook else "attach a function with trainer.on"
            found[name] = f"{type(module).__name__}.{name} is no hook and is never called: {meant}"
    return list(found.values())


def warn_of_epoch(run: SupervisedRun) -> None:
    """Warn at an epoch's end of a `training_step` without a loss, and of a loss without meaning."""
    if run.epochs == 1 and run.batches and run.loss is None and not run.batch_skipped:
        if not any(window.steps or window.summed for window in run.windows):
            log.warning(
                "%s.training_step has returned no loss in the whole first epoch, so nothing was "
                "trained: return it",
                type(run.module).__name__,
            )
    elif run.loss is not None and not torch.isfinite(run.loss).all():
        log.warning("the loss of epoch %d's last batch is %s", run.epoch, float(run.loss))


def _methods(module: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    for cls in type(module).__mro__:
        if not issubclass(Module, cls) and cls.__module__ != Module.__module__:
            for name, value in vars(cls).items():
                if isinstance(value, FunctionType):
                    yield name, value
