"""Plain attributes of modules and callback objects that change in training: they are state too.

An attribute that differs from what it was when `fit` began is saved and restored; the others stay
as the program gives them, so that a changed constructor argument is not undone by a resume.
Generators held in attributes are always saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from statetrain.errors import CheckpointError
from statetrain.persist import container, randomness
from statetrain.persist.parts import Part

__all__ = ["Attributes", "holders"]

OWN = frozenset(vars(nn.Module())) | {"run", "trainer"}
SCALARS = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (list, tuple, dict, set, frozenset)


def holders(modules: Mapping[str, nn.Module], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return every submodule and object by its path."""
    found = {f"callback {name}": instance for name, instance in objects.items()}
    for path, module in modules.items():
        for name, each in module.named_modules():
            found[f"{path}.{name}" if name else path] = each
    return found


class Attributes:
    """Remember what the attributes of some objects were, and tell which have changed."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.objects = dict(objects)
        self._before = {
            path: {name: _mark(value) for name, value in _plain(instance).items()}
            for path, instance in self.objects.items()
        }

    def changed(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that are not what they were, and all generators."""
        found: dict[str, dict[str, Any]] = {}
        for path, instance in self.objects.items():
            before = self._before[path]
            for name, value in _plain(instance).items():
                if isinstance(value, randomness.Rng):
                    found.setdefault(path, {})[name] = Part("generator", randomness.state_of(value))
                elif name not in before or before[name] != _mark(value):
                    found.setdefault(path, {})[name] = _detached(value)
        return found

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the attributes in `saved`; an object that is not there any more is passed over."""
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


def _plain(instance: Any) -> dict[str, Any]:
    """Return the attributes that hold data or generators, but no parameters, modules or others."""
    own = OWN if isinstance(instance, nn.Module) else ()
    return {k: v for k, v in vars(instance).items() if k not in own and _is_data(v)}


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
