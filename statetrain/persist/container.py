"""A segment: one tree as a file of raw aligned tensor bytes with a verified index behind them.

    header 64 B | blobs, each on a multiple of 64 B | msgpack index | trailer 96 B

docs/format.md is the contract. Writing is one forward pass, so a socket or an object store will do;
reading checks every byte of the file before a value is built from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
import xxhash

from statetrain.errors import CheckpointError
from statetrain.persist.codec import MAX_INDEX, DamagedError, Decoder, Encoder, Opaque, pack
from statetrain.persist.layout import (
    ALIGN,
    CHUNK,
    HEAD,
    LARGE,
    MAJOR,
    PAGE,
    TAIL,
    Segment,
    Tables,
    ends,
    fill,
    header,
    open_tables,
    require,
    trailer,
    up,
)
from statetrain.persist.tensors import Blob, byte_view, rebuild

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
    "write",
]

SMALL = 256 << 10  # smaller pieces are joined before they are written


class Writable(Protocol):
    """What a segment is written to: a file, a socket's file, a store's stream."""

    def write(self, data: Any, /) -> Any:
        """Write `data`, or as much of it as the returned number says."""


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
    plan = _Plan(tree, os.urandom(16) if uuid is None else uuid)
    sink = _Sink(file)
    sink.write(header(plan.uuid))
    sink.hashing = True
    for blob, offset in zip(plan.blobs, plan.offsets, strict=True):
        sink.pad(offset)
        for piece in blob.pieces(CHUNK):
            sink.write(piece)
    sink.end_chunk()
    sink.hashing = False
    sink.pad(plan.index_off)
    index = plan.index(b"".join(sink.digests))
    sink.write(index)
    segment = Segment(
        nbytes=plan.nbytes,
        index_off=plan.index_off,
        index_len=len(index),
        index_digest=xxhash.xxh3_128_digest(index),
    )
    sink.write(trailer(segment, plan.uuid, plan.data_end))
    sink.flush()
    return segment


def check(tree: object) -> int:
    """Return how many bytes `write` would write, without copying tensor data.

    Raises:
        CheckpointError: exactly what `write` would raise.
    """
    return _Plan(tree, bytes(16)).nbytes


def read(file: BinaryIO) -> object:
    """Return the tree in `file`, made of fresh objects, after every byte was verified.

    Tensors come back on the CPU, or on `meta` if they were there.

    Raises:
        DamagedError: the bytes are not what was written.
        CheckpointError: they were written by a newer version, or hold a class unknown here.
    """
    tables = open_tables(file)
    buffers = _read_blobs(file, tables)
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


class _Plan:
    """Everything about a segment but its data: decided before the first byte is written."""

    def __init__(self, tree: object, uuid: bytes) -> None:
        encoder = Encoder()
        self.uuid = uuid
        self._tree = encoder.encode(tree)
        self._names = encoder.names
        self._storages, self._tensors = encoder.table.close()
        self.blobs: list[Blob] = encoder.table.blobs
        self.offsets: list[int] = []
        end = HEAD
        for blob in self.blobs:
            offset = up(end, PAGE if blob.nbytes >= LARGE else ALIGN)
            self.offsets.append(offset)
            end = offset + blob.nbytes
        self.data_end = end
        self.index_off = up(end, PAGE)
        chunks = -(-(end - HEAD) // CHUNK)
        self.index_len = len(self.index(bytes(16 * chunks)))
        if self.index_len > MAX_INDEX:
            raise CheckpointError(
                f"the state's index takes {self.index_len} bytes, the limit is {MAX_INDEX}: "
                "keep long lists of numbers as arrays or tensors"
            )
        self.nbytes = self.index_off + self.index_len + TAIL

    def index(self, chunks: bytes) -> bytes:
        spans = zip(self.offsets, self.blobs, strict=True)
        return pack(
            {
                "v": MAJOR,
                "seg": self.uuid,
                "chunks": chunks,
                "blobs": [[offset, blob.nbytes, None, None] for offset, blob in spans],
                "storages": self._storages,
                "tensors": self._tensors,
                "names": self._names,
                "tree": self._tree,
            }
        )


class _Sink:
    """Count, join and hash what goes to a file."""

    def __init__(self, file: Writable) -> None:
        self.hashing = False
        self.digests: list[bytes] = []
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._in_chunk = 0
        self._at = 0
        self._small = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self._at += len(data)
        if self.hashing:
            self._update(memoryview(data))
        if len(data) < SMALL:
            self._small += data
            if len(self._small) >= LARGE:
                self.flush()
        else:
            self.flush()
            _write_all(self._file, memoryview(data))

    def pad(self, offset: int) -> None:
        self.write(bytes(offset - self._at))

    def flush(self) -> None:
        if self._small:
            _write_all(self._file, memoryview(self._small))
            self._small = bytearray()

    def end_chunk(self) -> None:
        if self._in_chunk:
            self.digests.append(self._hash.digest())
            self._hash = xxhash.xxh3_128()
            self._in_chunk = 0

    def _update(self, data: memoryview) -> None:
        while data:
            part = data[: CHUNK - self._in_chunk]
            self._hash.update(part)
            self._in_chunk += len(part)
            data = data[len(part) :]
            if self._in_chunk == CHUNK:
                self.end_chunk()


def _read_blobs(file: BinaryIO, tables: Tables) -> list[torch.UntypedStorage]:
    """Read the data in one pass, each blob straight into its storage, and check every chunk."""
    buffers = [_storage(nbytes) for _, nbytes, _, _ in tables.blobs]
    digests: list[bytes] = []
    hasher, in_chunk = xxhash.xxh3_128(), 0
    file.seek(HEAD)
    for piece in _targets(tables, buffers):
        target = piece
        while target:
            part = target[: CHUNK - in_chunk]
            fill(file, part)
            hasher.update(part)
            in_chunk += len(part)
            target = target[len(part) :]
            if in_chunk == CHUNK:
                _check_chunk(tables, digests, hasher.digest())
                hasher, in_chunk = xxhash.xxh3_128(), 0
    if in_chunk:
        _check_chunk(tables, digests, hasher.digest())
    return buffers


def _storage(nbytes: int, *, device: str = "cpu") -> torch.UntypedStorage:
    storage: torch.UntypedStorage = torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]
    return storage


def _targets(tables: Tables, buffers: list[torch.UntypedStorage]) -> Iterator[memoryview]:
    end = HEAD
    for (offset, nbytes, _, _), buffer in zip(tables.blobs, buffers, strict=True):
        while end < offset:  # not at once: a wide gap is memory that the file does not hold
            gap = min(offset - end, CHUNK)
            yield memoryview(bytearray(gap))
            end += gap
        yield byte_view(buffer).numpy().data
        end = offset + nbytes


def _check_chunk(tables: Tables, digests: list[bytes], digest: bytes) -> None:
    number = len(digests)
    require(
        tables.chunks[16 * number : 16 * number + 16] == digest,
        f"bytes {HEAD + number * CHUNK} to {HEAD + (number + 1) * CHUNK} are not what was written",
    )
    digests.append(digest)


def _write_all(file: Writable, data: memoryview) -> None:
    while data:
        count = file.write(data)
        data = data[count if isinstance(count, int) and count > 0 else len(data) :]
