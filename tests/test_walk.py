from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import statetrain as st
from statetrain.callbacks import Callbacks, point
from statetrain.machine import Machine
from statetrain.walk import Call, Edge, Spent, Walk

AB = {"a": "a", "b": "b"}


def step(walk: Walk, state: str, run: Any, *, attribute: str = "state") -> Any:
    """Take one transition, and return the state that it leads to."""
    setattr(run, attribute, state)
    return next(walk.go(run, id))


@dataclass(kw_only=True)
class Counted(st.Run):
    number: int = 0
    seen: list[str] = field(default_factory=list)


def count(run: Counted) -> None:
    run.number += 1


def rest(run: Counted) -> None:
    run.seen.append("rest")


def enough(run: Counted) -> bool:
    return run.number >= 3


def counting(**states: Callable[[Counted], None]) -> st.Loop:
    work = {"count": count, "rest": rest, **states}
    return st.Loop(
        initial="count",
        states=[*(st.State(name, do) for name, do in work.items()), st.State("done", final=True)],
        transitions=[
            st.Transition("count", "rest"),
            st.Transition("rest", "done", enough),
            st.Transition("rest", "count"),
        ],
    )


WRITTEN = """\
def walk(run, wanted):
    state = run.state
    while state in compiled:
        if state == 'count':
            run.state = state = 'rest'
            rest(run)
            if wanted(run) or changed or run.state is not state:
                yield run.state
                if changed:
                    return False
                state = run.state
        if state == 'rest':
            if enough(run):
                run.state = state = 'done'
                came_from(run)
            else:
                run.state = state = 'count'
                count(run)
            if wanted(run) or changed or run.state is not state:
                yield run.state
                if changed:
                    return False
                state = run.state
    return False
"""


def test_the_walk_is_written_down_as_one_would_write_it_by_hand() -> None:
    assert Machine.of(counting(), Counted()).source() == WRITTEN


def test_what_is_attached_stands_in_the_source_in_firing_order() -> None:
    loop = counting()
    callbacks = Callbacks(loop)
    machine = Machine.of(loop, Counted(), callbacks)

    def look(run: Counted) -> None: ...

    def announce(run: Counted) -> None: ...

    callbacks.attach(look, point("rest"))
    callbacks.attach(announce, point("count -> rest"))
    machine.refresh()
    moving = "            run.state = state = 'rest'\n            rest(run)\n"
    around = f"            announce(run)\n{moving}            look(run)\n"
    assert machine.source() == WRITTEN.replace(moving, around)


def test_several_guards_stand_on_a_line_each() -> None:
    asked: list[str] = []

    def first(run: Any) -> bool:
        asked.append("first")
        return True

    def second(run: Any) -> bool:
        asked.append("second")
        raise ValueError("no")

    guards = (Call(first, "in first"), Call(second, "in second"))
    walk = Walk({"a": [Edge(guards, (), "b", ())]}, AB, attribute="state")
    told = "if (\n                first(run)\n                and second(run)\n            ):\n"
    assert told in walk.source
    with pytest.raises(ValueError, match="no") as caught:
        step(walk, "a", Counted())
    assert asked == ["first", "second"]
    assert walk.label(caught.value) == "in second"


def test_functions_of_one_name_are_told_apart() -> None:
    made: list[int] = []

    def action(number: int) -> Callable[[Any], None]:
        def work(run: Any) -> None:
            made.append(number)

        return work

    works = [action(0), action(1)]
    arriving = tuple(Call(work) for work in (*works, *works))
    walk = Walk({"a": [Edge((), (), "b", arriving)]}, AB, attribute="state")
    step(walk, "a", Counted())
    assert made == [0, 1, 0, 1]
    assert walk.source.count(" work(run)") == walk.source.count(" work_2(run)") == 2


def test_only_states_that_are_wanted_are_yielded() -> None:
    run = Counted()
    machine = Machine.of(counting(), run)
    assert list(machine.walk(lambda run: run.number == 2)) == ["count", "rest"]
    assert run.state == "done"


def test_a_state_that_an_action_moved_on_from_is_not_named() -> None:
    def leap(run: Any) -> None:
        run.state = "done"

    run = Counted()
    assert list(Machine.of(counting(rest=leap), run)) == ["count", "done"]
    assert run.number == 1


@pytest.mark.parametrize(
    "name",
    [
        "run",
        "wanted",
        "changed",
        "compiled",
        "names",
        "setattr",
        "began",
        "lambda",
        "<lambda>",
        "1st",
        "é",
        "",
    ],
)
def test_any_name_of_a_function_or_state_can_be_written_down(name: str) -> None:
    def work(run: Any) -> None:
        run.number += 1

    work.__name__ = name
    walk = Walk({name: [Edge((), (), name, (Call(work),))]}, {name: name}, attribute="state")
    run = Counted()
    assert step(walk, name, run) == name
    assert (run.state, run.number) == (name, 1)


def test_states_of_names_that_differ_in_signs_alone_are_told_apart() -> None:
    names = ["a-b", "a_b", "a b"]
    edges = {name: [Edge((), (), name[::-1], ())] for name in names}
    walk = Walk(edges, {name: name for name in [*names, *(name[::-1] for name in names)]})
    for name in names:
        run = Counted()
        assert step(walk, name, run) == run.state == name[::-1]


def test_an_attribute_that_is_no_name_is_set_too() -> None:
    walk = Walk({"a": [Edge((), (), "b", ())]}, AB, attribute="my state")
    run = Counted()
    step(walk, "a", run, attribute="my state")
    assert vars(run)["my state"] == "b"


def test_an_error_is_told_by_the_walk_it_happened_in() -> None:
    def fail(run: Any) -> None:
        raise ValueError("inner")

    inner = Walk({"a": [Edge((), (), "b", (Call(fail, "inner label"),))]}, AB, attribute="state")

    def nested(run: Any) -> None:
        step(inner, "a", Counted())

    outer = Walk({"a": [Edge((), (), "b", (Call(nested, "outer label"),))]}, AB, attribute="state")
    with pytest.raises(ValueError, match="inner") as caught:
        step(outer, "a", Counted())
    assert outer.label(caught.value) == "outer label"
    assert inner.label(caught.value) == "inner label"
    other = Walk({"a": [Edge((), (), "b", (Call(fail, "inner label"),))]}, AB, attribute="state")
    assert other.label(caught.value) is None


def test_a_clock_counts_visits_and_time_and_changes_no_step() -> None:
    def slow(run: Counted) -> None:
        time.sleep(0.002)

    run, timed = Counted(), Counted()
    plain = list(Machine.of(counting(), run))
    machine = Machine.of(counting(rest=slow), timed)
    spent = machine.clock()
    assert list(machine) == plain
    assert {name: each.visits for name, each in spent.items()} == {
        "count": 3,
        "rest": 3,
        "done": 1,
    }
    assert spent["rest"].nanoseconds >= 3 * 2_000_000
    assert spent["count"].nanoseconds < spent["rest"].nanoseconds
    assert "clock" in machine.source()
    assert "clock" not in Machine.of(counting(), Counted()).source()


def test_visits_go_on_counting_when_the_walk_is_compiled_again() -> None:
    machine = Machine.of(counting(), Counted())
    spent = machine.clock()
    for state in machine:
        if state == "rest":
            machine.refresh()
    assert spent["rest"] == Spent(visits=3, nanoseconds=spent["rest"].nanoseconds)
