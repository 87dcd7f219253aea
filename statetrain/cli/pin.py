"""`statetrain pin` and `unpin`: keep a checkpoint for good, or let it go again."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from statetrain.cli.stored import Place, split
from statetrain.cli.text import emit

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

__all__ = ["add"]

PIN = """\
Keep a checkpoint for good: nothing prunes it, neither the run that made it nor `statetrain prune`.
Without @ID it is the newest that is whole.
"""
UNPIN = """\
Let a pinned checkpoint be pruned again. It is removed by the next save or prune that does not
keep it for another reason.
"""
EXAMPLES = """\
examples:
  statetrain pin runs/digits@step=120 "before the learning rate fell"
  statetrain unpin runs/digits@step=120

exit codes: 0; 2 there is no such checkpoint, it is damaged, or the place cannot be written
"""


def add(commands: Commands) -> None:
    """Add the commands `pin` and `unpin` to the command line."""
    for name, about, work in (("pin", PIN, _pin), ("unpin", UNPIN, _unpin)):
        parser = commands.add_parser(
            name,
            help=about.split(":", maxsplit=1)[0].split(".", maxsplit=1)[0].lower(),
            description=about,
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("target", metavar="URL[@ID]", help="as `statetrain show` takes it")
        if name == "pin":
            parser.add_argument("name", metavar="NAME", nargs="?", default="", help="what for")
        parser.set_defaults(command=work)


def _pin(options: argparse.Namespace) -> None:
    place, key = _found(options.target)
    place.store.unpin(key)  # it may be pinned under another name
    place.store.pin(key, options.name)
    emit([f"pinned {key}"])


def _unpin(options: argparse.Namespace) -> None:
    place, key = _found(options.target)
    pinned = key in place.store.pins()
    place.store.unpin(key)
    emit([f"unpinned {key}" if pinned else f"{key} was not pinned"])


def _found(target: str) -> tuple[Place, str]:
    url, wanted = split(target)
    place = Place(url)
    return place, place.find(wanted)[0].record.id
