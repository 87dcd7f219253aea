"""`statetrain verify`: whether checkpoints are whole, to the last byte."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, TextIO

from statetrain.cli.stored import Place, Stored, split
from statetrain.cli.text import emit, printable, size
from statetrain.persist import container
from statetrain.persist.codec import DamagedError
from statetrain.persist.store import Store
from statetrain.progress import terminal

if TYPE_CHECKING:
    from rich.status import Status

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

__all__ = ["Bar", "add"]

PATIENCE = 1.0  # seconds without a bar
BAR = 24  # columns

ABOUT = """\
Check that checkpoints are whole: every byte is read and compared with its checksum.
Nothing is built from them, none of the program is imported, and nothing is changed.
Without @ID it is each checkpoint at the place, newest first.
"""

EXAMPLES = """\
examples:
  statetrain verify runs/digits                   all that are there
  statetrain verify runs/digits@g000001-n000004   the one whose id begins so
  statetrain verify runs/digits@step=120          those of step 120
  statetrain verify s3://bucket/digits --quick    all but the tensors' data

exit codes: 0 all are whole; 1 some are damaged, or there are none; 2 the place is not there or
cannot be read
"""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A checkpoint, and what is wrong with it; its size is None where its record is damaged."""

    id: str
    nbytes: int | None
    damage: str | None


def add(commands: Commands) -> None:
    """Add the command `verify` to the command line."""
    parser = commands.add_parser(
        "verify",
        help="check that checkpoints are whole",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target",
        metavar="URL[@ID]",
        help="a path or URL, and the beginning of an id, or step=N; `statetrain ls URL` has them",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--quick",
        action="store_true",
        help="check records, sizes, headers, indexes and trailers, and read no tensor data",
    )
    how.add_argument(
        "--full", action="store_true", help="read all data too, and check it; this is the default"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_verify)


def _verify(options: argparse.Namespace) -> int:
    url, wanted = split(options.target)
    place, full = Place(url), not options.quick
    listed = place.all
    if wanted is not None and listed:
        chosen = place.chosen(wanted)  # a wrong id is explained in one place
        listed = [stored for stored in listed if stored.id in chosen]
    found: list[Checked] = []
    checked = _checked(place.store, listed, full=full)
    if options.json:
        found += checked
        rows = [asdict(each) for each in found]
        emit([json.dumps({"url": place.url, "full": full, "checkpoints": rows}, indent=2)])
    elif listed:
        lines = _lines(checked, found, full=full)
        emit(lines)
        deque(lines, maxlen=0)  # a reader that went away does not make the rest whole
    if not found:
        print(f"statetrain: {place.nothing()}", file=sys.stderr)
    return 0 if found and not any(each.damage for each in found) else 1


def _checked(store: Store, listed: list[Stored], *, full: bool) -> Iterator[Checked]:
    bar = Bar(sum(stored.record.nbytes for stored in listed if stored.record))
    progress = bar.look if full and bar.console is not None else None
    read: Callable[[BinaryIO], container.Index] = container.read_index
    if full:
        read = partial(container.verify, progress=progress)
    for stored in listed:
        nbytes = None if stored.record is None else stored.record.nbytes
        damage = stored.damage
        try:
            if damage is None:
                store.load(stored.id, read)
        except DamagedError as error:
            damage = str(error)
            if stored.id not in store.ids():
                continue  # it was pruned while this looked
        finally:
            bar.hide(nbytes or 0)
        yield Checked(id=stored.id, nbytes=nbytes, damage=damage)


def _lines(checked: Iterator[Checked], found: list[Checked], *, full: bool) -> Iterator[str]:
    for each in checked:
        found.append(each)
        told = "-" if each.nbytes is None else size(each.nbytes)
        words = "ok" if each.damage is None else f"damaged: {' '.join(each.damage.split())}"
        yield f"{each.id}  {told:>9}  {printable(words)}"
    damaged = sum(each.damage is not None for each in found)
    words = f"{damaged} damaged" if damaged else "all whole"
    note = "" if full else " (the tensors' data was not read)"
    yield f"{len(found)} checkpoint{'s' * (len(found) != 1)}: {words}{note}"


class Bar:
    """How much of `total` bytes has been read, on a terminal, once it takes long.

    Args:
        total: the bytes of all checkpoints.
        stream: where to draw, if it is a terminal; by default `sys.stderr` as it is now.
        clock: seconds from any beginning.
    """

    def __init__(
        self,
        total: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = terminal(sys.stderr if stream is None else stream, live=None)
        self._total = total
        self._clock = clock
        self._begun = clock()
        self._before = 0
        self._status: Status | None = None

    def look(self, nbytes: int) -> None:
        """Show that so much of the checkpoint in hand has been read."""
        if self.console is None or self._clock() - self._begun < PATIENCE:
            return
        text = self.text(nbytes)
        if self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        self._status.update(text)

    def hide(self, nbytes: int) -> None:
        """Take the bar away, so that a line can be printed: a checkpoint of that size is done."""
        self._before += nbytes
        if self._status is not None:
            self._status.stop()
            self._status = None

    def text(self, nbytes: int) -> str:
        """Return the bar and the numbers it stands for."""
        done = min(self._before + nbytes, self._total)
        full = BAR * done // max(self._total, 1)
        plain = self.console is None or self.console.options.ascii_only
        marks = "#-" if plain else "━─"
        bar = marks[0] * full + marks[1] * (BAR - full)
        return f"{bar}  {size(done)} of {size(self._total)}"
