"""A segment: one tree as a file of raw aligned tensor bytes with a verified index behind them.

    header 64 B | blobs, each on a multiple of 64 B | msgpack index | trailer 96 B

docs/format.md is the contract. Writing is one forward pass, so a socket or an object store will do;
reading checks every byte of the file before a value is built from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash

from statetrain.errors import CheckpointError
from statetrain.persist.chunks import read_chunks, read_spans
from statetrain.persist.chunks import verify as verify_data
from statetrain.persist.codec import DamagedError, Decoder, Opaque
from statetrain.persist.layout import (
    CHUNK,
    HEAD,
    Segment,
    Tables,
    ends,
    open_tables,
    read_at,
    require,
)
from statetrain.persist.plan import Plan, Writable, push, slices
from statetrain.persist.tensors import CONJ, DTYPES, NEG, byte_view, memory, rebuild

__all__ = [
    "DamagedError",
    "Index",
    "Opaque",
    "Segment",
    "TensorInfo",
    "Values",
    "check",
    "identify",
    "read",
    "read_index",
    "read_into",
    "verify",
    "write",
]


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor, or a large array, that was looked at without reading its data.

    `number` is its place among the segment's tensors, or that of an array's data among its blobs;
    `pending` what is still to be done with its values: `"conj"`, `"neg"`, both, or nothing.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    storage: int
    requires_grad: bool
    number: int
    pending: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a segment holds: the tree with `TensorInfo` for tensors, and its tensors by name."""

    tree: object
    tensors: dict[str, TensorInfo]
    segment: Segment


def write(tree: object, file: Writable, *, uuid: bytes | None = None) -> Segment:
    """Write `tree` to `file` in one forward pass and return what identifies the bytes.

    No copy of the whole state is made: data goes out in slices of at most 8 MiB. `uuid` (16 bytes)
    is random unless given.

    Raises:
        CheckpointError: something in the tree cannot be stored; nothing has been written then.
    """
    plan = Plan(tree, uuid=uuid)
    return push(plan, file, slices(plan), aside=True)


def check(tree: object) -> int:
    """Return how many bytes `write` would write, without copying tensor data.

    Raises:
        CheckpointError: exactly what `write` would raise.
    """
    return Plan(tree).nbytes


