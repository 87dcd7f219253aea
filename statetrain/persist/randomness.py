"""The random streams of python, numpy, torch and cuda: read, set, exchanged, and found in objects.

It knows no `Run` and no files. A state here is a tree of plain values.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import random
import struct
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from statetrain.errors import CheckpointError

__all__ = [
    "Lane",
    "Rng",
    "capture",
    "generators",
    "reseed",
    "restore",
    "seed_everything",
    "set_state",
    "state_of",
]

Rng = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
"""A random generator object of the user's own."""

_LEGACY: Any = np.random.get_state.__self__  # type: ignore[attr-defined]  # numpy's global stream
_PYTHON: Any = random.getstate.__self__  # type: ignore[attr-defined]  # python's global stream
_get_bits: Any = np.random.get_bit_generator  # type: ignore[attr-defined]  # not in its stubs
_set_bits: Any = np.random.set_bit_generator  # type: ignore[attr-defined]


def capture() -> dict[str, Any]:
    """Return the state of the global streams of python, numpy and torch, as plain values.

    `cuda` holds one state a device, and is there only when this process uses cuda.
    """
    tree: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.default_generator.get_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tree["cuda"] = torch.cuda.get_rng_state_all()
    return tree


def restore(tree: Mapping[str, Any]) -> None:
    """Set the global streams to what `capture` returned.

    Raises:
        CheckpointError: the tree holds more cuda devices than this process sees.
    """
    cuda = tree.get("cuda", ())
    seen = torch.cuda.device_count() if cuda else 0
    if len(cuda) > seen:
        raise CheckpointError(
            f"the random state of {len(cuda)} cuda devices was saved and this process sees {seen}: "
            "resume with as many devices"
        )
    random.setstate(tree["python"])
    np.random.set_state(tree["numpy"])
    torch.default_generator.set_state(tree["torch"])
    for device, state in enumerate(cuda):
        torch.cuda.set_rng_state(state, device)


