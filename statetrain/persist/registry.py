"""The classes that a checkpoint may hold, by the names given to them in code."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from statetrain.errors import CheckpointError

__all__ = ["Registered", "register", "registered_as", "registered_class"]


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A class that may be stored, and how it becomes a tree of plain values and back."""

    cls: type
    name: str
    version: int
    to_state: Callable[[Any], object]
    from_state: Callable[[Any], object]
    upgrade: Callable[[Any, int], object] | None


# filled by code at import, never from a file: what a checkpoint may build is the program's choice
_by_class: dict[type, Registered] = {}
_by_name: dict[str, Registered] = {}


def register(
    cls: type,
    name: str,
    *,
    version: int = 1,
    to_state: Callable[[Any], object] | None = None,
    from_state: Callable[[Any], object] | None = None,
    upgrade: Callable[[Any, int], object] | None = None,
) -> None:
    """Let checkpoints hold objects of exactly `cls`, stored under `name`.

    Dataclasses, enums and namedtuples need no functions. For other classes `to_state(obj)` gives
    values that a checkpoint can hold and `from_state(state)` builds the object again. A state of an
    older `version` goes through `upgrade(state, its_version)` first. Register in code that runs
    before a checkpoint is read; the name, not the class's place, is what files hold.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass
        ... class Meter:
        ...     total: float
        >>> register(Meter, "meter")

    Raises:
        CheckpointError: the name is taken, or the class needs `to_state` and `from_state`.
    """
    if not isinstance(cls, type):
        raise CheckpointError(f"register takes a class, not {cls!r}: write register(type(x), ...)")
    if (to_state is None) != (from_state is None):
        raise CheckpointError(f"register {cls.__qualname__}: give both to_state and from_state")
    if to_state is None or from_state is None:
        to_state, from_state = _defaults(cls)
    other = _by_name.get(name)
    if other is not None and not _same_class(other.cls, cls):
        raise CheckpointError(
            f"the name {name!r} is taken by {other.cls.__qualname__}: give {cls.__qualname__} "
            "another"
        )
    if other is not None:  # a notebook cell that defines the class was run again
        _by_class.pop(other.cls, None)
    earlier = _by_class.get(cls)
    if earlier is not None:
        raise CheckpointError(f"{cls.__qualname__} is registered already, as {earlier.name!r}")
    entry = Registered(
        cls=cls,
        name=name,
        version=version,
        to_state=to_state,
        from_state=from_state,
        upgrade=upgrade,
    )
    _by_class[cls] = _by_name[name] = entry


def registered_as(cls: type) -> Registered | None:
    """Return how objects of exactly `cls` are stored, if they can be."""
    return _by_class.get(cls)


def registered_class(name: str) -> Registered | None:
    """Return what was registered under `name`."""
    return _by_name.get(name)


def _same_class(old: type, new: type) -> bool:
    return (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)


def _defaults(cls: type) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    if issubclass(cls, enum.Flag):
        return lambda member: member.value, cls
    if issubclass(cls, enum.Enum):
        return lambda member: member.name, lambda name: cls[name]
    if dataclasses.is_dataclass(cls):
        return _fields_of, lambda state: _from_fields(cls, state)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return lambda value: value._asdict(), lambda state: _from_names(cls, state)
    raise CheckpointError(
        f"register {cls.__qualname__}: give to_state= and from_state=; only dataclasses, enums and "
        "namedtuples have them by default"
    )


def _fields_of(value: Any) -> dict[str, object]:
    names = [field.name for field in dataclasses.fields(value)]
    extra = sorted(set(getattr(value, "__dict__", ())) - set(names))
    if extra:
        raise CheckpointError(
            f"{type(value).__qualname__} has attributes that are no fields ({', '.join(extra)}): "
            "declare them, or register it with to_state= and from_state="
        )
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _from_fields(cls: type, state: Any) -> object:
    names = {field.name for field in dataclasses.fields(cls)}
    if not isinstance(state, dict) or set(state) != names:
        raise CheckpointError(_changed(cls, state, names))
    value: object = object.__new__(cls)  # not __init__: __post_init__ ran when the object was made
    for name, part in state.items():
        object.__setattr__(value, name, part)
    return value


def _from_names(cls: Any, state: Any) -> object:
    if not isinstance(state, dict) or tuple(state) != cls._fields:
        raise CheckpointError(_changed(cls, state, cls._fields))
    return cls._make(state.values())


def _changed(cls: type, state: object, names: object) -> str:
    stored = sorted(map(str, state)) if isinstance(state, dict) else repr(state)
    return (
        f"{cls.__qualname__} was stored with the fields {stored} and has {sorted(names)} now: "  # type: ignore[call-overload]  # names are strings
        "register it with a higher version= and upgrade="
    )
