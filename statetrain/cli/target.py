"""Finds a loop that the command line names as `pkg.mod:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from statetrain.errors import StatetrainError
from statetrain.loop import Loop, nearest

__all__ = ["load_loop"]


def load_loop(target: str) -> Loop:
    """Return the loop that `target` names; a function without arguments that returns one is called.

    The current folder is searched for modules first, as `python -m` does.

    Raises:
        StatetrainError: there is no such module or name, or it is no loop.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise StatetrainError(
            f"{target!r} names no loop: write pkg.mod:name or path/to/file.py:name"
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise StatetrainError(f"no {part!r} in {place!r}{_suggestion(part, vars(found))}")
        found = getattr(found, part)
    return _as_loop(found, target)


def _as_loop(found: object, target: str) -> Loop:
    if callable(found):
        try:
            found = found()
        except Exception as error:
            raise StatetrainError(f"calling {target!r} failed: {_told(error)}") from error
    if not isinstance(found, Loop):
        raise StatetrainError(
            f"{target!r} is of type {type(found).__name__}, not a loop: name an st.Loop, or a "
            "function of no arguments that returns one"
        )
    return found


def _suggestion(name: str, names: Mapping[str, object]) -> str:
    public = [known for known in names if not known.startswith("_")]
    loops = [known for known in public if isinstance(names[known], Loop)]
    hint = nearest(name, public)
    # where no name is near, a list of all that a script imports helps less than its loops
    return hint if "did you mean" in hint or not loops else nearest(name, loops)


def _load_module(name: str) -> ModuleType:
    _search_first(Path.cwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise StatetrainError(f"cannot import {name!r}: {_told(error)}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise StatetrainError(f"no file {str(path)!r} in {str(Path.cwd())!r}")
    _search_first(path.resolve().parent)  # what `python path/to/file.py` searches first
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # noqa: S101  a .py file always has one
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise StatetrainError(f"cannot load {str(path)!r}: {_told(error)}") from error
    return module


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