def seed_everything(seed: int) -> None:
    """Seed the global streams of python, numpy and torch, with all its devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy's global stream takes 32 bits
    torch.manual_seed(seed if -(2**63) <= seed < 2**64 else seed % 2**64)  # it takes no others


def digest(*key: int | str) -> bytes:
    """Return 32 bytes that depend on the key alone, the same in every process."""
    return hashlib.blake2b(repr(key).encode(), digest_size=32).digest()


def reseed(rng: Rng, seed: int) -> None:
    """Seed a generator object in place; `seed` is in [0, 2**63)."""
    if isinstance(rng, torch.Generator):
        rng.manual_seed(seed)
    elif isinstance(rng, np.random.Generator):
        bits: Any = rng.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(rng, np.random.RandomState):
        try:
            rng.seed(seed % 2**32)
        except TypeError:  # it knows MT19937 alone
            kind: Any = getattr(np.random, str(rng.get_state(legacy=False)["bit_generator"]))
            rng.set_state(np.random.RandomState(kind(seed)).get_state(legacy=False))
    else:
        rng.seed(seed)


def state_of(rng: Rng) -> Any:
    """Return the state of a generator object as plain values."""
    if isinstance(rng, torch.Generator):
        return rng.get_state()
    if isinstance(rng, np.random.Generator):
        return rng.bit_generator.state
    if isinstance(rng, np.random.RandomState):
        return rng.get_state(legacy=False)
    return rng.getstate()


def set_state(rng: Rng, state: Any) -> None:
    """Set a generator object to what `state_of` returned for it, or for one of its kind."""
    if isinstance(rng, torch.Generator):
        rng.set_state(state)
    elif isinstance(rng, np.random.Generator):
        rng.bit_generator.state = state
    elif isinstance(rng, np.random.RandomState):
        rng.set_state(state)
    else:
        rng.setstate(state)


class Lane:
    """Keep private streams of python, numpy and torch that replace the global ones inside.

        lane = Lane(seed, "order", epoch)
        with lane:
            ...  # random.random(), np.random.rand() and torch.rand() draw from the lane
        ...      # the global streams are where they were, bit for bit

    A lane goes on where it was when it is entered again; `lasting=False` drops its position when it
    is left, which is cheaper, so `seed` it before each use. What it draws depends on its key alone,
    whatever the process. The streams of cuda devices are exchanged too, once this process uses
    cuda; where it begins to inside a lane, from the next time on.
    """

    def __init__(self, *key: int | str, lasting: bool = True) -> None:
        self._lasting = lasting
        self._depth = 0
        self._outer: _Streams | None = None
        self._mine: _Streams | None = None
        self._bits: Any = None  # made once: a new MT19937 costs 70 us
        self._digest: bytes | None = digest(*key)

    def seed(self, *key: int | str) -> bytes:
        """Move the lane to the start of the streams of `key`, and return the key's digest."""
        found = digest(*key)
        self._digest = found
        if self._depth:
            self._sow(found)
        return found

    def __enter__(self) -> Lane:
        self._depth += 1
        if self._depth > 1:
            return self
        self._outer = _take()
        if self._digest is not None:
            if type(self._bits) is not np.random.MT19937:  # np.random.seed knows no other
                self._bits = np.random.MT19937(0)
            _set_bits(self._bits)
            self._sow(self._digest)
        elif self._mine is not None:
            _put(self._mine)
        else:
            self.__exit__()
            raise RuntimeError("a lane that is not lasting is seeded before each use")
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._mine = _take() if self._lasting else None
        if self._mine is not None:
            self._bits = self._mine[1]
        if self._outer is not None:
            _put(self._outer)
        self._outer = None

    def state_dict(self) -> dict[str, Any]:
        """Return where the lane is, as plain values."""
        if self._depth:
            return _plain(_take())
        if self._digest is not None:
            return {"digest": self._digest}
        return _plain(self._mine) if self._mine is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the lane to where `state_dict` was called; not while it is entered."""
        self._digest = state.get("digest")
        self._mine = None
        if "numpy" in state:
            numpy = state["numpy"]
            bits = getattr(np.random, numpy["bit_generator"])(0)
            bits.state = numpy
            gauss = {key: numpy[key] for key in ("has_gauss", "gauss")}
            cuda = list(state.get("cuda", ()))
            self._mine = (state["python"], bits, gauss, state["torch"], cuda)

    def _sow(self, found: bytes) -> None:
        python, numpy, seed = _SEEDS.unpack_from(found)
        random.seed(python)
        np.random.seed(numpy)
        torch.default_generator.manual_seed(seed >> 1)
        for generator in _cuda():
            generator.manual_seed(seed >> 1)
        self._digest = None


_SEEDS = struct.Struct("<QIQ")  # of python, numpy and torch, in a digest

_Streams = tuple[Any, Any, dict[str, Any], torch.Tensor, list[torch.Tensor]]
"""python's state, numpy's bit generator object and kept half of a pair, torch's, each device's."""


class _NoBits:
    """Stand in for a bit generator, so that numpy's kept normal is read without copying the rest.

    Exchanging the bit generator of numpy's global stream drops that number; `np.random.get_state`
    is the way to it and copies the 624 words beside it, in 28 us.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"bit_generator": "none", "state": None}


_NO_BITS = _NoBits()


