"""A walk as source code: the loop that a machine's table stands for, as one would write it by hand.

Interpreting a table costs several times what plain calls cost. So a machine writes those calls
down, in the order in which `transitions` would make them, and runs that; `Machine.source()` shows
it. It knows nothing of `transitions`.
"""

from __future__ import annotations

import keyword
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Call", "Edge", "Spent", "Walk"]

Go: TypeAlias = Callable[[Any, Callable[[Any], object]], Generator[str, None, bool]]
RESERVED = ("run", "state", "wanted", "changed", "began", "setattr", "getattr")


class Call(NamedTuple):
    """A function that a transition calls; an error in it is noted with the label."""

    function: Callable[..., Any]
    label: str | None = None
    given_run: bool = True


class Edge(NamedTuple):
    """A transition: what must be true, and what runs before and after the state moves."""

    guards: tuple[Call, ...]
    leaving: tuple[Call, ...]
    dest: Any
    arriving: tuple[Call, ...]


@dataclass
class Spent:
    """How often a state was visited, and the nanoseconds spent in its action and callbacks."""

    visits: int = 0
    nanoseconds: int = 0


class Walk:
    """The transitions out of some states, compiled into one generator function, `go`.

    `go(run, wanted)` walks, and yields the name of each state in which `wanted(run)` is true. It
    returns where it cannot go on: true if no transition out of the state is open, false if the
    state is not compiled, or something was added to `changed`. `names` are those of the states.
    Where `spent` has an entry for a state, its visits are counted and timed in it.
    """

    def __init__(
        self,
        edges: Mapping[Any, Sequence[Edge]],
        names: Mapping[Any, str],
        *,
        attribute: str = "state",
        spent: Mapping[Any, Spent] | None = None,
    ) -> None:
        self.compiled = frozenset(edges)
        self.changed: list[object] = []
        self._spent = {} if spent is None else spent
        self._names: dict[str, Any] = {"changed": self.changed, "compiled": self.compiled}
        self._labels: dict[int, str] = {}
        self._lines: list[str] = []
        plain = attribute.isidentifier() and not keyword.iskeyword(attribute)
        self._state = f"run.{attribute}" if plain else f"getattr(run, {attribute!r})"
        self._assigned = (
            f"{self._state} = state = {{}}"
            if plain
            else (f"setattr(run, {attribute!r}, state := {{}})")
        )
        if all(state == name for state, name in names.items()):
            self._name_now = self._state
        else:
            self._names["names"] = names
            self._name_now = f"names[{self._state}]"
        self._write(edges)
        self.source = "\n".join([*self._lines, ""])
        exec(_code(self.source), self._names)  # noqa: S102  the source is that of this file
        self.go: Go = self._names["walk"]

    def label(self, error: BaseException) -> str | None:
        """Return the label of the call that raised `error`."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals is self._names:
                return self._labels.get(trace.tb_lineno)
            trace = trace.tb_next
        return None

    def _write(self, edges: Mapping[Any, Sequence[Edge]]) -> None:
        self._line(0, "def walk(run, wanted):")
        self._line(1, f"state = {self._state}")
        self._line(1, "while state in compiled:")
        for state, leading_away in edges.items():
            self._line(2, f"if state == {self._value(state)}:")
            self._branches(leading_away)
            self._line(3, f"if wanted(run) or changed or {self._state} is not state:")
            self._line(4, f"yield {self._name_now}")
            self._line(4, "if changed:")
            self._line(5, "return False")
            self._line(4, f"state = {self._state}")
        self._line(2, "yield from ()") if not edges else None
        self._line(1, "return False")

    def _branches(self, edges: Sequence[Edge]) -> None:
        for number, edge in enumerate(edges):
            if edge.guards:
                self._guards("elif" if number else "if", edge.guards)
            elif number:
                self._line(3, "else:")
            self._transition(edge, 4 if number or edge.guards else 3)
            if not edge.guards:
                return  # those after it are never reached
        self._line(3, "else:")
        self._line(4, "return True")

    def _guards(self, word: str, guards: tuple[Call, ...]) -> None:
        if len(guards) == 1:
            self._line(3, f"{word} {self._call(guards[0])}:", guards[0].label)
            return
        self._line(3, f"{word} (")  # one on a line, or an error could not be told from its line
        for number, guard in enumerate(guards):
            self._line(4, f"{'and ' if number else ''}{self._call(guard)}", guard.label)
        self._line(3, "):")

    def _transition(self, edge: Edge, depth: int) -> None:
        self._calls(edge.leaving, depth)
        self._line(depth, self._assigned.format(self._value(edge.dest)))
        spent = self._spent.get(edge.dest)
        if spent is None:
            self._calls(edge.arriving, depth)
            return
        clock, name = self._name("clock", time.perf_counter_ns), self._name("spent", spent)
        self._line(depth, f"began = {clock}()")
        self._calls(edge.arriving, depth)
        self._line(depth, f"{name}.nanoseconds += {clock}() - began")
        self._line(depth, f"{name}.visits += 1")

    def _calls(self, calls: Iterable[Call], depth: int) -> None:
        for call in calls:
            self._line(depth, self._call(call), call.label)

    def _line(self, depth: int, text: str, label: str | None = None) -> None:
        self._lines.append("    " * depth + text)
        if label is not None:
            self._labels[len(self._lines)] = label

    def _call(self, call: Call) -> str:
        inner = getattr(call.function, "func", call.function)
        name = self._name(str(getattr(inner, "__name__", type(inner).__name__)), call.function)
        return f"{name}({'run' if call.given_run else ''})"

    def _value(self, state: Any) -> str:
        return repr(state) if type(state) is str else self._name("state", state)

    def _name(self, wanted: str, value: Any) -> str:
        """Return a name for `value` in the source: the one it has, or a new one."""
        stem = re.sub(r"\W|^(?=\d)", "_", wanted) or "_"
        taken = keyword.iskeyword(stem) or stem in RESERVED
        name, number = f"{stem}_1" if taken else stem, 1
        while name in self._names and self._names[name] is not value:
            number += 1
            name = f"{stem}_{number}"
        self._names[name] = value
        return name


@cache
def _code(source: str) -> CodeType:
    return compile(source, "<the walk of a statetrain.Machine>", "exec")
