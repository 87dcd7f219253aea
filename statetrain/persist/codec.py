"""A tree of Python values as msgpack, and back: the only importer of msgpack.

The encoding is written down in docs/format.md. Plain values are msgpack's own; any other value is
an extension, or an array whose first element is an extension that says what it is. Nothing read
from a file names code to run: the kinds are a fixed table, classes are those registered in code.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar

import msgpack
import numpy as np
import torch

from statetrain.errors import CheckpointError
from statetrain.persist.registry import Registered, register, registered_as, registered_class
from statetrain.persist.tensors import TensorTable, UnstorableError
from statetrain.persist.values import KINDS, KINDS_BY_CODE, PAIRS, SPARSE, Kind, array_dtype, pairs

__all__ = [
    "MAX_INDEX",
    "DamagedError",
    "Decoder",
    "Encoder",
    "Opaque",
    "pack",
    "register",
    "unpack",
]

TENSOR, ARRAY, BIG_INT, ALIAS, COMPLEX, SURROGATES, BYTEARRAY, SCALAR, CLASS = (
    *range(1, 9),
    48,
)
LONGEST = 500  # characters of a message
MAX_DEPTH = 128
MAX_INDEX = 1 << 30
INLINE = 4096  # a smaller array costs less in the index than as a blob of its own


class DamagedError(CheckpointError):
    """Bytes that are not what was written: another checkpoint may still be whole.

    What a file holds may stand in the message, so it is cut short.
    """

    def __init__(self, message: str) -> None:
        cut = len(message) > LONGEST
        super().__init__(f"{message[:LONGEST]}…" if cut else message)


@dataclass(frozen=True, kw_only=True, eq=False)
class Opaque:
    """A value that was looked at without being built: its kind and its parts."""

    kind: str
    parts: tuple[object, ...]


def pack(plain: object) -> bytes:
    """Return plain values and extensions as msgpack; other types are refused, never converted."""
    packed: bytes = msgpack.packb(plain, strict_types=True, use_bin_type=True)
    return packed


def unpack(data: bytes) -> Any:
    """Return the plain values and extensions in `data`, built from no more than it holds.

    Raises:
        DamagedError: it is not one whole msgpack value, or a map has a key twice.
    """
    size = len(data)
    try:
        return msgpack.unpackb(
            data,
            strict_map_key=False,
            object_pairs_hook=lambda items: pairs(part for item in items for part in item),
            max_str_len=size,
            max_bin_len=size,
            max_array_len=size,
            max_map_len=size,
            max_ext_len=size,
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise DamagedError(f"damaged: not the msgpack that was written ({error})") from error


class Encoder:
    """Turn one tree into plain values and extensions; its tensors go into `table`."""

    def __init__(self) -> None:
        self.table = TensorTable()
        self.names: dict[str, int] = {}
        self._path: list[object] = []
        self._done: dict[int, tuple[int, object]] = {}
        self._open: set[int] = set()
        self._in_set = 0

    def encode(self, tree: object) -> Any:
        """Return `tree` as msgpack can hold it.

        Raises:
            CheckpointError: something in it cannot be stored; the message names where it is.
        """
        try:
            return self._value(tree)
        except RecursionError as error:
            raise self._refusal("it is nested too deeply") from error

    def _value(self, value: object) -> Any:
        cls = type(value)
        if cls in _PLAIN:
            return value
        leaf = _LEAVES.get(cls)
        if leaf is not None:
            return leaf(value)
        if cls is torch.Tensor or cls is torch.nn.Parameter:
            return self._tensor(value)
        if isinstance(value, np.generic):
            return [_tag(SCALAR), self._dtype(value.dtype), value.tobytes()]
        return self._shared(value, cls)

    def _shared(self, value: Any, cls: type) -> Any:
        """Encode what may be referred to from several places: once, and then by its number."""
        if not self._in_set and id(value) in self._done:
            return msgpack.ExtType(ALIAS, struct.pack("<I", self._done[id(value)][0]))
        kind = KINDS.get(cls)
        if kind is not None and not kind.shared:
            return self._parts(value, kind)
        if id(value) in self._open:
            raise self._refusal("it contains itself")
        if len(self._open) == MAX_DEPTH:
            raise self._refusal(f"it lies deeper than {MAX_DEPTH} levels")
        self._open.add(id(value))
        plain = self._built(value, cls, kind)
        self._open.discard(id(value))
        if not self._in_set:
            self._done[id(value)] = (len(self._done), value)  # the value, so that its id stays its
        return plain

    def _built(self, value: Any, cls: type, kind: Kind | None) -> Any:
        if kind is not None:
            return self._parts(value, kind)
        own = self._own.get(cls)
        if own is not None:
            return own(self, value)
        entry = registered_as(cls)
        if entry is None:
            raise self._unknown(cls)
        return self._registered(value, entry)

    def _list(self, value: list[object]) -> list[Any]:
        return [self._at(i, item) for i, item in enumerate(value)]

    def _dict(self, value: dict[Any, object]) -> Any:
        if all(map(_plain_key, value)):
            return {key: self._at(key, item) for key, item in value.items()}
        return self._parts(value, PAIRS)

    def _bytearray(self, value: bytearray) -> Any:
        return msgpack.ExtType(BYTEARRAY, bytes(value))

    def _sparse(self, value: torch.Tensor) -> Any:
        return self._parts(value, SPARSE)

    def _at(self, key: object, value: object) -> Any:
        """Encode a part that lies at `key`, so that an error can name where."""
        if type(value) in _PLAIN:
            return value
        self._path.append(key)
        plain = self._value(value)
        self._path.pop()
        return plain

    def _parts(self, value: Any, kind: Kind) -> list[Any]:
        try:
            parts = list(kind.split(value))
        except UnstorableError as error:
            raise self._refusal(str(error)) from error
        if kind.unordered:
            return [_tag(kind.code), *self._sorted(parts)]
        head, items = parts[: kind.header], parts[kind.header :]
        plain = [_tag(kind.code), *map(self._value, head)]
        for i, item in enumerate(items):
            key = items[i // 2 * 2] if kind.paired else i
            plain.append(self._at(key, item))
        return plain

    def _sorted(self, items: list[object]) -> list[Any]:
        self._in_set += 1  # numbers follow the order of the file, which is not known in here
        encoded = [self._at(item, item) for item in items]
        self._in_set -= 1
        return sorted(encoded, key=pack)

    def _tensor(self, tensor: Any) -> Any:
        if tensor.layout in _SPARSE_LAYOUTS:
            return self._shared(tensor, type(tensor))
        try:
            number = self.table.add(tensor)
        except UnstorableError as error:
            raise self._refusal(str(error)) from error
        self.names.setdefault("/".join(map(str, self._path)), number)
        return _tensor_ref(number)

    def _array(self, array: np.ndarray[Any, Any]) -> list[Any]:
        dtype = self._dtype(array.dtype)
        order = "C" if array.flags.c_contiguous or not array.flags.f_contiguous else "F"
        data: Any = array.tobytes(order) if array.nbytes <= INLINE else self.table.add_array(array)  # type: ignore[arg-type]  # "C" or "F"
        return [_tag(ARRAY), dtype, list(array.shape), order, data]

    def _dtype(self, dtype: np.dtype[Any]) -> str:
        try:
            if array_dtype(dtype.str) == dtype:
                return dtype.str
        except ValueError:
            pass
        raise self._refusal(f"its dtype {dtype} is not one of plain bytes: store its parts instead")

    def _registered(self, value: object, entry: Registered) -> list[Any]:
        try:
            state = entry.to_state(value)
        except CheckpointError as error:
            raise self._refusal(str(error)) from error
        except Exception as error:  # what it raises is the user's choice
            raise self._refusal(f"to_state of {entry.name!r} raised {error!r}") from error
        return [_tag(CLASS), entry.name, entry.version, self._value(state)]

    def _unknown(self, cls: type) -> CheckpointError:
        name = cls.__qualname__
        return self._refusal(
            f"type {name} is not known; statetrain.register({name}, {name.lower()!r}) it, or keep "
            "it out of the state"
        )

    def _refusal(self, why: str) -> CheckpointError:
        return CheckpointError(f"cannot store {_where(self._path)}: {why}")

    # not bound to an encoder: the cycle would keep a tree's tensors until garbage is collected
    _own: ClassVar[Mapping[type, Callable[[Encoder, Any], Any]]] = {
        list: _list,
        dict: _dict,
        bytearray: _bytearray,
        np.ndarray: _array,
        torch.Tensor: _sparse,
        torch.nn.Parameter: _sparse,
    }


class Decoder:
    """Turn plain values and extensions into the tree again.

    `tensor(number)` and `array(blob, dtype, shape, order)` give what lies outside the index. With
    `build=False` generators, sparse tensors and registered classes become `Opaque` values.
    """

    def __init__(
        self,
        tensor: Callable[[int], object],
        array: Callable[[int, np.dtype[Any], tuple[int, ...], str], object],
        *,
        build: bool = True,
    ) -> None:
        self._tensor = tensor
        self._array = array
        self._build = build
        self._done: list[object] = []
        self._depth = 0
        self._in_set = 0

    def decode(self, plain: object) -> Any:
        """Return the value that `plain` encodes.

        Raises:
            DamagedError: it encodes none.
            CheckpointError: it holds a class that is not registered, or has changed.
        """
        try:
            return self._value(plain)
        except CheckpointError:
            raise
        except _BAD_PARTS as error:
            raise DamagedError(f"damaged: a value cannot be built ({error!r})") from error

    def _value(self, plain: Any) -> Any:
        cls = type(plain)
        if cls in _PLAIN_READ:
            return plain
        if cls is msgpack.ExtType:
            return self._extension(plain.code, plain.data)
        if cls not in {list, dict}:
            raise ValueError(f"a {cls.__name__} is no part of the format")
        if self._depth > MAX_DEPTH * 2:
            raise ValueError("too deep")
        self._depth += 1
        value, shared = self._container(plain)
        self._depth -= 1
        return self._keep(value) if shared else value

    def _keep(self, value: object) -> object:
        if not self._in_set:
            self._done.append(value)
        return value

    def _container(self, plain: Any) -> tuple[Any, bool]:
        if isinstance(plain, dict):
            if not all(map(_plain_key, plain)):
                raise ValueError("a key is neither a string nor an integer")
            return {key: self._value(item) for key, item in plain.items()}, True
        if not plain or type(plain[0]) is not msgpack.ExtType or plain[0].data:
            return [self._value(item) for item in plain], True
        return self._tagged(plain[0].code, plain[1:])

    def _tagged(self, code: int, parts: list[Any]) -> tuple[Any, bool]:
        if code == CLASS:
            return self._registered(*parts), True
        if code == ARRAY:
            return self._ndarray(*parts), True
        if code == SCALAR:
            return _scalar(*parts), False
        kind = KINDS_BY_CODE[code]
        self._in_set += kind.unordered
        values = [self._value(part) for part in parts]
        self._in_set -= kind.unordered
        if not self._build and kind.code >= 64:
            return Opaque(kind=_KIND_NAMES[kind.code], parts=tuple(values)), True
        shared = kind.shared
        return kind.join(*values), shared

    def _ndarray(self, dtype: object, shape: list[Any], order: object, data: Any) -> object:
        kind = array_dtype(dtype)
        if order not in {"C", "F"} or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError("an array's shape is out of range")
        if type(data) is int:
            return self._array(data, kind, tuple(shape), str(order))
        flat = np.frombuffer(bytearray(data), kind) if data else np.empty(0, kind)
        return flat.reshape(shape, order=order)

    def _registered(self, name: Any, version: Any, plain: object) -> object:
        state = self._value(plain)
        if not isinstance(name, str) or type(version) is not int:
            raise ValueError("a class has no name or no version")
        if not self._build:
            return Opaque(kind=name, parts=(version, state))
        entry = registered_class(name)
        if entry is None:
            raise CheckpointError(
                f"the checkpoint holds an object of the class {name!r}, which is not known: "
                f"statetrain.register(cls, {name!r}) it before loading"
            )
        return _restored(entry, version, state)

    def _extension(self, code: int, data: bytes) -> object:
        if code == TENSOR:
            return self._tensor(struct.unpack("<I", data)[0])
        if code == ALIAS:
            return self._done[struct.unpack("<I", data)[0]]
        if code == BIG_INT:
            return int.from_bytes(data, "little", signed=True)
        if code == COMPLEX:
            return complex(*struct.unpack("<2d", data))
        if code == SURROGATES:
            return data.decode("utf-8", "surrogatepass")
        if code == BYTEARRAY:
            return self._keep(bytearray(data))
        raise ValueError(f"extension {code} is no part of the format")


def _integer(value: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    size = (value.bit_length() + 8) // 8
    return msgpack.ExtType(BIG_INT, value.to_bytes(size, "little", signed=True))


def _string(value: str) -> Any:
    if value.isascii() or _encodable(value):
        return value
    return msgpack.ExtType(SURROGATES, value.encode("utf-8", "surrogatepass"))


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain_key(key: object) -> bool:
    if type(key) is str:
        return key.isascii() or _encodable(key)
    return type(key) is int and -(1 << 63) <= key < 1 << 64


@lru_cache(maxsize=1 << 16)  # made for each tensor of each save
def _tensor_ref(number: int) -> Any:
    return msgpack.ExtType(TENSOR, struct.pack("<I", number))


@cache
def _tag(code: int) -> Any:
    return msgpack.ExtType(code, b"")


def _scalar(dtype: object, data: bytes) -> object:
    kind = array_dtype(dtype)
    if kind.itemsize == 0:  # the empty string: numpy gives it room for one character
        return kind.type()
    (value,) = np.frombuffer(data, kind)
    return value


def _restored(entry: Registered, version: int, state: object) -> object:
    if version > entry.version or (version < entry.version and entry.upgrade is None):
        raise CheckpointError(
            f"{entry.name!r} was stored as version {version} and is version {entry.version} here: "
            "register it with upgrade=, or run the program that stored it"
        )
    try:
        if version < entry.version and entry.upgrade is not None:
            state = entry.upgrade(state, version)
        return entry.from_state(state)
    except CheckpointError:
        raise
    except Exception as error:  # what it raises is the user's choice
        raise CheckpointError(
            f"cannot build {entry.name!r} from its state: {error!r:.300}"
        ) from error


def _where(path: Iterable[object]) -> str:
    text = ""
    for key in path:
        if type(key) is str and key.isidentifier():
            text += f".{key}"
        else:
            text += f"[{key!r:.80}]"
    return text.removeprefix(".") or "the state"


_PLAIN = {type(None), bool, float, bytes}
_LEAVES: dict[type, Callable[[Any], Any]] = {
    int: _integer,
    str: _string,
    complex: lambda z: msgpack.ExtType(COMPLEX, struct.pack("<2d", z.real, z.imag)),
}
_PLAIN_READ = _PLAIN | {int, str}
_SPARSE_LAYOUTS = {
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
}
_KIND_NAMES = {64: "random.Random", 65: "numpy.random", 66: "torch.Generator", 72: "sparse tensor"}
_BAD_PARTS = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    AssertionError,
    struct.error,
    MemoryError,
)
