"""A segment: one tree as a file of raw aligned tensor bytes with a verified index behind them.

    header 64 B | blobs, each on a multiple of 64 B | msgpack index | trailer 96 B

docs/format.md is the contract. Writing is one forward pass, so a socket or an object store will do;
reading checks every byte of the file before a value is built from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch

from statetrain.errors import CheckpointError
from statetrain.persist.chunks import read_chunks, read_spans, verify
from statetrain.persist.codec import DamagedError, Decoder, Opaque
from statetrain.persist.layout import Segment, Tables, ends, open_tables
from statetrain.persist.plan import Plan, Writable, push, slices
from statetrain.persist.tensors import byte_view, memory, rebuild

__all__ = [
    "DamagedError",
    "Index",
    "Opaque",
    "Segment",
    "TensorInfo",
    "check",
    "identify",
    "read",
    "read_index",
    "read_into",
    "write",
]


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor, or a large array, that was looked at without reading its data."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    storage: int
    requires_grad: bool


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
    verify(file, tables)
    spans: list[tuple[int, memoryview]] = []
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []
    for here, there in places.items():
        number = tables.storages[there][0]
        if number is not None:
            target = plan.blobs[plan.storages[here][0]].bytes()
            landing = target if target.is_cpu else torch.empty_like(target, device="cpu")
            spans.append((tables.blobs[number][0], landing.numpy().data))
            copied.append((target, landing))
    read_spans(file, spans)
    for target, landing in copied:
        if landing is not target:
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
    tables = open_tables(file)

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
        )

    def array(blob: int, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> TensorInfo:
        return TensorInfo(
            dtype=dtype.str,
            shape=shape,
            stride=(),
            device=f"numpy {order}",
            storage=-1 - blob,
            requires_grad=False,
        )

    tree = Decoder(tensor, array, build=False).decode(tables.tree)
    named = {name: tensor(number) for name, number in tables.names.items()}
    return Index(tree=tree, tensors=named, segment=tables.segment)


def identify(file: BinaryIO) -> Segment:
    """Return what identifies the segment in `file`, from its header and trailer alone."""
    return ends(file)[0]


def _storage(nbytes: int, *, device: str = "cpu") -> torch.UntypedStorage:
    storage: torch.UntypedStorage = torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]
    return storage
