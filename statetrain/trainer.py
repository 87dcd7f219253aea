"""`Trainer`: a loop with callbacks, loggers and checkpoints, and the driver of them all."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from statetrain import diagram
from statetrain.callbacks import Callbacks, point
from statetrain.errors import CheckpointError, LoopError, TrainingError
from statetrain.loggers.csv import CSVLogger
from statetrain.loop import Loop
from statetrain.persist.checkpoint import Checkpoints
from statetrain.persist.randomness import seed_everything
from statetrain.run import Limits, Run
from statetrain.session import Session
from statetrain.supervised.loop import supervised

__all__ = ["Trainer"]

Function = TypeVar("Function", bound=Callable[[Any], Any])


class Trainer:
    """Drive a loop, save its run, and go on with it.

    Args:
        loop: what to drive; by default `st.supervised()`.
        max_epochs, max_steps: where training ends: after so many epochs or optimizer steps.
        seed: seeds python, numpy and torch now, so build the model afterwards. None takes
            `torch.initial_seed()` as the key of the loaders' order.
        callbacks: objects whose methods are marked with `st.on` and `st.before`.
        loggers: what writes logged values; by default a `CSVLogger` beside local checkpoints.
        checkpoints: a `Checkpoints`, or its URL. None saves nothing.
        resume: `"auto"` goes on from the newest checkpoint, if there is one; `"never"` starts
            afresh, and refuses a URL that already holds checkpoints.
        exact: True makes what cannot be resumed exactly an error, False a warning. By default it
            is an error when checkpoints are on.

    Raises:
        StatetrainError: an argument has no meaning; the message says which ones have.
    """

    def __init__(
        self,
        loop: Loop | None = None,
        *,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        seed: int | None = None,
        callbacks: Collection[object] = (),
        loggers: Sequence[Any] | None = None,
        checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
        resume: str = "auto",
        exact: bool | None = None,
    ) -> None:
        if loop is not None and not isinstance(loop, Loop):
            raise LoopError(f"Trainer was given {loop!r}: its first argument is a st.Loop")
        for name, value in (("max_epochs", max_epochs), ("max_steps", max_steps)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise TrainingError(f"{name}={value!r}: give a whole number from 1, or None")
        if resume not in ("auto", "never"):
            raise CheckpointError(f'resume={resume!r}: give "auto" or "never"')
        self.loop = supervised() if loop is None else loop
        self.limits = Limits(max_epochs=max_epochs, max_steps=max_steps)
        self.seed = seed
        self.resume = resume
        self.exact = exact
        self.checkpoints = (
            checkpoints
            if checkpoints is None or isinstance(checkpoints, Checkpoints)
            else Checkpoints(checkpoints)
        )
        if self.checkpoints is not None:
            self.checkpoints.check(self.loop)
        self.loggers = self._default_loggers() if loggers is None else list(loggers)
        self.run: Run | None = None
        self._callbacks = Callbacks(self.loop)
        self._session: Session | None = None
        for instance in callbacks:
            self._callbacks.attach_object(instance)
        if seed is not None:
            seed_everything(seed)

    def on(
        self,
        place: str,
        *,
        every: int | None = None,
        once: bool = False,
        at: int | Collection[int] | None = None,
        when: Callable[[Any], bool] | None = None,
        priority: int = 0,
        name: str | None = None,
    ) -> Callable[[Function], Function]:
        """Attach a function to a state or to a transition `"source -> dest"`; see `st.on`.

        Raises:
            CallbackError: no such point, or the function does not take the run.
        """
        return self._attaching(
            place, every=every, once=once, at=at, when=when, priority=priority, name=name
        )

    def before(
        self,
        place: str,
        *,
        every: int | None = None,
        once: bool = False,
        at: int | Collection[int] | None = None,
        when: Callable[[Any], bool] | None = None,
        priority: int = 0,
        name: str | None = None,
    ) -> Callable[[Function], Function]:
        """Attach a function that fires before the action of a state; see `st.before`."""
        return self._attaching(
            place,
            leading=True,
            every=every,
            once=once,
            at=at,
            when=when,
            priority=priority,
            name=name,
        )

    def fit(self, *arguments: Any) -> Any:
        """Train, and return the run.

        `fit(module, train_loader, val_loader=None)` for the supervised loop, `fit(run)` for a loop
        of your own. With checkpoints the same call starts, goes on, or, when the run is complete,
        does nothing.

        Raises:
            StatetrainError: the loop, the data or a checkpoint does not fit; before training where
                that can be known.
            Preempted: a signal came, and the run is saved.
        """
        run = self.run = self._begin(arguments)
        run.limits, run.trainer = self.limits, self
        with Session(
            run=run,
            loop=self.loop,
            callbacks=self._callbacks,
            loggers=self.loggers,
            checkpoints=self.checkpoints,
            seed=self.seed,
            fresh=self.resume == "never",
            exact=self.exact,
        ) as session:
            self._session = session
            for state in session:
                session.save_if_due(state)
                if session.leaving:
                    break
        return run

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the loop, with what is attached to it, as .svg, .png, .mmd or .dot."""
        diagram.draw(self.loop, path, callbacks=self._points())

    @property
    def current_epoch(self) -> int:
        """The running epoch, from 0."""
        return 0 if self.run is None else self.run.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return 0 if self.run is None else self.run.step

    def _begin(self, arguments: tuple[Any, ...]) -> Run:
        if self.loop.begin is not None:
            run: Run = self.loop.begin(self.loop.options, *arguments)
            return run
        if len(arguments) == 1 and isinstance(arguments[0], Run):
            return arguments[0]
        given = ", ".join(type(argument).__name__ for argument in arguments)
        raise TrainingError(
            f"this loop is driven with fit(run), a run of your st.Run subclass, not fit({given})"
        )

    def _attaching(self, place: str, **how: Any) -> Callable[[Function], Function]:
        where = point(place, **how)

        def attach(function: Function) -> Function:
            self._callbacks.attach(function, where)
            if self._session is not None and self._session.machine is not None:
                self._session.machine.refresh()
            return function

        return attach

    def _default_loggers(self) -> list[Any]:
        folder = None if self.checkpoints is None else self.checkpoints.store.folder
        return [] if folder is None else [CSVLogger(os.path.join(folder, "metrics.csv"))]

    def _points(self) -> dict[str, list[str]]:
        points: dict[str, list[str]] = {}
        for callback in self._callbacks:
            where = callback.point
            name = f"before {where.place}" if where.leading else where.place
            points.setdefault(name, []).append(callback.label)
        return points
