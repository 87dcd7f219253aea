"""Which callback fires at which named point of a loop, in which order and how often."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from statetrain.errors import CallbackError
from statetrain.loop import ARROW, Loop, deferred, nearest

__all__ = ["Callback", "Callbacks", "before", "on"]

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "__statetrain_points__"


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a callback fires, and when: what `on(...)` and `before(...)` were given."""

    place: str
    leading: bool = False  # before the state's action instead of after it
    every: int | None = None
    once: bool = False
    at: tuple[int, ...] | None = None
    when: Callable[[Any], bool] | None = None
    priority: int = 0
    name: str | None = None  # the key its counters are saved under

    def __post_init__(self) -> None:
        if self.every is not None and (not isinstance(self.every, int) or self.every < 1):
            raise CallbackError(f"every={self.every!r}: give a whole number from 1")
        if self.at is not None and any(not isinstance(n, int) or n < 1 for n in self.at):
            raise CallbackError(f"at={self.at!r}: give visit numbers, counted from 1")
        if self.when is not None and not (callable(self.when) and _takes_one(self.when)):
            raise CallbackError(f"when={self.when!r}: give a function of the run")
        if not isinstance(self.priority, int | float):
            raise CallbackError(f"priority={self.priority!r}: give a number, 0 is the usual one")

    @property
    def filtered(self) -> bool:
        """Whether the callback fires on some visits only, so that visits must be counted."""
        return self.once or not (self.every is None and self.at is None and self.when is None)

    def __str__(self) -> str:
        kind = "transition" if ARROW in self.place else "state"
        return f"{'before' if self.leading else 'at'} {kind} {self.place!r}"


def on(
    place: str,
    *,
    every: int | None = None,
    once: bool = False,
    at: int | Collection[int] | None = None,
    when: Callable[[Any], bool] | None = None,
    priority: int = 0,
    name: str | None = None,
) -> Callable[[Function], Function]:
    """Mark a method of a callback object to fire at a state or a transition `"source -> dest"`.

    At a state it fires when the state's work is done, at a transition before the next state's.
    `every` counts visits of the point, `at` names visits from 1; both are counted before `when` is
    asked. `once` fires a single time. A higher `priority` fires first, then the order of attaching.
    The object goes to `Trainer(callbacks=[...])`; with `state_dict` and `load_state_dict` its own
    state is saved too. `name` is the key the counters are saved under.
    """
    return _marking(
        point(place, every=every, once=once, at=at, when=when, priority=priority, name=name)
    )


def before(
    place: str,
    *,
    every: int | None = None,
    once: bool = False,
    at: int | Collection[int] | None = None,
    when: Callable[[Any], bool] | None = None,
    priority: int = 0,
    name: str | None = None,
) -> Callable[[Function], Function]:
    """Mark a method of a callback object to fire before the action of the state `place`.

    `run.state` is still the state before. `name` and the rest are as in `on`.
    """
    return _marking(
        point(
            place,
            leading=True,
            every=every,
            once=once,
            at=at,
            when=when,
            priority=priority,
            name=name,
        )
    )


def point(place: str, *, at: int | Collection[int] | None = None, **rest: Any) -> Point:
    """Build a `Point`, with `at` given as one number or several."""
    if not isinstance(place, str):
        raise CallbackError(
            f'on({place!r}): give the name of a state first, as @trainer.on("step")'
        )
    visits = (at,) if isinstance(at, int) else None if at is None else tuple(at)
    return Point(place=place, at=visits, **rest)


def _marking(marked: Point) -> Callable[[Function], Function]:
    def mark(function: Function) -> Function:
        setattr(function, MARK, (*getattr(function, MARK, ()), marked))
        return function

    return mark


@dataclass(kw_only=True, eq=False)
class Callback:
    """A function attached to a point. Its counters are state, saved under `key`."""

    function: Callable[[Any], Any]
    point: Point
    key: str
    label: str
    visits: int = 0
    fired: int = 0

    def visit(self, run: Any) -> None:
        """Count a visit of the point, and fire when the filters let it."""
        self.visits += 1
        where = self.point
        if where.once and self.fired:
            return
        if where.at is not None and self.visits not in where.at:
            return
        if where.every is not None and self.visits % where.every:
            return
        if where.when is not None and not where.when(run):
            return
        self.fired += 1
        self.function(run)

    @property
    def call(self) -> Callable[[Any], Any]:
        """What the machine calls: the bare function where no visit needs counting."""
        return self.visit if self.point.filtered else self.function


