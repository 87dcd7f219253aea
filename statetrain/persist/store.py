"""Where checkpoints live: named blobs under a URL, and the protocol that makes them exist.

    data/{id}/r00000.000.sts   what was saved; means nothing until a commit record names it
    commits/{id}.stc           a commit record, self-checked and never overwritten
    claims/g{gen}-{uid}        who began to write when; a newer one stops an older writer
    keep/{id}                  pins a checkpoint against pruning
    lock, LATEST               a live writer's lock (local only); a hint that nothing relies on

It knows neither torch nor runs. docs/format.md has the reasons.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import BinaryIO, TypeVar

from statetrain.errors import CheckpointError
from statetrain.persist.codec import DamagedError
from statetrain.persist.container import Segment, identify
from statetrain.persist.local import LocalFiles, Lock
from statetrain.persist.record import Parent, Record, Shard, order_of
from statetrain.persist.remote import Files, files_at

__all__ = ["Store"]

log = logging.getLogger("statetrain")
T = TypeVar("T")

TRIES = 4
PAUSE = 0.5  # seconds before the first retry; doubled each time
_CLAIM = re.compile(r"g(\d{6,9})-([0-9a-f]{8})")


class Store:
    """Checkpoints under `url`: a local path, or any URL that fsspec can open.

    Making a store and reading from it write nothing. `pause` waits between retries.

    Raises:
        CheckpointError: the URL's kind is unknown, or the package for it is missing.
    """

    def __init__(
        self, url: str | os.PathLike[str], *, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self.url = os.fspath(url)
        self.acknowledged: Record | None = None
        self._pause = pause
        self._uid = secrets.token_hex(4)
        self._gen = 0
        self._saves = 0
        self._torn = False
        self._run_id = ""
        self._parent: Record | None = None
        self._lock: Lock | None = None
        self._files: Files = files_at(self.url)

    @property
    def folder(self) -> str | None:
        """The folder of a local store; None for a remote one."""
        return self._files.root if isinstance(self._files, LocalFiles) else None

    def claim(self) -> int:
        """Begin to write: return a generation newer than all before, and stop older writers."""
        with self._explained("begin writing"):
            gen = 1 + max((order[0] for order in self._orders()), default=0)
            known = self._parent or next(iter(self.records()), None)
            self._run_id = known.run_id if known else secrets.token_hex(8)
            self._files.put(f"claims/g{gen:06d}-{self._uid}", f"{os.getpid()}\n".encode())
        self._gen, self._saves = gen, 0
        return gen

    def save(
        self,
        write: Callable[[BinaryIO], Segment],
        *,
        step: int,
        state: str,
        tags: Collection[str] = (),
        versions: Mapping[str, str] | None = None,
    ) -> Record:
        """Store what `write` writes as a new checkpoint; on return it is there and read back.

        Raises:
            CheckpointError: it could not be stored, or a newer writer has taken over. What was
                stored before is untouched.
        """
        if self._gen == 0:
            self.claim()
        if self._torn:
            with self._explained("tidy"):
                self._sweep(self._gen, {*self._ids()})
        self._torn = True  # until it is acknowledged
        self._saves += 1
        record = Record(
            run_id=self._run_id,
            gen=self._gen,
            save=self._saves,
            uid=self._uid,
            step=step,
            state=state,
            parent=Parent(id=self._parent.id, digest=self._parent.digest) if self._parent else None,
            created=time.time(),
            versions=dict(versions or {}),
            tags=tuple(tags),
        )
        with self._explained("save to"):
            record = self._written(record, write)
            self._fence(record)
            self._commit(record)
        self.acknowledged = self._parent = record
        self._torn = False
        return record

    def records(self) -> list[Record]:
        """Return the valid commit records, newest first."""
        with self._explained("list"):
            found = [self._record(key) for key in self._ids()]
        return [record for record in found if isinstance(record, Record)]

    def newest(self, read: Callable[[BinaryIO], T]) -> tuple[Record, T] | None:
        """Return the newest checkpoint that is whole, and what `read` made of it.

        A damaged one is reported as a warning, and the next older one is tried. None means that
        nothing was ever committed here.

        Raises:
            CheckpointError: there are checkpoints but none is whole; or the store cannot be read,
                which never leads to an older checkpoint; or `read` says that it does not fit.
        """
        damage: list[str] = []
        with self._explained("read"):
            for key in self._ids():
                record = self._record(key)
                try:
                    if isinstance(record, DamagedError):
                        raise record
                    value = self._read(record, read)
                except DamagedError as error:
                    log.warning("checkpoint %s in %s is damaged: %s", key, self.url, error)
                    damage.append(f"{key}: {error}")
                    continue
                self._parent = record
                return record, value
        if damage:
            raise CheckpointError(
                f"no checkpoint in {self.url} is whole ({'; '.join(damage)}): restore one from a "
                "copy, or name another place to start afresh"
            )
        return None

    def open(self, record: Record) -> BinaryIO:
        """Open the data of `record` for reading.

        Raises:
            DamagedError: it is not there, or not of the recorded size.
        """
        with self._explained("read"):
            try:
                return self._retried(lambda: self._opened(record))
            except FileNotFoundError as error:
                raise DamagedError(f"the data of {record.id} is missing ({error})") from error

    def prune(self, keep: int, protect: Collection[str] = ()) -> list[str]:
        """Remove all but the newest `keep` whole checkpoints, and return the removed ids.

        Kept as well: the ids in `protect` and under `keep/`, and whatever a newer writer made. What
        interrupted saves and superseded writers left behind is removed.
        """
        with self._explained("prune"):
            keys = self._ids()
            gen = self._gen or max((order[0] for order in self._orders()), default=0)
            older = [key for key in keys if _order(key)[0] <= gen]
            whole = [key for key in older if self._is_whole(key)]
            kept = {*protect, *self._files.names("keep"), *whole[: max(keep, 1)]}
            gone = [key for key in older if key not in kept] if whole else []
            for key in gone:
                self._files.remove(f"commits/{key}.stc")
            if gone:
                self._files.settle("commits")
            for key in gone:
                self._files.remove(f"data/{key}")
            self._sweep(gen, {*keys} - {*gone})
        return gone

    def clear(self) -> None:
        """Remove every checkpoint: records first, so that none is left without its data."""
        with self._explained("clear"):
            keys = self._ids()
            for key in keys:
                self._files.remove(f"commits/{key}.stc")
            if keys:
                self._files.settle("commits")
            for key in keys:
                self._files.remove(f"data/{key}")
            for name in self._files.names("claims"):
                self._files.remove(f"claims/{name}")

    def lock(self) -> None:
        """Refuse a second live writer, on local stores where the system can; else do nothing.

        Raises:
            CheckpointError: another process or another store of this one is writing here.
        """
        if not isinstance(self._files, LocalFiles):
            log.info("%s has no locks: a second writer is found at its next save", self.url)
            return
        if self._lock is not None:
            raise CheckpointError(
                f"{self.url} is in use by another fit of this process: wait for it"
            )
        with self._explained("lock"):
            os.makedirs(self._files.root, exist_ok=True)
            lock = Lock(os.path.join(self._files.root, "lock"))
            lock.acquire()
        self._lock = lock

    def unlock(self) -> None:
        """Let another writer in."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _written(self, record: Record, write: Callable[[BinaryIO], Segment]) -> Record:
        name = f"data/{record.id}/r00000.000.sts"
        segment, size = self._files.write_new(name, write)
        if size != segment.nbytes:
            raise CheckpointError(
                f"{self.url} kept {size} of {segment.nbytes} bytes of {name}: check the free space"
            )
        shard = Shard(
            path=name,
            nbytes=segment.nbytes,
            index_off=segment.index_off,
            index_len=segment.index_len,
            index_digest=segment.index_digest,
        )
        return replace(record, shards=(shard,))

    def _fence(self, record: Record) -> None:
        """Stop if a newer writer has begun, or has already swept this save's data away."""
        mine = (self._gen, self._uid)
        newer = [(gen, uid) for gen, _, uid in self._orders() if (gen, uid) > mine]
        lost = [shard.path for shard in record.shards if not self._has(shard)]
        if newer or lost:
            raise CheckpointError(
                f"superseded: another run has begun to write to {self.url} "
                f"(generation {max(newer, default=mine)[0]}, this one is {self._gen}). Stop this "
                "run, or give it another place"
            )

    def _commit(self, record: Record) -> None:
        name, data = f"commits/{record.id}.stc", record.to_bytes()
        self._files.put(name, data)
        if self._retried(lambda: self._files.get(name)) != data:
            raise CheckpointError(f"{self.url} gave other bytes back for {name} than it was given")
        try:
            self._files.hint("LATEST", record.id.encode())
        except OSError as error:  # nothing relies on it
            log.debug("no LATEST in %s: %s", self.url, error)

    def _has(self, shard: Shard) -> bool:
        try:
            return self._retried(lambda: self._files.size(shard.path)) == shard.nbytes
        except FileNotFoundError:
            return False

    def _is_whole(self, key: str) -> bool:
        record = self._record(key)
        return isinstance(record, Record) and all(map(self._has, record.shards))

    def _ids(self) -> list[str]:
        """Return the ids of all commits, newest first; a hint helps where listings lag behind."""
        names = self._retried(lambda: self._files.names("commits"))
        ids = {name.removesuffix(".stc") for name in names if name.endswith(".stc")}
        with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
            hint = self._retried(lambda: self._files.get("LATEST")).decode().strip()
            if order_of(hint) and hint not in ids:
                self._retried(lambda: self._files.size(f"commits/{hint}.stc"))
                ids.add(hint)
        return sorted(filter(order_of, ids), key=_order, reverse=True)

    def _orders(self) -> list[tuple[int, int, str]]:
        """Return the places of all writers and commits in the order of checkpoints."""
        claims = map(_CLAIM.fullmatch, self._retried(lambda: self._files.names("claims")))
        return [(int(m[1]), 0, m[2]) for m in claims if m] + [_order(key) for key in self._ids()]

    def _record(self, key: str) -> Record | DamagedError:
        try:
            data = self._retried(lambda: self._files.get(f"commits/{key}.stc"))
            record = Record.from_bytes(data)
        except DamagedError as error:
            return error
        except FileNotFoundError:
            return DamagedError("its commit record is gone")
        if record.id != key:
            return DamagedError(f"its commit record is that of {record.id}")
        return record

    def _read(self, record: Record, read: Callable[[BinaryIO], T]) -> T:
        def once() -> T:
            with self._opened(record) as file:
                return read(file)

        try:
            return self._retried(once)
        except FileNotFoundError as error:
            raise DamagedError(f"its data is missing ({error})") from error

    def _opened(self, record: Record) -> BinaryIO:
        if len(record.shards) != 1:
            raise CheckpointError(
                f"{record.id} has {len(record.shards)} parts and this statetrain reads one: "
                "upgrade it"
            )
        (shard,) = record.shards
        file = self._files.open(shard.path)
        try:
            if identify(file) != _identity(shard):
                raise DamagedError(f"{shard.path} is not the segment that was committed")  # noqa: TRY301  # the file is open
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def _sweep(self, gen: int, committed: set[str]) -> None:
        """Remove what interrupted saves and superseded writers left, never a newer writer's."""
        for key in self._files.names("data"):
            order = order_of(key)
            if order and key not in committed and self._is_over(order, gen):
                self._files.remove(f"data/{key}")
        for name in self._files.names("claims"):
            match = _CLAIM.fullmatch(name)
            if match and int(match[1]) < gen:
                self._files.remove(f"claims/{name}")
        for name in self._files.names("commits"):
            order = order_of(name.removeprefix(".").split(".stc.")[0])
            if name.endswith(".tmp") and order and self._is_over(order, gen):
                self._files.remove(f"commits/{name}")

    def _is_over(self, order: tuple[int, int, str], gen: int) -> bool:
        """Tell whether the save at `order` can no longer be in progress."""
        own = self._gen and order[0] == self._gen and order[2] == self._uid
        return order[0] < gen or bool(own and order[1] <= self._saves)

    def _retried(self, attempt: Callable[[], T]) -> T:
        """Try again after an error that may pass; what is damaged or missing does not pass."""
        for number in range(TRIES - 1):
            try:
                return attempt()
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                raise
            except OSError as error:
                log.info("%s: %r, trying again", self.url, error)
                self._pause(PAUSE * 2**number)
        return attempt()

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Turn a backend's failure into an error that says what to do."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot {doing} {self.url}: {error}; {_advice(error)}"
            ) from error


def _identity(shard: Shard) -> Segment:
    return Segment(
        nbytes=shard.nbytes,
        index_off=shard.index_off,
        index_len=shard.index_len,
        index_digest=shard.index_digest,
    )


def _order(key: str) -> tuple[int, int, str]:
    return order_of(key) or (0, 0, "")


def _advice(error: OSError) -> str:
    code = error.errno
    if code in {errno.ENOSPC, errno.EDQUOT}:
        return "the disk is full: free some space, or keep fewer checkpoints"
    if code in {errno.EACCES, errno.EPERM, errno.EROFS} or isinstance(error, PermissionError):
        return "it is not writable or not readable by this user: check its permissions"
    if code in {errno.ENOTDIR, errno.EEXIST}:
        return "a file is where a folder should be: name another place"
    return "check that it can be reached, and run the same command again"
