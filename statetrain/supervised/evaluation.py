"""Validation, test and prediction as loops of their own: the same table under three names.

They train nothing: the module is given anew, and only its digest is kept, so that a stopped
evaluation goes on with the weights that it began with and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import xxhash
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from statetrain.data.device import moved
from statetrain.data.loader import Loader, resumable
from statetrain.errors import TrainingError
from statetrain.loop import Action, Loop, State, Transition, nearest
from statetrain.persist.randomness import Lane
from statetrain.run import Run, static, transient
from statetrain.supervised.batches import limited, samples
from statetrain.supervised.means import add, as_metrics, enter_eval, leave_eval, means
from statetrain.supervised.module import Module
from statetrain.supervised.predictions import Predictions

__all__ = ["KINDS", "EvaluationRun", "evaluation"]

KINDS = {"validate": "validation", "test": "test", "predict": "predict"}  # and their states' stem


@dataclass(kw_only=True, repr=False, eq=False)
class EvaluationRun(Run):
    """An evaluation. `metrics` are its result, or `predictions`.

    Attributes:
        module: what is evaluated. loader: its batches, read up to `limit`.
        kind: `"validate"`, `"test"` or `"predict"`.
        weights: with checkpoints, a digest of what is evaluated.
        modes: training or eval, of each submodule, before the evaluation; None before and after.
        totals: of each metric so far, the weighted sum and the weight.
        weight: samples of the batch in hand.
        random: the stream that the hooks draw from.
        predictions: what `predict_step` returned, and where it goes.
        device: where batches go; None leaves them as they are.
    """

    loader: Loader
    kind: str = static()
    weights: str = static(default="")
    module: Module = transient(default=None)
    limit: int | float | None = static(default=None)
    modes: list[bool] | None = None
    totals: dict[str, list[Any]] = field(default_factory=dict)
    weight: int = 1
    random: Lane = field(default_factory=Lane)
    predictions: Predictions = field(default_factory=Predictions)
    device: torch.device | None = transient(default=None)

    def ready(self) -> None:
        """Find the device, and check that the hook is there."""
        self.module.run, self.module.trainer = self, self.trainer
        places = [parameter.device for parameter in self.module.parameters()]
        self.device = places[0] if places and places[0].type != "cpu" else None
        self.limit = limited(self.limit, self.loader.length, name="limit_batches")
        saving = self.trainer is not None and self.trainer.checkpoints is not None
        if saving and not self.weights:
            self.weights = weights_digest(self.module)

    def resumed(self) -> None:
        """Evaluate the rest in eval mode too: the module comes as it is made."""
        if self.modes is not None:
            enter_eval(self.module)
            self.predictions.open()

    def close(self) -> None:
        """Put the modes back, also when the evaluation was broken off."""
        leave_eval(self.module, self.modes)
        self.predictions.close()
        self.module.run = None

    def record(self, name: str, value: Any) -> None:
        """Add `value` to the mean that is logged at the end."""
        add(self.totals, {name: value}, self.weight)


def start(run: EvaluationRun) -> None:
    """Switch to eval mode, at the first batch."""
    run.loader.start(0)
    run.random.seed(run.seed or 0, run.kind)
    run.modes = enter_eval(run.module)
    run.predictions.open()


def step(run: EvaluationRun) -> None:
    """Evaluate one batch, without gradients, and with random streams of its own."""
    run.batch = moved(next(run.loader), run.device)
    run.batch_nb = run.loader.position - 1
    run.weight = samples(run.batch)
    hook = f"{KINDS[run.kind]}_step"
    with torch.no_grad(), run.random:
        returned = getattr(run.module, hook)(run.batch, run.batch_nb)
    if run.kind == "predict":
        run.predictions.add(returned)
    else:
        name = "val_loss" if run.kind == "validate" else "test_loss"
        add(run.totals, as_metrics(returned, hook=hook, name=name), run.weight)


def end(run: EvaluationRun) -> None:
    """Log the means, and go back to the modes from before."""
    leave_eval(run.module, run.modes)
    run.modes = None
    for name, value in means(run.totals).items():
        run.log(name, value)


def has_batch(run: EvaluationRun) -> bool:
    """Whether there is another batch."""
    loader, limit = run.loader, run.limit
    return (limit is None or loader.position < limit) and loader.has_next and not run.finishing


def evaluation(kind: str) -> Loop:
    """Declare the loop of `trainer.validate`, `trainer.test` or `trainer.predict`.

    `kind` is `"validate"`, `"test"` or `"predict"`; the states are called `validation_start`,
    `validation_step`, `validation_end`, or `test_...`, `predict_...`.
    """
    if kind not in KINDS:
        raise TrainingError(f"evaluation({kind!r}): no such kind{nearest(kind, KINDS)}")
    stem = KINDS[kind]
    names = [f"{stem}_{part}" for part in ("start", "step", "end")]
    actions: tuple[Action, ...] = (start, step, end)
    first, middle, last = names
    return Loop(
        initial=first,
        states=(
            *(State(name, action) for name, action in zip(names, actions, strict=True)),
            State("done", final=True),
        ),
        transitions=(
            Transition(first, middle, has_batch),
            Transition(first, last),
            Transition(middle, middle, has_batch),
            Transition(middle, last),
            Transition(last, "done"),
        ),
        begin=partial(_begin, kind),
    )


def weights_digest(module: torch.nn.Module) -> str:
    """Return a digest of the parameters and buffers, which names what is evaluated."""
    digest = xxhash.xxh3_128()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            digest.update(f"{name} has no shape yet".encode())
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _begin(
    kind: str,
    _options: Mapping[str, Any],
    module: Any,
    loader: Any,
    *,
    limit_batches: int | float | None = None,
    to: Any = None,
) -> EvaluationRun:
    if not isinstance(module, Module):
        raise TrainingError(
            f"{kind} was given a {type(module).__name__}: "
            "write st.Module.wrap(model, loss=..., optimizer=...), or subclass st.Module"
        )
    return EvaluationRun(
        kind=kind,
        module=module,
        loader=resumable(loader),
        limit=limit_batches,
        predictions=Predictions(to),
    )
