"""One optimizer's turn with a batch: which parameters take part, and whose gradients they hold."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from statetrain.errors import TrainingError
from statetrain.supervised.optimizers import parameters

if TYPE_CHECKING:
    from statetrain.supervised.loop import SupervisedRun

__all__ = ["all_parameters", "freeze_others", "loss_of", "own_gradients", "shared", "thaw"]


def all_parameters(run: SupervisedRun) -> list[nn.Parameter]:
    """Return every parameter of the module and the optimizers once, in an order that stays."""
    owned = [p for optimizer in run.optimizers for p in parameters(optimizer)]
    return list(dict.fromkeys([*run.module.parameters(), *owned]))


def shared(run: SupervisedRun) -> list[nn.Parameter]:
    """Return the parameters that several optimizers hold."""
    holders = Counter(p for optimizer in run.optimizers for p in set(parameters(optimizer)))
    return [p for p in run.parameters if holders[p] > 1]


def freeze_others(run: SupervisedRun) -> None:
    """Let only the parameters of the optimizer whose turn it is take part in the loss."""
    if len(run.optimizers) < 2 or run.frozen:
        return
    mine = set(parameters(run.optimizers[run.pass_i]))
    others = {p for optimizer in run.optimizers for p in parameters(optimizer)} - mine
    run.frozen = [i for i, p in enumerate(run.parameters) if p in others and p.requires_grad]
    for i in run.frozen:
        run.parameters[i].requires_grad_(False)


def thaw(run: SupervisedRun) -> None:
    """Let all parameters take part again that took part before."""
    for i in run.frozen:
        run.parameters[i].requires_grad_(True)
    run.frozen = []


def own_gradients(run: SupervisedRun, i: int) -> None:
    """Make the gradients of shared parameters those of optimizer `i`, and keep the others'."""
    if i == run.owner or not run.shared:
        return
    run.shelf[run.owner] = {k: p.grad for k, p in enumerate(run.shared)}
    mine = run.shelf.pop(i, {})
    for k, parameter in enumerate(run.shared):
        gradient = mine.get(k)
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    run.owner = i


def loss_of(run: SupervisedRun, returned: Any) -> torch.Tensor | None:
    """Take the loss out of what `training_step` returned, and log the rest.

    Raises:
        TrainingError: it is no scalar tensor that depends on the optimizer's parameters.
    """
    loss = returned
    if isinstance(returned, dict):
        if "loss" not in returned:
            raise TrainingError(
                f"training_step returned a dict without 'loss', only {list(returned)}: "
                'return {"loss": loss, "log": {...}}'
            )
        loss = returned["loss"]
        for key in ("log", "progress_bar"):
            for name, value in (returned.get(key) or {}).items():
                run.log(name, value)
    if loss is None:
        return None
    if not isinstance(loss, torch.Tensor):
        raise TrainingError(f"training_step returned {loss!r}: return a scalar tensor, the loss")
    if loss.numel() != 1:
        raise TrainingError(
            f"training_step returned a loss of shape {tuple(loss.shape)}: reduce it to a scalar, "
            "for example with .mean()"
        )
    if not loss.requires_grad:
        raise TrainingError(
            f"the loss depends on no parameter of optimizer {run.pass_i} that requires a gradient: "
            "do not detach it, and give that optimizer the parameters that it should train"
        )
    return loss
