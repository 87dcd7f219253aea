"""One call of `fit`: a run taken up where its newest checkpoint left it, saved, and left."""

from __future__ import annotations

import dataclasses
import io
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from signal import SIGINT
from types import TracebackType
from typing import Any

import torch

from statetrain.callbacks import Callbacks
from statetrain.cluster.determinism import numerics
from statetrain.cluster.preempt import Signals
from statetrain.data.loader import Loader
from statetrain.errors import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    CheckpointError,
    DataError,
    Preempted,
    TrainingError,
)
from statetrain.exactness import exactness_of
from statetrain.fitting import (
    check_fit,
    first_weights,
    modules_of,
    named_loggers,
    other_bits,
    other_loggers,
    other_settings,
    static_fields,
)
from statetrain.loop import Action, Loop
from statetrain.machine import Machine
from statetrain.persist import container, randomness, snapshot
from statetrain.persist.attributes import Attributes, holders
from statetrain.persist.checkpoint import Checkpoints, Snapshot, graph, read
from statetrain.persist.compare import unequal
from statetrain.progress import Progress
from statetrain.run import Run
from statetrain.summary import summary
from statetrain.walk import Spent

__all__ = ["Session"]

REQUESTED = attrgetter("request")  # no function of Python's: it is asked in each state

log = logging.getLogger("statetrain")


