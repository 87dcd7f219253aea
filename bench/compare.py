"""Contenders measured side by side: pairs in one process, medians of their differences, tables.

A contender is measured in pairs with its reference, back to back, in turns first and second, and
the pairs of all contenders take turns: a machine that is slower for a minute is slower for all. A
row holds the median of the differences within its pairs, their quartiles, and the 95 % interval of
that median (from the ranks, so nothing is assumed of the noise). A reference measured against
itself says what the noise alone looks like. Where nothing waits, time is CPU time, of all threads
of the process: what else the machine does is not in it. Torch has one thread. Garbage of earlier
runs is collected before each, and what lives on from before is out of the collector's sight.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

import statetrain

HEADS = (
    "", "what it does", "reference", "measured", "ratio", "difference", "95 %", "quartiles", "pairs"
)  # fmt: skip
WORDS = 2  # columns of words, the others are numbers
clock = time.process_time_ns
PEERS = ("lightning", "pytorch-ignite", "accelerate", "transformers")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is measured: `measure()` does one run and returns one number, in the table's unit."""

    name: str
    measure: Callable[[], float]
    does: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured: medians, and of the differences the 95 % interval and the quartiles."""

    name: str
    does: str
    reference: float
    measured: float
    difference: float
    sure: tuple[float, float]
    quartiles: tuple[float, float]
    pairs: int
    best: float  # the least that was measured over the least of the reference


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a figure should be; one that is not met is printed and stops nothing."""

    name: str
    limit: str
    measured: float
    met: bool


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows in one unit, and what they should show."""

    title: str
    unit: str
    rows: list[Row]
    gates: list[Gate] = field(default_factory=list)


def at_least(name: str, limit: float, measured: float) -> Gate:
    """Return the gate of a figure that should not be below `limit`."""
    return Gate(name=name, limit=f"≥ {limit:.2f}", measured=measured, met=measured >= limit)


def at_most(name: str, limit: float, measured: float) -> Gate:
    """Return the gate of a figure that should not be above `limit`."""
    return Gate(name=name, limit=f"≤ {limit:.2f}", measured=measured, met=measured <= limit)


def against(reference: Contender, *contenders: Contender) -> list[tuple[Contender, Contender]]:
    """Pair each contender with one reference, and the reference with itself."""
    return [(reference, contender) for contender in (reference, *contenders)]


def compare(
    title: str, matches: Sequence[tuple[Contender, Contender]], *, rounds: int, unit: str
) -> Table:
    """Measure each pair of a reference and a contender `rounds` times."""
    for contender in {id(each): each for match in matches for each in match}.values():
        contender.measure()  # caches fill, lazy imports happen
    gc.collect()
    gc.freeze()
    pairs: list[list[tuple[float, float]]] = [[] for _ in matches]
    for number in range(rounds):
        for match, found in zip(matches, pairs, strict=True):
            found.append(_measured(match, swapped=number % 2 == 1))
    gc.unfreeze()
    rows = [
        row(each.name, each.does, found) for (_, each), found in zip(matches, pairs, strict=True)
    ]
    return Table(title=title, unit=unit, rows=rows)


def row(name: str, does: str, pairs: list[tuple[float, float]]) -> Row:
    """Sum up (reference, contender) pairs."""
    differences = sorted(value - reference for reference, value in pairs)
    reach = math.ceil(0.98 * math.sqrt(len(pairs)))  # 1.96 standard deviations of the median's rank
    middle = (len(pairs) - 1) / 2
    low, high = max(0, math.floor(middle - reach)), min(len(pairs) - 1, math.ceil(middle + reach))
    first, _, third = quantiles(differences, n=4, method="inclusive")
    return Row(
        name=name,
        does=does,
        reference=median(reference for reference, _ in pairs),
        measured=median(value for _, value in pairs),
        difference=median(differences),
        sure=(differences[low], differences[high]),
        quartiles=(first, third),
        pairs=len(pairs),
        best=min(value for _, value in pairs) / min(reference for reference, _ in pairs),
    )


def main(name: str, tables: Callable[[bool], Iterable[Table]]) -> None:
    """Run one benchmark from the command line: `tables(quick)` measures."""
    parser = argparse.ArgumentParser(description=f"Measure {name}, and print the tables.")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--quick", action="store_true", help="few rounds: a trial, no result")
    given = parser.parse_args()
    torch.set_num_threads(1)
    measured, facts = [], machine()
    for table in tables(given.quick):
        measured.append(asdict(table))
        print(f"{_text(measured[-1])}\n", flush=True)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    if given.json is not None:
        found = {"name": name, "quick": given.quick, "machine": facts, "tables": measured}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


def machine() -> dict[str, Any]:
    """Say what the figures hold for."""
    installed = {found.name.lower(): found.version for found in metadata.distributions()}
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "statetrain": statetrain.__version__,
        **{peer: installed[peer] for peer in PEERS if peer in installed},
        "date": datetime.now(UTC).date().isoformat(),
    }


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of a table as text, their head first."""
    lines = [
        [
            each["name"],
            each["does"],
            f"{each['reference']:,.1f}",
            f"{each['measured']:,.1f}",
            f"{each['measured'] / each['reference']:.3f}",
            f"{each['difference']:+,.2f}",
            "{:+,.2f} … {:+,.2f}".format(*each["sure"]),
            "{:+,.2f} … {:+,.2f}".format(*each["quartiles"]),
            str(each["pairs"]),
        ]
        for each in rows
    ]
    return [list(HEADS), *lines]


def gate_cells(gates: list[dict[str, Any]]) -> list[list[str]]:
    """Return gates as text, their head first."""
    lines = [
        [
            each["name"],
            each["limit"],
            f"{each['measured']:.2f}",
            "met" if each["met"] else "not met",
        ]
        for each in gates
    ]
    return [["gate", "limit", "measured", ""], *lines] if lines else []


def _measured(match: tuple[Contender, Contender], *, swapped: bool) -> tuple[float, float]:
    values = {}
    for which in (1, 0) if swapped else (0, 1):
        gc.collect()
        values[which] = match[which].measure()
    return values[0], values[1]


def _text(table: dict[str, Any]) -> str:
    lines = cells(table["rows"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [f"{table['title']} ({table['unit']})"]
    for line in lines:
        words = [c.ljust(w) for c, w in zip(line[:WORDS], widths, strict=False)]
        numbers = [c.rjust(w) for c, w in zip(line[WORDS:], widths[WORDS:], strict=True)]
        texts.append("  ".join(words + numbers))
    texts += ["  ".join(line) for line in gate_cells(table["gates"])]
    return "\n".join(texts)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
