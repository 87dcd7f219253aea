"""Peak memory of training: fresh processes, a raw loop against statetrain.

    python bench/memory.py [--json FILE] [--quick]

A transformer of 3.2 million parameters trains with AdamW for 12 batches (`memory_worker.py`). The
raw loop's process does not import statetrain; one row says what the import alone takes. The figure
is the kernel's `ru_maxrss` at the process's end.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from compare import Contender, Table, against, compare, main

WORKER = Path(__file__).with_name("memory_worker.py")


def peak(name: str, does: str, how: str) -> Contender:
    """Measure MiB of a process that trains so."""

    def measure() -> float:
        command = [sys.executable, str(WORKER), how]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    return Contender(name=name, does=does, measure=measure)


def tables(quick: bool) -> Iterator[Table]:
    """Measure all over the raw loop."""
    matches = against(
        peak("raw loop", "torch alone", "raw"),
        peak("raw loop", "and import statetrain", "imported"),
        peak("statetrain", "no checkpoints", "statetrain"),
        peak("statetrain", "a checkpoint every 4 steps", "checkpoints"),
    )
    yield compare("peak memory", matches, rounds=3 if quick else 7, unit="MiB")


if __name__ == "__main__":
    main("memory", tables)
