"""All that a loop carries from state to state: a `Run`'s fields are what a checkpoint holds."""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass, field
from typing import Any, NamedTuple

from statetrain.errors import TrainingError

__all__ = ["Limits", "Row", "Run", "static", "transient"]

FLUSHED = 100  # logged rows that are handed to the loggers at once
KIND = "statetrain"  # the key of a field's kind in its metadata


def static(*, default: Any = MISSING, default_factory: Any = MISSING) -> Any:
    """Declare a field that is given anew at each start: a checkpoint holds it only to compare.

    A difference on resume is a `CheckpointError`.
    """
    return field(default=default, default_factory=default_factory, metadata={KIND: "static"})


def transient(*, default: Any = MISSING, default_factory: Any = MISSING) -> Any:
    """Declare a field that no checkpoint holds: it has its default again after a resume."""
    return field(default=default, default_factory=default_factory, metadata={KIND: "transient"})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where training ends: after `max_epochs` epochs, `max_steps` steps or `max_time` seconds.

    `finish` is honoured only after `min_epochs` epochs.
    """

    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int | None = None
    max_time: float | None = None


class Row(NamedTuple):
    """One logged value, with the epoch and the step it belongs to."""

    epoch: int
    step: int
    name: str
    value: Any


@dataclass(kw_only=True, repr=False, eq=False)
class Run:
    """Carry a run.

    Declare your own loop's fields in a subclass that is a dataclass too:

        @dataclass(kw_only=True)
        class GAN(st.Run):
            g: nn.Module
            opt_g: torch.optim.Optimizer
            loader: st.Loader
            loss: torch.Tensor | None = None

    Fields are stored in checkpoints and restored from them. Modules, optimizers, schedulers,
    loaders and random generators are restored in place; tensors come back detached, other data as
    it was. `st.static()` and `st.transient()` declare the exceptions.

    Attributes:
        state: the name of the state whose work is done, or being done.
        came_from: the state before a final one; a raised limit goes on from there.
        epoch: the running epoch, from 0. batch_nb: the running batch of the epoch, from 0.
        step: optimizer steps done.
        batch: the batch in hand, as the loader gave it.
        metrics: the newest value of each logged name.
        seed: the key of the loaders' private random streams.
        finishing, epoch_ending, batch_skipped: what `finish`, `end_epoch` and `skip_batch` asked
            for; guards read them.
        elapsed: seconds of training so far, over all resumes, counted only under `max_time`.
        limits, trainer: from the Trainer.
    """

    state: str = ""
    came_from: str = ""
    epoch: int = 0
    step: int = 0
    batch: Any = None
    batch_nb: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    finishing: bool = False
    epoch_ending: bool = False
    batch_skipped: bool = False
    elapsed: float = 0.0
    limits: Limits = transient(default_factory=Limits)
    trainer: Any = transient(default=None)
    clock: Any = transient(default=time.monotonic)
    ticked: float | None = transient(default=None)
    request: str | None = transient(default=None)
    pin: str | None = transient(default=None)
    logged: dict[str, int] = transient(default_factory=dict)  # the step of each newest value
    rows: list[Row] = transient(default_factory=list)
    flush: Any = transient(default=None)

    def save(self, *, pin: str | None = None) -> None:
        """Ask for a checkpoint when the work and all callbacks of this state are over.

        One with a `pin`, a name of your own, is never removed; `statetrain unpin` lets it go.
        """
        self.request = self.request or "save"
        self.pin = pin if pin is not None else self.pin

    def stop(self) -> None:
        """Ask to save and leave when this state is over; the same command run again goes on."""
        self.request = "stop"

    def finish(self) -> None:
        """Ask the loop to end for good: its guards take it to a final state.

        In a loop of your own, let the guards look at `run.finishing`.
        """
        self.finishing = True

    def end_epoch(self) -> None:
        """Ask the loop to end this epoch. In a loop of your own guards read `run.epoch_ending`."""
        self.epoch_ending = True

    def skip_batch(self) -> None:
        """Ask not to train on the batch in hand: it counts as seen, not as trained."""
        self.batch_skipped = True

    def log(self, name: str, value: Any) -> None:
        """Record a number (or a tensor of one) under `name`, at this epoch and step.

        The newest value stands in `run.metrics`. A tensor is detached, and read by the loggers
        later, so logging does not wait for the device.
        """
        size = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
        if size != 1 or (not isinstance(value, (int, float, str)) and not hasattr(value, "item")):
            given = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
            raise TrainingError(f"log({name!r}) was given {given}: log a number or a scalar tensor")
        if hasattr(value, "detach"):
            value = value.data.clone()  # the tensor may be changed in place before it is read
        self.metrics[name] = value
        self.logged[name] = self.step
        self.rows.append(Row(self.epoch, self.step, name, value))
        if len(self.rows) >= FLUSHED and self.flush is not None:
            self.flush()

    def tick(self) -> None:
        """Add the time since the last call to `elapsed`, where `max_time` limits it."""
        if self.limits.max_time is not None:
            now = self.clock()
            self.elapsed += 0.0 if self.ticked is None else now - self.ticked
            self.ticked = now

    @property
    def time_over(self) -> bool:
        """Whether `max_time` is used up."""
        return self.limits.max_time is not None and self.elapsed >= self.limits.max_time

    def ready(self) -> None:
        """Check, with all fields set and before the first action, that the run can be driven."""

    def resumed(self) -> None:
        """Do what the restored fields ask of objects that are given anew."""

    def close(self) -> None:
        """Undo what the run changed in objects that are not its own; called when `fit` leaves."""
