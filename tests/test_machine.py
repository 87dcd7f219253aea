"""The compiled walk against `transitions`' own triggers, and the documentation of `transitions`."""

from __future__ import annotations

import enum
import itertools
import logging
import pickle
import random
from functools import partial
from typing import Any

import pytest
import strategies
import transitions
from hypothesis import HealthCheck, Phase, find, given, settings
from strategies import Attached, Call, Change, Check, Edge, Plan, Walk
from transitions.core import Condition
from transitions.extensions import GraphMachine
from transitions.extensions.diagrams import TransitionGraphSupport
from transitions.extensions.markup import MarkupMachine
from transitions.extensions.states import Tags, add_state_features

import statetrain as st
from statetrain.callbacks import Callbacks, point

LONGEST = 12  # transitions of a random walk
EXAMPLES = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


QUICK = settings(
    EXAMPLES, max_examples=2000, database=None, phases=[Phase.generate]
)  # no shrinking

# --- random machines of transitions' own making -------------------------------------------------


class Model:
    """What random callbacks work on: a counter, and the trace of all calls."""

    def __init__(self) -> None:
        self.trace: list[Any] = []
        self.count = 0
        self.nested = 3  # triggers that callbacks may still call: a queue would never end
        self.state: Any = None

    def leave(self, tag: str) -> None:
        self.trace.append((tag, self.state, self.count))