@dataclass(eq=False)
class Callbacks:
    """The callbacks attached to one loop, in firing order at each point."""

    loop: Loop
    _all: list[Callback] = field(default_factory=list)
    _objects: dict[str, Any] = field(default_factory=dict)  # those that save themselves
    unsaved: dict[str, Any] = field(default_factory=dict)  # ... and those that do not

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._all)

    def attach(self, function: Callable[[Any], Any], where: Point) -> Callback:
        """Attach a function, checked now rather than when it first fires.

        Raises:
            CallbackError: no such point in the loop, or the function does not take one argument.
        """
        self._check_point(where)
        name = _name(function)
        _check_signature(function, name, where)
        callback = Callback(function=function, point=where, key=self._key(name, where), label=name)
        self._all.append(callback)
        return callback

    def has(self, where: Point) -> bool:
        """Whether the loop has this point."""
        edges = () if where.leading else (edge.name for edge in self.loop.transitions)
        return where.place in (*self.loop.names, *edges)

    def attach_object(self, instance: object) -> list[Callback]:
        """Attach the methods of `instance` that `st.on` and `st.before` marked."""
        kind = type(instance)
        found = [
            (getattr(instance, name), where)
            for name in dict.fromkeys(n for k in reversed(kind.__mro__) for n in vars(k))
            for where in getattr(getattr(kind, name, None), MARK, ())
        ]
        if not found:
            raise CallbackError(
                f"{kind.__qualname__} has no callback: mark its methods with "
                "@st.on('state'), or attach a function with trainer.on('state')"
            )
        named = hasattr(instance, "state_dict") and hasattr(instance, "load_state_dict")
        name = str(getattr(instance, "name", kind.__qualname__))
        if named and name in self._objects:
            raise CallbackError(
                f"two callback objects are called {name!r}: give each an attribute `name` of "
                "its own, under which its state is saved"
            )
        attached = [self.attach(method, where) for method, where in found]
        if named:
            self._objects[name] = instance
        else:
            self.unsaved[f"{name} #{len(self.unsaved)}"] = instance
        return attached

    @property
    def forgetful(self) -> list[str]:
        """Say which functions keep state in variables outside, which no checkpoint holds."""
        return [
            f"callback {c.label!r} sets {', '.join(map(repr, names))} outside itself, which no "
            "checkpoint holds: keep it in a callback object or in the module"
            for c in self._all
            if (names := _set_outside(c.function))
        ]

    def detach(self, callbacks: Iterable[Callback]) -> None:
        """Take these off again."""
        gone = list(callbacks)
        self._all = [callback for callback in self._all if callback not in gone]

    def firing(self, place: str, *, leading: bool = False) -> list[Callback]:
        """Return the callbacks of a point in the order they fire."""
        here = [c for c in self._all if c.point.place == place and c.point.leading is leading]
        return sorted(here, key=lambda callback: -callback.point.priority)

    def reset(self) -> None:
        """Count from the beginning: a fresh run starts."""
        for callback in self._all:
            callback.visits = callback.fired = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of filtered callbacks and the states of callback objects."""
        return {
            "counters": {c.key: [c.visits, c.fired] for c in self._all if c.point.filtered},
            "objects": {name: o.state_dict() for name, o in self._objects.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the counters and objects that `state` names; `differences` tells what it lacks."""
        for callback in self._all:
            if callback.key in state["counters"]:
                callback.visits, callback.fired = state["counters"][callback.key]
        for name, instance in self._objects.items():
            if name in state["objects"]:
                instance.load_state_dict(state["objects"][name])

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """Name the callback objects that only one of this run and the saved one has."""
        saved, here = set(state["objects"]), set(self._objects)
        return [
            *(f"callback {name!r} has saved state, but is not attached" for name in saved - here),
            *(f"callback {name!r} has no saved state" for name in here - saved),
        ]

    def recounted(self, state: Mapping[str, Any]) -> list[str]:
        """Say whose visits are counted from 0 here, and whose saved counts nobody takes up."""
        saved = {key for key, (visits, _) in state["counters"].items() if visits}
        here = {c.key for c in self._all if c.point.filtered}
        gone = [f"{key!r} is only in the checkpoint" for key in sorted(saved - here)]
        new = [f"{key!r} is counted from 0" for key in sorted(here - set(state["counters"]))]
        advice = "; name=... keeps a counter when a function is renamed" if gone and new else ""
        return [f"counter of callback {'; '.join([*gone, *new])}{advice}"] if gone or new else []

    def _check_point(self, where: Point) -> None:
        states = self.loop.names
        edges = [edge.name for edge in self.loop.transitions]
        place = where.place
        if where.leading and place not in states:
            raise CallbackError(f"before({place!r}): no such state{nearest(place, states)}")
        if place not in states and place not in edges:
            kind, known = ("transition", edges) if "->" in str(place) else ("state", list(states))
            raise CallbackError(f"on({place!r}): no such {kind}{nearest(place, known)}")

    def _key(self, name: str, where: Point) -> str:
        taken = {callback.key for callback in self._all}
        if where.name is not None:
            if where.name in taken:
                raise CallbackError(f"name={where.name!r} is taken by another callback")
            return where.name
        stem = f"{where}: {name}"
        ordinal = sum(1 for key in taken if key.rpartition(" #")[0] == stem)
        return f"{stem} #{ordinal}"


def _name(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)  # a functools.partial names what it calls
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _set_outside(function: Any) -> list[str]:
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    stores = {"STORE_GLOBAL": None, "STORE_DEREF": code.co_freevars}
    return sorted(
        {
            instruction.argval
            for instruction in dis.get_instructions(code)
            if instruction.opname in stores
            and (stores[instruction.opname] is None or instruction.argval in code.co_freevars)
        }
    )


def _check_signature(function: object, name: str, where: Point) -> None:
    if not callable(function):
        raise CallbackError(f"{function!r} {where} is no function: give def callback(run)")
    if deferred(function):
        raise CallbackError(f"callback {name!r} {where} must be a plain function, def {name}(run)")
    if not _takes_one(function):
        raise CallbackError(
            f"callback {name!r} {where} must take one argument, the run: write def {name}(run)"
        )


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
