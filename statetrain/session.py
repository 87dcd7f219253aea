"""One call of `fit`: a run taken up where its newest checkpoint left it, saved, and left."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from signal import SIGINT
from types import TracebackType
from typing import Any

import torch
from torch import nn

from statetrain.callbacks import Callbacks
from statetrain.cluster.preempt import Signals
from statetrain.data.loader import Loader
from statetrain.errors import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    CheckpointError,
    DataError,
    Preempted,
)
from statetrain.exactness import exactness_of
from statetrain.loop import Action, Loop
from statetrain.machine import Machine
from statetrain.persist import container, randomness, snapshot
from statetrain.persist.attributes import Attributes, holders
from statetrain.persist.checkpoint import Checkpoints, Snapshot, changed, graph, misfits, read
from statetrain.persist.compare import unequal
from statetrain.persist.parts import restore_weights, weight_differences
from statetrain.progress import Progress
from statetrain.run import Run
from statetrain.summary import summary

__all__ = ["Session"]

log = logging.getLogger("statetrain")


class Session:
    """Carry one `fit` from the newest checkpoint to the next stop; use it in a `with` block.

    Iterating over it walks from where the run is; a complete run has nothing to walk.
    """

    def __init__(
        self,
        *,
        run: Run,
        loop: Loop,
        callbacks: Callbacks,
        loggers: Sequence[Any],
        checkpoints: Checkpoints | None,
        seed: int | None,
        fresh: bool = False,
        exact: bool | None = None,
        init_from: str | None = None,
        passing: bool = False,
        progress: bool | None = False,
    ) -> None:
        self.run = run
        self.loop = loop
        self.callbacks = callbacks
        self.loggers = loggers
        self.checkpoints = checkpoints
        self.seeded = seed is not None
        self.seed = torch.initial_seed() if seed is None else seed
        self.fresh = fresh
        self.init_from = init_from
        self.passing = passing  # a run that is of no use once it is complete
        self.strict = exact if exact is not None else checkpoints is not None
        self.leaving = False
        self.progress = None if progress is False else Progress(run, loop, live=progress)
        self.machine: Machine | None = None
        self.signals = Signals(() if checkpoints is None else checkpoints.signals)
        self.rehearsals: dict[str, snapshot.Rehearsal] = {}
        self._replayed = {state.name for state in loop.states if state.replay}
        self._checked = checkpoints is None
        self._exit = ExitStack()

    def __enter__(self) -> Session:
        with ExitStack() as opened:
            opened.callback(self.run.close)
            self.run.request, self.run.flush = None, self._flush
            self._name_loaders()
            self.run.ready()
            self.attributes = Attributes(self._holders())
            found = self._locked_and_found(opened)
            for logger in self.loggers:
                opened.callback(logger.close)
            opened.callback(self._flush)
            if self.progress is not None:
                if found is None:
                    self.progress.stream.write(f"{self._summary()}\n")
                opened.callback(self.callbacks.detach, self.progress.attach(self.callbacks))
            if found is None:
                self._start()
            else:
                self._take_up(found)
            opened.enter_context(self.signals)
            if self.progress is not None and self.machine is not None:
                opened.enter_context(self.progress)
            self._exit = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with self._exit:
            if error is None and not self.leaving and self.machine is not None:
                self._finish()
            received = self.signals.received
        if error is None and self.leaving and received is not None and self.checkpoints is not None:
            code = EXIT_INTERRUPTED if received == SIGINT else EXIT_PREEMPTED
            url, state = self.checkpoints.url, self.run.state
            message = f"{received.name}: saved in state {state!r} at {url}; run it again to go on"
            log.warning("%s", message)
            raise Preempted(message, code=code, url=url, state=state)

    def __iter__(self) -> Iterator[str]:
        return iter(()) if self.machine is None else iter(self.machine)

    def save_if_due(self, state: str) -> None:
        """Do what was asked for in `state`, now that its work and its callbacks are over."""
        run, checkpoints = self.run, self.checkpoints
        if checkpoints is None:
            self.leaving = run.request == "stop"
            return
        if not self._checked and run.batch is not None:
            self._check_storable()
        if self.signals.received is not None:
            run.stop()
        wanted = run.request
        due = checkpoints.due(run, state) and checkpoints.chosen(state)
        if wanted is None and not due:
            return
        if state in self._replayed and state not in self.rehearsals:
            return  # in the next state then: this one leaves what cannot be stored
        self._save(state)
        self.leaving = wanted == "stop"

    def _save(self, state: str) -> None:
        assert self.checkpoints is not None  # noqa: S101
        self.run.request = None
        self.checkpoints.save(self.run, self.snapshot(), state)

    def _finish(self) -> None:
        self.run.request = None
        if self.checkpoints is not None:
            if self.passing:
                self.checkpoints.store.clear()
            else:
                self._save(self.run.state)

    def snapshot(self) -> Snapshot:
        """Return the run and all that belongs to it; its tensors are those of the run."""
        self._flush()
        run = self.run
        kinds = snapshot.fields(run)
        rehearsal = self.rehearsals.get(run.state)
        return Snapshot(
            run=snapshot.capture(run),
            static={n: _plain(getattr(run, n)) for n, kind in kinds.items() if kind == "static"},
            random=randomness.capture(),
            callbacks=self.callbacks.state_dict(),
            loggers=[logger.state_dict() for logger in self.loggers],
            attributes=self.attributes.changed(),
            loop=graph(self.loop),
            options=dict(self.loop.options),
            limits=dataclasses.asdict(run.limits),
            replay=None if rehearsal is None else rehearsal.taken,
        )

    def _name_loaders(self) -> None:
        """Give each loader its own random stream, and refuse what cannot be resumed exactly."""
        run = self.run
        run.seed = self.seed if run.seed is None else run.seed
        for path, loader in snapshot.live_parts(run):
            if isinstance(loader, Loader):
                loader.name = loader.name or path
                loader.seed = run.seed if loader.seed is None else loader.seed
        found = list(exactness_of(run).lost)
        self._object(found, DataError, "the run could not go on exactly")

    def _object(self, found: list[str], error: type[Exception], what: str) -> None:
        message = "\n  - ".join([f"{what}:", *found])
        if found and self.strict:
            raise error(f"{message}\nTrainer(exact=False) makes this a warning")
        if found and self.checkpoints is not None:
            log.warning("%s", message)

    def _locked_and_found(self, opened: ExitStack) -> Snapshot | None:
        checkpoints = self.checkpoints
        if checkpoints is None:
            return None
        lost = snapshot.orphans(self.run)
        self._object(lost, CheckpointError, "parameters of optimizers are in no module of the run")
        for line in self.callbacks.forgetful:
            log.warning("%s", line)
        self._check_storable()
        checkpoints.store.lock()
        opened.callback(checkpoints.store.unlock)
        found = checkpoints.newest()
        checkpoints.store.claim()
        checkpoints.begin(self.run)
        if found is None:
            return None
        record, saved = found
        if self.fresh:
            raise CheckpointError(
                f'resume="never", but {checkpoints.url} holds checkpoints ({record.id}): '
                "give another URL, or remove them"
            )
        self._check_fit(saved, f"checkpoint {record.id} at {checkpoints.url}")
        return saved

    def _check_storable(self) -> None:
        """Encode everything without writing it: better an error now than when a signal comes."""
        container.check(self.snapshot())
        self._checked = self.run.batch is not None

    def _check_fit(self, saved: Snapshot, where: str) -> None:
        found = misfits(self.loop, self.run, saved)
        for name, kind in snapshot.fields(self.run).items():
            if kind == "static":
                was = {name: saved.static.get(name)}
                found += changed("run", was, {name: _plain(getattr(self.run, name))})
        if found:
            lines = "\n  - ".join([f"{where} does not fit this run:", *found])
            raise CheckpointError(
                f"{lines}\ngive the run what it had, or start another at a new URL"
            )
        lost = self.callbacks.differences(saved.callbacks)
        self._object(lost, CheckpointError, f"{where} has other callbacks")
        limits = dataclasses.asdict(self.run.limits)
        for line in (
            *changed("option", saved.options, self.loop.options),
            *changed("limit", saved.limits, limits),
        ):
            log.warning("%s (this run's is used)", line)
        seeds = changed("run", {"seed": saved.run["seed"]}, {"seed": self.run.seed})
        for line in (*_rates(self.run, saved), *(seeds if self.seeded else ())):
            log.warning("%s (the checkpoint's is used)", line)

    def _start(self) -> None:
        self.callbacks.reset()
        if self.init_from is not None:
            parts = dict(snapshot.live_parts(self.run))
            modules = {path: live for path, live in parts.items() if isinstance(live, nn.Module)}
            first_weights(modules, self.init_from)
        for logger in self.loggers:
            logger.start(None)
        self.machine = self._armed()

    def copy(self) -> Snapshot:
        """Return everything as it is now, sharing no memory with the run."""
        file = io.BytesIO()
        container.write(self.snapshot(), file)
        file.seek(0)
        return read(file)

    def put_back(self, saved: Snapshot) -> None:
        """Undo all that happened since `saved` was copied."""
        snapshot.restore(self.run, saved.run)
        self.attributes.restore(saved.attributes)
        self.callbacks.load_state_dict(saved.callbacks)
        randomness.restore(saved.random)

    def _take_up(self, saved: Snapshot) -> None:
        """Give the run the saved state; the random streams last, when nothing draws any more."""
        run = self.run
        snapshot.restore(run, saved.run)
        self.attributes.restore(saved.attributes)
        run.resumed()
        self.callbacks.load_state_dict(saved.callbacks)
        for logger, state in zip(self.loggers, saved.loggers, strict=False):
            logger.start(state)
        for logger in self.loggers[len(saved.loggers) :]:
            logger.start(None)
        if self.checkpoints is not None:
            self.checkpoints.begin(run)
        state = self.loop.state(run.state)
        if state.final and not self._goes_on():
            limit = "run.finish() ended it" if run.finishing else "a higher limit would go on"
            randomness.restore(saved.random)
            self._say(f"complete at epoch {run.epoch}, step {run.step}: nothing to do ({limit})")
            return
        self._say(f"going on from state {run.state!r}, epoch {run.epoch}, step {run.step}")
        self.machine = self._armed()
        if state.replay and state.action is not None:
            assert saved.replay is not None  # noqa: S101 - no save without it
            self._replay(saved.replay, state.action)
        randomness.restore(saved.random)

    def _replay(self, before: dict[str, Any], action: Action) -> None:
        """Do the action again, and see that it made the same of the run."""
        saved = self.copy()
        snapshot.Rehearsal.replay(self.run, before, action)
        different = unequal(saved.run, snapshot.capture(self.run))
        self._object(
            different,
            CheckpointError,
            f"the action of state {self.run.state!r} was done again and left other values than "
            "those saved, because it, or a callback after it, changed what it starts from",
        )

    def _holders(self) -> dict[str, Any]:
        parts = dict(snapshot.live_parts(self.run))
        modules = {path: live for path, live in parts.items() if isinstance(live, nn.Module)}
        return holders(modules, self.callbacks.unsaved)

    def _goes_on(self) -> bool:
        """Whether a raised limit opens another way out of the state before the final one."""
        for edge in self.loop.leaving(self.run.came_from):
            if edge.when is None or edge.when(self.run):
                if self.loop.state(edge.dest).final:
                    return False
                self.run.state = self.run.came_from
                return True
        return False

    def _armed(self) -> Machine:
        machine = Machine.of(self.loop, self.run, self.callbacks)
        if self.checkpoints is not None:
            for name in self._replayed & self.checkpoints.at:
                self.rehearsals[name] = snapshot.Rehearsal()
                machine.rehearse(name, self.rehearsals[name].take)
        return machine

    def _say(self, line: str) -> None:
        log.info("%s", line)
        if self.progress is not None:
            self.progress.stream.write(f"{line}\n")

    def _summary(self) -> str:
        found = exactness_of(self.run)
        notes = str(found).splitlines()
        return summary(
            self.run, self.loop, self.callbacks, checkpoints=self.checkpoints, notes=notes
        )

    def _flush(self) -> None:
        rows, self.run.rows = self.run.rows, []
        for logger in self.loggers:
            logger.write(rows)


def first_weights(modules: dict[str, nn.Module], url: str) -> None:
    """Give modules, by their path in the run, the weights of another run's newest checkpoint.

    Raises:
        CheckpointError: there is none, or it does not fit; every difference is named.
    """
    found = Checkpoints(url).newest()
    if found is None:
        raise CheckpointError(f"init_from={url!r} holds no checkpoint")
    saved = {f"run.{name}": part for name, part in found[1].run.items()}
    pairs = [(path, live, saved[path]) for path, live in modules.items() if path in saved]
    lacking = [d for path, live, part in pairs for d in weight_differences(live, part, path)]
    if lacking or not pairs:
        lines = lacking or [f"it has none of {', '.join(modules)}"]
        raise CheckpointError("\n  - ".join([f"init_from={url!r} does not fit:", *lines]))
    for _, live, part in pairs:
        restore_weights(live, part)
    log.info("first weights from %s at %s", found[0].id, url)


def _plain(value: Any) -> Any:
    """Return a static field as it is compared: itself if it can be stored, else its name."""
    try:
        container.check(value)
    except CheckpointError:
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return value


def _given(group: dict[str, Any]) -> dict[str, Any]:
    """Return what an optimizer's group was built with: the first rate, not the scheduled one."""
    rest = {k: v for k, v in group.items() if k not in ("params", "initial_lr", "param_names")}
    return {**rest, "lr": group.get("initial_lr", group["lr"])} if "lr" in group else rest


def _rates(run: Run, saved: Snapshot) -> list[str]:
    """Say where an optimizer was built with other settings than the saved one."""
    found: list[str] = []
    for path, live, part in snapshot.pairs(run, saved.run):
        if isinstance(live, torch.optim.Optimizer):
            groups = zip(part.state["state"]["param_groups"], live.param_groups, strict=True)
            for i, (old, new) in enumerate(groups):
                was, now = _given(old), _given(new)
                found += changed(f"{path}.param_groups[{i}]", was, now)
    return found
