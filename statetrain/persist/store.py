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
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, TypeVar

from statetrain.errors import CheckpointError
from statetrain.persist.codec import DamagedError
from statetrain.persist.container import Segment, identify
from statetrain.persist.failures import explained, retried
from statetrain.persist.local import LocalFiles, Lock
from statetrain.persist.record import Parent, Record, Shard, order_of
from statetrain.persist.remote import Files, files_at

__all__ = ["MissingError", "Store", "SupersededError", "newest_of"]

log = logging.getLogger("statetrain")
T = TypeVar("T")

LEAST = 2  # whole checkpoints that always stay
LISTINGS = 5  # times that a listing is read again when what it named was pruned meanwhile
SLICE = 8 << 20
_CLAIM = re.compile(r"g(\d{6,9})-([0-9a-f]{8})")


class SupersededError(CheckpointError):
    """A newer writer has taken over."""


class MissingError(DamagedError):
    """What a listing named is not there: it was pruned meanwhile, or is lost."""


class Store:
    """Checkpoints under `url`: a local path, or any URL that fsspec can open.

    Making a store and reading from it write nothing. `storage_options` goes to the URL's file
    system. `uid` names the writer, and is random unless given. `pause` waits between retries.

    Raises:
        CheckpointError: the URL's kind is unknown, the package for it is missing, or it cannot be
            reached.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        uid: str | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = os.fspath(url)
        self.acknowledged: Record | None = None
        self.held: set[str] = set()  # ids that are never removed, because something reads them
        self._pause = pause
        self._uid = uid or secrets.token_hex(4)
        self._gen = 0
        self._saves = 0
        self._torn = False
        self._run_id = ""
        self._parent: Record | None = None
        self._origin = ""  # the id of the parent of this run
        self._damaged: set[str] = set()
        self._lock: Lock | None = None
        with self._explained("open"):
            self._files: Files = retried(
                lambda: files_at(self.url, storage_options), url=self.url, pause=pause
            )

    @property
    def folder(self) -> str | None:
        """The folder of a local store; None for a remote one."""
        return self._files.root if isinstance(self._files, LocalFiles) else None

    @property
    def uid(self) -> str:
        """The name of this writer."""
        return self._uid

    def claim(self, above: int = 0) -> int:
        """Begin to write: return a generation newer than all before, and stop older writers."""
        with self._explained("begin writing"):
            gen = 1 + max((above, *(order[0] for order in self._orders())))
            known = self._parent or next(iter(self.records()), None)
            self._run_id = self._run_id or (known.run_id if known else secrets.token_hex(8))
            claim = f"{os.getpid()}\n".encode()
            self._retried(lambda: self._files.put(f"claims/g{gen:06d}-{self._uid}", claim))
        self._gen, self._saves = gen, 0
        self._origin = self._parent.id if self._parent else ""
        return gen

    def generation(self) -> int:
        """Return the newest generation that has begun to write here; 0 if none has."""
        with self._explained("list"):
            return max((order[0] for order in self._orders()), default=0)

    def descend(self, record: Record) -> None:
        """Make the run that is written here a child of one that is stored elsewhere."""
        self._parent, self._run_id = record, secrets.token_hex(8)

    def save(
        self,
        write: Callable[[BinaryIO], Segment],
        *,
        step: int,
        state: str,
        tags: Collection[str] = (),
        pin: str | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> Record:
        """Store what `write` writes as a new checkpoint; on return it is there and read back.

        `write` is called again, from the beginning, after an error of the store that may pass.

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
            try:
                record = self._written(record, write)
            except FileNotFoundError:
                self._fence(record)  # the newer writer has swept it away while it was written
                raise
            self._fence(record)
            if pin is not None:  # first: a checkpoint that is there and should be pinned, is
                self._put_pin(record.id, pin)
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
        return newest_of([self], read)

    def ids(self, listed: Iterable[str] | None = None) -> list[str]:
        """Return the ids of all commits, newest first; `listed` are the names of all blobs."""
        with self._explained("list"):
            if listed is None:
                return self._ids()
            return self._ids(name.removeprefix("commits/") for name in listed)

    def record(self, key: str) -> Record:
        """Return the commit record of the checkpoint `key`.

        Raises:
            DamagedError: it is not there (a `MissingError`), or not whole.
        """
        with self._explained("read"):
            found = self._record(key)
        if isinstance(found, DamagedError):
            raise found
        return found

    def load(self, key: str, read: Callable[[BinaryIO], T]) -> tuple[Record, T]:
        """Return the checkpoint `key` and what `read` made of it.

        Raises:
            DamagedError: it is not whole.
        """
        with self._explained("read"):
            try:
                record = self.record(key)
                return record, self._read(record, read)
            except MissingError:
                raise
            except DamagedError:
                self._damaged.add(key)
                raise

    def continue_from(self, record: Record) -> None:
        """Let the next save be a child of `record`, a checkpoint of this run."""
        self._parent = record

    def adopt(
        self, record: Record, source: Store, *, check: Callable[[], None] = lambda: None
    ) -> None:
        """Copy a checkpoint of another store to here, the record last, under the same names.

        `check` is called between slices and may raise.

        Raises:
            CheckpointError: it could not be copied, or a newer writer has taken over here.
        """
        with self._explained("copy to"):
            if record.id in self._ids():
                return
            for shard in record.shards:
                self._new(shard.path, partial(_copied, source, shard, check))
            self._fence(record)
            self._commit(record)
        self._saves = max(self._saves, record.save)

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
        """Remove all but the newest `keep` whole checkpoints; see `retain`."""
        return self.retain(lambda whole: {*protect, *(record.id for record in whole[:keep])})

    def retain(
        self, chosen: Callable[[list[Record]], Collection[str]], *, dry: bool = False
    ) -> list[str]:
        """Remove what is not kept, and return the removed ids.

        `chosen` is given the whole checkpoints, newest first, and returns the ids that it keeps.
        Kept in any case: the newest two that are whole, the parent of this run, pins, and whatever
        a newer writer made. Where none is whole nothing is removed. What interrupted saves and
        superseded writers left behind is removed. A `dry` one removes nothing.
        """
        with self._explained("prune"):
            keys = self._ids()
            gen = self._gen or max((order[0] for order in self._orders()), default=0)
            older = [key for key in keys if _order(key)[0] <= gen]
            whole = [record for key in older if (record := self._whole(key)) is not None]
            kept = {*self._files.names("keep"), *(record.id for record in whole[:LEAST])}
            kept |= {*chosen(whole), self._origin, *self.held}
            gone = [key for key in older if key not in kept] if whole else []
            if not dry:
                self._remove(gone)
                self._sweep(gen, {*keys} - {*gone})
        return gone

    def pin(self, key: str, name: str = "") -> None:
        """Keep the checkpoint `key` from ever being pruned; `name` says what for."""
        with self._explained("pin in"):
            self._put_pin(key, name)

    def unpin(self, key: str) -> None:
        """Let the checkpoint `key` be pruned again."""
        with self._explained("unpin in"):
            self._files.unlink(f"keep/{key}")

    def pins(self) -> dict[str, str]:
        """Return the name of each pinned checkpoint."""
        with self._explained("list"):
            return {key: self._pin_name(key) for key in self._files.names("keep") if order_of(key)}

    def remove(self, ids: Iterable[str]) -> None:
        """Remove these checkpoints, whatever they are: the records first, then their data."""
        with self._explained("remove from"):
            self._remove([key for key in self._ids() if key in {*ids}])

    def close(self, *, at_once: bool = False) -> None:
        """Do nothing: what was acknowledged is there."""

    def clear(self) -> None:
        """Remove all that is here, and the folder: records first, so that none lacks its data."""
        with self._explained("clear"):
            self._remove(self._ids())
            self._files.remove("")

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

    def _remove(self, keys: list[str]) -> None:
        for key in keys:
            self._files.unlink(f"commits/{key}.stc")
        if keys:
            self._files.settle("commits")
        for key in keys:
            self._files.remove(f"data/{key}")

    def _put_pin(self, key: str, name: str) -> None:
        with contextlib.suppress(FileExistsError):  # a try before this one
            self._retried(lambda: self._files.put(f"keep/{key}", name.encode()))

    def _pin_name(self, key: str) -> str:
        try:
            return self._retried(lambda: self._files.get(f"keep/{key}")).decode(errors="replace")
        except FileNotFoundError:  # it was unpinned since it was listed
            return ""

    def _new(self, name: str, write: Callable[[BinaryIO], Segment]) -> Segment:
        segment, size = self._retried(lambda: self._files.write_new(name, write))
        if size != segment.nbytes:
            raise CheckpointError(
                f"{self.url} kept {size} of {segment.nbytes} bytes of {name}: check the free space"
            )
        return segment

    def _written(self, record: Record, write: Callable[[BinaryIO], Segment]) -> Record:
        name = f"data/{record.id}/r00000.000.sts"
        segment = self._new(name, write)
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
        others = self._orders() if self._gen else []  # else this is a copy, and no writer
        newer = [(gen, uid) for gen, _, uid in others if (gen, uid) > mine]
        lost = [shard.path for shard in record.shards if not self._has(shard)]
        if newer or lost:
            raise SupersededError(
                f"superseded: another run has begun to write to {self.url} "
                f"(generation {max(newer, default=mine)[0]}, this one is {self._gen}). Stop this "
                "run, or give it another place"
            )

    def _commit(self, record: Record) -> None:
        name, data = f"commits/{record.id}.stc", record.to_bytes()
        with contextlib.suppress(FileExistsError):  # a try before this one; what counts is below
            self._retried(lambda: self._files.put(name, data))
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

    def _whole(self, key: str) -> Record | None:
        record = None if key in self._damaged else self._record(key)
        return record if isinstance(record, Record) and all(map(self._has, record.shards)) else None

    def _ids(self, listed: Iterable[str] | None = None) -> list[str]:
        """Return the ids of all commits, newest first; a hint helps where listings lag behind."""
        names = listed or self._retried(lambda: self._files.names("commits"))
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
            return MissingError("its commit record is gone")
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
            raise MissingError(f"its data is missing ({error})") from error

    def opened(self, shard: Shard) -> BinaryIO:
        """Open a segment that a record names.

        Raises:
            DamagedError: another one is there.
        """
        file = self._files.open(shard.path, shard.nbytes)
        try:
            if identify(file) != _identity(shard):
                raise DamagedError(f"{shard.path} is not the segment that was committed")  # noqa: TRY301  # the file is open
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def _opened(self, record: Record) -> BinaryIO:
        if len(record.shards) != 1:
            raise CheckpointError(
                f"{record.id} has {len(record.shards)} parts and this statetrain reads one: "
                "upgrade it"
            )
        return self.opened(record.shards[0])

    def _sweep(self, gen: int, committed: set[str]) -> None:
        """Remove what interrupted saves and superseded writers left, never a newer writer's."""
        for key in self._files.names("data"):
            order = order_of(key)
            if order and key not in committed and self._is_over(order, gen):
                self._files.remove(f"data/{key}")
        for key in self._files.names("keep"):
            order = order_of(key)
            if order and key not in committed and self._is_over(order, gen):
                self._files.unlink(f"keep/{key}")
        for name in self._files.names("claims"):
            match = _CLAIM.fullmatch(name)
            if match and int(match[1]) < gen:
                self._files.unlink(f"claims/{name}")
        for name in self._files.names("commits"):
            order = order_of(name.removeprefix(".").split(".stc.")[0])
            if name.endswith(".tmp") and order and self._is_over(order, gen):
                self._files.unlink(f"commits/{name}")

    def _is_over(self, order: tuple[int, int, str], gen: int) -> bool:
        """Tell whether the save at `order` can no longer be in progress."""
        own = self._gen and order[0] == self._gen and order[2] == self._uid
        return order[0] < gen or bool(own and order[1] <= self._saves)

    def _retried(self, attempt: Callable[[], T]) -> T:
        return retried(attempt, url=self.url, pause=self._pause, renew=self._files.renew)

    def _explained(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return explained(doing, self.url)


def newest_of(stores: Iterable[Store], read: Callable[[BinaryIO], T]) -> tuple[Record, T] | None:
    """Return the newest checkpoint that is whole in any of the stores of one run.

    Where several have it, the first store is read. See `Store.newest`.
    """
    stores = list(stores)
    for again in reversed(range(LISTINGS)):
        listed = [(store, key) for store in stores for key in store.ids()]
        damage: list[str] = []
        for store, key in sorted(listed, key=lambda each: _order(each[1]), reverse=True):
            try:
                record, value = store.load(key, read)
            except DamagedError as error:
                if again and isinstance(error, MissingError) and key not in store.ids():
                    break  # it was pruned since it was listed, so there is a newer one
                log.warning("checkpoint %s in %s is damaged: %s", key, store.url, error)
                damage.append(f"{key}: {error}")
                continue
            for each in stores:
                each.continue_from(record)
            return record, value
        else:
            break
    if damage:
        places = " and ".join(store.url for store in stores)
        raise CheckpointError(
            f"no checkpoint in {places} is whole ({'; '.join(damage)}): restore one from a "
            "copy, or name another place to start afresh"
        )
    return None


def _copied(source: Store, shard: Shard, check: Callable[[], None], file: BinaryIO) -> Segment:
    """Copy the bytes of a shard; that they are the right ones is checked where they are read."""
    with source.opened(shard) as data:
        while piece := data.read(SLICE):
            check()
            file.write(piece)
    return _identity(shard)


def _identity(shard: Shard) -> Segment:
    return Segment(
        nbytes=shard.nbytes,
        index_off=shard.index_off,
        index_len=shard.index_len,
        index_digest=shard.index_digest,
    )


def _order(key: str) -> tuple[int, int, str]:
    return order_of(key) or (0, 0, "")