def read(file: BinaryIO) -> object:
    """Return the tree in `file`, made of fresh objects, after every byte was verified.

    Tensors come back on the CPU, or on `meta` if they were there.

    Raises:
        DamagedError: the bytes are not what was written.
        CheckpointError: they were written by a newer version, or hold a class unknown here.
    """
    tables = open_tables(file)
    buffers = [_storage(nbytes) for _, nbytes, _, _ in tables.blobs]
    read_chunks(file, tables, [memory(buffer) for buffer in buffers])
    storages = [
        _storage(nbytes, device="meta" if device == "meta" else "cpu")
        if blob is None
        else buffers[blob]
        for blob, nbytes, device in tables.storages
    ]
    made: dict[int, torch.Tensor] = {}

    def tensor(number: int) -> torch.Tensor:
        if number not in made:
            row = tables.tensors[number]
            made[number] = rebuild(row, storages[row[0]])
        return made[number]

    free = set(range(len(buffers))) - {blob for blob, _, _ in tables.storages}

    def array(blob: int, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> object:
        free.remove(blob)  # a second array over the same bytes would be an alias nobody stored
        flat = byte_view(buffers[blob]).numpy().view(dtype)
        return flat.reshape(shape, order=order)  # type: ignore[call-overload]  # "C" or "F"

    return Decoder(tensor, array).decode(tables.tree)


def read_into(file: BinaryIO, tree: object) -> None:
    """Give the tensors in `tree` the values that `file` has under their names, in place.

    They must be the same in shape, stride, dtype, and in what they share memory with. Nothing is
    changed before every byte of the file was verified.

    Raises:
        CheckpointError: the file has none, or another one, of a name; or it is damaged.
    """
    tables, plan = open_tables(file), Plan(tree)
    places: dict[int, int] = {}
    other = [name for name in plan.names if not _matches(name, plan, tables, places)]
    if other or len(set(places.values())) < len(places):
        raise CheckpointError(
            f"the file's tensors are not those of the tree: {', '.join(other[:5]) or 'other ties'}"
        )
    verify_data(file, tables)
    spans: list[tuple[int, memoryview]] = []
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []
    for here, there in places.items():
        number = tables.storages[there][0]
        if number is None:
            continue
        blob = plan.blobs[plan.storages[here][0]]
        view = blob.view()
        if view is None:  # on another device
            landing = torch.empty(blob.nbytes, dtype=torch.uint8)
            copied.append((blob.bytes(), landing))
            view = landing.numpy().data
        spans.append((tables.blobs[number][0], view))
    read_spans(file, spans)
    for target, landing in copied:
        target.copy_(landing)


def _matches(name: str, plan: Plan, tables: Tables, places: dict[int, int]) -> bool:
    """Tell if the file has the same tensor of this name, and note whose storage is whose."""
    if name not in tables.names:
        return False
    here, there = plan.tensors[plan.names[name]], tables.tensors[tables.names[name]]
    sizes = plan.storages[here[0]][1], tables.storages[there[0]][1]
    together = places.setdefault(here[0], there[0]) == there[0]
    return here[1:5] == there[1:5] and sizes[0] == sizes[1] and together


def read_index(file: BinaryIO) -> Index:
    """Return what `file` holds, verified, without reading tensor data or building objects."""
    return _index(open_tables(file))


def verify(file: BinaryIO, progress: Callable[[int], None] | None = None) -> Index:
    """Return what `file` holds after every byte was verified; no data is kept, nothing is built.

    `progress` is called with the number of bytes of data read so far, in the order of the file;
    without it chunks are read by several threads where they can be.

    Raises:
        DamagedError: the bytes are not what was written.
    """
    tables = open_tables(file)
    index = _index(tables)
    if progress is None:
        verify_data(file, tables)
        return index
    for number in range(len(tables.chunks) // 16):
        progress(number * CHUNK + len(_chunk(file, tables, number)))
    return index


class Values:
    """The data of the tensors in `file`, read one at a time, with each chunk of it verified.

    No more is in memory than what is asked for and one chunk; ask in the order of the tree.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._tables = open_tables(file)
        self._kept: tuple[int, bytes] = (-1, b"")

    def bits(self, info: TensorInfo) -> np.ndarray[Any, Any]:
        """Return the bits of a tensor or array, as unsigned numbers with one dimension more.

        The last dimension is as long as an element needs numbers: 1 up to eight bytes. What is
        `pending` is not done.

        Raises:
            DamagedError: a chunk in which it lies is not what was written.
        """
        start, itemsize, strides = self._place(info)
        unit = math.gcd(itemsize, 8)
        shape = (*info.shape, itemsize // unit)
        steps = (*strides, unit)
        last = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        data = self._read(start, last + unit) if math.prod(shape) and start else b""
        require(bool(data) or not math.prod(shape), "a tensor has no bytes")
        return np.ndarray(shape, f"<u{unit}", data, 0, steps)

    def _place(self, info: TensorInfo) -> tuple[int, int, list[int]]:
        """Return where in the file it begins, 0 for nowhere; an element's size; byte strides."""
        if info.device.startswith("numpy"):
            itemsize = np.dtype(info.dtype).itemsize
            require(0 <= info.number < len(self._tables.blobs), "an array has no blob")
            start, nbytes, _, _ = self._tables.blobs[info.number]
            require(math.prod(info.shape) * itemsize == nbytes, "an array's size is not its blob's")
            return start, itemsize, _strides(info, itemsize)
        place, name, _, stride, offset, _, _ = self._tables.tensors[info.number]
        blob, itemsize = self._tables.storages[place][0], DTYPES[name].itemsize
        start = 0 if blob is None else self._tables.blobs[blob][0] + offset * itemsize
        return start, itemsize, [step * itemsize for step in stride]

    def _read(self, start: int, size: int) -> bytes:
        first, last = (start - HEAD) // CHUNK, (start + size - 1 - HEAD) // CHUNK
        pieces = []
        for number in range(first, last + 1):
            if self._kept[0] != number:
                self._kept = (number, _chunk(self._file, self._tables, number))
            begin = HEAD + number * CHUNK
            pieces.append(self._kept[1][max(start - begin, 0) : start + size - begin])
        return b"".join(pieces)


def _strides(info: TensorInfo, itemsize: int) -> list[int]:
    forward = info.device == "numpy F"  # the first dimension is the one that moves fastest
    steps, step = [], itemsize
    for length in info.shape if forward else reversed(info.shape):
        steps.append(step)
        step *= length
    return steps if forward else steps[::-1]


def _index(tables: Tables) -> Index:
    def tensor(number: int) -> TensorInfo:
        place, dtype, size, stride, _, flags, _ = tables.tensors[number]
        device = tables.storages[place][2]
        return TensorInfo(
            dtype=dtype,
            shape=tuple(size),
            stride=tuple(stride),
            device=device,
            storage=place,
            requires_grad=bool(flags & 1),
            number=number,
            pending=" ".join(["conj"] * bool(flags & CONJ) + ["neg"] * bool(flags & NEG)),
        )

    def array(blob: int, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> TensorInfo:
        return TensorInfo(
            dtype=dtype.str,
            shape=shape,
            stride=(),
            device=f"numpy {order}",
            storage=-1 - blob,
            requires_grad=False,
            number=blob,
            pending="",
        )

    tree = Decoder(tensor, array, build=False).decode(tables.tree)
    named = {name: tensor(number) for name, number in tables.names.items()}
    return Index(tree=tree, tensors=named, segment=tables.segment)


def _chunk(file: BinaryIO, tables: Tables, number: int) -> bytes:
    start = HEAD + number * CHUNK
    data = read_at(file, start, min(CHUNK, tables.data_end - start))
    require(
        tables.chunks[16 * number : 16 * number + 16] == xxhash.xxh3_128_digest(data),
        f"bytes {start} to {start + CHUNK} are not what was written",
    )
    return data


def identify(file: BinaryIO) -> Segment:
    """Return what identifies the segment in `file`, from its header and trailer alone."""
    return ends(file)[0]


def _storage(nbytes: int, *, device: str = "cpu") -> torch.UntypedStorage:
    storage: torch.UntypedStorage = torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]
    return storage
