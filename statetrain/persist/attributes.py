"""Plain attributes of modules and callback objects that change in training: they are state too.

An attribute that training has changed is saved and restored; the others stay as the program gives
them, so that a changed constructor argument is not undone by a resume. Generators held in
attributes are always saved.

Training may be several calls of `fit` in one process. What an earlier one changed, and nobody has
touched since, still counts as changed: a new process, whose module is as it is made, needs it. What
the program itself set between two calls is the program's. So each object remembers, for each
attribute, what it was before training and how the newest `fit` left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn

from statetrain.errors import CheckpointError
from statetrain.persist import container, randomness
from statetrain.persist.parts import Part, submodules

__all__ = ["Attributes", "holders"]

MEMORY = "_statetrain_memory"  # the attribute in which an object remembers
OWN = frozenset(vars(nn.Module())) | {"run", "trainer"}
COPIED = 1 << 20  # bytes up to which a value from before training is kept, to be put back
SCALARS = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (list, tuple, dict, set, frozenset)


def holders(modules: Mapping[str, nn.Module], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return every submodule and object by its path."""
    found = {f"callback {name}": instance for name, instance in objects.items()}
    for path, module in modules.items():
        for name, each in submodules(module).items():
            found[f"{path}.{name}" if name else path] = each
    return found


class Before(NamedTuple):
    """What an attribute was before training. Plain data, since pickles of the object have it."""

    mark: Any
    copy: tuple[Any, ...]  # of one item, or empty where the value is too large to be kept


ABSENT = (None, ())  # the attribute was not there


class Attributes:
    """Remember what the attributes of some objects were, and tell which have changed."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.objects = dict(objects)
        self._before = {path: _remembered(instance) for path, instance in self.objects.items()}

    def leave(self) -> None:
        """Let the objects remember how they were, and how they are left now."""
        for path, instance in self.objects.items():
            before = self._before[path]
            vars(instance)[MEMORY] = {
                name: (tuple(before.get(name, ABSENT)), _mark(value))
                for name, value in _plain(instance).items()
            }

    def changed(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that are not what they were, and all generators."""
        found: dict[str, dict[str, Any]] = {}
        for path, instance in self.objects.items():
            before = self._before[path]
            for name, value in _plain(instance).items():
                if isinstance(value, randomness.Rng):
                    found.setdefault(path, {})[name] = Part("generator", randomness.state_of(value))
                elif before.get(name, ABSENT)[0] != _mark(value):
                    found.setdefault(path, {})[name] = _detached(value)
        return found

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the attributes in `saved`, and put the others back to what they were before training.

        An object that is not there any more is passed over.
        """
        for path, instance in self.objects.items():
            self._put_back(path, instance, but=saved.get(path, {}))
        for path, attributes in saved.items():
            instance = self.objects.get(path)
            for name, value in attributes.items():
                live = getattr(instance, name, None)
                if isinstance(value, Part):
                    if isinstance(live, randomness.Rng):
                        randomness.set_state(live, value.state)
                elif instance is not None:
                    on = live.device if isinstance(live, torch.Tensor) else None
                    moved = isinstance(value, torch.Tensor) and on is not None
                    setattr(instance, name, value.to(on) if moved else value)

    def _put_back(self, path: str, instance: Any, *, but: Mapping[str, Any]) -> None:
        before = self._before[path]
        for name, value in _plain(instance).items():
            was, copy = before.get(name, ABSENT)
            if name in but or isinstance(value, randomness.Rng) or was == _mark(value):
                continue
            if name not in before:
                delattr(instance, name)
            elif copy:
                setattr(instance, name, deepcopy(copy[0]))
            else:
                raise CheckpointError(
                    f"{path}.{name} has changed since training began, and is too large to be put "
                    "back: make the object anew, or register it as a buffer"
                )


def _remembered(instance: Any) -> dict[str, Before]:
    """Return what each attribute was before training: now, unless the newest `fit` left it so."""
    memory = vars(instance).get(MEMORY, {})
    found = {}
    for name, value in _plain(instance).items():
        mark = _mark(value)
        before, left = memory.get(name, (ABSENT, None))
        if name not in memory or left != mark:
            found[name] = Before(mark, _copied(value))
        elif before != ABSENT:
            found[name] = Before(*before)
    return found


def _copied(value: Any) -> tuple[Any, ...]:
    if isinstance(value, SCALARS):
        return (value,)
    if isinstance(value, randomness.Rng):
        return ()
    return (deepcopy(_detached(value)),) if _size(value) <= COPIED else ()


def _size(value: Any) -> int:
    """Return about how many bytes a value takes."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(_size(key) + _size(item) for key, item in value.items())
    if type(value) in CONTAINERS:
        return sum(map(_size, value))
    return len(value) if isinstance(value, (str, bytes)) else 8


def _plain(instance: Any) -> dict[str, Any]:
    """Return the attributes that hold data or generators, but no parameters, modules or others."""
    own = OWN if isinstance(instance, nn.Module) else ()
    return {k: v for k, v in vars(instance).items() if k not in (*own, MEMORY) and _is_data(v)}


def _is_data(value: Any, depth: int = 0) -> bool:
    if isinstance(value, nn.Parameter):
        return False
    if isinstance(value, (*SCALARS, torch.Tensor, np.ndarray, np.generic, randomness.Rng)):
        return depth == 0 or not isinstance(value, randomness.Rng)
    if type(value) in CONTAINERS and depth < 8:
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return all(_is_data(item, depth + 1) for item in items)
    return False


def _mark(value: Any) -> Any:
    """Return what tells this value from another: itself, or a digest of it."""
    if isinstance(value, SCALARS):
        return (type(value), repr(value))
    if isinstance(value, randomness.Rng):
        return None
    digest = xxhash.xxh3_128()
    try:
        container.write(_detached(value), _Sink(digest), uuid=bytes(16))
    except CheckpointError:
        return id(value)  # of a kind that cannot be stored: saving it says so, if it is replaced
    return digest.digest()


class _Sink:
    """A file that only feeds a digest."""

    def __init__(self, digest: Any) -> None:
        self._digest = digest

    def write(self, data: Any, /) -> int:
        self._digest.update(data)
        return len(data)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(_detached(item) for item in value)
    if type(value) is dict:
        return {key: _detached(item) for key, item in value.items()}
    return value
