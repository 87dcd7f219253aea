"""Where everything in a segment lies: its header, index tables and trailer, and their checks."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

import xxhash

from statetrain.errors import CheckpointError
from statetrain.persist.codec import MAX_INDEX, DamagedError, unpack
from statetrain.persist.tensors import check_row

__all__ = [
    "ALIGN",
    "CHUNK",
    "HEAD",
    "LARGE",
    "MAJOR",
    "PAGE",
    "TAIL",
    "Segment",
    "Tables",
    "ends",
    "fill",
    "header",
    "open_tables",
    "read_at",
    "require",
    "rest",
    "trailer",
    "up",
]

MAGIC = b"\x89STS\r\n\x1a\n"
END = b"STSEND\r\n"
MAJOR, MINOR = 1, 0
CHUNK = 8 << 20
HEADER = struct.Struct("<8sHHI16sQQ8s")  # and 8 bytes of checksum
TRAILER = struct.Struct("<4Q16s16sI4s")  # and checksum, 8 zero bytes, END
HEAD, TAIL = 64, 96
ALIGN, PAGE, LARGE = 64, 4096, 1 << 20
XXH3 = 1


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What names a written segment's content: a commit record holds it."""

    nbytes: int
    index_off: int
    index_len: int
    index_digest: bytes


