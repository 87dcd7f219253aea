"""A loop as data: states, the transitions between them, and the checks made when it is declared."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from statetrain.errors import LoopError

__all__ = ["Action", "Guard", "Loop", "State", "Transition", "path"]

Action = Callable[[Any], None]
"""A state's work: `action(run) -> None`. It talks through the run's declared fields only."""

Guard = Callable[[Any], bool]
"""A transition's condition: `guard(run) -> bool`, a pure function of data equal on every rank."""

ARROW = " -> "


@dataclass(frozen=True)
class State:
    """Declare a state: its name and the action that is its work.

    `replay=True` marks an action that leaves what no checkpoint can hold, such as an autograd
    graph: a run stopped there does the action again when it resumes. Such an action must not read
    a field that it writes. `final=True` marks a state where the machine stops.
    """

    name: str
    action: Action | None = None
    replay: bool = field(default=False, kw_only=True)
    final: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise LoopError(
                f"a state's name must be a Python identifier such as 'forward', not {self.name!r}"
            )
        if self.action is not None:
            _check_callable(self.action, f"the action of state {self.name!r}")
        if self.replay and self.action is None:
            raise LoopError(f"state {self.name!r} has replay=True but no action to replay")


@dataclass(frozen=True)
class Transition:
    """Declare an edge from `source` to `dest`, open when the guard `when` says so, or always."""

    source: str
    dest: str
    when: Guard | None = None

    def __post_init__(self) -> None:
        if self.when is not None:
            _check_callable(self.when, f"the guard of transition {self.name!r}")

    @property
    def name(self) -> str:
        """The transition's name everywhere: `"source -> dest"`."""
        return f"{self.source}{ARROW}{self.dest}"


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Declare a loop: where it starts, its states, and its transitions in order of precedence.

    Of the transitions out of a state the first open one, in declared order, is taken. `options`
    are settings that belong to the mathematics of the loop; they are stored in checkpoints, and
    differences are reported on resume. `begin(options, *fit_args)` makes the run that `fit`
    drives; without it `fit` takes a run.

    Raises:
        LoopError: the graph has a fault; the message says what to write instead.
    """

    initial: str
    states: tuple[State, ...]
    transitions: tuple[Transition, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    begin: Callable[..., Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", tuple(self.states))
        object.__setattr__(self, "transitions", tuple(self.transitions))
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        _check_types(self)
        _check_names(self)
        _check_edges(self)
        _check_graph(self)

    def state(self, name: str) -> State:
        """Return the state called `name`.

        Raises:
            LoopError: there is none; the message suggests the nearest name.
        """
        for state in self.states:
            if state.name == name:
                return state
        raise LoopError(f"no state {name!r} in the loop{nearest(name, self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """The states' names in declared order."""
        return tuple(state.name for state in self.states)

    def leaving(self, name: str) -> tuple[Transition, ...]:
        """Return the transitions out of the state `name`, in order of precedence."""
        return tuple(edge for edge in self.transitions if edge.source == name)

    def replacing(self, name: str, action: Action) -> Loop:
        """Return this loop with another action in the state `name`."""
        new = replace(self.state(name), action=action)
        return replace(self, states=tuple(new if s.name == name else s for s in self.states))

    def inserting(self, name: str, action: Action, *, after: str, replay: bool = False) -> Loop:
        """Return this loop with a new state behind `after`.

        The transitions out of `after` become the new state's; `after` gets one to the new state.
        """
        place = self.states.index(self.state(after)) + 1
        if self.state(after).final:
            raise LoopError(f"state {after!r} is final: insert after a state that goes on")
        new = State(name, action, replay=replay)
        edges: list[Transition] = []
        for edge in self.transitions:
            if edge.source == after and edge is self.leaving(after)[0]:
                edges.append(Transition(after, name))
            edges.append(replace(edge, source=name) if edge.source == after else edge)
        states = (*self.states[:place], new, *self.states[place:])
        return replace(self, states=states, transitions=tuple(edges))

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """Show the loop's picture in notebooks."""
        from statetrain import diagram  # it stands above; only a notebook calls this

        return diagram.mimebundle(self)


