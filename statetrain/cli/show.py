"""`statetrain show`: what one checkpoint holds, without the program that made it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from statetrain.cli.facts import Facts, Thing, facts
from statetrain.cli.stored import Found, Place, split
from statetrain.cli.text import age, emit, printable, size, table
from statetrain.cli.tree import brief, info_dtype, nbytes, plain, tensors, tree_lines
from statetrain.persist.container import TensorInfo

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

__all__ = ["add"]

LABEL, WIDTH = 13, 100  # of the column of labels, and of the page
EXACT = 8  # a longer number is rounded on the page, and exact in JSON and in the tree

ABOUT = """\
Show what a checkpoint holds: where the run stood, its objects, its settings.
None of the program is imported, and the tensors' data is not read.
Without @ID it is the newest that is whole, where a run would go on.
"""

EXAMPLES = """\
examples:
  statetrain show runs/digits                   the newest
  statetrain show runs/digits@g000001-n000004   the one whose id begins so
  statetrain show runs/digits@step=120          the newest of step 120
  statetrain show runs/digits --tensors         name, dtype, shape and bytes of each tensor
  statetrain show runs/digits --tree            all of it

exit codes: 0; 2 there is no such checkpoint, or it is damaged
"""


def add(commands: Commands) -> None:
    """Add the command `show` to the command line."""
    parser = commands.add_parser(
        "show",
        help="show what a checkpoint holds",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target",
        metavar="URL[@ID]",
        help="a path or URL, and the beginning of an id, or step=N; `statetrain ls URL` has them",
    )
    parser.add_argument("--tensors", action="store_true", help="list the tensors")
    parser.add_argument("--tree", action="store_true", help="print the whole tree")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, with what is asked for in it"
    )
    parser.set_defaults(command=_show)


def _show(options: argparse.Namespace) -> None:
    place = Place(split(options.target)[0])
    found, passed = place.find(split(options.target)[1])
    for stored in passed:
        print(f"statetrain: passed over {stored.id}: {stored.damage}", file=sys.stderr)
    listed = tensors(found.index.tree) if options.tensors else {}
    if options.json:
        shown = _as_json(place, found)
        if options.tensors:
            shown["tensors"] = [{"name": name, **plain(info)} for name, info in listed.items()]
        if options.tree:
            shown["tree"] = plain(found.index.tree)
        emit([json.dumps(shown, indent=2)])
    elif options.tensors or options.tree:
        emit(_tensor_lines(listed) if options.tensors else ())
        emit(tree_lines(found.index.tree) if options.tree else ())
    else:
        emit(_page(place, found))


def _as_json(place: Place, found: Found) -> dict[str, Any]:
    record = found.record
    stored = {
        "id": record.id,
        "url": place.url,
        "newer": found.number,
        "pinned": found.stored.pinned,
        "nbytes": record.nbytes,
        "created": record.created,
        "run_id": record.run_id,
        "parent": record.parent and record.parent.id,
        "world": record.world,
        "versions": dict(record.versions),
        "tags": list(record.tags),
    }
    return {**stored, **plain(dataclasses.asdict(facts(found.index)))}


def _page(place: Place, found: Found) -> Iterator[str]:
    told = facts(found.index)
    sections = [
        ("checkpoint", _checkpoint(place, found)),
        ("position", _position(told)),
        ("model", _of_kinds(told.things, ("module", "parameter"))),
        ("optimizer", _of_kinds(told.things, ("optimizer",))),
        ("objects", _of_kinds(told.things, ("stateful", "same"))),
        ("random", _random(told)),
        ("metrics", _settings(told.metrics)),
        ("fields", [", ".join(map(printable, told.fields))]),
        ("callbacks", _callbacks(told)),
        ("loggers", [f"{name}: {brief(state)}" for name, state in told.loggers]),
        ("loop", _loop(told)),
        ("options", _settings(told.options)),
        ("limits", _settings({k: v for k, v in told.limits.items() if v is not None})),
        ("static", _settings(told.static)),
    ]
    for label, lines in sections:
        for number, line in enumerate(filter(None, lines)):
            inner = textwrap.wrap(
                line, WIDTH - LABEL, subsequent_indent="  ", break_on_hyphens=False
            )
            for more, part in enumerate(inner):
                yield f"{'' if number or more else label:{LABEL}}{part}"


def _checkpoint(place: Place, found: Found) -> list[str]:
    record = found.record
    which = "the newest" if found.number == 0 else f"{found.number} newer"
    versions = [f"{name} {version}" for name, version in record.versions.items()]
    facts_of = [
        f"{which} of {len(place.ids)}",
        size(record.nbytes),
        f"saved {age(time.time() - record.created)} ago",
        f"run {record.run_id[:8]}",
        *versions,
        *([f"{record.world} processes"] if record.world != 1 else []),
        *(["pinned"] if found.stored.pinned else []),
    ]
    return [
        record.id,
        printable(f"at {place.url}"),
        printable(", ".join(facts_of)),
        f"after {record.parent.id}" if record.parent else "the first of its run",
    ]


def _position(told: Facts) -> list[str]:
    notes = [f"came from {told.came_from!r}"] if told.came_from else []
    notes += ["its action is done again on resume"] if told.replayed else []
    notes += ["finishing"] if told.finishing else []
    state = f"state {told.state!r}" + (f" ({', '.join(notes)})" if notes else "")
    elapsed = f", {told.elapsed:g} s of training" if told.elapsed else ""
    counters = f"step {told.step:,}, epoch {told.epoch}, batch {told.batch_nb}"
    return [printable(state), f"{counters}, seed {told.seed}{elapsed}"]


def _of_kinds(things: Iterable[Thing], kinds: tuple[str, ...]) -> list[str]:
    lines = []
    for thing in things:
        if thing.kind in kinds:
            name = None if thing.cls is None else thing.cls.rpartition(".")[2]
            words = ", ".join(filter(None, (name, thing.told)))
            lines.append(printable(f"{thing.name}: {words}"))
    return lines


def _random(told: Facts) -> list[str]:
    own = [thing.name for thing in told.things if thing.kind == "generator"]
    held = [f"in fields: {', '.join(own)}"] if own else []
    return [printable("; ".join([", ".join(told.random), *held]))]


def _callbacks(told: Facts) -> list[str]:
    counted = [
        f"{key}: {value[0]} visits, fired {value[1]} times" for key, value in told.counters.items()
    ]
    objects = [f"{name}: {_inline(state)}" for name, state in told.objects.items()]
    changed = [f"{path}: {_inline(values)} changed" for path, values in told.attributes.items()]
    return [printable(line) for line in (*objects, *counted, *changed)]


def _loop(told: Facts) -> list[str]:
    states, edges = told.loop["states"], told.loop["transitions"]
    replays = [name for name, replay, _ in states if replay]
    parts = [f"{len(states)} states from {told.loop['initial']!r}, {len(edges)} transitions"]
    parts += [f"replays {', '.join(replays)}"] if replays else []
    return [printable("; ".join(parts))]


def _settings(settings: Mapping[str, Any]) -> list[str]:
    return [_inline(settings)]


def _inline(values: Any) -> str:
    if not isinstance(values, Mapping):
        return brief(values)
    return ", ".join(f"{printable(str(name))}={_value(value)}" for name, value in values.items())


def _value(value: object) -> str:
    if isinstance(value, TensorInfo):
        return f"({brief(value)}, not read)"
    text = brief(value)
    return f"{value:.6g}" if isinstance(value, float) and len(text) > EXACT else text


def _tensor_lines(listed: Mapping[str, Any]) -> Iterator[str]:
    rows = [("name", "dtype", "shape", "bytes")]
    for name, info in listed.items():
        shape = "×".join(map(str, info.shape)) or "()"
        rows.append((printable(name), info_dtype(info), shape, str(nbytes(info))))
    yield from table(rows, right=(3,))
    total = sum(map(nbytes, listed.values()))
    uses = Counter(info.storage for info in listed.values())
    shared = sum(count for count in uses.values() if count > 1)
    note = f"; {shared} of them share memory, stored once" if shared else ""
    yield f"{len(listed)} tensors, {total} bytes ({size(total)}){note}"