class Built:
    """A random machine of one class, with its model."""

    def __init__(self, plan: Plan, kind: type[transitions.Machine]) -> None:
        self.model = Model()
        self.machine = kind(
            self.model,
            states=[
                {
                    "name": node.name,
                    "final": node.final,
                    "on_enter": [self.call(c) for c in node.on_enter],
                    "on_exit": [self.call(c) for c in node.on_exit],
                }
                for node in plan.nodes
            ],
            transitions=[self.edge(edge) for edge in plan.edges],
            initial="s0",
            **plan.options,
        )
        self.changes = sorted(plan.changes, key=lambda change: change.after)
        self.moves = 0

    def call(self, call: Call) -> Any:
        def work(*_: Any) -> None:
            model = self.model
            model.leave(call.tag)
            model.count += call.adds
            if model.count == call.raises_at:
                raise KeyError(call.tag)
            if call.triggers and model.nested:
                model.nested -= 1
                model.trace.append(("nested", model.trigger("advance")))  # type: ignore[attr-defined]

        return self.named(work, by_name=call.by_name)

    def check(self, check: Check) -> Any:
        def condition(*_: Any) -> Any:
            self.model.leave(check.tag)
            self.model.count += check.adds
            return check.answers[self.model.count // check.period % len(check.answers)]

        return self.named(condition, by_name=check.by_name)

    def named(self, function: Any, *, by_name: bool) -> Any:
        if not by_name:
            return function
        name = f"method_{len(vars(self.model))}"
        setattr(self.model, name, function)
        return name

    def edge(self, edge: Edge) -> dict[str, Any]:
        return {
            "trigger": "advance",
            "source": edge.source,
            "dest": edge.dest,
            "prepare": [self.call(c) for c in edge.prepare],
            "conditions": [self.check(c) for c in edge.conditions],
            "unless": [self.check(c) for c in edge.unless],
            "before": [self.call(c) for c in edge.before],
            "after": [self.call(c) for c in edge.after],
        }

    def arrived(self) -> bool:
        """Leave where the machine is, make the changes due; return whether the walk goes on."""
        self.moves += 1
        self.model.leave("at")
        while self.changes and self.changes[0].after <= self.moves:
            self.change(self.changes.pop(0))
        return self.moves < LONGEST

    def change(self, change: Change) -> None:
        machine, state = self.machine, self.machine.states[change.state]
        event = machine.events.get("advance")
        found = machine.get_transitions("advance", change.state)
        call = self.call(change.call)
        if change.kind == "add":
            machine.add_transition(**self.edge(change.edge))
        elif change.kind == "remove" and event:
            machine.remove_transition("advance", change.state, change.other)
        elif change.kind == "enter":
            state.add_callback("enter", call)
        elif change.kind == "dynamic_exit":
            getattr(machine, f"on_exit_{change.state}")(call)
        elif change.kind == "dynamic_before" and event:
            machine.before_advance(call)
        elif change.kind == "insert_after" and found:
            found[-1].after.insert(0, call)
        elif change.kind == "condition" and found:
            found[0].conditions += [Condition(self.check(change.check))]
        else:
            self.change_lists(change, call)

    def change_lists(self, change: Change, call: Any) -> None:
        machine, state = self.machine, self.machine.states[change.state]
        event = machine.events.get("advance")
        if change.kind == "clear":
            state.on_exit.clear()
        elif change.kind == "pop" and state.on_enter:
            del state.on_enter[0]
        elif change.kind == "edge_list" and event:
            event.transitions[change.state].reverse()
        elif change.kind == "wide":
            machine.after_state_change = call
        elif change.kind == "wide_append":
            machine.prepare_event.append(call)
        else:
            self.change_rest(change)

    def change_rest(self, change: Change) -> None:
        machine = self.machine
        if change.kind == "final":
            machine.states[change.state].final ^= True
        elif change.kind == "send_event":
            machine.send_event ^= True
        elif change.kind == "ignore":
            machine.ignore_invalid_triggers = True
        elif change.kind == "to":
            self.model.trigger(f"to_{change.state}")  # type: ignore[attr-defined]
        elif change.kind == "set_state":
            machine.set_state(change.state)


def triggered(built: Built) -> None:
    """Walk by calling the trigger again and again."""
    machine, model = built.machine, built.model
    while not machine.get_model_state(model).final:
        if "advance" not in machine.events:
            model.leave("no trigger")
            return
        if not model.advance():  # type: ignore[attr-defined]
            model.leave("stuck")
            return
        if not built.arrived():
            return


def iterated(built: Built) -> None:
    """Walk by iterating."""
    try:
        for state in built.machine:
            assert state == built.model.state
            if not built.arrived():
                return
    except st.LoopError as error:
        built.model.leave("stuck" if "is open" in str(error) else "no trigger")


def trace(plan: Plan, kind: type[transitions.Machine], walk: Any) -> list[Any]:
    built = Built(plan, kind)
    try:
        walk(built)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        built.model.leave(f"{type(error).__name__}: {error}")
    return built.model.trace


@EXAMPLES
@given(strategies.plans())
def test_iterating_leaves_the_trace_of_the_triggers(plan: Plan) -> None:
    expected = trace(plan, transitions.Machine, triggered)
    assert trace(plan, st.Machine, iterated) == expected
    assert trace(plan, st.Machine, triggered) == expected


class NoExit(st.Machine):
    def _edge(self, source: Any, edge: Any) -> Any:
        return super()._edge(source, edge)._replace(leaving=())


class NoEnter(st.Machine):
    def _edge(self, source: Any, edge: Any) -> Any:
        return super()._edge(source, edge)._replace(arriving=())


class NoGuard(st.Machine):
    def _edge(self, source: Any, edge: Any) -> Any:
        return super()._edge(source, edge)._replace(guards=())


class LastGuard(st.Machine):
    def _edge(self, source: Any, edge: Any) -> Any:
        made = super()._edge(source, edge)
        return made._replace(guards=made.guards[::-1])


class EarlyEnter(st.Machine):
    def _edge(self, source: Any, edge: Any) -> Any:
        made = super()._edge(source, edge)
        return made._replace(leaving=made.leaving + made.arriving, arriving=())


class NoNews(st.Machine):
    def _watched(self, items: Any) -> Any:
        return items


class Wide(st.Machine):
    def _plain(self) -> bool:
        return True


@pytest.mark.parametrize("broken", [NoExit, NoEnter, NoGuard, LastGuard, EarlyEnter, NoNews, Wide])
def test_a_broken_compilation_is_found_by_that_comparison(broken: type[st.Machine]) -> None:
    def differs(plan: Plan) -> bool:
        expected = trace(plan, transitions.Machine, triggered)
        return trace(plan, broken, iterated) != expected

    assert find(strategies.plans(), differs, settings=QUICK, random=random.Random(0))


# --- random loops -------------------------------------------------------------------------------


def attach(loop: st.Loop, attached: tuple[Attached, ...]) -> Callbacks:
    callbacks = Callbacks(loop)
    for each in attached:
        callbacks.attach(
            strategies.traced(each.tag, raises_at=each.raises_at),
            point(each.place, leading=each.leading, priority=each.priority, every=each.every),
        )
    return callbacks


def iterated_loop(loop: st.Loop, attached: tuple[Attached, ...], run: Walk) -> None:
    for moves, state in enumerate(st.Machine.of(loop, run, attach(loop, attached))):
        assert state == run.state
        if moves == LONGEST:
            return


def advance(machine: Any, run: Any) -> None:
    for _ in range(LONGEST):
        if machine.get_model_state(run).final:
            return
        if not run.advance():
            raise st.LoopError("stuck")


def triggered_loop(loop: st.Loop, attached: tuple[Attached, ...], run: Walk) -> None:
    machine = st.Machine.of(loop, run, attach(loop, attached))
    machine.start()
    advance(machine, run)


def reference_loop(loop: st.Loop, attached: tuple[Attached, ...], run: Walk) -> None:
    """Write the loop out by hand for `transitions`."""
    callbacks = attach(loop, attached)

    def fire(place: str, *, leading: bool = False) -> list[Any]:
        return [partial(c.visit, run) for c in callbacks.firing(place, leading=leading)]

    machine = transitions.Machine(run, auto_transitions=False, initial=loop.initial, states=[])
    for state in loop.states:
        work = [] if state.action is None else [partial(state.action, run)]
        machine.states.pop(state.name, None)
        machine.add_state(state.name, final=state.final, on_enter=work + fire(state.name))
    for edge in loop.transitions:
        when = edge.when
        machine.add_transition(
            "advance",
            edge.source,
            edge.dest,
            conditions=[] if when is None else [lambda when=when: bool(when(run))],
            before=fire(edge.name) + fire(edge.dest, leading=True),
        )
    first = machine.get_state(loop.initial)
    for work in fire(loop.initial, leading=True) + first.on_enter:
        work()
    advance(machine, run)


def loop_trace(walk: Any, loop: st.Loop, attached: tuple[Attached, ...]) -> list[Any]:
    run = Walk()
    ending = "done"
    try:
        walk(loop, attached, run)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        ending = type(error).__name__
    return [*run.calls, ending, run.state, run.step]


@EXAMPLES
@given(strategies.loops())
def test_a_loop_leaves_the_trace_that_transitions_would(drawn: Any) -> None:
    expected = loop_trace(reference_loop, *drawn)
    assert loop_trace(iterated_loop, *drawn) == expected
    assert loop_trace(triggered_loop, *drawn) == expected


def test_a_loop_walked_without_callbacks_is_found_by_that_comparison() -> None:
    def differs(drawn: Any) -> bool:
        loop, attached = drawn
        return loop_trace(iterated_loop, loop, ()) != loop_trace(reference_loop, loop, attached)

    assert find(strategies.loops(), differs, settings=QUICK)


# --- changes inside a transition, and what the class's docstring says of them ---------------------


def two_states(**options: Any) -> tuple[Model, st.Machine]:
    model = Model()
    edges = [["advance", "a", "b"], ["advance", "b", "a"]]
    return model, st.Machine(model, ["a", "b"], initial="a", transitions=edges, **options)


def steps(machine: st.Machine, count: int) -> list[str]:
    return list(itertools.islice(machine, count))


def test_a_change_inside_a_transition_counts_from_the_next_one() -> None:
    model, machine = two_states()
    leave = partial(model.leave, "new")

    def grow() -> None:
        model.leave("grow")
        machine.on_enter_b(leave)

    machine.before_advance(grow)
    steps(machine, 1)
    assert model.trace == [("grow", "a", 0)]
    steps(machine, 2)
    assert model.trace[1:] == [("grow", "b", 0), ("grow", "a", 0), *[("new", "b", 0)] * 2]


def test_a_replaced_list_is_seen_after_refresh() -> None:
    model, machine = two_states()
    steps(machine, 2)
    machine.states["b"].on_enter = [partial(model.leave, "new")]
    steps(machine, 2)
    assert model.trace == []
    machine.refresh()
    steps(machine, 2)
    assert model.trace == [("new", "b", 0)]


def test_a_state_shared_by_two_machines_tells_both() -> None:
    shared = transitions.State("a")
    machines = []
    for _ in range(2):
        model = Model()
        edges = [["advance", "a", "="]]
        machines.append(st.Machine(model, [shared], initial="a", transitions=edges))
        steps(machines[-1], 2)
    counted: list[int] = []
    shared.add_callback("enter", lambda: counted.append(1))
    for machine in machines:
        steps(machine, 2)
    assert len(counted) == 4


def test_a_model_added_during_a_walk_does_not_end_it() -> None:
    model, machine = two_states(before_state_change=None)
    model.named = partial(model.leave, "named")
    machine.on_enter_b("named")
    walk = iter(machine)
    assert next(walk) == "b"
    machine.add_model(Model())
    assert [next(walk), next(walk)] == ["a", "b"]
    assert [tag for tag, _, _ in model.trace] == ["named", "named"]


# --- machines of loops ----------------------------------------------------------------------------


def ring(**fields: Any) -> st.Loop:
    return st.Loop(
        initial="a",
        states=[
            st.State("a", strategies.traced("work a", adds=1)),
            st.State("b", strategies.traced("work b")),
            st.State("end", strategies.traced("work end"), final=True),
        ],
        transitions=[
            st.Transition("a", "b"),
            st.Transition("b", "end", when=lambda run: run.step >= 2),
            st.Transition("b", "a"),
        ],
        **fields,
    )


def test_first_open_transition_wins() -> None:
    def asks(name: str, *, answer: bool) -> Any:
        def when(run: Walk) -> bool:
            run.calls.append(name)
            return answer

        return when

    names = ["no", "yes", "other"]
    loop = st.Loop(
        initial="a",
        states=[st.State("a"), *(st.State(name, final=True) for name in names)],
        transitions=[st.Transition("a", n, when=asks(n, answer=n != "no")) for n in names],
    )
    run = Walk()
    assert list(st.Machine.of(loop, run)) == ["a", "yes"]
    assert run.calls == ["no", "yes"]


def test_a_walk_yields_each_state_whose_work_is_done() -> None:
    run = Walk()
    seen = [(state, run.state, run.calls[-1][0]) for state in st.Machine.of(ring(), run)]
    assert seen == [(name, name, f"work {name}") for name in ("a", "b", "a", "b", "end")]


def test_the_initial_action_runs_once_by_start_or_by_iterating() -> None:
    counts = []
    for starts in (0, 1, 2):
        run = Walk()
        machine = st.Machine.of(ring(), run)
        assert run.calls == []
        for _ in range(starts):
            machine.start()
        list(machine)
        counts.append([tag for tag, _, _ in run.calls].count("work a"))
    assert counts == [2, 2, 2]


def test_a_resumed_run_goes_on_from_its_state_without_redoing_the_action() -> None:
    whole, run = Walk(), Walk()
    list(st.Machine.of(ring(), whole))
    for stop in range(1, 5):
        run = Walk()
        walk = iter(st.Machine.of(ring(), run))
        for _ in range(stop):
            next(walk)
        resumed = Walk(state=run.state, step=run.step)
        machine = st.Machine.of(ring(), resumed)
        machine.start()
        assert resumed.calls == []
        list(machine)
        assert run.calls + resumed.calls == whole.calls


def test_a_run_in_a_final_state_has_nothing_left() -> None:
    run = Walk(state="end")
    assert list(st.Machine.of(ring(), run)) == []
    assert run.calls == []


def test_a_run_in_an_unknown_state_is_refused() -> None:
    with pytest.raises(st.LoopError) as caught:
        st.Machine.of(ring(), Walk(state="ennd"))
    assert str(caught.value) == "run.state='ennd' is not a state: did you mean 'end'?"


def test_no_open_transition_is_an_error_and_the_walk_may_be_taken_up_again() -> None:
    loop = st.Loop(
        initial="a",
        states=[st.State("a"), st.State("end", final=True)],
        transitions=[st.Transition("a", "end", when=lambda run: run.step)],
    )
    run = Walk()
    machine = st.Machine.of(loop, run)
    with pytest.raises(st.LoopError) as caught:
        list(machine)
    assert str(caught.value) == (
        "no transition out of state 'a' is open: let the last one have no guard, or finish"
    )
    run.step = 1
    assert list(machine) == ["end"]


def test_came_from_names_the_state_before_the_final_one() -> None:
    run = Walk()
    walk = st.Machine.of(ring(), run)
    assert [(state, run.came_from) for state in walk][-2:] == [("b", ""), ("end", "b")]


@pytest.mark.parametrize("answer", [1, "yes", [0], 2.5, object()])
def test_any_truth_opens_a_loops_transition(answer: Any) -> None:
    loop = st.Loop(
        initial="a",
        states=[st.State("a"), st.State("yes", final=True), st.State("no", final=True)],
        transitions=[st.Transition("a", "yes", when=lambda run: answer), *st.path("a", "no")],
    )
    assert list(st.Machine.of(loop, Walk())) == ["a", "yes"]
    run = Walk()
    st.Machine.of(loop, run)
    assert run.may_advance()
    assert run.advance()
    assert run.state == "yes"


def test_a_run_may_be_driven_by_a_second_machine() -> None:
    run = Walk()
    walk = iter(st.Machine.of(ring(), run))
    assert [next(walk), next(walk)] == ["a", "b"]
    other = ring().inserting("c", strategies.traced("work c"), after="b")
    machine = st.Machine.of(other, run)
    assert run.advance.func.__self__ is machine.events["advance"]
    assert list(machine) == ["c", "a", "b", "c", "end"]
    assert run.is_end()


def test_another_machine_on_the_same_run_keeps_its_triggers() -> None:
    run = Walk()
    mood = st.Machine(run, ["calm", "wild"], initial="calm", model_attribute="mood")
    st.Machine.of(ring(), run)
    list(st.Machine.of(ring(), run))
    assert run.to_mood_wild()
    assert (run.state, run.mood, mood.get_model_state(run).name) == ("end", "wild", "wild")


def test_callbacks_by_name_and_on_the_run_come_behind_those_of_the_loop() -> None:
    class Named(Walk):
        def on_enter_b(self) -> None:
            self.calls.append("on_enter_b")

        def added(self) -> None:
            self.calls.append("added")

    run = Named()
    loop = ring()
    callbacks = Callbacks(loop)
    callbacks.attach(lambda run: run.calls.append("attached"), point("b"))
    machine = st.Machine.of(loop, run, callbacks)
    machine.on_enter_b("added")
    machine.states["b"].on_enter.insert(0, "added")
    machine.refresh()
    steps(machine, 2)
    assert run.calls[1:] == [("work b", "b", 1), "attached", "added", "on_enter_b", "added"]


@pytest.mark.parametrize("option", ["send_event", "after_state_change"])
def test_a_loop_walks_by_triggers_where_it_must(option: str) -> None:
    run = Walk()
    machine = st.Machine.of(ring(), run)
    events: list[Any] = []
    setattr(
        machine, option, True if option == "send_event" else lambda *_: events.append(run.state)
    )
    assert list(machine) == ["a", "b", "a", "b", "end"]
    assert events == ([] if option == "send_event" else ["b", "a", "b", "end"])
    plain = Walk()
    list(st.Machine.of(ring(), plain))
    assert run.calls == plain.calls


def test_rehearsed_work_runs_before_the_action() -> None:
    run = Walk()
    machine = st.Machine.of(ring(), run)
    machine.rehearse("b", strategies.traced("rehearsed"))
    steps(machine, 2)
    assert [tag for tag, _, _ in run.calls] == ["work a", "rehearsed", "work b"]


@pytest.mark.parametrize("models", [None, [Model(), Model()]])
def test_iterating_needs_one_model(models: Any) -> None:
    machine = st.Machine(models, ["a", "b"], initial="a", transitions=[["advance", "a", "b"]])
    with pytest.raises(st.LoopError) as caught:
        next(iter(machine))
    count = len(models or [])
    assert str(caught.value) == (
        f"iterating needs one model, this machine has {count}: call triggers"
    )


def test_iterating_needs_the_trigger_advance() -> None:
    machine = st.Machine(states=["a", "b"], initial="a", transitions=[["go", "a", "b"]])
    with pytest.raises(st.LoopError) as caught:
        next(iter(machine))
    assert str(caught.value) == "iterating calls the trigger 'advance': add it to a transition"


def test_a_state_without_the_trigger_raises_what_transitions_raises() -> None:
    machine = st.Machine(states=["a", "b"], initial="a", transitions=[["advance", "a", "b"]])
    with pytest.raises(transitions.MachineError):
        list(machine)


def test_a_machine_that_is_its_own_model_iterates() -> None:
    states = ["a", "b", {"name": "c", "final": True}]
    edges = [["advance", "a", "b"], ["advance", "b", "c"]]
    machine = st.Machine(states=states, initial="a", transitions=edges)
    assert list(machine) == ["b", "c"]
    assert machine.is_c()


def test_iterating_a_compiled_machine_compiles_once() -> None:
    class Counting(st.Machine):
        compiled = 0

        def _compile(self) -> Any:
            vars(self)["compiled"] = self.compiled + 1
            return super()._compile()

    machine = Counting.of(ring(), Walk())
    list(machine)
    assert machine.compiled == 1


# --- the documentation of transitions, on both machines -------------------------------------------

BOTH = pytest.mark.parametrize("kind", [transitions.Machine, st.Machine])
MATTER = ["solid", "liquid", "gas", "plasma"]
HEATING = [
    {"trigger": "melt", "source": "solid", "dest": "liquid"},
    {"trigger": "evaporate", "source": "liquid", "dest": "gas"},
    {"trigger": "sublimate", "source": "solid", "dest": "gas"},
    {"trigger": "ionize", "source": "gas", "dest": "plasma"},
]


class Matter:
    """The model of the documentation's examples."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def tell(self, *given: Any, **named: Any) -> None:
        self.told.append((self.state, *given, *named.items()))  # type: ignore[attr-defined]

    def on_enter_gas(self, *_: Any, **__: Any) -> None:
        self.told.append("on_enter_gas")

    def on_exit_solid(self, *_: Any, **__: Any) -> None:
        self.told.append("on_exit_solid")

    def is_flammable(self, temp: int = 0) -> bool:
        return temp > 50

    def is_really_hot(self, temp: int = 0) -> bool:
        return temp > 90


@BOTH
def test_the_quickstart(kind: Any) -> None:
    lump = Matter()
    machine = kind(model=lump, states=MATTER, transitions=HEATING, initial="solid")
    assert lump.state == "solid"
    assert lump.melt()
    assert lump.is_liquid()
    assert lump.may_evaporate()
    assert not lump.may_melt()
    assert lump.trigger("evaporate")
    assert machine.get_state(lump.state).name == "gas"
    with pytest.raises(transitions.MachineError, match="trigger event melt from state gas"):
        lump.melt()
    with pytest.raises(AttributeError, match="Do not know event named 'freeze'"):
        lump.trigger("freeze")
    assert lump.told == ["on_exit_solid", "on_enter_gas"]


@BOTH
def test_the_machine_as_its_own_model_and_the_default_initial_state(kind: Any) -> None:
    machine = kind(states=["a", "b"])
    assert machine.state == "initial"
    assert machine.to_b()
    assert machine.is_b()
    assert machine.model is machine


@BOTH
def test_states_as_strings_states_and_dicts_with_callbacks(kind: Any) -> None:
    lump = Matter()
    states = [
        transitions.State("solid", on_exit=["tell"]),
        "liquid",
        {"name": "gas", "on_exit": ["tell"], "on_enter": "tell"},
    ]
    machine = kind(lump, states, initial="solid")
    machine.add_transition("sublimate", "solid", "gas")
    machine.on_enter_liquid("tell")
    lump.sublimate()
    lump.to_liquid()
    assert lump.told == [
        ("solid",),
        "on_exit_solid",
        ("gas",),
        "on_enter_gas",
        ("gas",),
        ("liquid",),
    ]


class Light(enum.Enum):
    RED = 1
    GREEN = 2


@BOTH
def test_states_as_an_enumeration(kind: Any) -> None:
    edges = [["advance", Light.RED, Light.GREEN], ["advance", Light.GREEN, Light.RED]]
    machine = kind(states=Light, transitions=edges, initial=Light.RED)
    assert machine.is_RED()
    assert machine.advance()
    assert machine.state is Light.GREEN
    assert machine.to_RED()
    assert machine.get_triggers(Light.RED) == ["to_RED", "to_GREEN", "advance"]


def test_an_enumeration_iterates_by_names() -> None:
    edges = [["advance", Light.RED, Light.GREEN], ["advance", Light.GREEN, Light.RED]]
    machine = st.Machine(states=Light, transitions=edges, initial=Light.RED)
    assert steps(machine, 3) == ["GREEN", "RED", "GREEN"]
    assert machine.state is Light.GREEN


@BOTH
def test_auto_transitions_may_be_left_out(kind: Any) -> None:
    lump = Matter()
    kind(lump, MATTER, initial="solid", auto_transitions=False)
    assert not hasattr(lump, "to_gas")


@BOTH
def test_sources_in_lists_wildcards_and_reflexive_transitions(kind: Any) -> None:
    lump = Matter()
    machine = kind(lump, MATTER, initial="solid")
    machine.add_transition("touch", ["liquid", "gas"], "=", after="tell")
    machine.add_transition("to_dust", "*", "solid")
    lump.to_gas()
    assert lump.touch()
    assert lump.told == ["on_exit_solid", "on_enter_gas", "on_enter_gas", ("gas",)]
    assert lump.to_dust()
    assert lump.is_solid()


@BOTH
def test_internal_transitions_leave_the_state_alone(kind: Any) -> None:
    lump = Matter()
    machine = kind(lump, MATTER, initial="gas")
    machine.add_transition("internal", "gas", None, after="tell")
    assert lump.internal()
    assert lump.told == [("gas",)]


@BOTH
def test_ordered_transitions(kind: Any) -> None:
    machine = kind(states=["a", "b", "c"], initial="a")
    machine.add_ordered_transitions(loop=False)
    assert machine.next_state()
    assert machine.next_state()
    with pytest.raises(transitions.MachineError):
        machine.next_state()
    again = kind(states=["a", "b", "c"], initial="b", ordered_transitions=True)
    assert [again.next_state() and again.state for _ in range(3)] == ["c", "a", "b"]


@BOTH
def test_conditions_and_unless(kind: Any) -> None:
    lump = Matter()
    machine = kind(lump, MATTER, initial="solid")
    machine.add_transition("heat", "solid", "gas", conditions="is_flammable")
    machine.add_transition("heat", "solid", "liquid", unless=["is_flammable", "is_really_hot"])
    assert lump.may_heat(temp=60)
    assert lump.heat(temp=10)
    assert lump.is_liquid()
    lump.to_solid()
    assert lump.heat(temp=74)
    assert lump.is_gas()


@BOTH
def test_invalid_triggers_may_be_ignored(kind: Any) -> None:
    lump = Matter()
    machine = kind(lump, ["solid", "gas"], initial="solid", ignore_invalid_triggers=True)
    machine.add_transition("cool", "gas", "solid")
    assert lump.cool() is False
    strict = kind(lump := Matter(), ["solid"], initial="solid")
    strict.add_states("gas", ignore_invalid_triggers=True)
    strict.add_transition("melt", "solid", "gas")
    lump.melt()
    assert lump.melt() is False


@BOTH
def test_callbacks_by_name_path_and_attribute(kind: Any) -> None:
    lump = Matter()
    lump.ready = False
    machine = kind(lump, MATTER, initial="solid")
    machine.add_transition("go", "solid", "gas", conditions="ready")
    assert lump.go() is False
    lump.ready = True
    machine.on_enter_gas("random.random")
    assert lump.go()
    machine.add_transition("fail", "gas", "solid", before="nowhere.at_all")
    with pytest.raises(AttributeError, match="nowhere"):
        lump.fail()


@BOTH
def test_passing_data_and_send_event(kind: Any) -> None:
    lump = Matter()
    machine = kind(lump, MATTER, initial="solid")
    machine.add_transition("melt", "solid", "liquid", before="tell")
    lump.melt(45, pressure=1)
    assert lump.told[0] == ("solid", 45, ("pressure", 1))

    class Listening:
        def heard(self, event: Any) -> None:
            self.event = event

    ear = Listening()
    machine = kind(ear, MATTER, initial="solid", send_event=True)
    machine.add_transition("melt", "solid", "liquid", before="heard")
    ear.melt(45, pressure=1)
    event = ear.event
    assert (event.args, event.kwargs) == ((45,), {"pressure": 1})
    assert (event.event.name, event.transition.source, event.state.name) == (
        "melt",
        "solid",
        "liquid",
    )
    assert event.machine is machine
    assert event.model is ear


@BOTH
@pytest.mark.parametrize("queued", [False, True])
def test_queued_triggers_wait(kind: Any, *, queued: bool) -> None:
    class Going:
        def __init__(self) -> None:
            self.told: list[str] = []

        def on_enter_b(self) -> None:
            self.told.append("b in")
            self.go()  # type: ignore[attr-defined]
            self.told.append("b out")

        def on_enter_c(self) -> None:
            self.told.append("c in")

    model = Going()
    edges = [["go", "a", "b"], ["go", "b", "c"]]
    kind(model, ["a", "b", "c"], initial="a", transitions=edges, queued=queued)
    assert model.go()
    middle = ["b out", "c in"] if queued else ["c in", "b out"]
    assert model.told == ["b in", *middle]


@BOTH
def test_the_order_of_all_callbacks(kind: Any) -> None:
    told: list[str] = []

    def say(name: str) -> Any:
        return lambda: told.append(name)

    states = [
        {"name": "a", "on_exit": say("on_exit")},
        {"name": "b", "on_enter": say("on_enter"), "final": True},
    ]
    edge = {
        "trigger": "advance",
        "source": "a",
        "dest": "b",
        **{name: say(name) for name in ("prepare", "before", "after")},
    }
    names = ["prepare_event", "before_state_change", "after_state_change", "finalize_event"]
    wide = {name: say(name) for name in [*names, "on_final"]}
    machine = kind(states=states, transitions=[edge], initial="a", **wide)
    order = [
        *("prepare_event", "prepare", "before_state_change", "before", "on_exit", "on_enter"),
        *("on_final", "after", "after_state_change", "finalize_event"),
    ]
    if kind is st.Machine:
        assert list(machine) == ["b"]
        assert told == order
        told.clear()
        machine.set_state("a")
    assert machine.advance()
    assert told == order


@BOTH
def test_on_exception_may_put_things_right(kind: Any) -> None:
    class Fragile:
        def fail(self, event: Any) -> None:
            raise ValueError("Oh no")

        def mend(self, event: Any) -> None:
            self.mended = str(event.error)
            del event.error

    lump = Fragile()
    kind(lump, MATTER, before_state_change="fail", on_exception="mend", send_event=True)
    assert lump.to_gas() is False
    assert (lump.mended, lump.state) == ("Oh no", "initial")


@BOTH
def test_an_exception_after_the_change_leaves_the_new_state(kind: Any) -> None:
    def fail() -> None:
        raise ValueError

    machine = kind(states=["a", {"name": "b", "on_enter": fail}], initial="a")
    with pytest.raises(ValueError, match=r"^$"):
        machine.to_b()
    assert machine.state == "b"


@BOTH
def test_many_models_dispatch_and_removing(kind: Any) -> None:
    first, second = Matter(), Matter()
    machine = kind(None, MATTER, initial="solid")
    machine.add_model(first)
    machine.add_model(second, initial="liquid")
    assert machine.models == [first, second]
    assert (first.state, second.state) == ("solid", "liquid")
    assert machine.dispatch("to_gas")
    assert (first.state, second.state) == ("gas", "gas")
    machine.remove_model([first])
    assert machine.dispatch("to_solid")
    assert (first.state, second.state) == ("gas", "solid")


@BOTH
def test_no_initial_state(kind: Any) -> None:
    machine = kind(model=None, states=MATTER, initial=None)
    with pytest.raises(ValueError, match="No initial state configured"):
        machine.add_model(Matter())
    machine.add_model(lump := Matter(), initial="liquid")
    assert lump.state == "liquid"


@BOTH
def test_two_machines_on_one_model_by_model_attribute(kind: Any) -> None:
    lump = Matter()
    kind(lump, MATTER, initial="solid")
    kind(lump, ["delivered", "shipping"], initial="delivered", model_attribute="shipping_state")
    assert lump.to_gas()
    assert lump.to_shipping_state_shipping()
    assert (lump.state, lump.shipping_state) == ("gas", "shipping")
    assert lump.is_shipping_state_shipping()


@BOTH
def test_looking_up_and_removing_transitions(kind: Any) -> None:
    lump = Matter()
    machine = kind(lump, MATTER, "solid", HEATING, auto_transitions=False)
    assert machine.get_triggers("solid") == ["melt", "sublimate"]
    assert machine.get_triggers("solid", "gas") == ["melt", "sublimate", "ionize"]
    assert [(t.source, t.dest) for t in machine.get_transitions(source="solid")] == [
        ("solid", "liquid"),
        ("solid", "gas"),
    ]
    assert machine.get_transitions("nothing") == []
    machine.remove_transition("sublimate")
    assert not hasattr(lump, "sublimate")
    assert machine.get_triggers("solid") == ["melt"]


@BOTH
def test_what_is_logged(kind: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="transitions"):
        kind(Matter(), MATTER, initial="solid", name="lump").models[0].to_liquid()
    assert [record.getMessage() for record in caplog.records] == [
        "lump: Executed callback 'on_exit_solid'",
        "lump: Finished processing state solid exit callbacks.",
        "lump: Finished processing state liquid enter callbacks.",
    ]


@BOTH
def test_pickling_a_machine(kind: Any) -> None:
    machine = kind(states=["a", "b"], transitions=[["advance", "a", "b"]], initial="a")
    machine.advance()
    machine.to_a()
    machine.on_enter_b("to_a")
    if kind is st.Machine:
        assert next(iter(machine)) == "a"
    again = pickle.loads(pickle.dumps(machine))
    assert again.advance()
    assert again.state == "a"
    assert again.get_triggers("a") == ["to_a", "to_b", "advance"]


def test_a_pickled_machine_still_sees_changes() -> None:
    edges = [["advance", "a", "b"], ["advance", "b", "a"]]
    machine = st.Machine(states=["a", "b"], transitions=edges, initial="a")
    steps(machine, 2)
    again = pickle.loads(pickle.dumps(machine))
    told: list[str] = []
    again.on_enter_b(lambda: told.append("b"))
    again.on_enter_a(lambda: told.append("a"))
    steps(again, 2)
    assert told == ["b", "a"]
    steps(machine, 2)
    assert told == ["b", "a"]


@BOTH
def test_a_machine_by_inheritance(kind: Any) -> None:
    class Lump(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(self, states=MATTER, transitions=HEATING, initial="solid")
            self.told: list[str] = []

        def on_enter_liquid(self) -> None:
            self.told.append(self.state)

    lump = Lump()
    assert lump.melt()
    assert lump.told == ["liquid"]


@BOTH
def test_state_features(kind: Any) -> None:
    @add_state_features(Tags)
    class Tagged(kind):  # type: ignore[misc]
        pass

    machine = Tagged(states=[{"name": "a", "tags": ["hot"]}, "b"], initial="a")
    assert machine.get_state("a").is_hot
    assert not machine.get_state("b").is_hot


class Marked(MarkupMachine, st.Machine):
    """A machine that can be written as a dict."""


class Drawn(GraphMachine, st.Machine):
    """A machine that can be drawn."""


def test_markup_by_mixing_in() -> None:
    plain = MarkupMachine(None, MATTER, "solid", HEATING, auto_transitions=False)
    marked = Marked(None, MATTER, "solid", HEATING, auto_transitions=False)
    assert marked.markup == plain.markup
    assert Marked(markup=marked.markup).markup == marked.markup
    edges = [["advance", "solid", "gas"], ["advance", "gas", "solid"]]
    assert steps(Marked(states=MATTER, initial="solid", transitions=edges), 2) == ["gas", "solid"]


def test_the_active_state_of_a_mixed_in_graph_moves_with_a_walk() -> None:
    states = ["a", {"name": "b", "final": True}]
    edges = [["advance", "a", "b"]]
    model = Model()
    machine = Drawn(model, states, "a", edges, graph_engine="mermaid")
    assert machine.transition_cls is TransitionGraphSupport
    assert list(machine) == ["b"]
    other = Model()
    GraphMachine(other, states, "a", edges, graph_engine="mermaid")
    other.advance()  # type: ignore[attr-defined]
    assert model.get_graph().source == other.get_graph().source  # type: ignore[attr-defined]
