"""`Module`: a model with the hooks that the supervised loop calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from statetrain.errors import TrainingError

if TYPE_CHECKING:
    from statetrain.supervised.evaluation import EvaluationRun
    from statetrain.supervised.loop import SupervisedRun
    from statetrain.trainer import Trainer

__all__ = ["Module"]


class Module(nn.Module):
    """A model, how a batch becomes a loss, and what happens at the named points of the loop.

    Subclass it and write `training_step` and `configure_optimizers`; every other hook is optional.
    Each hook is called in the state of the loop that its docstring names.
    """

    run: SupervisedRun | EvaluationRun | None = None
    """The run that trains or evaluates this module, while the trainer is at work."""
    trainer: Trainer | None = None
    """The trainer, from the first `fit` on."""

    def training_step(self, batch: Any, batch_nb: int, *rest: int) -> Any:
        """Return the loss of a batch, a scalar tensor; in state `forward`.

        With several optimizers it is called once for each, with the optimizer's index as the third
        argument. A dict with `"loss"`, and perhaps `"log"` and `"progress_bar"` (dicts of numbers
        to log), will do too. None skips this pass: nothing is added to the gradients.
        """
        raise TrainingError(
            f"{type(self).__name__} has no training_step: write "
            "def training_step(self, batch, batch_nb) and return the loss"
        )

    def validation_step(self, batch: Any, batch_nb: int) -> Any:
        """Return metrics of a batch, in state `validation_step`, in eval mode without gradients.

        A dict of numbers, or a scalar tensor that is called `"val_loss"`. The mean over the
        validation, weighted by samples, is logged in `validation_end`.
        """
        raise TrainingError(
            f"{type(self).__name__} has no validation_step, but fit was given a validation loader: "
            "write def validation_step(self, batch, batch_nb) and return a dict of metrics"
        )

    def test_step(self, batch: Any, batch_nb: int) -> Any:
        """Return metrics of a batch in `trainer.test`, in state `test_step`, as `validation_step`.

        A scalar tensor is called `"test_loss"`.
        """
        raise TrainingError(
            f"{type(self).__name__} has no test_step: write "
            "def test_step(self, batch, batch_nb) and return a dict of metrics"
        )

    def predict_step(self, batch: Any, batch_nb: int) -> Any:
        """Return what `trainer.predict` collects, in state `predict_step`.

        By default the module is called with the batch, or with the first item of a tuple or list.
        """
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def configure_optimizers(self) -> Any:
        """Return the optimizer or optimizers, and schedulers.

        An optimizer, a list of them, `([optimizers], [schedulers])`, or dicts with `"optimizer"`
        and `"lr_scheduler"`. A scheduler is itself, stepped after each epoch, or a dict with
        `"scheduler"`, `"interval"` (`"epoch"` or `"step"`), `"frequency"` and `"monitor"` (the
        metric for `ReduceLROnPlateau`, by default `"val_loss"`).
        """
        raise TrainingError(
            f"{type(self).__name__} has no configure_optimizers: write it and return an optimizer, "
            "such as torch.optim.AdamW(self.parameters(), lr=1e-3)"
        )

    def on_epoch_start(self) -> None:
        """Called in state `epoch_start`."""

    def on_epoch_end(self) -> None:
        """Called in state `epoch_end`, after the epoch's schedulers."""

    def on_batch_start(self, batch: Any) -> int | None:
        """Called in state `batch_start`, with the batch. Return -1 to end the epoch."""

    def on_batch_end(self) -> None:
        """Called in state `batch_end`; not for a batch ended by -1."""

    def backward(self, use_amp: bool, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Compute the gradients, in state `backward`. `loss` is scaled for accumulation."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def on_after_backward(self) -> None:
        """Called in state `backward`, after each backward pass: the gradients are there."""

    def optimizer_step(
        self,
        current_epoch: int,
        batch_nb: int,
        optimizer: torch.optim.Optimizer,
        optimizer_i: int,
        second_order_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step the optimizer, in state `step`, once per optimizer and closed window.

        An override that does not step leaves the gradients, and the next window adds to them.
        """
        optimizer.step() if second_order_closure is None else optimizer.step(second_order_closure)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step and before the gradients are cleared, in state `zero_grad`.

        Where `optimizer_step` is overridden it is called right after the optimizer's step, since
        the override may clear the gradients itself.
        """

    def on_pre_performance_check(self) -> None:
        """Called in state `validation_start`, in eval mode."""

    def on_post_performance_check(self) -> None:
        """Called in state `validation_end`, back in the modes of training, with the metrics."""

    def log(self, name: str, value: Any) -> None:
        """Log a number or a scalar tensor: as it is in training, as a mean in validation."""
        if self.run is None:
            raise TrainingError(f"log({name!r}): the module is not being trained by a Trainer now")
        self.run.record(name, value)

    @staticmethod
    def wrap(
        model: nn.Module,
        *,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
    ) -> Wrapped:
        """Make a `Module` of a plain model whose batches are `(input, target)`.

        `loss(model(input), target)` is the loss. `optimizer` is an optimizer, or makes one of the
        model's parameters: `lambda parameters: torch.optim.SGD(parameters, lr=0.1)`.
        """
        return Wrapped(model, loss, optimizer)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the run and the trainer: a copy of a module is not being trained."""
        own = ("run", "trainer", "_statetrain_memory")
        return {k: v for k, v in self.__dict__.items() if k not in own}


class Wrapped(Module):
    """What `Module.wrap` makes: a model, a loss function and an optimizer."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.optimizer = optimizer

    def forward(self, inputs: Any) -> Any:
        """Call the model."""
        return self.model(inputs)

    def training_step(self, batch: Any, batch_nb: int, *_rest: int) -> torch.Tensor:
        """Return the loss of an `(input, target)` batch."""
        inputs, target = batch
        return self.loss(self.model(inputs), target)

    def validation_step(self, batch: Any, batch_nb: int) -> dict[str, torch.Tensor]:
        """Return `{"val_loss": ...}` of an `(input, target)` batch."""
        return {"val_loss": self.training_step(batch, batch_nb)}

    def test_step(self, batch: Any, batch_nb: int) -> dict[str, torch.Tensor]:
        """Return `{"test_loss": ...}` of an `(input, target)` batch."""
        return {"test_loss": self.training_step(batch, batch_nb)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer, made of the model's parameters if it is a function."""
        if isinstance(self.optimizer, torch.optim.Optimizer):
            return self.optimizer
        return self.optimizer(self.model.parameters())
