"""The values that a checkpoint can hold beside plain ones, each with its code in the format."""

from __future__ import annotations

import datetime
import random
import re
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import torch

from statetrain.persist.tensors import DTYPES, UnstorableError

__all__ = ["KINDS", "KINDS_BY_CODE", "PAIRS", "Kind", "array_dtype", "pairs"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of value: `split` takes it apart into storable parts, `join` puts it together.

    `header` is how many parts come before the items. `paired` items are keys and values in turn,
    `unordered` ones are sorted by their bytes so that equal sets have equal bytes. A `shared` value
    is stored once however often it is referred to, and is one object again afterwards.
    """

    code: int
    split: Callable[[Any], Iterable[object]]
    join: Callable[..., object]
    header: int = 0
    paired: bool = False
    unordered: bool = False
    shared: bool = False


def pairs(items: Iterable[Any], *, into: Any = None) -> Any:
    """Return the mapping of keys and values given in turn, filled into `into`.

    Raises:
        ValueError: a key has no value, or is there twice.
    """
    flat = list(items)
    mapping = {} if into is None else into
    for key, value in zip(flat[::2], flat[1::2], strict=True):
        dict.__setitem__(mapping, key, value)
    if len(mapping) * 2 != len(flat):
        raise ValueError("a key is there twice")
    return mapping


def _flat(mapping: dict[Any, Any]) -> list[object]:
    return [part for pair in mapping.items() for part in pair]


PAIRS = Kind(code=39, split=_flat, join=lambda *p: pairs(p), paired=True, shared=True)
"""A dict with keys that are not all strings or 64-bit integers."""

_FACTORIES: dict[str, Any] = {
    c.__name__: c
    for c in (list, dict, set, tuple, int, float, str, bool, bytes, deque, Counter, OrderedDict)
}


def _split_default(mapping: defaultdict[Any, Any]) -> list[object]:
    factory = mapping.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise UnstorableError(
            f"a defaultdict's factory {factory!r} is none of {', '.join(_FACTORIES)}: store "
            "dict(value) instead"
        )
    return [name, *_flat(mapping)]


def _join_default(name: str | None, *items: object) -> object:
    return pairs(items, into=defaultdict(None if name is None else _FACTORIES[name]))


def _join_set(cls: type) -> Callable[..., object]:
    def join(*items: object) -> object:
        value = cls(items)
        if len(value) != len(items):
            raise ValueError("an element is there twice")
        return value

    return join


def _named(code: int, name: str, split: Callable[[Any], Iterable[object]]) -> Kind:
    """Return a kind that shares its code with others and is told apart by its first part."""
    return Kind(code=code, split=lambda v: (name, *split(v)), join=_JOINS[code])


def _split_zone(zone: datetime.tzinfo | None) -> list[object]:
    if zone is None:
        return []
    if type(zone) is not datetime.timezone:
        raise UnstorableError(f"its time zone {zone!r} has no fixed offset: use value.isoformat()")
    return [zone.utcoffset(None), zone.tzname(None)]


def _split_datetime(t: datetime.datetime) -> list[object]:
    clock = (t.year, t.month, t.day, t.hour, t.minute, t.second, t.microsecond, t.fold)
    return [*clock, *_split_zone(t.tzinfo)]


def _join_datetime(*parts: Any) -> object:
    year, month, day, hour, minute, second, microsecond, fold = parts[:8]
    zone = None
    if parts[8:]:
        offset, name = parts[8:]
        zone = datetime.timezone(offset)
        if zone.tzname(None) != name:
            zone = datetime.timezone(offset, name)
    day_of = datetime.datetime(year, month, day, hour, minute, second, microsecond)
    return day_of.replace(fold=fold, tzinfo=zone)


def _join_date(name: str, *parts: Any) -> object:
    if name == "datetime":
        return _join_datetime(*parts)
    return {"date": datetime.date, "timedelta": datetime.timedelta}[name](*parts)


def _join_torch(name: str, *parts: Any) -> object:
    if name == "dtype":
        return DTYPES[parts[0]]
    if name == "device":
        return torch.device(*parts)
    if name != "Size":
        raise ValueError(f"torch has no {name}")
    return torch.Size(parts)


def _join_path(name: str, text: str) -> object:
    classes: dict[str, Callable[[str], object]] = {
        "Path": Path,
        "PurePosixPath": PurePosixPath,
        "PureWindowsPath": PureWindowsPath,
    }
    return classes[name](text)


def _join_number(name: str, *parts: Any) -> object:
    if name == "UUID":
        return uuid.UUID(bytes=parts[0])
    return {"slice": slice, "range": range, "Decimal": Decimal, "Fraction": Fraction}[name](*parts)


def _split_random(rng: random.Random) -> list[object]:
    version, words, gauss = rng.getstate()
    return [version, struct.pack(f"<{len(words)}I", *words), gauss]


def _join_random(version: int, words: bytes, gauss: float | None) -> object:
    rng = random.Random()  # noqa: S311  # a training's generator, not a secret's
    rng.setstate((version, struct.unpack(f"<{len(words) // 4}I", words), gauss))
    return rng


_BIT_GENERATORS: dict[str, Any] = {
    c.__name__: c
    for c in (
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.MT19937,
        np.random.Philox,
        np.random.SFC64,
    )
}


def _split_bits(bits: Any) -> list[object]:
    seed = bits.seed_seq  # it is not in the state, but spawn() draws from it
    if type(seed) is np.random.SeedSequence:
        seeds = [seed.entropy, seed.spawn_key, seed.pool_size, seed.n_children_spawned]
    else:
        seeds = []
    return [type(bits).__name__, bits.state, *seeds]


def _join_bits(name: str, state: object, *seeds: Any) -> object:
    seed: Any = 0
    if seeds:
        entropy, spawn_key, pool_size, spawned = seeds
        if not 4 <= pool_size <= 4096:
            raise ValueError("a seed sequence's pool size is out of range")
        seed = np.random.SeedSequence(
            entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=spawned
        )
    bits = _BIT_GENERATORS[name](seed)
    bits.state = state
    return bits


def _join_numpy(name: str, *parts: Any) -> object:
    if name == "Generator":
        return np.random.Generator(*parts)
    if name == "RandomState":
        bits, state = parts
        legacy = np.random.RandomState(bits)
        legacy.set_state(state)
        return legacy
    return _join_bits(name, *parts)


def _split_legacy(rng: np.random.RandomState) -> list[object]:
    bits = rng._bit_generator  # noqa: SLF001  # get_state leaves out what it is shared with
    return [bits, rng.get_state(legacy=False)]


def _split_generator(rng: torch.Generator) -> list[object]:
    return [str(rng.device), rng.get_state().numpy().tobytes()]


def _join_generator(device: str, state: bytes) -> object:
    rng = torch.Generator(device=device)
    rng.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return rng


def split_sparse(tensor: torch.Tensor) -> list[object]:
    """Return the parts of a sparse tensor: its layout, shape and dense inner tensors."""
    layout = str(tensor.layout).removeprefix("torch.")
    detached = tensor.detach()
    head: list[object] = [layout, list(tensor.shape), tensor.requires_grad]
    if tensor.layout is torch.sparse_coo:  # indices() refuses what is not coalesced
        inner = [detached._indices(), detached._values()]  # noqa: SLF001
        return [*head, tensor.is_coalesced(), *inner]
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [*head, True, detached.crow_indices(), detached.col_indices(), detached.values()]
    return [*head, True, detached.ccol_indices(), detached.row_indices(), detached.values()]


def _join_sparse(
    layout: str, size: list[int], requires_grad: bool, coalesced: bool, *inner: Any
) -> object:
    build: Any = torch.sparse_coo_tensor
    options: dict[str, Any] = {"is_coalesced": coalesced}
    if layout != "sparse_coo":
        layouts = ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
        build = torch.sparse_compressed_tensor
        options = {"layout": {name: getattr(torch, name) for name in layouts}[layout]}
    with catch_warnings():
        simplefilter("ignore", UserWarning)  # "CSR is in beta": the user chose it before
        tensor = build(*inner, size, check_invariants=True, **options)
    return tensor.requires_grad_(requires_grad)


_DTYPE = re.compile(r"[<>|][biufcSUVmM]\d{1,9}(\[\w{1,8}\])?")


def array_dtype(text: object) -> np.dtype[Any]:
    """Return the dtype that `text` names, one whose elements are plain bytes.

    Raises:
        ValueError: it names none.
    """
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise ValueError(f"no dtype of plain bytes: {text!r}")
    dtype = np.dtype(text)
    if dtype.hasobject or dtype.str != text:
        raise ValueError(f"no dtype of plain bytes: {text!r}")
    return dtype


_JOINS: dict[int, Callable[..., object]] = {
    9: _join_torch,
    10: _join_date,
    11: _join_path,
    12: _join_number,
    65: _join_numpy,
}

KINDS: dict[type, Kind] = {
    tuple: Kind(code=32, split=iter, join=lambda *p: p, shared=True),
    set: Kind(code=33, split=iter, join=_join_set(set), unordered=True, shared=True),
    frozenset: Kind(code=34, split=iter, join=_join_set(frozenset), unordered=True, shared=True),
    deque: Kind(
        code=35,
        split=lambda d: (d.maxlen, *d),
        join=lambda maxlen, *p: deque(p, maxlen),
        header=1,
        shared=True,
    ),
    OrderedDict: Kind(
        code=36,
        split=_flat,
        join=lambda *p: OrderedDict(pairs(p)),
        paired=True,
        shared=True,
    ),
    defaultdict: Kind(
        code=37, split=_split_default, join=_join_default, header=1, paired=True, shared=True
    ),
    Counter: Kind(
        code=38,
        split=_flat,
        join=lambda *p: pairs(p, into=Counter()),
        paired=True,
        shared=True,
    ),
    torch.dtype: _named(9, "dtype", lambda d: (str(d).removeprefix("torch."),)),
    torch.device: _named(9, "device", lambda d: (str(d),)),
    torch.Size: _named(9, "Size", iter),
    datetime.datetime: _named(10, "datetime", _split_datetime),
    datetime.date: _named(10, "date", lambda d: (d.year, d.month, d.day)),
    datetime.timedelta: _named(10, "timedelta", lambda d: (d.days, d.seconds, d.microseconds)),
    PosixPath: _named(11, "Path", lambda p: (str(p),)),
    WindowsPath: _named(11, "Path", lambda p: (str(p),)),
    PurePosixPath: _named(11, "PurePosixPath", lambda p: (str(p),)),
    PureWindowsPath: _named(11, "PureWindowsPath", lambda p: (str(p),)),
    slice: _named(12, "slice", lambda s: (s.start, s.stop, s.step)),
    range: _named(12, "range", lambda r: (r.start, r.stop, r.step)),
    Decimal: _named(12, "Decimal", lambda d: (str(d),)),
    Fraction: _named(12, "Fraction", lambda f: (f.numerator, f.denominator)),
    uuid.UUID: _named(12, "UUID", lambda u: (u.bytes,)),
    random.Random: Kind(code=64, split=_split_random, join=_join_random, shared=True),
    np.random.Generator: Kind(
        code=65, split=lambda g: ("Generator", g.bit_generator), join=_join_numpy, shared=True
    ),
    np.random.RandomState: Kind(
        code=65,
        split=lambda r: ("RandomState", *_split_legacy(r)),
        join=_join_numpy,
        shared=True,
    ),
    torch.Generator: Kind(code=66, split=_split_generator, join=_join_generator, shared=True),
    **{
        cls: Kind(code=65, split=_split_bits, join=_join_numpy, shared=True)
        for cls in _BIT_GENERATORS.values()
    },
}
"""How a value of exactly this type is stored."""

SPARSE = Kind(code=72, split=split_sparse, join=_join_sparse, shared=True)

KINDS_BY_CODE: dict[int, Kind] = {kind.code: kind for kind in (*KINDS.values(), PAIRS, SPARSE)}
"""How a value is put together again; kinds that share a code share `join` too."""
