"""A store with a second one behind it: saved to the first, copied to the second meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import BinaryIO, TypeVar

from statetrain.errors import CheckpointError
from statetrain.persist.container import Segment
from statetrain.persist.record import Record
from statetrain.persist.store import Store, SupersededError, newest_of

__all__ = ["Mirrored"]

log = logging.getLogger("statetrain")
T = TypeVar("T")


class Mirrored:
    """A store and its mirror, used as one; a checkpoint has the same name in both.

    A save is acknowledged by the first store. A thread copies the newest to the mirror, its record
    last. A copy that fails is a warning, and is tried again with the next save and at the end. Both
    are looked at for the newest checkpoint, and claimed, so a writer elsewhere that has the same
    mirror is noticed.
    """

    def __init__(self, store: Store, mirror: Store) -> None:
        self.store = store
        self.mirror = mirror
        self._chosen: Callable[[list[Record]], Collection[str]] | None = None
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted: Record | None = None
        self._failed: Record | None = None
        self._superseded: SupersededError | None = None
        self._stopped = False

    @property
    def url(self) -> str:
        """Where the first store is."""
        return self.store.url

    @property
    def folder(self) -> str | None:
        """The folder of the first store; None if it is remote."""
        return self.store.folder

    @property
    def acknowledged(self) -> Record | None:
        """What the last save has stored."""
        return self.store.acknowledged

    def claim(self) -> int:
        """Begin to write in both, in one generation that is newer than all before."""
        above = max(self.store.generation(), self.mirror.generation())
        self.mirror.claim(above)
        return self.store.claim(above)

    def descend(self, record: Record) -> None:
        """Make the run that is written here a child of one that is stored elsewhere."""
        self.store.descend(record)

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
        """Store in the first store, as `Store.save` does, and begin to copy to the mirror.

        Raises:
            CheckpointError: it could not be stored, or a newer writer has taken over in the mirror.
        """
        if self._superseded is not None:
            raise self._superseded
        record = self.store.save(
            write, step=step, state=state, tags=tags, pin=pin, versions=versions
        )
        if pin is not None:
            self._pin_mirrored(record.id, pin)
        self._send(record)
        return record

    def records(self) -> list[Record]:
        """Return the valid commit records of the first store, newest first."""
        return self.store.records()

    def newest(self, read: Callable[[BinaryIO], T]) -> tuple[Record, T] | None:
        """Return the newest checkpoint that is whole in either; see `Store.newest`."""
        return newest_of([self.store, self.mirror], read)

    def prune(self, keep: int, protect: Collection[str] = ()) -> list[str]:
        """Remove all but the newest `keep` whole checkpoints; see `retain`."""
        return self.retain(lambda whole: {*protect, *(record.id for record in whole[:keep])})

    def retain(self, chosen: Callable[[list[Record]], Collection[str]]) -> list[str]:
        """Remove what is not kept from the first store now, and behind it from the mirror."""
        self._chosen = chosen
        return self.store.retain(chosen)

    def _pin_mirrored(self, key: str, name: str) -> None:
        try:
            self.mirror.pin(key, name)
        except CheckpointError as error:  # the first store has it
            log.warning("%s is not pinned in the mirror: %s", key, error)

    def clear(self) -> None:
        """Remove all that is in both."""
        self.close()
        self.mirror.clear()
        self.store.clear()

    def lock(self) -> None:
        """Refuse a second live writer of the first store."""
        self.store.lock()

    def unlock(self) -> None:
        """Let another writer in."""
        self.store.unlock()

    def close(self, *, at_once: bool = False) -> None:
        """Wait until the newest checkpoint is in the mirror; or stop copying, to end `at_once`."""
        self._stopped = at_once
        self._join()
        again, self._failed = self._failed, None
        if again is not None and not at_once and self._superseded is None:
            self._send(again)
            self._join()
        self._stopped = False

    def _send(self, record: Record) -> None:
        with self._mutex:
            self._wanted, self._failed = record, None
            self.store.held |= {record.id}
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="statetrain-mirror")
                self._thread.start()

    def _join(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join()

    def _next(self) -> Record | None:
        """Return the newest that is not copied yet; what was saved in between is left out."""
        with self._mutex:
            record, self._wanted = self._wanted, None
            self.store.held = set() if record is None else {record.id}
            if record is None:
                self._thread = None
            return record

    def _work(self) -> None:
        while (record := self._next()) is not None:
            try:
                self.mirror.adopt(record, self.store, check=self._check)
                log.info("copied %s to %s", record.id, self.mirror.url)
                if self._chosen is not None:
                    self.mirror.retain(self._chosen)
            except SupersededError as error:
                self._superseded = error
            except Exception as error:  # noqa: BLE001  # the first store has it
                self._failed = record
                log.warning("%s is not in the mirror %s yet: %s", record.id, self.mirror.url, error)

    def _check(self) -> None:
        if self._stopped:
            raise CheckpointError("the copy was stopped before it was whole")
