"""`statetrain cp`: checkpoints copied to another place, whole or not at all."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from statetrain.cli.stored import Place, Stored, split
from statetrain.cli.text import emit, size
from statetrain.cli.verify import Bar
from statetrain.errors import CheckpointError
from statetrain.persist import container
from statetrain.persist.codec import DamagedError
from statetrain.persist.record import Record
from statetrain.persist.remote import Files, files_at
from statetrain.persist.store import SLICE, Store

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

__all__ = ["add"]

ABOUT = """\
Copy a checkpoint to another place, on a disk or at any URL: the data first, then the record that
makes it exist, under the same names. The copy is read back and verified. What an interrupted copy
left is no checkpoint, and the same command begins it anew. Pins are not copied.
Without @ID it is the newest that is whole.
"""

EXAMPLES = """\
examples:
  statetrain cp runs/digits s3://bucket/digits           the newest
  statetrain cp runs/digits@step=120 kept/digits
  statetrain cp s3://bucket/digits runs/digits --all     all that are whole, oldest first

exit codes: 0; 2 there is no such checkpoint, or the copy could not be made or is not the same
"""


def add(commands: Commands) -> None:
    """Add the command `cp` to the command line."""
    parser = commands.add_parser(
        "cp",
        help="copy checkpoints to another place",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="URL[@ID]", help="as `statetrain show` takes it")
    parser.add_argument("dest", metavar="DEST", help="a path or URL, where a run may go on from")
    parser.add_argument("--all", action="store_true", help="copy all checkpoints that are whole")
    parser.add_argument("--quick", action="store_true", help="do not read the copied data back")
    parser.add_argument(
        "--force", action="store_true", help="copy to where another run has checkpoints, too"
    )
    parser.set_defaults(command=_cp)


def _cp(options: argparse.Namespace) -> None:
    url, wanted = split(options.target)
    if options.all and wanted is not None:
        raise CheckpointError(f"@{wanted} names one checkpoint and --all means each: give one")
    place = Place(url)
    chosen, passed = _chosen(place, wanted, every=options.all)
    for stored in passed:
        print(f"statetrain: passed over {stored.id}: {stored.damage}", file=sys.stderr)
    dest = Store(options.dest)
    if not options.force:
        _check_run(dest, chosen)
    reads = 1 if options.quick else 2
    bar = Bar(reads * sum(record.nbytes for record in chosen))
    with _locked(dest), _hidden(bar):
        there = {*dest.ids()}
        for record in chosen:
            if record.id not in there:
                _copy(record, place.store, dest, bar)
            _check(record, dest, bar, copied=record.id not in there, quick=options.quick)
            bar.hide(reads * record.nbytes)
    emit(_told(record, already=record.id in there, where=dest.url) for record in chosen)


def _chosen(place: Place, wanted: str | None, *, every: bool) -> tuple[list[Record], list[Stored]]:
    """Return the records to copy, oldest first, and the damaged checkpoints that are left out."""
    if not every:
        found, passed = place.find(wanted)
        return [found.record], passed
    looked = list(place.looked_at())
    whole = [stored.record for stored, index in looked if index is not None and stored.record]
    if not whole:
        place.find(None)  # says why there is none
    damaged = [stored for stored, index in looked if index is None and stored.damage is not None]
    return whole[::-1], damaged


def _check_run(dest: Store, chosen: list[Record]) -> None:
    runs = {record.run_id for record in chosen}
    others = [record for record in dest.records() if record.run_id not in runs]
    if others:
        raise CheckpointError(
            f"{dest.url} holds checkpoints of another run ({others[0].run_id[:8]}, and this is "
            f"{chosen[0].run_id[:8]}): name another place, or --force"
        )


@contextlib.contextmanager
def _locked(dest: Store) -> Iterator[None]:
    dest.lock()
    try:
        yield
    finally:
        dest.unlock()


@contextlib.contextmanager
def _hidden(bar: Bar) -> Iterator[None]:
    try:
        yield
    finally:
        bar.hide(0)


def _copy(record: Record, source: Store, dest: Store, bar: Bar) -> None:
    files = files_at(dest.url)
    _clear(files, record, dest.url)  # of a copy that was killed
    done = 0

    def count() -> None:
        nonlocal done
        bar.look(done)
        done = min(done + SLICE, record.nbytes)

    try:
        dest.adopt(record, source, check=count)
    except CheckpointError as error:
        if record.id not in source.ids():
            raise CheckpointError(
                f"{record.id} was pruned from {source.url} while it was copied: run it again"
            ) from error
        raise


def _clear(files: Files, record: Record, url: str) -> None:
    try:
        files.remove(f"data/{record.id}")
    except OSError as error:
        raise CheckpointError(f"cannot write to {url}: {error}") from error


def _check(record: Record, dest: Store, bar: Bar, *, copied: bool, quick: bool) -> None:
    """Read the copy back; what was copied now and is not the same is removed again."""
    verify = partial(container.verify, progress=lambda done: bar.look(record.nbytes + done))
    try:
        found, _ = dest.load(record.id, container.read_index if quick else verify)
        if found != record:
            raise DamagedError("its record is of another checkpoint")  # noqa: TRY301  it is one kind of damage
    except DamagedError as error:
        if copied:
            dest.remove([record.id])
            raise CheckpointError(
                f"the copy of {record.id} is not whole and was removed: {error}; the original may "
                "be damaged, or the place loses bytes"
            ) from error
        raise CheckpointError(
            f"{dest.url} has {record.id} already, and it is damaged: {error}; copy to another place"
        ) from error


def _told(record: Record, *, already: bool, where: str) -> str:
    verb = "already there" if already else "copied"
    return f"{verb}: {record.id}, {size(record.nbytes)}, at {where}"
