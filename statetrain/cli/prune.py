"""`statetrain prune`: remove the checkpoints that a policy does not keep."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from statetrain.cli.stored import Place
from statetrain.cli.text import emit, size, table
from statetrain.persist.keep import Keep

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

__all__ = ["add"]

ABOUT = """\
Remove the checkpoints that are not kept, and what interrupted saves left behind.
The options are those of st.Keep. Kept in any case: the newest two that are whole, and pinned ones.
Where no checkpoint is whole, none is removed.
"""

EXAMPLES = """\
examples:
  statetrain prune runs/digits --dry-run                        what would go, and how many bytes
  statetrain prune runs/digits --last 3 --steps 1000
  statetrain prune runs/digits --best 2 --metric val_loss

exit codes: 0; 2 the place is not there, or cannot be read or written
"""


def add(commands: Commands) -> None:
    """Add the command `prune` to the command line."""
    parser = commands.add_parser(
        "prune",
        help="remove checkpoints that are not kept",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="what the run has as checkpoints=")
    parser.add_argument("--last", type=int, default=2, help="how many of the newest stay (2)")
    parser.add_argument("--steps", type=int, help="the first of every so many steps stays")
    parser.add_argument("--best", type=int, default=0, help="how many of the best stay (0)")
    parser.add_argument("--metric", help="what the best are best by")
    parser.add_argument("--mode", default="min", help="min or max of the metric is better (min)")
    parser.add_argument("--dry-run", action="store_true", help="remove nothing, say what would go")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_prune)


def _prune(options: argparse.Namespace) -> None:
    keep = Keep(
        last=options.last,
        steps=options.steps,
        best=options.best,
        metric=options.metric,
        mode=options.mode,
    )
    place = Place(options.url)
    known = {stored.id: stored for stored in place.all}
    gone = place.store.retain(keep.chosen, dry=options.dry_run)
    sizes = {key: _nbytes(place, key) for key in gone}
    if options.json:
        told = {"url": place.url, "dry_run": options.dry_run, "removed": sizes}
        emit([json.dumps(told, indent=2)])
        return
    emit(table([(key, str(known[key].step), size(sizes[key])) for key in gone], right=(1, 2)))
    verb = "would be removed" if options.dry_run else "removed"
    left = len(known) - len(gone)
    emit([f"{len(gone)} {verb}, {size(sum(sizes.values()))}; {left} stay: {keep}, and pinned ones"])


def _nbytes(place: Place, key: str) -> int:
    record = next(stored.record for stored in place.all if stored.id == key)
    return 0 if record is None else record.nbytes
