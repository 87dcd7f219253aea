"""What the arguments of the public constructors may be, and the words for those that are not."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

from statetrain.errors import CheckpointError, TrainingError
from statetrain.loop import nearest

__all__ = [
    "called",
    "check_counts",
    "check_list",
    "check_seed",
    "keywords_checked",
    "place",
    "seconds",
]

Function = TypeVar("Function", bound=Callable[..., Any])
T = TypeVar("T")


def keywords_checked(function: Function) -> Function:
    """Let a call with a keyword that `function` does not have name the nearest that it has.

    Raises:
        TrainingError: when it is called so.
    """
    known = inspect.signature(function).parameters

    @wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        if wrong := _misspelt(named, known):
            name = function.__qualname__.removesuffix(".__init__")
            raise TrainingError(f"{name}({wrong}")
        return function(*arguments, **named)

    return checked  # type: ignore[return-value]  # it is called as `function` is


def called(begin: Callable[..., T], options: Any, *arguments: Any, **named: Any) -> T:
    """Return `begin(options, ...)`, a loop's start, with what `fit` was given.

    Raises:
        TrainingError: it takes other arguments; the message says which.
    """
    known = [*inspect.signature(begin).parameters][1:]
    if wrong := _misspelt(named, known):
        raise TrainingError(f"fit({wrong}")
    try:
        inspect.signature(begin).bind(options, *arguments, **named)
    except TypeError as error:
        raise TrainingError(f"{error}: it is called as fit({', '.join(known)})") from None
    return begin(options, *arguments, **named)


def check_counts(**counts: Any) -> None:
    """Raise a `TrainingError` unless each is None or a whole number from 1."""
    for name, value in counts.items():
        if value is not None and (type(value) is not int or value < 1):
            raise TrainingError(f"{name}={value!r}: give a whole number from 1, or None")


def check_seed(seed: Any) -> None:
    """Raise a `TrainingError` unless the seed is None or a whole number."""
    if seed is not None and type(seed) is not int:
        raise TrainingError(f"seed={seed!r}: give a whole number, or None")


def place(name: str, given: Any) -> str:
    """Return a path or a URL as text.

    Raises:
        CheckpointError: it is neither.
    """
    if not isinstance(given, (str, os.PathLike)):
        raise CheckpointError(f"{name}={given!r}: give a path or a URL")
    return os.fspath(given)


def check_list(name: str, given: Any, *, needs: Sequence[str] = ()) -> list[Any]:
    """Return the objects in `given`: instances with the methods `needs`.

    Raises:
        TrainingError: it is no list of them; the message says what to write.
    """
    single = isinstance(given, (type, str)) or not hasattr(given, "__iter__")
    if single:
        raise TrainingError(f"{name}={given!r}: give a list, as {name}=[{_made(given)}]")
    items = list(given)
    for item in items:
        if isinstance(item, type):
            raise TrainingError(
                f"{name} has the class {item.__qualname__}: give an object, {_made(item)}"
            )
        lacking = [method for method in needs if not callable(getattr(item, method, None))]
        if lacking:
            raise TrainingError(
                f"{name} has {item!r}, which has no {', '.join(lacking)}: give objects with "
                f"{', '.join(needs)}"
            )
    return items


def seconds(limit: Any) -> float | None:
    """Return a time limit in seconds.

    Raises:
        TrainingError: it is no number, `timedelta` or "HH:MM:SS", or not above 0.
    """
    if limit is None:
        return None
    found = 0.0
    if isinstance(limit, timedelta):
        found = limit.total_seconds()
    elif isinstance(limit, str):
        match = re.fullmatch(r"(?:(\d+):)?(\d+):(\d\d):(\d\d)", limit)
        days, hours, minutes, rest = (
            (int(part or 0) for part in match.groups()) if match else [0] * 4
        )
        found = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif isinstance(limit, (int, float)):
        found = float(limit)
    if not found > 0:
        raise TrainingError(
            f'max_time={limit!r}: give seconds, a timedelta, "HH:MM:SS" or "DD:HH:MM:SS"'
        )
    return found


def _made(given: Any) -> str:
    return f"{given.__qualname__}(...)" if isinstance(given, type) else repr(given)


def _misspelt(named: Mapping[str, Any], known: Iterable[str]) -> str | None:
    """Say which keyword is not known, as the end of a call, and which is meant; None if none."""
    names = [name for name in known if name != "self"]
    for name, value in named.items():
        if name not in names:
            return f"{name}={value!r}): no such argument{nearest(name, names)}"
    return None
