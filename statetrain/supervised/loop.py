"""The supervised loop, whole: what a run carries, the work of each state, guards, and the table.

Read from top to bottom it is an epoch: batches, passes over the optimizers, steps, validation. It
knows no files and no `transitions`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from statetrain.arguments import keywords_checked
from statetrain.data.device import moved
from statetrain.data.loader import Loader, resumable
from statetrain.errors import DataError, TrainingError
from statetrain.loop import Loop, State, Transition
from statetrain.persist.randomness import Lane
from statetrain.persist.registry import register
from statetrain.run import Run, transient
from statetrain.supervised.batches import samples
from statetrain.supervised.hooks import warn_of_epoch
from statetrain.supervised.means import add, as_metrics, enter_eval, leave_eval, means
from statetrain.supervised.module import Module
from statetrain.supervised.optimizers import Schedule, configured, parameters, scale
from statetrain.supervised.passes import (
    all_parameters,
    freeze_others,
    loss_of,
    own_gradients,
    shared,
    thaw,
)
from statetrain.supervised.setup import (
    Hooks,
    Options,
    check_module,
    hooks_of,
    overfit,
    set_limits,
)

log = logging.getLogger("statetrain")

ZERO_GRAD = Optimizer.zero_grad

__all__ = ["SupervisedRun", "Window", "supervised"]


@dataclass(kw_only=True)
class Window:
    """The micro-batches whose gradients one optimizer step uses.

    `planned` is how many there will be as far as known, `seen` how many came (those without a loss
    too), `summed` how many have added to the gradients; `steps` counts the optimizer's steps.
    """

    planned: int = 1
    seen: int = 0
    summed: int = 0
    steps: int = 0


register(Window, "statetrain.Window")


@dataclass(kw_only=True, repr=False, eq=False)
class SupervisedRun(Run):
    """A supervised run. `epoch`, `batch_nb`, `step`, `loss` and `metrics` are for everyone.

    Attributes:
        module, train_loader, val_loader: what `fit` was given.
        optimizers, schedulers: what `configure_optimizers` returned; one `Window` an optimizer
            stands in `windows`.
        loss: of the newest pass, detached once `backward` is done; None where there was none.
        epochs: epochs done. batches: batches of this epoch that are done.
        batch_open: whether a batch is between `batch_start` and `batch_end`.
        pass_i: the optimizer whose turn it is. pass_open: between `forward` and `pass_end`.
        served: the optimizer that the last step was about. stepped: whether it did step.
        counted: whether this batch has raised `step`.
        frozen: parameters that sit out this pass.
        owner: whose gradients stand in parameters of several optimizers; `shelf` has the others'.
        validated: `batches` at this epoch's newest validation. validations: how many there were.
        modes: training or eval, of each submodule, before validation; None outside of one.
        totals: of each metric of this validation, the weighted sum and the weight.
        val_random: the stream that validation draws from.
        options, device, interval, train_limit, val_limit: the loop's options; where batches go
            (None: as they are); batches between validations, and of an epoch.
    """

    module: Module
    train_loader: Loader
    val_loader: Loader | None = None
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Schedule] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    loss: torch.Tensor | None = None

    epochs: int = 0
    batches: int = 0
    batch_open: bool = False
    pass_i: int = 0
    pass_open: bool = False
    served: int = 0
    stepped: bool = False
    counted: bool = False
    frozen: list[int] = field(default_factory=list)
    owner: int = 0
    shelf: dict[int, dict[int, Any]] = field(default_factory=dict)

    validated: int | None = None
    validations: int = 0
    modes: list[bool] | None = None
    totals: dict[str, list[Any]] = field(default_factory=dict)
    val_random: Lane = field(default_factory=Lane)

    options: Options = transient(default_factory=Options)
    device: torch.device | None = transient(default=None)
    parameters: list[torch.nn.Parameter] = transient(default_factory=list)
    shared: list[torch.nn.Parameter] = transient(default_factory=list)
    interval: int | None = transient(default=None)
    train_limit: int | None = transient(default=None)
    val_limit: int | None = transient(default=None)
    weight: int = transient(default=1)  # samples of the validation batch in hand
    hooks: Hooks = transient(default_factory=Hooks)
    watching: list[Any] = transient(default_factory=list)  # of the optimizers' steps

    def ready(self) -> None:
        """Configure the optimizers and check the module against them."""
        module = self.module
        module.run, module.trainer = self, self.trainer
        limits = self.limits
        if (limits.max_epochs, limits.max_steps, limits.max_time) == (None, None, None):
            raise TrainingError(
                "training has no end: give Trainer(max_epochs=...), max_steps or max_time"
            )
        if not module.training:
            log.warning("the module is in eval mode, and is trained so: call module.train() first?")
        self.optimizers, self.schedulers = configured(module.configure_optimizers())
        self.windows = [Window() for _ in self.optimizers]
        check_module(self)
        self.hooks = hooks_of(module, compiled=self.options.compile)
        places = [p.device for p in module.parameters()]
        self.device = places[0] if places and places[0].type != "cpu" else None
        self.parameters = all_parameters(self)
        for parameter in self.parameters:
            parameter.grad = None  # an earlier run may have stopped within a window
        self.shared = shared(self)
        overfit(self)
        set_limits(self)
        self._watch_steps()

    def resumed(self) -> None:
        """Put the batch in hand, read on the CPU, where the module is."""
        self.batch = moved(self.batch, self.device)

    def _watch_steps(self) -> None:
        """Notice the steps that an overridden `optimizer_step` makes, or does not make."""
        if self.hooks.optimizer_step is None:
            return

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            if not self.stepped:
                self.stepped = True
                self.module.on_before_zero_grad(optimizer)

        self.watching = [o.register_step_post_hook(stepped) for o in self.optimizers]

    def close(self) -> None:
        """Take back hooks, modes and frozen parameters, also when training was broken off."""
        for handle in self.watching:
            handle.remove()
        thaw(self)
        leave_eval(self.module, self.modes)
        self.module.run = None

    def record(self, name: str, value: Any) -> None:
        """Log `value`; inside a validation, add it to the mean."""
        if self.modes is None:
            self.log(name, value)
        else:
            add(self.totals, {name: value}, self.weight)


# The work of each state, in the order of the loop.


def epoch_start(run: SupervisedRun) -> None:
    """Begin an epoch at its first batch."""
    run.epoch = run.epochs
    run.batches = 0
    run.validated = None
    run.epoch_ending = False
    for window in run.windows:  # passes without a loss may have left one begun
        window.seen = 0
    run.train_loader.start(run.epoch)
    run.tick()
    run.module.on_epoch_start()


def batch_start(run: SupervisedRun) -> None:
    """Fetch a batch and plan the windows that begin with it."""
    run.batch = run.train_loader.__next__()
    if run.device is not None:
        run.batch = moved(run.batch, run.device)
    run.batch_nb = run.train_loader.position - 1
    run.batch_open, run.batch_skipped, run.counted = True, False, False
    run.pass_i = 0
    longest = run.options.accumulate_grad_batches
    if longest > 1:
        for window in run.windows:
            if window.seen == 0:
                window.planned = min(longest, _batches_left(run))
    on_batch_start = run.hooks.on_batch_start
    if on_batch_start is not None and on_batch_start(run.batch) == -1:
        run.end_epoch()


def forward(run: SupervisedRun) -> None:
    """Compute the loss of this batch for the optimizer whose turn it is.

    It is replayed on resume, so whatever it changes it leaves as it is the second time. An action
    that replaces it sets `run.loss`.
    """
    run.pass_open = True
    if len(run.optimizers) == 1:
        loss = run.hooks.training_step(run.batch, run.batch_nb)
        plain = type(loss) is torch.Tensor and loss.requires_grad and not loss.dim()
        run.loss = loss if plain else loss_of(run, loss)
        return
    own_gradients(run, run.pass_i)
    freeze_others(run)
    try:
        run.loss = loss_of(run, run.hooks.training_step(run.batch, run.batch_nb, run.pass_i))
    except BaseException:
        thaw(run)
        raise


def backward(run: SupervisedRun) -> None:
    """Add the gradients of the loss, divided by the planned length of the window."""
    run.pass_open = True
    window = run.windows[run.pass_i]
    loss: torch.Tensor = run.loss  # type: ignore[assignment]  # guarded by has_loss
    share = loss if window.planned == 1 else loss / window.planned
    if run.hooks.backward is None:
        torch.autograd.backward((share,))  # as share.backward(), without its checks
    else:
        run.hooks.backward(False, share, run.optimizers[run.pass_i])
    run.loss = loss.detach()
    window.seen += 1
    window.summed += 1
    if run.frozen:
        thaw(run)
    if run.hooks.on_after_backward is not None:
        run.hooks.on_after_backward()


def step(run: SupervisedRun) -> None:
    """Step the first optimizer whose window is due, and its schedulers."""
    run.served = i = 0 if len(run.windows) == 1 else _first_due(run)
    window, optimizer = run.windows[i], run.optimizers[i]
    if run.shared:
        own_gradients(run, i)
    if window.summed != window.planned:  # closed early, or a pass without a loss
        scale(parameters(optimizer), window.planned / window.summed)
    if run.options.gradient_clip_val is not None:
        torch.nn.utils.clip_grad_norm_(parameters(optimizer), run.options.gradient_clip_val)
    if run.hooks.optimizer_step is None:
        run.stepped = True
        optimizer.step()
    else:
        run.stepped = False  # until the optimizer says so
        run.hooks.optimizer_step(run.epoch, run.batch_nb, optimizer, i, None)
    window.seen = window.summed = 0
    if run.stepped:
        window.steps += 1
        run.step += not run.counted
        run.counted = True
        if run.schedulers:
            _step_schedulers(run, "step", i, window.steps)


def zero_grad(run: SupervisedRun) -> None:
    """Clear the gradients of the optimizer that stepped."""
    optimizer = run.optimizers[run.served]
    hook = run.hooks.on_before_zero_grad
    if hook is not None and run.hooks.optimizer_step is None:
        hook(optimizer)  # else it was called right after the step
    if type(optimizer).zero_grad is ZERO_GRAD:
        for group in optimizer.param_groups:  # the same bits, without its profiler range
            for parameter in group["params"]:
                parameter.grad = None
    else:
        optimizer.zero_grad()


def pass_end(run: SupervisedRun) -> None:
    """Move on to the next optimizer, once per forward."""
    if run.pass_open:
        if run.loss is None or run.batch_skipped:
            window = run.windows[run.pass_i]
            window.seen += not run.batch_skipped
            if window.summed == 0 and window.seen >= window.planned:
                window.seen = 0  # nothing came of this window
            run.loss = None
            thaw(run)
        run.pass_open = False
        run.pass_i += 1
    elif run.pass_i == 0 and not run.epoch_ending:
        run.pass_i = len(run.optimizers)  # a skipped batch has no pass


def batch_end(run: SupervisedRun) -> None:
    """Count the batch as done."""
    run.batch_open = False
    run.batches += 1
    if run.limits.max_time is not None:
        run.tick()
    if run.hooks.on_batch_end is not None:
        run.hooks.on_batch_end()


def validation_start(run: SupervisedRun) -> None:
    """Switch to eval mode, at the first validation batch."""
    run.validated = run.batches
    run.validations += 1
    run.totals = {}
    if run.val_loader is not None:
        run.val_loader.start(run.validations)
    run.val_random.seed(run.seed or 0, "validation", run.validations)
    run.modes = enter_eval(run.module)
    run.module.on_pre_performance_check()


def validation_step(run: SupervisedRun) -> None:
    """Add the metrics of one validation batch; no gradient and no random stream is touched."""
    assert run.val_loader is not None  # noqa: S101 - guarded by has_val
    batch = moved(next(run.val_loader), run.device)
    with torch.no_grad(), run.val_random:
        run.weight = samples(batch)
        returned = run.module.validation_step(batch, run.val_loader.position - 1)
    metrics = as_metrics(returned, hook="validation_step", name="val_loss")
    add(run.totals, metrics, run.weight)
    run.weight = 1


def validation_end(run: SupervisedRun) -> None:
    """Log the means, and go back to the modes of training."""
    leave_eval(run.module, run.modes)
    run.modes = None
    for name, value in means(run.totals).items():
        run.log(name, value)
    run.tick()
    run.module.on_post_performance_check()


def epoch_end(run: SupervisedRun) -> None:
    """Count the epoch as done and step its schedulers."""
    run.epochs += 1
    warn_of_epoch(run)
    for i in range(len(run.optimizers)):
        _step_schedulers(run, "epoch", i, run.epochs)
    run.tick()
    run.module.on_epoch_end()


# The guards: pure functions of the run.


def has_next(run: SupervisedRun) -> bool:
    """Whether this epoch goes on with another batch."""
    return not epoch_over(run)


def trainable(run: SupervisedRun) -> bool:
    """Whether the batch in hand is to be trained on."""
    return not (run.batch_skipped or run.epoch_ending)


def has_loss(run: SupervisedRun) -> bool:
    """Whether `training_step` returned a loss, and nobody has asked to skip the batch since."""
    return not run.batch_skipped and run.loss is not None


def window_due(run: SupervisedRun) -> bool:
    """Whether an optimizer holds the gradients of a window that is full, or must close now."""
    for window in run.windows:  # any() would cost a generator, three times a batch
        if window.summed and (window.seen >= window.planned or _closing(run)):
            return True
    return False


def stepped(run: SupervisedRun) -> bool:
    """Whether the optimizer did step."""
    return run.stepped


def more_passes(run: SupervisedRun) -> bool:
    """Whether another optimizer has its turn with this batch."""
    return 0 < run.pass_i < len(run.optimizers) and not run.batch_skipped


def has_batch(run: SupervisedRun) -> bool:
    """Whether the batch in hand is still to be ended; one ended by -1 is not."""
    return run.batch_open and not (run.epoch_ending and run.pass_i == 0)


def validation_due(run: SupervisedRun) -> bool:
    """Whether to validate at this position: at a multiple of the interval, or the epoch's end.

    `finish` adds no validation, and no position is validated twice.
    """
    if run.val_loader is None or run.val_limit == 0:
        return False
    if run.validated == run.batches:
        return False
    interval = run.interval
    at_interval = interval is not None and run.batches > 0 and run.batches % interval == 0
    return at_interval or run.epoch_ending or not _more_batches(run)


def has_val(run: SupervisedRun) -> bool:
    """Whether there is another validation batch."""
    loader, limit = run.val_loader, run.val_limit
    return loader is not None and loader.has_next and (limit is None or loader.position < limit)


def epoch_over(run: SupervisedRun) -> bool:
    """Whether this epoch has no further batch."""
    loader, limit = run.train_loader, run.train_limit
    return (
        run.epoch_ending
        or (run.finishing and _finishing(run))
        or (limit is not None and loader.position >= limit)
        or not loader.has_next
    )


def paused(run: SupervisedRun) -> bool:
    """Whether a limit is reached in the middle of an epoch; a higher one goes on from here."""
    limits = run.limits
    return (limits.max_steps is not None and run.step >= limits.max_steps) or (
        limits.max_time is not None and run.time_over
    )


def finished(run: SupervisedRun) -> bool:
    """Whether training is over."""
    limit = run.limits.max_epochs
    return _finishing(run) or paused(run) or (limit is not None and run.epochs >= limit)


STATES = (
    State("epoch_start", epoch_start),
    State("batch_start", batch_start),
    State("forward", forward, replay=True),
    State("backward", backward),
    State("step", step),
    State("zero_grad", zero_grad),
    State("pass_end", pass_end),
    State("batch_end", batch_end),
    State("validation_start", validation_start),
    State("validation_step", validation_step),
    State("validation_end", validation_end),
    State("epoch_end", epoch_end),
    State("done", final=True),
)

TRANSITIONS = (
    Transition("epoch_start", "batch_start", has_next),
    Transition("epoch_start", "validation_start", validation_due),
    Transition("epoch_start", "epoch_end"),
    Transition("batch_start", "forward", trainable),
    Transition("batch_start", "pass_end"),
    Transition("forward", "backward", has_loss),
    Transition("forward", "pass_end"),
    Transition("backward", "step", window_due),
    Transition("backward", "pass_end"),
    Transition("step", "zero_grad", stepped),
    Transition("step", "pass_end"),
    Transition("zero_grad", "pass_end"),
    Transition("pass_end", "step", window_due),
    Transition("pass_end", "forward", more_passes),
    Transition("pass_end", "batch_end", has_batch),
    Transition("pass_end", "validation_start", validation_due),
    Transition("pass_end", "epoch_end"),
    Transition("batch_end", "pass_end", window_due),
    Transition("batch_end", "validation_start", validation_due),
    Transition("batch_end", "epoch_end", epoch_over),
    Transition("batch_end", "done", paused),
    Transition("batch_end", "batch_start"),
    Transition("validation_start", "validation_step", has_val),
    Transition("validation_start", "validation_end"),
    Transition("validation_step", "validation_step", has_val),
    Transition("validation_step", "validation_end"),
    Transition("validation_end", "pass_end", window_due),
    Transition("validation_end", "epoch_end", epoch_over),
    Transition("validation_end", "done", paused),
    Transition("validation_end", "batch_start"),
    Transition("epoch_end", "done", finished),
    Transition("epoch_end", "epoch_start"),
)


@keywords_checked
def supervised(
    *,
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    val_check_interval: int | float | None = None,
    limit_train_batches: int | float | None = None,
    limit_val_batches: int | float | None = None,
    overfit_batches: int | None = None,
    compile: bool = False,  # noqa: A002  as torch.compile
) -> Loop:
    """Declare the supervised loop, for `fit(module, train_loader, val_loader=None)`.

    `accumulate_grad_batches`: micro-batches whose mean gradient makes one optimizer step; a window
    that the epoch's end cuts short is the mean of what it has. `gradient_clip_val`: the largest
    norm of an optimizer's gradients, as `torch.nn.utils.clip_grad_norm_`. `val_check_interval`:
    validate after every so many batches of an epoch; an epoch's end is always validated, once.
    `limit_*_batches`: use only so many batches of each. These three may be a float, a fraction of
    the epoch. `overfit_batches`: train and validate on the first so many batches alone.
    `compile`: run `training_step` through `torch.compile`, which gives other bits than without.

    Raises:
        TrainingError: a setting has no meaning; the message says which values have one.
    """
    options = Options(
        accumulate_grad_batches=accumulate_grad_batches,
        gradient_clip_val=gradient_clip_val,
        val_check_interval=val_check_interval,
        limit_train_batches=limit_train_batches,
        limit_val_batches=limit_val_batches,
        overfit_batches=overfit_batches,
        compile=compile,
    )
    return Loop(
        initial="epoch_start",
        states=STATES,
        transitions=TRANSITIONS,
        options=asdict(options),
        begin=_begin,
    )


def _begin(
    options: Mapping[str, Any], module: Any, train_loader: Any, val_loader: Any = None
) -> SupervisedRun:
    if not isinstance(module, Module):
        what = "write st.Module.wrap(model, loss=..., optimizer=...), or subclass st.Module"
        raise TrainingError(f"fit was given a {type(module).__name__} to train: {what}")
    run = SupervisedRun(
        module=module,
        train_loader=resumable(train_loader),
        val_loader=None if val_loader is None else resumable(val_loader),
        options=Options(**options),
    )
    if run.val_loader is run.train_loader:
        raise DataError(
            "the validation loader is the training loader itself, and would move its position: "
            "give each an st.resumable(...) of its own"
        )
    if run.train_loader.length == 0:
        raise DataError("the training loader is empty: check the dataset, batch_size and drop_last")
    return run


def _finishing(run: SupervisedRun) -> bool:
    return run.finishing and run.epochs >= (run.limits.min_epochs or 0)


def _more_batches(run: SupervisedRun) -> bool:
    loader, limit = run.train_loader, run.train_limit
    return (limit is None or loader.position < limit) and loader.has_next


def _batches_left(run: SupervisedRun) -> int:
    """Return how many batches of this epoch are left, with the one in hand, as far as known."""
    if not _more_batches(run):
        return 1
    known = [n for n in (run.train_loader.length, run.train_limit) if n is not None]
    if run.train_loader.length is None:
        return run.options.accumulate_grad_batches
    length = min(known)
    return max(1, length - run.train_loader.position + 1)


def _first_due(run: SupervisedRun) -> int:
    closing = _closing(run)
    due = [w.summed > 0 and (closing or w.seen >= w.planned) for w in run.windows]
    return due.index(True)


def _closing(run: SupervisedRun) -> bool:
    """Whether the windows must close, because the epoch ends with the passes that are done."""
    return not run.pass_open and not more_passes(run) and epoch_over(run)


def _step_schedulers(run: SupervisedRun, interval: str, optimizer_i: int, count: int) -> None:
    for schedule in run.schedulers:
        mine = schedule.interval == interval and schedule.optimizer_i == optimizer_i
        if mine and count % schedule.frequency == 0:
            schedule.step(run.metrics)
