"""Loops as data: what a declaration refuses, with its exact message, and how loops are changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import statetrain as st
from statetrain.loop import nearest


def work(run: Any) -> None: ...


def open_(run: Any) -> bool:
    return True


def no_argument() -> None: ...


def two_arguments(run: Any, more: Any) -> None: ...


async def later(run: Any) -> None: ...


def piecewise(run: Any) -> Any:
    yield


class Method:
    def act(self, run: Any) -> None: ...

    def lost(self) -> None: ...


def states(*names: str, final: str = "done") -> list[st.State]:
    return [*(st.State(name, work) for name in names), st.State(final, final=True)]


def small(**changes: Any) -> st.Loop:
    """Return a loop with two states, a way back and an end, with some fields exchanged."""
    fields: dict[str, Any] = {
        "initial": "load",
        "states": states("load", "train"),
        "transitions": [
            st.Transition("load", "train"),
            st.Transition("train", "done", when=open_),
            st.Transition("train", "load"),
        ],
    }
    return st.Loop(**{**fields, **changes})


def message(make: Any) -> str:
    with pytest.raises(st.LoopError) as caught:
        make()
    return str(caught.value)


STATES = [
    (lambda: st.State(""), "a state's name must be a Python identifier such as 'forward', not ''"),
    (
        lambda: st.State("two words"),
        "a state's name must be a Python identifier such as 'forward', not 'two words'",
    ),
    (
        lambda: st.State("a -> b"),
        "a state's name must be a Python identifier such as 'forward', not 'a -> b'",
    ),
    (lambda: st.State(3), "a state's name must be a Python identifier such as 'forward', not 3"),
    (
        lambda: st.State("load", "work"),
        "the action of state 'load' must be a function of one argument, the run, not 'work'",
    ),
    (
        lambda: st.State("load", no_argument),
        "the action of state 'load' must take one argument, the run: write def no_argument(run)",
    ),
    (
        lambda: st.State("load", two_arguments),
        "the action of state 'load' must take one argument, the run: write def two_arguments(run)",
    ),
    (
        lambda: st.State("load", Method.act),
        "the action of state 'load' must take one argument, the run: write def Method.act(run)",
    ),
    (
        lambda: st.State("load", Method().lost),
        "the action of state 'load' must take one argument, the run: write def Method.lost(run)",
    ),
    (
        lambda: st.State("load", later),
        "the action of state 'load' must be a plain function: write def later(run)",
    ),
    (
        lambda: st.State("load", piecewise),
        "the action of state 'load' must be a plain function: write def piecewise(run)",
    ),
    (
        lambda: st.State("load", replay=True),
        "state 'load' has replay=True but no action to replay",
    ),
]

EDGES = [
    (
        lambda: st.Transition("a", "b", when=True),
        "the guard of transition 'a -> b' must be a function of one argument, the run, not True",
    ),
    (
        lambda: st.Transition("a", "b", when=no_argument),
        "the guard of transition 'a -> b' must take one argument, the run: "
        "write def no_argument(run)",
    ),
    (
        lambda: st.Transition("a", "b", when=two_arguments),
        "the guard of transition 'a -> b' must take one argument, the run: "
        "write def two_arguments(run)",
    ),
    (
        lambda: st.Transition("a", "b", when=later),
        "the guard of transition 'a -> b' must be a plain function: write def later(run)",
    ),
    (st.path, "path needs two names or more, not ()"),
    (lambda: st.path("a"), "path needs two names or more, not ('a',)"),
]

LOOPS = [
    (
        lambda: small(initial="laod"),
        "initial='laod' is not a state: did you mean 'load'?",
    ),
    (
        lambda: small(initial="zzz"),
        "initial='zzz' is not a state: there are load, train, done",
    ),
    (
        lambda: small(states=states("load", "train", "load")),
        "state 'load' is declared twice: give each state its own name",
    ),
    (
        lambda: small(states=["load", *states("train")]),
        "states holds 'load': write State('name', action)",
    ),
    (
        lambda: small(transitions=[("load", "train")]),
        "transitions holds ('load', 'train'): write Transition('source', 'dest'); "
        "st.path(...) gives several: write *st.path(...)",
    ),
    (
        lambda: small(transitions=["load -> train"]),
        "transitions holds 'load -> train': write Transition('source', 'dest')",
    ),
    (
        lambda: small(transitions=[st.Transition("load", "trian")]),
        "transition 'load -> trian' names the unknown state 'trian': did you mean 'train'?",
    ),
    (
        lambda: small(transitions=[st.Transition("laod", "train")]),
        "transition 'laod -> train' names the unknown state 'laod': did you mean 'load'?",
    ),
    (
        lambda: small(transitions=[st.Transition("load", "zzz")]),
        "transition 'load -> zzz' names the unknown state 'zzz': there are load, train, done",
    ),
    (
        lambda: small(transitions=[*st.path("load", "train", "done"), *st.path("done", "load")]),
        "final state 'done' has the transition 'done -> load': remove it, or final=True",
    ),
    (
        lambda: small(transitions=st.path("load", "train")),
        "state 'train' is a dead end: give it a transition, or final=True",
    ),
    (
        lambda: small(transitions=[*st.path("load", "train", "done"), *st.path("load", "train")]),
        "transition 'load -> train' is declared twice: join the guards with 'or' in one",
    ),
    (
        lambda: small(
            transitions=[
                st.Transition("load", "train", when=open_),
                *st.path("load", "done"),
                st.Transition("load", "train", when=lambda run: False),
                *st.path("train", "done"),
            ]
        ),
        "transition 'load -> train' is declared twice: join the guards with 'or' in one",
    ),
    (
        lambda: small(
            transitions=[*st.path("load", "train", "load"), st.Transition("train", "done", open_)]
        ),
        "transition 'train -> done' can never be taken: 'train -> load' before it has no guard; "
        "give that one a when=, or declare it last",
    ),
    (
        lambda: small(states=[st.State("load"), st.State("train")], transitions=st.path(*"xy")),
        "transition 'x -> y' names the unknown state 'x': there are load, train",
    ),
    (
        lambda: small(
            states=[st.State("load"), st.State("train")],
            transitions=st.path("load", "train", "load"),
        ),
        "the loop has no way out: add State('done', final=True) and a way to it",
    ),
    (
        lambda: small(states=[], transitions=[]),
        "initial='load' is not a state: there are ",
    ),
    (
        lambda: small(transitions=[*st.path("load", "done"), *st.path("train", "load")]),
        "state 'train' is unreachable from 'load': add a transition to it, or remove it",
    ),
    (
        lambda: small(
            states=states("load", "train", "other"),
            transitions=[
                st.Transition("load", "done", when=open_),
                *st.path("load", "train", "other", "train"),
            ],
        ),
        "state 'train' has no way to a final state: add a transition towards 'done'",
    ),
    (lambda: small().state("laod"), "no state 'laod' in the loop: did you mean 'load'?"),
    (
        lambda: small().replacing("trian", work),
        "no state 'trian' in the loop: did you mean 'train'?",
    ),
    (
        lambda: small().replacing("train", no_argument),
        "the action of state 'train' must take one argument, the run: write def no_argument(run)",
    ),
    (
        lambda: small().inserting("ema", work, after="trian"),
        "no state 'trian' in the loop: did you mean 'train'?",
    ),
    (
        lambda: small().inserting("ema", work, after="done"),
        "state 'done' is final: insert after a state that goes on",
    ),
    (
        lambda: small().inserting("load", work, after="train"),
        "state 'load' is declared twice: give each state its own name",
    ),
]


@pytest.mark.parametrize(("make", "said"), [*STATES, *EDGES, *LOOPS])
def test_a_wrong_declaration_says_what_to_write(make: Any, said: str) -> None:
    assert message(make) == said


def test_the_sound_declaration_of_those_tables_is_accepted() -> None:
    loop = small()
    assert loop.names == ("load", "train", "done")
    assert [edge.name for edge in loop.transitions] == [
        "load -> train",
        "train -> done",
        "train -> load",
    ]


@pytest.mark.parametrize(
    "action", [work, Method().act, lambda run: None, print, Method.lost, lambda *runs: None]
)
def test_any_callable_of_one_argument_is_an_action(action: Any) -> None:
    assert st.State("load", action).action is action


def test_a_loop_may_be_final_at_once() -> None:
    loop = st.Loop(initial="done", states=[st.State("done", final=True)], transitions=[])
    assert loop.names == ("done",)


def test_a_state_may_lead_to_itself() -> None:
    edges = [st.Transition("load", "done", when=open_), *st.path("load", "load")]
    loop = st.Loop(initial="load", states=states("load"), transitions=edges)
    assert [edge.name for edge in loop.leaving("load")] == ["load -> done", "load -> load"]


def test_a_path_leads_through_its_names_without_guards() -> None:
    assert st.path("a", "b", "c") == (st.Transition("a", "b"), st.Transition("b", "c"))


def test_replacing_changes_one_action_and_nothing_else() -> None:
    def other(run: Any) -> None: ...

    old = small(states=[st.State("load", work, replay=True), *states("train")])
    new = old.replacing("load", other)
    assert new.state("load") == st.State("load", other, replay=True)
    assert new.states[1:] == old.states[1:]
    assert new.transitions == old.transitions
    assert old.state("load").action is work


def test_an_inserted_state_takes_over_the_edges_and_their_precedence() -> None:
    old = small(options={"a": 1}, begin=work)
    new = old.inserting("ema", work, after="train", replay=True)
    assert new.states == (*old.states[:2], st.State("ema", work, replay=True), old.states[2])
    assert new.transitions == (
        st.Transition("load", "train"),
        st.Transition("train", "ema"),
        st.Transition("ema", "done", when=open_),
        st.Transition("ema", "load"),
    )
    assert (new.options, new.begin, new.initial) == ({"a": 1}, work, "load")
    assert old == small(options={"a": 1})


def test_inserting_behind_a_state_that_leads_to_itself() -> None:
    edges = [st.Transition("load", "load", when=open_), *st.path("load", "done")]
    old = st.Loop(initial="load", states=states("load"), transitions=edges)
    new = old.inserting("rest", work, after="load")
    assert new.transitions == (
        st.Transition("load", "rest"),
        st.Transition("rest", "load", when=open_),
        st.Transition("rest", "done"),
    )


def test_edges_to_the_changed_state_stay_and_insertions_stack() -> None:
    new = small().inserting("one", work, after="load").inserting("two", work, after="load")
    assert [edge.name for edge in new.transitions] == [
        "load -> two",
        "two -> one",
        "one -> train",
        "train -> done",
        "train -> load",
    ]


def test_a_loop_is_frozen_with_all_it_holds() -> None:
    loop = small(options={"k": 1})
    for thing, name in (
        (loop, "initial"),
        (loop.states[0], "action"),
        (loop.transitions[0], "when"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, None)
    assert isinstance(loop.states, tuple)
    assert isinstance(loop.transitions, tuple)


def test_options_are_read_only_and_a_copy() -> None:
    given = {"k": 1}
    loop = small(options=given)
    given["k"] = 2
    with pytest.raises(TypeError):
        loop.options["k"] = 3  # type: ignore[index]
    assert loop.options == {"k": 1}


def test_equal_declarations_are_equal_loops() -> None:
    assert small() == small()
    assert small() == small(begin=work)  # how a run is made is not part of the loop
    assert small() != small(options={"k": 1})
    assert small() != small(initial="train")


def test_nearest_suggests_or_lists() -> None:
    assert nearest("stpe", ["step", "done"]) == ": did you mean 'step'?"
    assert nearest(7, ["step", "done"]) == ": there are step, done"
