"""The checkpoints at a place, looked at without the program that made them.

It knows no classes but the format's own, reads no tensor data, and writes nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from statetrain.errors import CheckpointError
from statetrain.loop import nearest
from statetrain.persist import container
from statetrain.persist.codec import DamagedError
from statetrain.persist.container import Index
from statetrain.persist.record import Record
from statetrain.persist.remote import files_at
from statetrain.persist.store import MissingError, Store

__all__ = ["Found", "Place", "Stored", "split"]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint in a listing: its record, None if that is damaged, and what is wrong with it."""

    id: str
    record: Record | None
    damage: str | None = None
    pinned: bool = False

    @property
    def step(self) -> int:
        """The optimizer step, which the id holds too."""
        return step_of(self.id)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint that was asked for, its index, and its place among all, 0 for the newest."""

    stored: Stored
    record: Record
    index: Index
    number: int


class Place:
    """What is at `url`, listed once.

    Raises:
        CheckpointError: there is no such place, or it cannot be read.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = Store(url)
        self._files = files_at(url)
        self._check_folder()
        with self._explained():
            names = self._files.everything()
            self.ids = self.store.ids(names)
        self._pins = {name.removeprefix("keep/") for name in names}
        self._stored: dict[str, Stored] = {}

    @property
    def all(self) -> list[Stored]:
        """The checkpoints, newest first, their records read; without those pruned meanwhile."""
        return list(filter(None, map(self._read, self.ids)))

    def index(self, record: Record) -> Index:
        """Return what the checkpoint holds, verified but for its tensors' data.

        Raises:
            DamagedError: its segment is missing, cut off, or damaged outside the data.
        """
        with self._explained(), self.store.open(record) as file:
            return container.read_index(file)

    def looked_at(self) -> Iterator[tuple[Stored, Index | None]]:
        """Yield each checkpoint, newest first, with its index; None where something is damaged."""
        yield from self._indexed(self.ids)

    def _indexed(self, ids: Iterable[str]) -> Iterator[tuple[Stored, Index | None]]:
        for stored in filter(None, map(self._read, ids)):
            if stored.record is None:
                yield stored, None
                continue
            try:
                index = self.index(stored.record)
            except DamagedError as error:
                if self._has(stored.id):  # else it was pruned while this looked
                    yield _damaged(stored, error), None
            else:
                yield stored, index

    def find(self, wanted: str | None) -> tuple[Found, list[Stored]]:
        """Return the checkpoint that is `wanted`, and the damaged ones that were passed over.

        `wanted` is the beginning of an id, or `step=N` for the newest of that step; None is the
        newest that is whole, where a run would go on.

        Raises:
            CheckpointError: there is none, or it is damaged, or several begin so.
        """
        if not self.ids:
            raise CheckpointError(self.nothing())
        chosen = self.chosen(wanted)
        passed: list[Stored] = []
        for stored, index in self._indexed(key for key in self.ids if key in chosen):
            if index is not None and stored.record is not None:
                number = self.ids.index(stored.id)
                found = Found(stored=stored, record=stored.record, index=index, number=number)
                return found, passed
            passed.append(stored)
        raise CheckpointError(
            "; ".join(f"checkpoint {each.id} is damaged: {each.damage}" for each in passed)
            + f": see `statetrain ls {self.url}` for others"
        )

    def nothing(self) -> str:
        """Say that no checkpoint is here, and where there are some instead."""
        return f"no checkpoints at {self.url!r}{self._instead() or ': nothing was saved there yet'}"

    def chosen(self, wanted: str | None) -> set[str]:
        """Return the ids that `wanted` names: all where it is None. It raises as `find` does."""
        ids = self.ids
        if wanted is None:
            return set(ids)
        if wanted.startswith("step="):
            return self._of_step(wanted.removeprefix("step="))
        chosen = [key for key in ids if key.startswith(wanted)]
        if not chosen:
            raise CheckpointError(f"no checkpoint {wanted!r} at {self.url}{nearest(wanted, ids)}")
        if len(chosen) > 1:
            raise CheckpointError(
                f"{len(chosen)} checkpoints begin with {wanted!r}: write more of one of "
                f"{', '.join(chosen)}"
            )
        return {*chosen}

    def _of_step(self, step: str) -> set[str]:
        if not step.isdecimal():
            raise CheckpointError(f"step={step!r} is no step: write a number, as in @step=120")
        steps = {key: step_of(key) for key in self.ids}
        chosen = {key for key, number in steps.items() if number == int(step)}
        if not chosen:
            near = min(steps.values(), key=lambda number: (abs(number - int(step)), number))
            raise CheckpointError(
                f"no checkpoint of step {step} at {self.url}: the nearest is of step {near}"
            )
        return chosen

    def _read(self, key: str) -> Stored | None:
        """Return the checkpoint `key`, its record read; None if it was pruned meanwhile."""
        if key not in self._stored:
            record, damage = None, None
            try:
                with self._explained():
                    record = self.store.record(key)
            except MissingError:
                return None
            except DamagedError as error:
                damage = str(error)
            self._stored[key] = Stored(
                id=key, record=record, damage=damage, pinned=key in self._pins
            )
        return self._stored[key]

    def _has(self, key: str) -> bool:
        with self._explained():
            return f"{key}.stc" in self._files.names("commits")

    def _check_folder(self) -> None:
        folder = self.store.folder
        if folder is None or os.path.isdir(folder):
            return
        if os.path.exists(folder):
            raise CheckpointError(f"{self.url!r} is a file: give the folder of the checkpoints")
        parent, name = os.path.split(folder)
        hint = nearest(name, os.listdir(parent)) if os.path.isdir(parent) else ""
        instead = hint if "did you mean" in hint else ": give what the run has as checkpoints="
        raise CheckpointError(f"no folder {self.url!r}{instead}")

    def _instead(self) -> str:
        folder = self.store.folder
        if folder is None:
            return ""
        inner = [
            os.path.join(self.url, entry.name)
            for entry in os.scandir(folder)
            if os.path.isdir(os.path.join(entry.path, "commits"))
        ]
        return f": there are some in {', '.join(sorted(inner))}" if inner else ""

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self.url}: {error}; check the URL and its permissions"
            ) from error


def step_of(id: str) -> int:  # noqa: A002  # the word of the format
    """Return the optimizer step in a checkpoint's id."""
    return int(id.split("-")[2][1:])


def split(text: str) -> tuple[str, str | None]:
    """Return the URL and the checkpoint that `URL@ID` names; None where no ID is written.

    An @ in a folder's name or in a URL's host is part of the URL.
    """
    url, _, wanted = text.rpartition("@")
    if not url or "/" in wanted or os.path.isdir(text):
        return text, None
    return url, wanted


def _damaged(stored: Stored, error: Exception) -> Stored:
    return replace(stored, damage=str(error))
