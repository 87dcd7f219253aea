"""A commit record: the small immutable object whose presence makes a checkpoint exist."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import xxhash

from statetrain.errors import CheckpointError
from statetrain.persist.codec import DamagedError, pack, unpack

__all__ = ["Parent", "Record", "Shard", "order_of"]

MAGIC = b"\x89STC\r\n\x1a\n"
END = b"STCEND\r\n"
VERSION = 1
HEAD = struct.Struct("<8sII")
LIMIT = 64 << 20  # a record lists shards, not data

_ID = re.compile(r"g(\d{6,9})-n(\d{6,9})-s(\d{12,18})-([0-9a-f]{8})")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One segment that a checkpoint is made of, and what its bytes must be."""

    path: str
    nbytes: int
    index_off: int
    index_len: int
    index_digest: bytes
    rank: int = 0
    role: str = "run"


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The checkpoint that a run went on from, or saved before: its id and its record's digest."""

    id: str
    digest: bytes


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a checkpoint is: whose, of which step and state, and which segments it is made of.

    Checkpoints are ordered by (gen, save, uid): the generation of the writer, the number of the
    save in it, and the writer. Neither the step nor a clock decides which one is newer.
    """

    run_id: str
    gen: int
    save: int
    uid: str
    step: int
    state: str
    parent: Parent | None = None
    world: int = 1
    created: float = 0.0  # informational: clocks of two machines are not comparable
    versions: Mapping[str, str] = field(default_factory=dict)
    shards: tuple[Shard, ...] = ()
    external: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The name, which no other save can have: generation, save, step and writer."""
        return f"g{self.gen:06d}-n{self.save:06d}-s{self.step:012d}-{self.uid}"

    @property
    def order(self) -> tuple[int, int, str]:
        """What checkpoints are sorted by; the greatest is the newest."""
        return (self.gen, self.save, self.uid)

    @property
    def nbytes(self) -> int:
        """The bytes of all segments."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def digest(self) -> bytes:
        """The digest of the record's content, by which a later record names it as its parent."""
        return xxhash.xxh3_128_digest(self._payload())

    def to_bytes(self) -> bytes:
        """Return the record as a `.stc` object; the same record gives the same bytes."""
        payload = self._payload()
        head = HEAD.pack(MAGIC, VERSION, len(payload))
        return head + payload + xxhash.xxh3_128_digest(payload) + END

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Return the record that `data` holds.

        Raises:
            DamagedError: it holds none, or not all of one.
            CheckpointError: it was written by a newer version.
        """
        payload = _verified(data)
        try:
            return _from_payload(unpack(payload))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise DamagedError(f"the commit record is damaged: {error!r}") from error

    def _payload(self) -> bytes:
        shards = [[getattr(shard, f.name) for f in fields(Shard)] for shard in self.shards]
        return pack(
            {
                "run_id": self.run_id,
                "id": self.id,
                "gen": self.gen,
                "save": self.save,
                "uid": self.uid,
                "step": self.step,
                "fsm_state": self.state,
                "parent": asdict(self.parent) if self.parent else None,
                "world": self.world,
                "created": self.created,
                "versions": dict(self.versions),
                "shards": shards,
                "external": list(self.external),
                "dcp": {},
                "tags": list(self.tags),
            }
        )


def order_of(id: str) -> tuple[int, int, str] | None:  # noqa: A002  # the word of the format
    """Return what the checkpoint `id` is sorted by, or None if it is no checkpoint's id."""
    match = _ID.fullmatch(id)
    return (int(match[1]), int(match[2]), match[4]) if match else None


def _verified(data: bytes) -> bytes:
    if len(data) < HEAD.size + 24 or data[:8] != MAGIC:
        raise DamagedError(
            f"the commit record is damaged: {len(data)} bytes that begin as no record"
        )
    _, version, size = HEAD.unpack_from(data)
    if version > VERSION and data.endswith(END):
        raise CheckpointError(
            f"the commit record has format {version} and this statetrain reads up to {VERSION}: "
            "upgrade it"
        )
    payload, rest = data[HEAD.size : HEAD.size + size], data[HEAD.size + size :]
    if version != VERSION or size > LIMIT or rest != xxhash.xxh3_128_digest(payload) + END:
        raise DamagedError("the commit record is damaged: its bytes are not what was written")
    return payload


def _from_payload(payload: dict[str, Any]) -> Record:
    parent = payload["parent"]
    names = [f.name for f in fields(Shard)]
    record = Record(
        run_id=_typed(payload["run_id"], str),
        gen=_typed(payload["gen"], int),
        save=_typed(payload["save"], int),
        uid=_typed(payload["uid"], str),
        step=_typed(payload["step"], int),
        state=_typed(payload["fsm_state"], str),
        parent=None if parent is None else Parent(**parent),
        world=_typed(payload["world"], int),
        created=_typed(payload["created"], float),
        versions=_typed(payload["versions"], dict),
        shards=tuple(
            Shard(**dict(zip(names, row, strict=True))) for row in _typed(payload["shards"], list)
        ),
        external=tuple(_typed(payload["external"], list)),
        tags=tuple(_typed(payload["tags"], list)),
    )
    if record.id != payload["id"] or order_of(record.id) is None:
        raise ValueError(f"its id is not {payload['id']!r}")
    for shard in record.shards:
        _check_shard(shard)
    return record


def _check_shard(shard: Shard) -> None:
    for value in (shard.nbytes, shard.index_off, shard.index_len, shard.rank):
        if _typed(value, int) < 0:
            raise ValueError("a shard's size is negative")
    _typed(shard.index_digest, bytes)
    parts = _typed(shard.path, str).split("/")
    if parts[0] != "data" or not all(parts) or {".", ".."} & set(parts) or "\\" in shard.path:
        raise ValueError(f"a shard lies outside the store: {shard.path!r}")


def _typed(value: Any, cls: type) -> Any:
    if type(value) is not cls:
        raise TypeError(f"{value!r} is no {cls.__name__}")
    return value