def _cuda() -> tuple[torch.Generator, ...]:
    """Return the generator of each cuda device; none where this process does not use cuda."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    return torch.cuda.default_generators


def _take() -> _Streams:
    bits = _get_bits()
    _LEGACY._bit_generator = _NO_BITS  # noqa: SLF001  # see _NoBits
    try:
        found = np.random.get_state(legacy=False)
    finally:
        _LEGACY._bit_generator = bits  # noqa: SLF001
    gauss: Any = {key: found[key] for key in ("has_gauss", "gauss")}
    cuda = [generator.get_state() for generator in _cuda()]
    return random.getstate(), bits, gauss, torch.default_generator.get_state(), cuda


def _put(streams: _Streams) -> None:
    python, bits, gauss, state, cuda = streams
    random.setstate(python)
    _set_bits(bits)
    if gauss["has_gauss"]:
        _LEGACY._bit_generator = _NO_BITS  # noqa: SLF001  # see _NoBits
        try:
            np.random.set_state({"bit_generator": "none", "state": None, **gauss})
        finally:
            _LEGACY._bit_generator = bits  # noqa: SLF001
            _NO_BITS.__init__()  # type: ignore[misc]  # set_state wrote to it
    torch.default_generator.set_state(state)
    for generator, device_state in zip(_cuda(), cuda, strict=False):  # a device may be new
        generator.set_state(device_state)


def _plain(streams: _Streams) -> dict[str, Any]:
    python, bits, gauss, state, cuda = streams
    tree = {"python": python, "numpy": {**bits.state, **gauss}, "torch": state}
    return {**tree, "cuda": cuda} if cuda else tree


MAX_DEPTH = 8
MAX_NODES = 4096
MAX_ITEMS = 64  # a list of transforms is short; a list of file names has nothing to find

_METHODS = ("__getitem__", "__getitems__", "__call__", "__iter__", "forward")
_LEAVES = (
    *(str, bytes, int, float, complex, bool, type(None), type, types.ModuleType),
    *(torch.Tensor, np.ndarray, np.generic, range),
)


def generators(obj: object, *, skip: Iterable[object] = ()) -> list[tuple[str, Rng]]:
    """Return the random generators that `obj` holds, each with the path to it.

    It looks into attributes, short lists and dicts, nested transforms, closures, partials and the
    generators, functions and transforms that functions on the way use by their global names, but
    not into `skip`, nor at the global streams themselves. It is bounded, so that what is very deep
    or behind 64 items is not found.
    """
    seen = {id(found) for found in (_LEGACY, _PYTHON, torch.default_generator, *skip)}
    queue: deque[tuple[str, object, int]] = deque([("", obj, 0)])
    found: list[tuple[str, Rng]] = []
    nodes = 0
    while queue and nodes < MAX_NODES:
        path, value, depth = queue.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        nodes += 1
        if _is_rng(value):
            found.append((path.removeprefix("."), value))  # type: ignore[arg-type]  # _is_rng
        elif depth < MAX_DEPTH:
            queue.extend((path + name, child, depth + 1) for name, child in _children(value))
    return found


def _is_rng(value: object) -> bool:
    return isinstance(value, Rng) and not isinstance(value, random.SystemRandom)


def _children(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):  # no other Mapping: its values may be read from a disk
        items = islice(dict.items(value), MAX_ITEMS)
        yield from ((f"[{key!r}]", child) for key, child in items)
    elif isinstance(value, (list, tuple, deque)):
        plain: Any = next(kind for kind in (list, tuple, deque) if isinstance(value, kind))
        children = islice(plain.__iter__(value), MAX_ITEMS)  # not by a method of the user's
        yield from ((f"[{i}]", child) for i, child in enumerate(children))
    if type(value) in {dict, list, tuple, deque}:
        return
    if isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), ("", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _used_by(value)
    else:
        yield from _attributes(value)


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
    for i, value in enumerate(function.__defaults__ or ()):
        yield f".default[{i}]", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f".default[{name}]", value
    for name in dict.fromkeys(_names(code)):
        value = function.__globals__.get(name)
        if _is_rng(value) or _is_callee(value, function):
            yield f".{name}", value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from (line.argval for line in dis.get_instructions(code) if line.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:  # comprehensions, lambdas
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_callee(value: object, function: types.FunctionType) -> bool:
    """Whether it is a function of the same module, or a transform: an object that is called."""
    if isinstance(value, types.FunctionType):
        return value.__globals__ is function.__globals__
    return callable(value) and not isinstance(value, (type, types.BuiltinFunctionType))


def _attributes(value: Any) -> Iterator[tuple[str, object]]:
    for name, child in list(getattr(value, "__dict__", {}).items()):
        yield f".{name}", child
    for cls in type(value).__mro__:
        names: str | Sequence[str] = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name != "__dict__" and isinstance(
                cls.__dict__.get(name), types.MemberDescriptorType
            ):
                yield f".{name}", getattr(value, name, None)
    for name in _METHODS:
        method = getattr(type(value), name, None)
        if isinstance(method, types.FunctionType):
            yield f".{name}", method
