"""A loop being driven: a `transitions.Machine` whose walk is compiled into plain calls.

It is the only file that imports `transitions`. Everything the documentation of `transitions` shows
works on it, and iterating over it leaves the same trace as calling its triggers. It knows nothing
of torch, files or ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import transitions
from transitions.core import Condition, EventData

from statetrain.callbacks import Callback, Callbacks
from statetrain.errors import LoopError
from statetrain.loop import Action, Guard, Loop, nearest
from statetrain.walk import Call, Edge, Spent, Walk

__all__ = ["Machine"]

TRIGGER = "advance"
MUTATORS = (
    "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort",
    "__delitem__", "__iadd__", "__imul__", "__setitem__",
)  # fmt: skip

EVENT = (transitions.Event, "trigger", "_trigger", "_process")  # what a compiled walk stands for
MACHINE = (
    transitions.Machine,
    "callback", "callbacks", "get_state", "set_state", "resolve_callable", "_process",
)  # fmt: skip
WIDE = (
    "prepare_event", "before_state_change", "after_state_change", "finalize_event",
    "on_exception", "on_final",
)  # fmt: skip
TRANSITION = (transitions.Transition, "execute", "_eval_conditions", "_change_state")
STATE = (transitions.State, "enter", "exit")

Work: TypeAlias = Callable[..., Any]


class Machine(transitions.Machine):
    """Drive a loop. The signature, triggers and attributes are those of `transitions.Machine`.

    `Machine.of(loop, run)` builds one from a loop: its trigger is `advance`, its model is the run.
    Iterating over it walks to a final state and yields the name of each state whose work is done.
    The walk is compiled when it starts, and again whenever the machine changes; a change made in
    the middle of a transition counts from the next one. Where an attribute of a state or a
    transition is replaced (`state.on_enter = [...]`, `state.final = True`), call `refresh()`. With
    `send_event`, `queued` or machine-wide callbacks `transitions`' own triggers walk.
    """

    _walk: Walk | None = None
    _course: _Course | None = None
    spent: dict[Any, Spent] | None = None
    """Visits and time of each state, counted where `clock()` asked for it."""

    @classmethod
    def of(cls, loop: Loop, run: Any, callbacks: Callbacks | None = None) -> Machine:
        """Build the machine that drives `run` through `loop`.

        A run whose `state` is empty starts at the beginning, another one goes on from its state.

        Raises:
            LoopError: `run.state` is not a state of the loop.
        """
        resumed = run.state
        if resumed and resumed not in loop.names:
            raise LoopError(f"run.state={resumed!r} is not a state{nearest(resumed, loop.names)}")
        for name, value in list(vars(run).items()):  # triggers that an earlier machine left there
            if isinstance(value, partial) and _drives_loop(value):
                delattr(run, name)
        machine = cls(
            model=run,
            states=[{"name": state.name, "final": state.final} for state in loop.states],
            transitions=[
                {
                    "trigger": TRIGGER,
                    "source": edge.source,
                    "dest": edge.dest,
                    "conditions": partial(_truth, edge.when, run, _guard_label(edge.when))
                    if edge.when is not None
                    else None,
                }
                for edge in loop.transitions
            ],
            initial=resumed or loop.initial,
            auto_transitions=False,
        )
        attached = callbacks if callbacks is not None else Callbacks(loop)
        machine._course = _Course(machine, loop, run, attached, entered=bool(resumed))
        return machine

    def refresh(self) -> None:
        """Take in the callbacks attached since; what was added in other ways stays behind them."""
        self._forget()
        if self._course is not None:
            self._course.lay()

    def clock(self) -> dict[Any, Spent]:
        """Count the visits of each state and the time spent there, from here on, in `spent`.

        Two reads of the clock a state. What `transitions`' own triggers walk is not counted.
        """
        self.spent = {state.value: Spent() for state in self.states.values()}
        return self.spent

    def rehearse(self, name: str, work: Action) -> None:
        """Do `work(run)` immediately before the action of the state `name`, at each visit."""
        if self._course is not None:
            self._course.rehearsals[name] = work
            self._course.lay()

    def start(self) -> None:
        """Do the initial state's work, once: `transitions` enters an initial state without it."""
        if self._course is not None and not self._course.entered:
            self._course.entered = True
            initial = self.get_state(self._course.loop.initial)
            for work in self._course.opening():
                work()
            spent = Spent() if self.spent is None else self.spent[initial.value]
            began = time.perf_counter_ns()
            for work in tuple(map(self._callable, initial.on_enter)):  # it may grow meanwhile
                work()
            spent.nanoseconds += time.perf_counter_ns() - began
            spent.visits += 1

    def __iter__(self) -> Iterator[str]:
        """Walk to a final state, yielding the name of each state whose work is done.

        Raises:
            LoopError: no transition out of the state is open.
        """
        return self.walk()

    def walk(self, wanted: Callable[[Any], object] = id) -> Iterator[str]:
        """Walk to a final state, yielding the name of each state where `wanted(run)` is true.

        Others may be yielded too. By default it is true in each: no `id` is zero.

        Raises:
            LoopError: no transition out of the state is open.
        """
        run, attribute = self._only_model(), self.model_attribute
        if self._course is not None and not self._course.entered:
            self.start()
            if wanted(run):
                yield self.get_model_state(run).name
        walk = self._walk or self._compile()
        try:
            while not self.get_model_state(run).final:
                walk = self._walk or self._compile()
                stuck = yield from walk.go(run, wanted)
                if stuck or getattr(run, attribute) not in walk.compiled:
                    reached = self._triggered(run, attribute, stuck=stuck)
                    if reached is not None and wanted(run):
                        yield reached
        except Exception as error:
            label = walk.label(error)
            if label is not None and self._course is not None:
                _add_note(error, label, self._course.run)
            raise

    def source(self) -> str:
        """Return the Python source of the compiled walk; empty where nothing can be compiled."""
        return (self._walk or self._compile()).source

    def _triggered(self, run: Any, attribute: str, *, stuck: bool) -> str | None:
        """Let `transitions` take a transition that is not compiled, and return where it leads.

        None is a final state, which needs none.
        """
        source = getattr(run, attribute)
        if self.get_model_state(run).final:
            return None
        if not stuck and TRIGGER not in self.events:
            raise LoopError(f"iterating calls the trigger {TRIGGER!r}: add it to a transition")
        if stuck or not self.events[TRIGGER].trigger(run):
            raise LoopError(
                f"no transition out of state {source!r} is open: "
                "let the last one have no guard, or finish"
            )
        reached = self.get_model_state(run)
        if reached.final and self._course is not None:
            run.came_from = source
        return str(reached.name)

    def _only_model(self) -> Any:
        if len(self.models) != 1:
            raise LoopError(
                f"iterating needs one model, this machine has {len(self.models)}: call triggers"
            )
        return self.models[0]

    def _compile(self) -> Walk:
        """Write down what `transitions` would interpret; leave out what it must walk itself."""
        edges: dict[Any, tuple[Edge, ...]] = {}
        event = self.events.get(TRIGGER)
        if event is not None and self._plain() and _unchanged(event, *EVENT):
            for source in list(event.transitions):
                found = event.transitions[source] = self._watched(event.transitions[source])
                state = self.states.get(source)
                if state is None or state.final or not found:
                    continue
                if all(map(self._compilable, found)):
                    edges[state.value] = tuple(self._edge(state, edge) for edge in found)
        names = {state.value: state.name for state in self.states.values()}
        self._walk = Walk(edges, names, attribute=self.model_attribute, spent=self.spent)
        return self._walk

    def _plain(self) -> bool:
        for name in WIDE:
            setattr(self, name, self._watched(getattr(self, name)))
        wide = any(getattr(self, name) for name in WIDE)
        return not (self.send_event or self.has_queue or wide) and _unchanged(self, *MACHINE)

    def _compilable(self, edge: Any) -> bool:
        ends = (self.states.get(edge.source), self.states.get(edge.dest))
        return (
            _unchanged(edge, *TRANSITION)
            and all(_unchanged(each, Condition, "check") for each in edge.conditions)
            and all(_unchanged(end, *STATE) for end in ends)
        )  # an internal transition has no destination

    def _edge(self, source: Any, edge: Any) -> Edge:
        dest = self.states[edge.dest]
        for owner, name in (
            (edge, "prepare"), (edge, "conditions"), (edge, "before"), (edge, "after"),
            (source, "on_exit"), (dest, "on_enter"),
        ):  # fmt: skip
            setattr(owner, name, self._watched(getattr(owner, name)))
        prepare = (
            Call(partial(_done, self._callable(work)), given_run=False) for work in edge.prepare
        )
        checks = (self._guard(condition) for condition in edge.conditions)
        return Edge(
            guards=(*prepare, *checks),
            leaving=tuple(map(self._resolved, (*edge.before, *source.on_exit))),
            dest=dest.value,
            arriving=(*map(self._resolved, (*dest.on_enter, *edge.after)), *self._end(edge)),
        )

    def _end(self, edge: Any) -> tuple[Call, ...]:
        def came_from(run: Any) -> None:
            run.came_from = edge.source

        ends = self._course is not None and self.states[edge.dest].final
        return (Call(came_from),) if ends else ()

    def _guard(self, condition: Any) -> Call:
        call = self._resolved(condition.func)
        if call.given_run and condition.target is True:
            return call  # a loop's guard: asked for its truth in any case
        check = self._callable(condition.func)
        return Call(partial(_equal, check, condition.target), given_run=False)

    def _resolved(self, function: Any) -> Call:
        """Return how to call a function in a list of `transitions`; our own is given the run."""
        if isinstance(function, partial) and function.func in (_perform, _truth):
            inner, _, label = function.args
            return Call(inner, label)
        return Call(self._callable(function), given_run=False)

    def _callable(self, function: Any) -> Work:
        work: Work = partial(self._call_named, function) if isinstance(function, str) else function
        return work

    def _call_named(self, name: str) -> Any:
        data = EventData(None, None, self, self.models[0], (), {})
        return self.resolve_callable(name, data)()

    def _watched(self, items: Iterable[Any]) -> Any:
        watched = items if isinstance(items, _Watched) else _Watched(items)
        if not any(machine is self for machine in watched.machines):
            watched.machines = (*watched.machines, self)
        return watched

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the compiled walk: it is compiled again where the copy walks."""
        return {name: value for name, value in vars(self).items() if name != "_walk"}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name not in ("_walk", "_course", vars(self).get("model_attribute")):
            self._forget()

    def _forget(self) -> None:
        """Compile again before the next transition."""
        if self._walk is not None:
            self._walk.changed.append(self)
            self._walk = None

    def add_states(self, *args: Any, **kwargs: Any) -> None:
        """As `transitions.Machine.add_states`."""
        self._forget()
        super().add_states(*args, **kwargs)

    def add_transition(self, *args: Any, **kwargs: Any) -> None:
        """As `transitions.Machine.add_transition`."""
        self._forget()
        super().add_transition(*args, **kwargs)

    def remove_transition(self, *args: Any, **kwargs: Any) -> None:
        """As `transitions.Machine.remove_transition`."""
        self._forget()
        super().remove_transition(*args, **kwargs)


class _Watched(list[Any]):
    """A list of callbacks whose changes make the machine compile again."""

    machines: tuple[Machine, ...] = ()  # several, where they share a state


def _watching(name: str) -> Callable[..., Any]:
    mutate = getattr(list, name)

    def change(self: _Watched, *args: Any, **kwargs: Any) -> Any:
        for machine in self.machines:
            machine._forget()  # noqa: SLF001 - both are this file's
        return mutate(self, *args, **kwargs)

    change.__name__ = name
    return change


for _name in MUTATORS:
    setattr(_Watched, _name, _watching(_name))


class _Course:
    """The loop, the run and the callbacks of a machine, laid into the lists of `transitions`."""

    def __init__(
        self, machine: Machine, loop: Loop, run: Any, attached: Callbacks, *, entered: bool
    ) -> None:
        self.machine = machine
        self.loop = loop
        self.run = run
        self.attached = attached
        self.entered = entered
        self.rehearsals: dict[str, Action] = {}
        self.laid: dict[tuple[str, str], list[Work]] = {}  # what in a list is ours
        self.lay()

    def lay(self) -> None:
        """Put actions and callbacks at the head of each state's and transition's list."""
        for state in self.loop.states:
            rehearsal = self.rehearsals.get(state.name)
            works = [work for work in (rehearsal, state.action) if work is not None]
            bound = [self.bind(work, f"in the action of state {state.name!r}") for work in works]
            bound += self.bound(self.attached.firing(state.name), f"after state {state.name!r}")
            self.put(self.machine.states[state.name].on_enter, ("", state.name), bound)
        for edge in self.loop.transitions:
            bound = self.bound(self.attached.firing(edge.name), f"at transition {edge.name!r}")
            leading = self.attached.firing(edge.dest, leading=True)
            bound += self.bound(leading, f"before state {edge.dest!r}")
            for found in self.machine.get_transitions(TRIGGER, edge.source, edge.dest)[:1]:
                self.put(found.before, (edge.source, edge.dest), bound)

    def opening(self) -> list[Work]:
        """Bind what fires before the initial state."""
        initial = self.loop.initial
        return self.bound(self.attached.firing(initial, leading=True), f"before state {initial!r}")

    def bound(self, callbacks: Iterable[Callback], where: str) -> list[Work]:
        return [self.bind(c.call, f"in callback {c.label!r} {where}") for c in callbacks]

    def bind(self, function: Action, label: str) -> Work:
        return partial(_perform, function, self.run, label)

    def put(self, place: list[Any], key: tuple[str, str], works: list[Work]) -> None:
        ours = self.laid.get(key, [])
        place[:] = [*works, *(other for other in place if all(other is not w for w in ours))]
        self.laid[key] = works


def _perform(function: Work, run: Any, label: str, *_: Any, **__: Any) -> Any:
    try:  # `transitions` calls this, with what its trigger got; the compiled walk what is in it
        return function(run)
    except Exception as error:
        _add_note(error, label, run)
        raise


def _truth(guard: Guard, run: Any, label: str, *_: Any, **__: Any) -> bool:
    return bool(_perform(guard, run, label))  # transitions asks == True: any truth may be given


def _guard_label(guard: Guard) -> str:
    return f"in guard {getattr(guard, '__qualname__', guard)!r}"


def _add_note(error: Exception, label: str, run: Any) -> None:
    error.add_note(f"{label} (epoch {run.epoch}, step {run.step})")


def _unchanged(thing: object, original: type, *names: str) -> bool:
    kind = type(thing)
    return isinstance(thing, original) and all(
        getattr(kind, name) is getattr(original, name) for name in names
    )


def _done(work: Work) -> bool:
    work()
    return True


def _equal(check: Work, target: object) -> bool:
    return bool(check() == target)


def _drives_loop(bound: partial[Any]) -> bool:
    owner = getattr(bound.func, "__self__", None)  # of Machine methods, or of Event.trigger
    machine = getattr(owner, "machine", owner)
    return isinstance(machine, Machine) and machine._course is not None  # noqa: SLF001 - ours
