"""Plain text for a terminal and a shell: aligned tables, sizes, ages, and names made printable."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

__all__ = ["age", "emit", "printable", "size", "table"]

AGES = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def emit(lines: Iterable[str]) -> None:
    """Print `lines`; a reader that went away, such as `head`, is no error."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


def table(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Return rows as lines of aligned columns; the columns numbered in `right` end together."""
    numbers = set(right)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def size(nbytes: int) -> str:
    """Return a size as people read it, without a space: `37.1KiB`."""
    if nbytes < 1024:
        return f"{nbytes}B"
    amount = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1024:
            return f"{amount:.1f}{unit}"
    return f"{amount / 1024:.1f}TiB"


def age(seconds: float) -> str:
    """Return a time as the largest unit that it fills, without a space: `2h`."""
    for unit, length in AGES:
        if seconds >= length:
            return f"{seconds // length:.0f}{unit}"
    return "0s"  # also where the clock of the machine that saved is ahead of this one's


def printable(text: str) -> str:
    """Return `text` itself, or with what would move a terminal's cursor escaped."""
    return text if text.isprintable() else ascii(text)[1:-1]
