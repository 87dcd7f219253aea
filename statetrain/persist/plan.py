"""A segment laid out: where each byte of a tree goes, and the file in slices that are written.

What is not tensor data is encoded when the plan is made. It knows files only as something with
`write`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import xxhash

from statetrain.errors import CheckpointError
from statetrain.persist.codec import MAX_INDEX, Encoder, pack
from statetrain.persist.layout import (
    ALIGN,
    CHUNK,
    HEAD,
    LARGE,
    MAJOR,
    PAGE,
    TAIL,
    Segment,
    header,
    rest,
    trailer,
    up,
)
from statetrain.persist.tensors import Blob

__all__ = ["Plan", "Writable", "push", "slices"]

ZEROS = memoryview(bytes(PAGE))
MOST = 1000  # pieces in one system call; Linux takes 1024


class Writable(Protocol):
    """What a segment is written to: a file, a socket's file, a store's stream."""

    def write(self, data: Any, /) -> Any:
        """Write `data`, or as much of it as the returned number says."""


class Plan:
    """Everything about a segment but its data: decided before the first byte is written.

    Raises:
        CheckpointError: something in the tree cannot be stored.
    """

    def __init__(self, tree: object, *, uuid: bytes | None = None) -> None:
        self.uuid = os.urandom(16) if uuid is None else uuid
        encoder = Encoder()
        encoded = encoder.encode(tree)
        storages, tensors = encoder.table.close()
        self.names = encoder.names
        self.storages, self.tensors = storages, tensors
        self.blobs: list[Blob] = encoder.table.blobs
        self.spans: list[tuple[int, int]] = []
        end = HEAD
        for blob in self.blobs:
            offset = up(end, PAGE if blob.nbytes >= LARGE else ALIGN)
            self.spans.append((offset, blob.nbytes))
            end = offset + blob.nbytes
        self.header = header(self.uuid)
        self.data_end = end
        self.index_off = up(end, PAGE)
        chunks = bytes(-(-(end - HEAD) // CHUNK) * 16)
        first = {"v": MAJOR, "seg": self.uuid}
        self._index = pack(
            {
                **first,
                "chunks": chunks,
                "blobs": [[offset, nbytes, None, None] for offset, nbytes in self.spans],
                "storages": storages,
                "tensors": tensors,
                "names": self.names,
                "tree": encoded,
            }
        )
        self._digests_end = len(pack(first)) + len(pack("chunks")) + len(pack(chunks))
        if len(self._index) > MAX_INDEX:
            raise CheckpointError(
                f"the state's index takes {len(self._index)} bytes, the limit is {MAX_INDEX}: "
                "keep long lists of numbers as arrays or tensors"
            )
        self.nbytes = self.index_off + len(self._index) + TAIL

    def forget(self) -> None:
        """Let go of the tree's tensors and arrays, once their bytes are somewhere else."""
        self.blobs = []

    def ending(self, digests: bytes) -> tuple[bytes, bytes, Segment]:
        """Return the index and the trailer, now that the digests of the data are known."""
        end = self._digests_end
        index = self._index[: end - len(digests)] + digests + self._index[end:]
        segment = Segment(
            nbytes=self.nbytes,
            index_off=self.index_off,
            index_len=len(index),
            index_digest=xxhash.xxh3_128_digest(index),
        )
        return index, trailer(segment, self.uuid, self.data_end), segment


def push(plan: Plan, file: Writable, parts: Iterable[list[memoryview]], *, aside: bool) -> Segment:
    """Write a segment whose bytes before the index are `parts`, in one forward pass.

    The digests are made meanwhile: in a thread if `aside`, while a part is written.
    """
    write = _scattered if isinstance(file, io.FileIO) and hasattr(os, "writev") else _joined
    digests = _Digests(plan.data_end)
    if plan.data_end <= CHUNK or not aside:
        for part in parts:
            digests.update(part)
            write(file, part)
    else:
        with ThreadPoolExecutor(1, "statetrain-hash") as pool:
            for part in parts:
                done = pool.submit(digests.update, part)
                write(file, part)
                done.result()
    index, tail, segment = plan.ending(digests.close())
    write(file, [memoryview(index), memoryview(tail)])
    return segment


def slices(plan: Plan) -> Iterator[list[memoryview]]:
    """Yield the file up to its index over the tree's own memory: pieces of 8 MiB together."""
    pieces: list[memoryview] = []
    room = CHUNK
    for piece in _pieces(plan):
        data = piece
        while data:
            pieces.append(data[:room])
            data, room = data[room:], room - len(pieces[-1])
            if not room or len(pieces) == MOST:
                yield pieces
                pieces, room = [], room or CHUNK
    if pieces:
        yield pieces


def _pieces(plan: Plan) -> Iterator[memoryview]:
    yield memoryview(plan.header)
    end = HEAD
    for blob, (offset, nbytes) in zip(plan.blobs, plan.spans, strict=True):
        if offset > end:
            yield ZEROS[: offset - end]
        yield from blob.pieces(CHUNK)
        end = offset + nbytes
    yield ZEROS[: plan.index_off - end]


class _Digests:
    """The digest of each chunk of the data, from the file's bytes in order."""

    def __init__(self, data_end: int) -> None:
        self._end = data_end
        self._at = 0
        self._digests: list[bytes] = []
        self._hash = xxhash.xxh3_128()
        self._in_chunk = 0

    def update(self, part: list[memoryview]) -> None:
        for piece in part:
            start, stop = max(HEAD - self._at, 0), self._end - self._at
            self._at += len(piece)
            self._add(piece[start : max(stop, start)])

    def _add(self, data: memoryview) -> None:
        while data:
            piece = data[: CHUNK - self._in_chunk]
            self._hash.update(piece)
            self._in_chunk += len(piece)
            data = data[len(piece) :]
            if self._in_chunk == CHUNK:
                self._next()

    def close(self) -> bytes:
        if self._in_chunk:
            self._next()
        return b"".join(self._digests)

    def _next(self) -> None:
        self._digests.append(self._hash.digest())
        self._hash = xxhash.xxh3_128()
        self._in_chunk = 0


def _scattered(file: Any, part: list[memoryview]) -> None:
    """Write the pieces from where they lie, in one system call."""
    pieces = part
    while pieces:
        pieces = rest(pieces, os.writev(file.fileno(), pieces))


def _joined(file: Writable, part: list[memoryview]) -> None:
    data = part[0] if len(part) == 1 else memoryview(b"".join(part))
    while data:
        count = file.write(data)
        data = data[count if isinstance(count, int) and count > 0 else len(data) :]
