"""Hypothesis strategies: random machines as plain data, and random loops with their callbacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as hs

import statetrain as st

NAMES = ("s0", "s1", "s2", "s3")
ANSWERS = (True, False, 1, 0, 2, None, "yes", "")  # a guard may return any of them


@dataclass(frozen=True, kw_only=True)
class Call:
    """A callback: traced under `tag`, it may count, trigger, or raise at a count.

    `by_name` attaches it as the name of a method of the model.
    """

    tag: str
    by_name: bool
    adds: int
    raises_at: int | None
    triggers: bool


@dataclass(frozen=True, kw_only=True)
class Check:
    """A condition: traced, it may change the counter, and answers by what the counter is then."""

    tag: str
    by_name: bool
    adds: int
    period: int
    answers: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A transition with everything that `transitions` lets hang on it; no `dest` is internal."""

    source: str
    dest: str | None
    prepare: tuple[Call, ...] = ()
    conditions: tuple[Check, ...] = ()
    unless: tuple[Check, ...] = ()
    before: tuple[Call, ...] = ()
    after: tuple[Call, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Node:
    """A state."""

    name: str
    final: bool
    on_enter: tuple[Call, ...]
    on_exit: tuple[Call, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change made to a machine between two of its transitions, after `after` of them."""

    after: int
    kind: str
    state: str
    other: str
    edge: Edge
    call: Call
    check: Check


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A machine of `transitions`, and what happens to it on the way."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    options: dict[str, Any]
    changes: tuple[Change, ...]


KINDS = (
    *("add", "remove", "enter", "dynamic_exit", "dynamic_before", "insert_after", "condition"),
    *("clear", "pop", "edge_list", "wide", "wide_append", "final", "send_event", "ignore"),
    *("to", "set_state"),
)


def tags() -> hs.SearchStrategy[str]:
    return hs.integers(0, 999).map("t{}".format)


def calls() -> hs.SearchStrategy[Call]:
    return hs.builds(
        Call,
        tag=tags(),
        by_name=hs.booleans(),
        adds=hs.sampled_from([0, 0, 0, 1, 2]),
        raises_at=hs.sampled_from([None] * 20 + [0, 2, 3]),
        triggers=hs.sampled_from([False] * 12 + [True]),
    )


def checks() -> hs.SearchStrategy[Check]:
    return hs.builds(
        Check,
        tag=tags(),
        by_name=hs.booleans(),
        adds=hs.sampled_from([0, 1]),
        period=hs.integers(1, 3),
        answers=hs.tuples(*[hs.sampled_from([True, True, True, *ANSWERS])] * 3),
    )


def few(
    each: hs.SearchStrategy[Any], most: int = 2, *, least: int = 0
) -> hs.SearchStrategy[tuple[Any, ...]]:
    return hs.lists(each, min_size=least, max_size=most).map(tuple)


def edges(source: hs.SearchStrategy[str]) -> hs.SearchStrategy[Edge]:
    return hs.builds(
        Edge,
        source=source,
        dest=hs.sampled_from([*NAMES, *NAMES, None]),
        prepare=few(calls(), 1),
        conditions=few(checks(), 1),
        unless=hs.one_of(hs.just(()), hs.just(()), few(checks(), 1)),
        before=few(calls()),
        after=few(calls(), 1),
    )


def nodes(name: str) -> hs.SearchStrategy[Node]:
    return hs.builds(
        Node,
        name=hs.just(name),
        final=hs.just(value=False) if name == "s0" else hs.sampled_from([False, False, True]),
        on_enter=few(calls()),
        on_exit=few(calls()),
    )


def changes() -> hs.SearchStrategy[Change]:
    name = hs.sampled_from(NAMES)
    return hs.builds(
        Change,
        after=hs.integers(1, 3),
        kind=hs.sampled_from(KINDS),
        state=name,
        other=name,
        edge=edges(name),
        call=calls(),
        check=checks(),
    )


def plans(most_changes: int = 4) -> hs.SearchStrategy[Plan]:
    """Draw machines of four states that walk, get stuck, raise, or end."""
    return hs.builds(
        Plan,
        nodes=hs.tuples(*map(nodes, NAMES)),
        edges=hs.tuples(
            *[few(edges(hs.just(name)), 3, least=int(name != "s3")) for name in NAMES]
        ).map(lambda found: tuple(edge for out in found for edge in out)),
        options=hs.sampled_from([{}] * 6 + [{"send_event": True}, {"queued": True}]),
        changes=few(changes(), most_changes),
    )


@dataclass(frozen=True, kw_only=True)
class Attached:
    """A callback on a point of a loop."""

    tag: str
    place: str
    leading: bool
    priority: int
    every: int | None
    raises_at: int | None


@dataclass(kw_only=True, eq=False)
class Walk(st.Run):
    """A run that keeps what was called; `step` is the counter that guards read and change."""

    calls: list[Any] = st.transient(default_factory=list)


def traced(tag: str, *, adds: int = 0, raises_at: int | None = None) -> Any:
    """Return an action or a callback that leaves its tag."""

    def work(run: Walk) -> None:
        run.calls.append((tag, run.state, run.step))
        run.step += adds
        if run.step == raises_at:
            raise KeyError(tag)

    return work


def guard(tag: str, answers: tuple[Any, ...]) -> Any:
    """Return a guard that leaves its tag, counts, and answers by the count."""

    def open_(run: Walk) -> Any:
        run.calls.append((tag, run.state, run.step))
        run.step += 1
        return answers[run.step % len(answers)]

    return open_


@hs.composite
def loops(draw: Any) -> tuple[st.Loop, tuple[Attached, ...]]:
    """Draw a loop that leads through its states to an end, with other edges between them."""
    inner = [f"a{i}" for i in range(draw(hs.integers(1, 4)))]
    names = [*inner, "done"]
    found: list[st.Transition] = []
    for i, name in enumerate(inner):
        dests = {names[i + 1], *draw(hs.sets(hs.sampled_from(names), max_size=3))}
        order = draw(hs.permutations(sorted(dests)))
        for j, dest in enumerate(order):
            last = j == len(order) - 1
            answers = draw(hs.tuples(*[hs.sampled_from(ANSWERS)] * 3))
            free = last and draw(hs.integers(0, 3)) > 0
            when = None if free else guard(f"{name}?{dest}", answers)
            found.append(st.Transition(name, dest, when=when))
    raising = hs.sampled_from([None] * 9 + [4])
    states = [
        st.State(name, traced(f"work {name}", adds=1, raises_at=draw(raising))) for name in inner
    ]
    loop = st.Loop(
        initial=inner[0], states=[*states, st.State("done", final=True)], transitions=found
    )
    return loop, draw(few(attachments(loop), 5))


@hs.composite
def attachments(draw: Any, loop: st.Loop) -> Attached:
    """Draw a callback for one of the loop's points."""
    leading = draw(hs.booleans())
    edge_names = [] if leading else [edge.name for edge in loop.transitions]
    return Attached(
        tag=draw(tags()),
        place=draw(hs.sampled_from([*loop.names, *edge_names])),
        leading=leading,
        priority=draw(hs.integers(-1, 1)),
        every=draw(hs.sampled_from([None, 1, 2])),
        raises_at=draw(hs.sampled_from([None] * 9 + [5])),
    )