class Tables:
    """A verified index: every offset in it lies where it may."""

    def __init__(self, index: Any, segment: Segment, uuid: bytes, data_end: int) -> None:
        self.segment = segment
        self.data_end = data_end
        self.chunks: bytes = index["chunks"]
        self.blobs: list[list[Any]] = index["blobs"]
        self.storages: list[list[Any]] = index["storages"]
        self.tensors: list[list[Any]] = index["tensors"]
        self.names: dict[str, int] = index["names"]
        self.tree: object = index["tree"]
        require(index["v"] == MAJOR and index["seg"] == uuid, "the index is of another segment")
        require(
            type(self.chunks) is bytes and len(self.chunks) == -(-(data_end - HEAD) // CHUNK) * 16,
            "the index has not one digest a chunk",
        )
        self._check_blobs()
        self._check_storages()
        for row in self.tensors:
            check_row(row, self.storages)
        require(
            isinstance(self.names, dict)
            and all(
                type(n) is int and 0 <= n < len(self.tensors) and type(name) is str
                for name, n in self.names.items()
            ),
            "a name refers to no tensor",
        )

    def _check_blobs(self) -> None:
        end = HEAD
        for offset, nbytes, digest, elsewhere in self.blobs:  # in the order of the file
            require(type(offset) is int and type(nbytes) is int, "a blob's place is no number")
            require(digest is None and elsewhere is None, "a blob lies in another segment")
            require(offset % ALIGN == 0 and offset >= end and nbytes >= 0, "blobs overlap")
            require(offset - end < PAGE, "there is a hole between blobs")
            end = offset + nbytes
        require(end == self.data_end, "the blobs do not end where the data ends")

    def _check_storages(self) -> None:
        used: set[int] = set()
        for blob, nbytes, device in self.storages:
            require(type(nbytes) is int and 0 <= nbytes < 1 << 62, "a storage has no size")
            require(type(device) is str and len(device) < 64, "a storage has no device")
            if blob is None:
                require(nbytes == 0 or device == "meta", "a storage has no bytes")
                continue
            require(type(blob) is int and 0 <= blob < len(self.blobs), "a storage has no blob")
            require(blob not in used, "two storages share a blob")
            require(self.blobs[blob][1] == nbytes, "a storage's size is not its blob's")
            used.add(blob)


def header(uuid: bytes) -> bytes:
    """Return the first 64 bytes of a segment."""
    head = HEADER.pack(MAGIC, MAJOR, MINOR, 0, uuid, HEAD, CHUNK, bytes(8))
    return head + _sum(head)


def trailer(segment: Segment, uuid: bytes, data_end: int) -> bytes:
    """Return the last 96 bytes of a segment."""
    tail = TRAILER.pack(
        segment.index_off,
        segment.index_len,
        segment.nbytes,
        data_end,
        segment.index_digest,
        uuid,
        XXH3,
        bytes(4),
    )
    return tail + _sum(tail) + bytes(8) + END


def ends(file: BinaryIO) -> tuple[Segment, bytes, int]:
    """Return the segment, its uuid and the end of its data, all verified."""
    length = file.seek(0, os.SEEK_END)
    require(length >= HEAD + TAIL, f"it is {length} bytes long, cut off")
    head, tail = read_at(file, 0, HEAD), read_at(file, length - TAIL, TAIL)
    require(head[:8] == MAGIC, "it does not begin as a segment does")
    require(head[56:] == _sum(head[:56]), "its header is damaged")
    _, major, _, flags, uuid, data_off, chunk, zero = HEADER.unpack(head[:56])
    if major > MAJOR:
        raise CheckpointError(
            f"the checkpoint has format {major} and this statetrain reads up to {MAJOR}: upgrade it"
        )
    require(tail[80:] == bytes(8) + END, "it does not end as a segment does")
    require(tail[72:80] == _sum(tail[:72]), "its trailer is damaged")
    fields = TRAILER.unpack(tail[:72])
    index_off, index_len, file_len, data_end, digest, again, hash_id, pad = fields
    require(uuid == again, "its header and trailer are of two segments")
    require(
        (flags & ~3, data_off, chunk, zero, hash_id, pad)
        == (0, HEAD, CHUNK, bytes(8), XXH3, bytes(4)),
        "its header asks for what this version does not know",
    )
    require(
        file_len == length == index_off + index_len + TAIL
        and index_off == up(data_end, PAGE)
        and data_end >= HEAD
        and index_len <= MAX_INDEX,
        f"its parts do not add up to its {length} bytes",
    )
    segment = Segment(nbytes=length, index_off=index_off, index_len=index_len, index_digest=digest)
    return segment, uuid, data_end


def open_tables(file: BinaryIO) -> Tables:
    """Return what the index of `file` says, verified; the file's data is not read."""
    segment, uuid, data_end = ends(file)
    between = read_at(file, data_end, segment.index_off - data_end)
    require(not any(between), "the bytes before its index are damaged")
    data = read_at(file, segment.index_off, segment.index_len)
    require(xxhash.xxh3_128_digest(data) == segment.index_digest, "its index is damaged")
    try:
        return Tables(unpack(data), segment, uuid, data_end)
    except (TypeError, ValueError, LookupError) as error:
        raise DamagedError(f"the segment is damaged: {error!r} in its index") from error


def fill(file: BinaryIO, target: memoryview) -> None:
    """Fill `target` with the next bytes of `file`."""
    readinto = getattr(file, "readinto", None)
    while target:
        if readinto is not None:
            count = readinto(target)
        else:
            data = file.read(len(target))
            count = len(data)
            target[:count] = data
        require(bool(count), "it ends too early")
        target = target[count:]


def rest(pieces: list[memoryview], count: int) -> list[memoryview]:
    """Return what of `pieces` is left when the first `count` bytes are done."""
    done = 0
    while done < len(pieces) and count >= len(pieces[done]):
        count -= len(pieces[done])
        done += 1
    return [pieces[done][count:], *pieces[done + 1 :]] if count else pieces[done:]


def read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    """Return `size` bytes of `file` from `offset` on."""
    file.seek(offset)
    data = bytearray(size)
    fill(file, memoryview(data))
    return bytes(data)


def _sum(data: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def up(offset: int, align: int) -> int:
    """Return the first multiple of `align` that is not below `offset`."""
    return -(-offset // align) * align


def require(condition: bool, why: str) -> None:
    """Raise a `DamagedError` unless `condition` holds."""
    if not condition:
        raise DamagedError(f"the segment is damaged: {why}")
