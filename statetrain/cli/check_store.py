"""`statetrain check-store`: try what checkpoints need of a place, and how fast it is."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import TYPE_CHECKING, BinaryIO

import torch

from statetrain.cli.text import emit, printable, size, table
from statetrain.errors import CheckpointError
from statetrain.persist import container
from statetrain.persist.failures import explained
from statetrain.persist.remote import Files, files_at
from statetrain.persist.store import Store

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

__all__ = ["add"]

ABOUT = """\
Try a place for checkpoints, with real writes and reads in a folder of its own there, which is
removed again: is what was written there at once, and whole, also for another connection?
"""

EXAMPLES = """\
examples:
  statetrain check-store runs/digits
  statetrain check-store s3://bucket/runs --mib 256

exit codes: 0 it is fit for checkpoints; 1 it is not; 2 it cannot be reached or written
"""

SMALL = b"statetrain"
TRIES = 5  # small writes, for the time of one


@dataclass(frozen=True)
class Finding:
    """What one trial found: `needed` ones decide the verdict."""

    trial: str
    found: str
    good: bool = True
    needed: bool = True


def add(commands: Commands) -> None:
    """Add the command `check-store` to the command line."""
    parser = commands.add_parser(
        "check-store",
        help="try whether a place is fit for checkpoints",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="a path or any URL that fsspec opens")
    parser.add_argument("--mib", type=int, default=64, help="how much is written for speed (64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_check_store)


def _check_store(options: argparse.Namespace) -> int:
    if options.mib < 1:
        raise CheckpointError(f"--mib {options.mib}: give a whole number from 1")
    url = f"{options.url.rstrip('/')}/check-store-{secrets.token_hex(4)}"
    made = not os.path.isdir(options.url)
    with explained("check", options.url):
        files = files_at(url)
        try:
            findings = list(_findings(url, files, options.mib << 20))
        finally:
            files.remove("")
            _tidy(options.url, made=made)
    fit = all(finding.good for finding in findings if finding.needed)
    verdict = f"{options.url} is {'fit' if fit else 'NOT fit'} for checkpoints"
    if options.json:
        told = {"url": options.url, "fit": fit, "findings": [asdict(each) for each in findings]}
        emit([json.dumps(told, indent=2)])
    else:
        rows = [(each.trial, _mark(each), printable(each.found)) for each in findings]
        emit([*table(rows), printable(verdict)])
    return 0 if fit else 1


def _findings(url: str, files: Files, nbytes: int) -> Iterator[Finding]:
    files.put("a/first", SMALL)
    yield _same("a small object is there at once", files.get("a/first"), SMALL)
    yield _same("its size is told", files.size("a/first"), len(SMALL))
    yield _same("it is listed at once", files.names("a"), ["first"])
    other = files_at(url)
    yield _same("another connection sees it at once", other.get("a/first"), SMALL)
    files.put("a/second", SMALL)
    yield _same("and sees in its listing what came since", other.names("a"), ["first", "second"])
    yield _again(files)
    files.hint("a/hint", b"1")
    files.hint("a/hint", b"22")
    yield _same("an object can be replaced", other.get("a/hint"), b"22")
    files.unlink("a/second")
    yield _same("a removed object is gone at once", other.names("a"), ["first", "hint"])
    yield from _checkpoint(url)
    yield from _speed(files, nbytes)


def _again(files: Files) -> Finding:
    try:
        files.put("a/first", SMALL[::-1])
    except FileExistsError:
        found = "refused: a second writer cannot replace it"
    else:
        found = "replaced: names are unique, so nothing relies on a refusal"
    return Finding("a second write of a name", found, needed=False)


def _checkpoint(url: str) -> Iterator[Finding]:
    tensor = torch.arange(100_000)

    def write(file: BinaryIO) -> container.Segment:
        return container.write({"tensor": tensor}, file)

    store = Store(f"{url}/run")
    ids = [store.save(write, step=step, state="check").id for step in range(3)]
    found = Store(f"{url}/run").newest(container.read)
    held = found[1] if found is not None else None
    whole = isinstance(held, dict) and torch.equal(held["tensor"], tensor)
    key = found[0].id if found is not None and whole else None
    yield _same("a checkpoint is found, the newest, and whole", key, ids[-1])
    yield _same("pruning removes the oldest", store.prune(2), ids[:1])
    older, newer = Store(f"{url}/run"), Store(f"{url}/run")
    older.claim()
    newer.claim()
    try:
        older.save(write, step=9, state="check")
    except CheckpointError:
        yield Finding("a writer that was replaced is stopped", "yes")
    else:
        yield Finding("a writer that was replaced is stopped", "no", good=False)


def _speed(files: Files, nbytes: int) -> Iterator[Finding]:
    piece = os.urandom(8 << 20)
    pieces = max(1, nbytes // len(piece))

    def write(file: BinaryIO) -> None:
        file.writelines(repeat(piece, pieces))

    total = pieces * len(piece)
    seconds = _timed(lambda: files.write_new("b/big", write))
    yield Finding(f"writing {size(total)}", _rate(total, seconds), needed=False)
    with files.open("b/big") as file:
        file.seek(total - len(piece) // 2)
        yield _same("a part of an object is read alone", file.read(), piece[len(piece) // 2 :])
        file.seek(0)
        seconds = _timed(lambda: [file.read(len(piece)) for _ in range(pieces)])
    yield Finding(f"reading {size(total)}", _rate(total, seconds), needed=False)
    times = [_timed(lambda n=n: files.put(f"b/{n}", SMALL)) for n in range(TRIES)]  # type: ignore[misc]
    found = f"{1000 * statistics.median(times):.1f} ms"
    yield Finding("writing a small object", found, needed=False)


def _same(trial: str, found: object, wanted: object) -> Finding:
    good = found == wanted
    return Finding(trial, "yes" if good else f"no: {found!r:.60} instead of {wanted!r:.60}", good)


def _mark(finding: Finding) -> str:
    return "FAILED" if not finding.good else "ok" if finding.needed else "-"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{size(int(nbytes / max(seconds, 1e-9)))}/s"


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _tidy(url: str, *, made: bool) -> None:
    """Remove the local folder, if it was made for the trial."""
    if made and os.path.isdir(url) and not os.listdir(url):
        os.rmdir(url)