def path(*names: str) -> tuple[Transition, ...]:
    """Return the unguarded transitions that lead through `names` one after the other."""
    if len(names) < 2:
        raise LoopError(f"path needs two names or more, not {names!r}")
    return tuple(Transition(a, b) for a, b in itertools.pairwise(names))


def nearest(name: object, names: Iterable[str]) -> str:
    """Return `": did you mean 'x'?"` or the list of what there is, to end an error message with."""
    known = list(names)
    close = difflib.get_close_matches(str(name), known, n=1)
    return f": did you mean {close[0]!r}?" if close else f": there are {', '.join(known)}"


def deferred(function: object) -> bool:
    """Whether calling `function` would not do its work: it is async, or a generator."""
    called = vars(type(function)).get("__call__")  # of an object that can be called
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_kind(each) for is_kind in kinds for each in (function, called))


def _check_callable(function: object, what: str) -> None:
    if not callable(function):
        raise LoopError(f"{what} must be a function of one argument, the run, not {function!r}")
    name = getattr(function, "__qualname__", repr(function))
    if deferred(function):
        raise LoopError(f"{what} must be a plain function: write def {name}(run)")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise LoopError(f"{what} must take one argument, the run: write def {name}(run)") from None
    except ValueError:  # a builtin without a signature
        return


def _check_types(loop: Loop) -> None:
    for state in loop.states:
        if not isinstance(state, State):
            raise LoopError(f"states holds {state!r}: write State('name', action)")
    for edge in loop.transitions:
        if not isinstance(edge, Transition):
            hint = "; st.path(...) gives several: write *st.path(...)"
            hint = hint if isinstance(edge, Sequence) and not isinstance(edge, str) else ""
            raise LoopError(f"transitions holds {edge!r}: write Transition('source', 'dest'){hint}")


def _check_names(loop: Loop) -> None:
    names = loop.names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LoopError(f"state {twice[0]!r} is declared twice: give each state its own name")
    if loop.initial not in names:
        raise LoopError(f"initial={loop.initial!r} is not a state{nearest(loop.initial, names)}")
    for edge in loop.transitions:
        for end in (edge.source, edge.dest):
            if end not in names:
                raise LoopError(
                    f"transition {edge.name!r} names the unknown state {end!r}{nearest(end, names)}"
                )


def _check_edges(loop: Loop) -> None:
    for state in loop.states:
        edges = loop.leaving(state.name)
        if state.final and edges:
            raise LoopError(
                f"final state {state.name!r} has the transition {edges[0].name!r}: "
                "remove it, or final=True"
            )
        if not state.final and not edges:
            raise LoopError(
                f"state {state.name!r} is a dead end: give it a transition, or final=True"
            )
        dests: set[str] = set()
        for edge in edges:
            if edge.dest in dests:
                raise LoopError(
                    f"transition {edge.name!r} is declared twice: join the guards with 'or' in one"
                )
            dests.add(edge.dest)
        for edge, later in itertools.pairwise(edges):
            if edge.when is None:
                raise LoopError(
                    f"transition {later.name!r} can never be taken: {edge.name!r} before it has no "
                    "guard; give that one a when=, or declare it last"
                )


def _check_graph(loop: Loop) -> None:
    forth: dict[str, set[str]] = {name: set() for name in loop.names}
    back: dict[str, set[str]] = {name: set() for name in loop.names}
    for edge in loop.transitions:
        forth[edge.source].add(edge.dest)
        back[edge.dest].add(edge.source)
    finals = [state.name for state in loop.states if state.final]
    if not finals:
        raise LoopError("the loop has no way out: add State('done', final=True) and a way to it")
    lost = [name for name in loop.names if name not in _reached([loop.initial], forth)]
    if lost:
        raise LoopError(
            f"state {lost[0]!r} is unreachable from {loop.initial!r}: "
            "add a transition to it, or remove it"
        )
    caught = [name for name in loop.names if name not in _reached(finals, back)]
    if caught:
        raise LoopError(
            f"state {caught[0]!r} has no way to a final state: add a transition towards "
            f"{finals[0]!r}"
        )


def _reached(starts: Iterable[str], graph: Mapping[str, set[str]]) -> set[str]:
    seen = set(starts)
    todo = deque(seen)
    while todo:
        for name in graph[todo.popleft()] - seen:
            seen.add(name)
            todo.append(name)
    return seen
