"""`Trainer`: a loop with callbacks, loggers and checkpoints, and the driver of them all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from statetrain import diagram
from statetrain.arguments import (
    called,
    check_counts,
    check_list,
    check_seed,
    keywords_checked,
    place,
    seconds,
)
from statetrain.callbacks import Callbacks, point
from statetrain.cluster.determinism import make_deterministic
from statetrain.errors import CheckpointError, LoopError, TrainingError
from statetrain.exactness import Exactness, exactness_of
from statetrain.fitting import first_weights
from statetrain.loggers.csv import CSVLogger
from statetrain.loop import Loop
from statetrain.persist.checkpoint import Checkpoints
from statetrain.persist.randomness import seed_everything
from statetrain.run import Limits, Run
from statetrain.session import Session
from statetrain.supervised.evaluation import KINDS, EvaluationRun, evaluation, weights_digest
from statetrain.supervised.loop import supervised
from statetrain.supervised.module import Module
from statetrain.walk import Spent

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
            afresh, and refuses a URL that already holds checkpoints. The URL of another run, or a
            `Checkpoints` of it, lets a run that has none yet go on from there, as a child of that
            run; nothing is written to that URL, so it may be a read-only one.
        exact: True makes what cannot be resumed exactly an error, False a warning. By default it
            is an error when checkpoints are on.
        progress: None shows a live line on a terminal and a plain line an epoch elsewhere, True the
            live line in any case, False nothing.
        timed: count the visits of each state and the time spent there, in `trainer.spent`.

    Raises:
        StatetrainError: an argument has no meaning; the message says which ones have.
    """

    @keywords_checked
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
        resume: str | os.PathLike[str] | Checkpoints = "auto",
        exact: bool | None = None,
        progress: bool | None = None,
        timed: bool = False,
    ) -> None:
        self.loop = _loop(loop)
        check_counts(max_epochs=max_epochs, min_epochs=min_epochs, max_steps=max_steps)
        check_seed(seed)
        self.limits = Limits(
            max_epochs=max_epochs,
            min_epochs=min_epochs,
            max_steps=max_steps,
            max_time=seconds(max_time),
        )
        self.seed = seed
        self.init_from = None if init_from is None else place("init_from", init_from)
        self.resume, self._source = _resumed(resume)
        self.exact = exact
        self.progress = progress
        self.timed = timed
        self.spent: dict[str, Spent] = {}
        self.checkpoints = _checkpoints(checkpoints, self.loop)
        self.loggers = self._default_loggers() if loggers is None else _loggers(loggers)
        self.run: Run | None = None
        self._callbacks = Callbacks(self.loop)
        self._evaluations = {kind: Callbacks(evaluation(kind)) for kind in KINDS}
        self._session: Session | None = None
        for instance in check_list("callbacks", callbacks):
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

        It fires wherever a loop of this trainer has that point: `"validation_end"` in `fit` and in
        `validate`. The type of the run tells which: in an evaluation it is an `EvaluationRun`.
        Objects in `callbacks=` belong to `fit` alone.

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

    def fit(self, *arguments: Any, dry_run: bool = False, **named: Any) -> Any:
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
            return self._rehearsed(arguments, named)
        run = self._begin(self.loop, arguments, **named)
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
            source=self._source,
            progress=self.progress,
            timed=self.timed,
        )
        self.spent = session.spent
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

    def exactness(self, *arguments: Any, **named: Any) -> Exactness:
        """Say whether a run could go on exactly: the last one, or one that `fit` would begin."""
        run = self._begin(self.loop, arguments, **named) if arguments or named else self.run
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

    def _begin(self, loop: Loop, arguments: tuple[Any, ...], **named: Any) -> Run:
        if loop.begin is not None:
            run: Run = called(loop.begin, loop.options, *arguments, **named)
        elif len(arguments) == 1 and isinstance(arguments[0], Run) and not named:
            run = arguments[0]
        else:
            given = ", ".join(
                [*(type(a).__name__ for a in arguments), *(f"{n}=..." for n in named)]
            )
            raise TrainingError(
                f"this loop is driven with fit(run), a run of your Run subclass, not fit({given})"
            )
        run.limits, run.trainer = self.limits, self
        return run

    def _drive(self, session: Session) -> None:
        with self._at_work(session):
            self.run = session.run
            with session:
                for state in session:
                    if session.served(state):
                        break

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
        if here is not None:
            run.weights = weights_digest(module)
        session = Session(
            run=run,
            loop=callbacks.loop,
            callbacks=callbacks,
            loggers=[],
            checkpoints=None if here is None else here.beside(f"{kind}-{run.weights[:12]}"),
            seed=self.seed,
            exact=self.exact,
            passing=True,
            progress=self.progress,
        )
        trained = self.run
        try:
            self._drive(session)
        finally:
            self.run = trained  # what was trained, also after an evaluation
        return run

    def _rehearsed(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Run:
        small = {"limit_train_batches": 2, "limit_val_batches": 2, "val_check_interval": None}
        options = {
            **self.loop.options,
            **{k: v for k, v in small.items() if k in self.loop.options},
        }
        loop = replace(self.loop, options=options)
        run = self._begin(loop, arguments, **named)
        session = Session(
            run=run, loop=loop, callbacks=self._callbacks, loggers=[], checkpoints=None,
            seed=self.seed, exact=self.exact,
        )  # fmt: skip
        todo = {state.name for state in loop.states if not state.final}
        with self._at_work(session):
            run.limits = Limits(max_epochs=1)
            try:
                with session:
                    self._rehearse(session, todo)
            finally:
                run.limits = self.limits
        log.info("dry run done%s", f"; not visited: {', '.join(sorted(todo))}" if todo else "")
        return run

    def _rehearse(self, session: Session, todo: set[str]) -> None:
        before = session.copy()
        try:
            for state in session.machine or ():
                todo.discard(state)
                if not todo or session.run.request == "stop":
                    break
        finally:
            session.put_back(before)

    @contextmanager
    def _at_work(self, session: Session) -> Iterator[None]:
        if self._session is not None:
            raise TrainingError("this trainer is at work already: give the other run a Trainer")
        self._session = session
        try:
            yield
        finally:
            self._session = None

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


def _loop(given: Any) -> Loop:
    if given is not None and not isinstance(given, Loop):
        hint = ": call it, as st.supervised()" if callable(given) else ""
        raise LoopError(f"Trainer was given {given!r}: its first argument is a st.Loop{hint}")
    return supervised() if given is None else given


def _resumed(given: Any) -> tuple[str, Checkpoints | None]:
    """Return "auto" or "never", and the run to go on from."""
    if given in ("auto", "never"):
        return given, None
    if isinstance(given, Checkpoints):
        return "auto", given
    if isinstance(given, os.PathLike) or (
        isinstance(given, str) and ("/" in given or os.path.isdir(given))
    ):
        return "auto", Checkpoints(given)
    raise CheckpointError(f'resume={given!r}: give "auto" or "never", or the URL of a run')


def _checkpoints(given: Any, loop: Loop) -> Checkpoints | None:
    if given is None:
        return None
    found = given if isinstance(given, Checkpoints) else Checkpoints(place("checkpoints", given))
    found.check(loop)
    return found


def _loggers(given: Any) -> list[Any]:
    return check_list("loggers", given, needs=("start", "write", "state_dict", "close"))
