"""`Trainer`: a loop with callbacks, loggers and checkpoints, and the driver of them all."""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from statetrain import diagram
from statetrain.callbacks import Callbacks, point
from statetrain.cluster.determinism import make_deterministic
from statetrain.errors import CheckpointError, LoopError, TrainingError
from statetrain.exactness import Exactness, exactness_of
from statetrain.loggers.csv import CSVLogger
from statetrain.loop import Loop
from statetrain.persist.checkpoint import Checkpoints
from statetrain.persist.randomness import seed_everything
from statetrain.run import Limits, Run
from statetrain.session import Session, first_weights
from statetrain.supervised.evaluation import KINDS, EvaluationRun, evaluation
from statetrain.supervised.loop import supervised
from statetrain.supervised.module import Module

__all__ = ["Trainer"]

log = logging.getLogger("statetrain")

Function = TypeVar("Function", bound=Callable[[Any], Any])


class Trainer:
    """Drive a loop, save its run, and go on with it.

    Args:
        loop: what to drive; by default `st.supervised()`.
        max_epochs, max_steps, max_time: where training ends: after so many epochs, optimizer steps,
            or so much time (seconds, a `timedelta`, or "HH:MM:SS"), whichever is first. A higher
            limit goes on from there.
        min_epochs: `run.finish()` is honoured only after so many epochs.
        seed: seeds python, numpy and torch now, so build the model afterwards. None takes
            `torch.initial_seed()` as the key of the loaders' order.
        deterministic: let torch use deterministic algorithms only.
        callbacks: objects whose methods are marked with `st.on` and `st.before`.
        loggers: what writes logged values; by default a `CSVLogger` beside local checkpoints.
        checkpoints: a `Checkpoints`, or its URL. None saves nothing.
        init_from: the URL of another run's checkpoints, whose weights a fresh start begins with.
        resume: `"auto"` goes on from the newest checkpoint, if there is one; `"never"` starts
            afresh, and refuses a URL that already holds checkpoints.
        exact: True makes what cannot be resumed exactly an error, False a warning. By default it
            is an error when checkpoints are on.
        progress: None shows a live line on a terminal and a plain line an epoch elsewhere, True the
            live line in any case, False nothing.

    Raises:
        StatetrainError: an argument has no meaning; the message says which ones have.
    """

    def __init__(
        self,
        loop: Loop | None = None,
        *,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int | None = None,
        max_time: str | float | timedelta | None = None,
        seed: int | None = None,
        deterministic: bool = False,
        callbacks: Collection[object] = (),
        loggers: Sequence[Any] | None = None,
        checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
        init_from: str | os.PathLike[str] | None = None,
        resume: str = "auto",
        exact: bool | None = None,
        progress: bool | None = None,
    ) -> None:
        if loop is not None and not isinstance(loop, Loop):
            hint = ": call it, as st.supervised()" if callable(loop) else ""
            raise LoopError(f"Trainer was given {loop!r}: its first argument is a st.Loop{hint}")
        for name, value in (
            ("max_epochs", max_epochs), ("min_epochs", min_epochs), ("max_steps", max_steps)
        ):  # fmt: skip
            if value is not None and (type(value) is not int or value < 1):
                raise TrainingError(f"{name}={value!r}: give a whole number from 1, or None")
        if resume not in ("auto", "never"):
            raise CheckpointError(f'resume={resume!r}: give "auto" or "never"')
        self.loop = supervised() if loop is None else loop
        self.limits = Limits(
            max_epochs=max_epochs,
            min_epochs=min_epochs,
            max_steps=max_steps,
            max_time=_seconds(max_time),
        )
        self.seed = seed
        self.init_from = None if init_from is None else os.fspath(init_from)
        self.resume = resume
        self.exact = exact
        self.progress = progress
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
        self._evaluations = {kind: Callbacks(evaluation(kind)) for kind in KINDS}
        self._session: Session | None = None
        for instance in callbacks:
            self._callbacks.attach_object(instance)
        if deterministic:
            make_deterministic()
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

    def fit(self, *arguments: Any, dry_run: bool = False) -> Any:
        """Train, and return the run.

        `fit(module, train_loader, val_loader=None)` for the supervised loop, `fit(run)` for a loop
        of your own. With checkpoints the same call starts, goes on, or, when the run is complete,
        does nothing. `dry_run=True` goes through two batches and a validation, so that every state
        is visited, saves and logs nothing, and puts everything back.

        Raises:
            StatetrainError: the loop, the data or a checkpoint does not fit; before training where
                that can be known.
            Preempted: a signal came, and the run is saved.
        """
        if dry_run:
            return self._rehearsed(arguments)
        run = self._begin(self.loop, arguments)
        session = Session(
            run=run,
            loop=self.loop,
            callbacks=self._callbacks,
            loggers=self.loggers,
            checkpoints=self.checkpoints,
            seed=self.seed,
            fresh=self.resume == "never",
            exact=self.exact,
            init_from=self.init_from,
            progress=self.progress,
        )
        self._drive(session)
        return run

    def validate(
        self, module: Any, loader: Any, *, limit_batches: int | float | None = None
    ) -> dict[str, float]:
        """Run the validation loop on its own, and return the metrics' means.

        Its states are `validation_start`, `validation_step` and `validation_end`. With checkpoints
        a stopped evaluation goes on; a complete one leaves nothing behind.
        """
        return dict(self._evaluate("validate", module, loader, limit_batches, None).metrics)

    def test(
        self, module: Any, loader: Any, *, limit_batches: int | float | None = None
    ) -> dict[str, float]:
        """Run `test_step` over a loader, and return the metrics' means; see `validate`."""
        return dict(self._evaluate("test", module, loader, limit_batches, None).metrics)

    def predict(
        self,
        module: Any,
        loader: Any,
        *,
        limit_batches: int | float | None = None,
        to: str | os.PathLike[str] | None = None,
    ) -> list[Any]:
        """Run `predict_step` over a loader, and return the list of what it returned.

        With `to="predictions.jsonl"` they are written there as they come, a line a sample, and the
        list is empty.
        """
        run = self._evaluate("predict", module, loader, limit_batches, to)
        return run.predictions.batches

    def exactness(self, *arguments: Any) -> Exactness:
        """Say whether a run could go on exactly: the last one, or one that `fit` would begin."""
        run = self._begin(self.loop, arguments) if arguments else self.run
        if run is None:
            raise TrainingError("exactness() looks at a run: give it what fit is given")
        return exactness_of(run)

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

    def _begin(self, loop: Loop, arguments: tuple[Any, ...], **settings: Any) -> Run:
        if loop.begin is not None:
            run = self._begun(loop.begin, loop.options, *arguments, **settings)
        elif len(arguments) == 1 and isinstance(arguments[0], Run):
            run = arguments[0]
        else:
            given = ", ".join(type(argument).__name__ for argument in arguments)
            raise TrainingError(
                f"this loop is driven with fit(run), a run of your Run subclass, not fit({given})"
            )
        run.limits, run.trainer = self.limits, self
        return run

    def _begun(self, begin: Callable[..., Run], *arguments: Any, **settings: Any) -> Run:
        try:
            inspect.signature(begin).bind(*arguments, **settings)
        except TypeError as error:
            raise TrainingError(
                f"{error}: it is called with (module, loader, ...), as fit(module, train_loader, "
                "val_loader)"
            ) from None
        return begin(*arguments, **settings)

    def _drive(self, session: Session) -> None:
        if self._session is not None:
            raise TrainingError("this trainer is at work already: give the other run a Trainer")
        self.run, self._session = session.run, session
        try:
            with session:
                for state in session:
                    session.save_if_due(state)
                    if session.leaving:
                        break
        finally:
            self._session = None

    def _evaluate(
        self, kind: str, module: Any, loader: Any, limit: int | float | None, to: Any
    ) -> EvaluationRun:
        callbacks = self._evaluations[kind]
        strange = isinstance(module, Module) and module.trainer is not self
        if self.init_from is not None and strange:  # not what this trainer has trained
            first_weights({"run.module": module}, self.init_from)
        run = self._begin(callbacks.loop, (module, loader), limit_batches=limit, to=to)
        assert isinstance(run, EvaluationRun)  # noqa: S101 - evaluation() begins no other
        here = self.checkpoints
        name = f"{kind}-{run.weights[:12]}"
        session = Session(
            run=run,
            loop=callbacks.loop,
            callbacks=callbacks,
            loggers=[],
            checkpoints=None if here is None else here.beside(name),
            seed=self.seed,
            exact=self.exact,
            passing=True,
            progress=self.progress,
        )
        self._drive(session)
        return run

    def _rehearsed(self, arguments: tuple[Any, ...]) -> Run:
        small = {"limit_train_batches": 2, "limit_val_batches": 2, "val_check_interval": None}
        options = {
            **self.loop.options,
            **{k: v for k, v in small.items() if k in self.loop.options},
        }
        loop = replace(self.loop, options=options)
        run = self._begin(loop, arguments)
        run.limits = Limits(max_epochs=1)
        session = Session(
            run=run, loop=loop, callbacks=self._callbacks, loggers=[], checkpoints=None,
            seed=self.seed, exact=self.exact,
        )  # fmt: skip
        todo = {state.name for state in loop.states if not state.final}
        with session:
            before = session.copy()
            try:
                for state in session:
                    todo.discard(state)
                    if not todo or run.request == "stop":
                        break
            finally:
                session.put_back(before)
        log.info("dry run done%s", f"; not visited: {', '.join(sorted(todo))}" if todo else "")
        return run

    def _attaching(self, place: str, **how: Any) -> Callable[[Function], Function]:
        where = point(place, **how)
        others = [each for each in self._evaluations.values() if each.has(where)]
        chosen = [self._callbacks] if self._callbacks.has(where) or not others else []

        def attach(function: Function) -> Function:
            for callbacks in (*chosen, *others):
                callbacks.attach(function, where)
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


def _seconds(limit: str | float | timedelta | None) -> float | None:
    """Return a time limit in seconds."""
    if limit is None:
        return None
    if isinstance(limit, timedelta):
        seconds = limit.total_seconds()
    elif isinstance(limit, str):
        match = re.fullmatch(r"(?:(\d+):)?(\d+):(\d\d):(\d\d)", limit)
        days, hours, minutes, rest = (
            (int(part or 0) for part in match.groups()) if match else [0] * 4
        )
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        seconds = float(limit)
    if not seconds > 0:
        raise TrainingError(
            f'max_time={limit!r}: give seconds, a timedelta, "HH:MM:SS" or "DD:HH:MM:SS"'
        )
    return seconds