class Session:
    """Carry one `fit` from the newest checkpoint to the next stop; use it in a `with` block.

    Iterating over it walks from where the run is, and yields the states in which there is something
    to do besides going on; a complete run has nothing to walk.
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
        source: Checkpoints | None = None,
        passing: bool = False,
        progress: bool | None = False,
        timed: bool = False,
    ) -> None:
        self.run = run
        self.loop = loop
        self.callbacks = callbacks
        self.loggers = named_loggers(loggers)
        self._logging = False  # rows are kept until the loggers have started
        self.checkpoints = checkpoints
        self.seeded = seed is not None
        self.seed = torch.initial_seed() if seed is None else seed
        self.fresh = fresh
        self.init_from = init_from
        self.source = source  # of a fresh run's state
        self.passing = passing  # a run that is of no use once it is complete
        self.exact = exact
        self.leaving = False
        self.progress = None if progress is False else Progress(run, loop, live=progress)
        self.machine: Machine | None = None
        self.timed = timed
        self.spent: dict[str, Spent] = {}
        self.signals = Signals(() if checkpoints is None else checkpoints.signals, run.stop)
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
            numeric = list(exactness_of(self.run).numeric)
            self._object(numeric, TrainingError, "the run may end with other bits", strict=False)
            self.attributes = Attributes(self._holders())
            opened.callback(self.attributes.leave)
            found = self._locked_and_found(opened)
            for logger in self.loggers.values():
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
            if self.checkpoints is not None and self.machine is not None:
                self.checkpoints.store.claim()  # a run that was refused has stopped no other
            opened.enter_context(self.signals)
            if self.progress is not None and self.machine is not None:
                opened.enter_context(self.progress)
            self._exit = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with self._exit:
            try:
                if error is None and not self.leaving and self.machine is not None:
                    self._finish()
            finally:
                if self.checkpoints is not None:
                    self.checkpoints.close(at_once=isinstance(error, KeyboardInterrupt))
            received = self.signals.received
        if error is None and self.leaving and received is not None and self.checkpoints is not None:
            code = EXIT_INTERRUPTED if received == SIGINT else EXIT_PREEMPTED
            url, record = self.checkpoints.url, self.checkpoints.store.acknowledged
            state = self.run.state if record is None else record.state
            message = f"{received.name}: saved in state {state!r} at {url}; run it again to go on"
            log.warning("%s", message)
            raise Preempted(message, code=code, url=url, state=state)

    def __iter__(self) -> Iterator[str]:
        if self.machine is None:
            return
        if not self._checked:
            for state in self.machine:
                yield state
                if self._checked:
                    break
        yield from self.machine.walk(
            REQUESTED if self.checkpoints is None else self.checkpoints.due
        )

    def served(self, state: str) -> bool:
        """Do what was asked for in `state`, now that all its work is over; true to leave."""
        run, checkpoints = self.run, self.checkpoints
        if checkpoints is None:
            self.leaving = run.request == "stop"
            return self.leaving
        if not self._checked and run.batch is not None:
            self._check_storable()
        if self.signals.received is not None:
            run.stop()
        wanted = run.request
        if wanted != "stop":  # then the newest state is saved first
            checkpoints.settle(run)
        due = checkpoints.due(run) and checkpoints.chosen(state)
        if wanted is None and not due:
            return False
        if state in self._replayed and state not in self.rehearsals:
            return False  # in the next state then: this one leaves what cannot be stored
        if wanted is None and checkpoints.skips(run):
            return False
        self._save(state, last=wanted == "stop")
        self.leaving = wanted == "stop"
        if self.signals.received is not None and not self.leaving:
            run.stop()  # the signal came while it was saved
        return self.leaving

    def _save(self, state: str, *, last: bool) -> None:
        assert self.checkpoints is not None  # noqa: S101
        self.run.request = None
        self.checkpoints.save(self.run, self.snapshot(), state, last=last, left=self._left())

    def _left(self) -> float | None:
        """Return the seconds until the process is killed, where a signal said that it will be."""
        grace = None if self.checkpoints is None else self.checkpoints.grace
        if grace is None or self.signals.received is None:
            return None
        return self.signals.received_at + grace - time.monotonic()

    def _finish(self) -> None:
        self.run.request = None
        if self.checkpoints is not None:
            if self.passing:
                self.checkpoints.close()
                self.checkpoints.store.clear()
            else:
                self._save(self.run.state, last=True)

    def snapshot(self) -> Snapshot:
        """Return the run and all that belongs to it; its tensors are those of the run."""
        self._flush()
        run = self.run
        rehearsal = self.rehearsals.get(run.state)
        return Snapshot(
            run=snapshot.capture(run),
            static=static_fields(run),
            random=randomness.capture(),
            callbacks=self.callbacks.state_dict(),
            loggers={name: logger.state_dict() for name, logger in self.loggers.items()},
            attributes=self.attributes.changed(),
            loop=graph(self.loop),
            options=dict(self.loop.options),
            limits=dataclasses.asdict(run.limits),
            numerics=numerics(modules_of(run)),
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

    def _object(
        self, found: list[str], error: type[Exception], what: str, *, strict: bool = True
    ) -> None:
        """Raise or warn, as `exact` says; by default `strict` raises where checkpoints are on."""
        if not found or (self.exact is None and self.checkpoints is None):
            return
        message = "\n  - ".join([f"{what}:", *found])
        if strict if self.exact is None else self.exact:
            raise error(f"{message}\nTrainer(exact=False) makes this a warning")
        log.warning("%s", message)

    def _locked_and_found(self, opened: ExitStack) -> Snapshot | None:
        checkpoints = self.checkpoints
        if checkpoints is None:
            return self._inherited()
        lost = snapshot.orphans(self.run)
        self._object(lost, CheckpointError, "parameters of optimizers are in no module of the run")
        for line in self.callbacks.forgetful:
            log.warning("%s", line)
        self._check_storable()
        checkpoints.store.lock()
        opened.callback(checkpoints.store.unlock)
        found = checkpoints.newest()
        if found is None:
            return self._inherited()
        record, saved = found
        if self.fresh:
            raise CheckpointError(
                f'resume="never", but {checkpoints.url} holds checkpoints ({record.id}): '
                "give another URL, or remove them"
            )
        self._check_fit(saved, f"checkpoint {record.id} at {checkpoints.url}")
        return saved

    def _inherited(self) -> Snapshot | None:
        """Return the state of the run that this one goes on from as its child, if there is one."""
        if self.source is None:
            return None
        found = self.source.newest()
        if found is None:
            raise CheckpointError(
                f"resume={self.source.url!r} holds no checkpoint: name the place of the run to go "
                'on from, or write resume="auto"'
            )
        record, saved = found
        self._check_fit(saved, f"checkpoint {record.id} at {self.source.url}")
        saved.loggers = {}  # the other run's logs are its own
        if self.checkpoints is not None:
            self.checkpoints.store.descend(record)
        return saved

    def _check_storable(self) -> None:
        """Encode everything without writing it: better an error now than when a signal comes."""
        container.check(self.snapshot())
        self._checked = self.run.batch is not None

    def _check_fit(self, saved: Snapshot, where: str) -> None:
        check_fit(self.loop, self.run, saved, where)
        lost = self.callbacks.differences(saved.callbacks)
        self._object(lost, CheckpointError, f"{where} has other callbacks")
        numeric = other_bits(self.loop, self.run, saved)
        what = f"{where} was made otherwise, and the run may end with other bits"
        self._object(numeric, CheckpointError, what, strict=False)
        for line in (
            *other_settings(self.run, saved, seeded=self.seeded),
            *self.callbacks.recounted(saved.callbacks),
            *other_loggers(self.loggers, saved.loggers),
        ):
            log.warning("%s", line)

    def _start(self) -> None:
        self.callbacks.reset()
        if self.init_from is not None:
            first_weights(modules_of(self.run), self.init_from)
        self._start_loggers({})
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
        run.rows.clear()  # those from before the start: the log has them already
        run.resumed()
        self.callbacks.reset()
        self.callbacks.load_state_dict(saved.callbacks)
        self._start_loggers(saved.loggers)
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
        return holders(modules_of(self.run), self.callbacks.unsaved)

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
        if self.timed:
            self.spent.update(machine.clock())
        if self.checkpoints is not None:
            self.checkpoints.begin(self.run)
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

    def _start_loggers(self, states: Mapping[str, Any]) -> None:
        for name, logger in self.loggers.items():
            logger.start(states.get(name))
        self._logging = True

    def _flush(self) -> None:
        if not self._logging:
            return
        rows, self.run.rows = self.run.rows, []
        for logger in self.loggers.values():
            logger.write(rows)
