"""The data of a segment, read chunk by chunk, each verified against its digest."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import BinaryIO, Protocol, TypeVar, runtime_checkable

import torch
import xxhash

from statetrain.persist.layout import CHUNK, HEAD, PAGE, Tables, fill, require, rest

__all__ = ["read_chunks", "read_spans", "verify"]

THREADS = min(4, os.cpu_count() or 1)
MOST = 512  # pieces that one system call fills; Linux takes 1024


@runtime_checkable
class Ranged(Protocol):
    """A file of which any range can be asked for, from so many threads at a time."""

    parallel: int

    def read_at(self, offset: int, nbytes: int) -> bytes: ...


Read = Callable[[int, list[memoryview]], None]
T = TypeVar("T")


def verify(file: BinaryIO, tables: Tables) -> None:
    """Read all data, and keep none of it.

    Raises:
        DamagedError: a chunk is not what was written.
    """
    count = -(-(tables.data_end - HEAD) // CHUNK)
    spare: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(min(THREADS, count)):
        spare.put(torch.empty(CHUNK, dtype=torch.uint8).numpy().data)

    def check(read: Read, number: int) -> None:
        buffer = spare.get()
        try:
            size = min(CHUNK, tables.data_end - HEAD - number * CHUNK)
            _read_chunk(read, tables, number, [buffer[:size]])
        finally:
            spare.put(buffer)

    _each(file, check, range(count))


def read_chunks(file: BinaryIO, tables: Tables, targets: list[memoryview]) -> None:
    """Fill the targets, one for each blob, and check every chunk when it is there.

    Raises:
        DamagedError: a chunk is not what was written; targets may have been filled before.
    """

    def take(read: Read, chunk: tuple[int, list[memoryview]]) -> None:
        _read_chunk(read, tables, *chunk)

    _each(file, take, enumerate(_chunks(tables, targets)))


def read_spans(file: BinaryIO, spans: list[tuple[int, memoryview]]) -> None:
    """Fill each view with the bytes of the file from its offset on; nothing is verified."""

    def take(read: Read, run: tuple[int, list[memoryview]]) -> None:
        read(*run)

    _each(file, take, _runs(spans))


def _runs(spans: list[tuple[int, memoryview]]) -> Iterator[tuple[int, list[memoryview]]]:
    """Join neighbours, up to 8 MiB of them: one system call instead of many."""
    start, end, pieces = 0, 0, list[memoryview]()
    for offset, view in sorted(spans, key=lambda span: span[0]):
        if pieces and (not 0 <= offset - end < PAGE or offset - start >= CHUNK):
            yield start, pieces
            pieces = []
        if not pieces:
            start = end = offset
        if offset > end:
            pieces.append(memoryview(bytearray(offset - end)))
        pieces.append(view)
        end = offset + len(view)
    if pieces:
        yield start, pieces


def _read_chunk(read: Read, tables: Tables, number: int, pieces: list[memoryview]) -> None:
    start = HEAD + number * CHUNK
    read(start, pieces)
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    require(
        tables.chunks[16 * number : 16 * number + 16] == digest.digest(),
        f"bytes {start} to {start + CHUNK} are not what was written",
    )


def _chunks(tables: Tables, targets: list[memoryview]) -> Iterator[list[memoryview]]:
    """Yield what each chunk is read into: parts of the targets, and of the gaps between them."""
    pieces: list[memoryview] = []
    room = CHUNK
    for target in _targets(tables, targets):
        data = target
        while data:
            pieces.append(data[:room])
            data, room = data[room:], room - len(pieces[-1])
            if not room:
                yield pieces
                pieces, room = [], CHUNK
    if pieces:
        yield pieces


def _targets(tables: Tables, targets: list[memoryview]) -> Iterator[memoryview]:
    end = HEAD
    for (offset, nbytes, _, _), target in zip(tables.blobs, targets, strict=True):
        if offset > end:
            yield memoryview(bytearray(offset - end))
        yield target
        end = offset + nbytes


def _each(file: BinaryIO, work: Callable[[Read, T], None], items: Iterable[T]) -> None:
    """Do the work on each item, on several cores where the file can be read at any place."""
    raw = file.raw if isinstance(file, io.BufferedReader) else file
    read: Read
    if isinstance(raw, io.FileIO) and hasattr(os, "preadv"):
        read, threads = partial(_read_at, raw.fileno()), THREADS
    elif isinstance(raw, Ranged):
        read, threads = partial(_read_range, raw), raw.parallel
    else:
        read, threads = partial(_read_on, file), 1
    if threads == 1:
        for item in items:
            work(read, item)
        return
    pool = ThreadPoolExecutor(threads, "statetrain-read")
    try:
        for _ in pool.map(partial(work, read), items):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def _read_at(fd: int, offset: int, pieces: list[memoryview]) -> None:
    while pieces:
        count = os.preadv(fd, pieces[:MOST], offset)
        require(count > 0, "it ends too early")
        offset += count
        pieces = rest(pieces, count)


def _read_range(file: Ranged, offset: int, pieces: list[memoryview]) -> None:
    data = memoryview(file.read_at(offset, sum(map(len, pieces))))
    for piece in pieces:
        require(len(data) >= len(piece), "it ends too early")
        piece[:] = data[: len(piece)]
        data = data[len(piece) :]


def _read_on(file: BinaryIO, offset: int, pieces: list[memoryview]) -> None:
    file.seek(offset)
    for piece in pieces:
        fill(file, piece)
