"""`statetrain ls`: the checkpoints at a place, newest first."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from statetrain.cli.facts import counter
from statetrain.cli.stored import Place, Stored
from statetrain.cli.text import age, emit, printable, size, table
from statetrain.persist.container import Index

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

__all__ = ["add"]

COLUMNS = ("id", "step", "epoch", "state", "size", "age", "run", "notes")
RIGHT = (1, 2, 4, 5)

ABOUT = """\
List the checkpoints at a place, newest first. Records, sizes and indexes are verified;
the tensors' data is not read. A run goes on from the first one that is whole.
The age is by two machines' clocks: it does not order anything.
"""

EXAMPLES = """\
examples:
  statetrain ls runs/digits                              a table
  statetrain ls runs/digits --json | jq '.checkpoints[0].step'
  statetrain ls runs/digits | awk 'NR > 1 {print $1}'    the ids alone

exit codes: 0; 1 there are no checkpoints; 2 the place is not there or cannot be read
"""


def add(commands: Commands) -> None:
    """Add the command `ls` to the command line."""
    parser = commands.add_parser(
        "ls",
        help="list the checkpoints at a place",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "url", metavar="URL", help="a path or URL: what the run has as checkpoints="
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_ls)


def _ls(options: argparse.Namespace) -> int:
    place = Place(options.url)
    found = list(place.looked_at())
    if options.json:
        listed = [_entry(stored, index) for stored, index in found]
        emit([json.dumps({"url": place.url, "checkpoints": listed}, indent=2)])
    elif found:
        now = time.time()
        rows = [COLUMNS, *(_row(stored, index, now) for stored, index in found)]
        emit(table(rows, right=RIGHT))
    if not found:
        print(f"statetrain: {place.nothing()}", file=sys.stderr)
    return 0 if found else 1


def _entry(stored: Stored, index: Index | None) -> dict[str, Any]:
    """Return a checkpoint as JSON has it: the same keys for each, null for what is not known."""
    record = stored.record
    return {
        "id": stored.id,
        "step": stored.step,
        "epoch": None if index is None else counter(index, "epoch"),
        "state": record and record.state,
        "nbytes": record and record.nbytes,
        "created": record and record.created,
        "run_id": record and record.run_id,
        "pinned": stored.pinned,
        "damage": stored.damage,
    }


def _row(stored: Stored, index: Index | None, now: float) -> tuple[str, ...]:
    record = stored.record
    notes = ["pinned"] if stored.pinned else []
    if stored.damage is not None:
        notes.append(f"damaged: {printable(' '.join(stored.damage.split()))}")
    epoch = None if index is None else counter(index, "epoch")
    return (
        stored.id,
        str(stored.step),
        "-" if epoch is None else str(epoch),
        "-" if record is None else printable(record.state),
        "-" if record is None else size(record.nbytes),
        "-" if record is None else age(now - record.created),
        "-" if record is None else printable(record.run_id[:8]),
        ", ".join(notes),
    )
