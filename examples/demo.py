"""Train digits once without a stop and once killed five times, and compare every bit.

python examples/demo.py
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from statetrain.persist.checkpoint import Checkpoints, Snapshot
from statetrain.persist.compare import leaves, unequal

HERE = Path(__file__).resolve().parent
PLAN = (  # state, its visit in that life's count, signal
    ("forward", 37, "SIGTERM"),
    ("backward", 75, "SIGKILL"),
    ("validation_step", 24, "SIGTERM"),
    ("zero_grad", 20, "SIGKILL"),
    ("step", 10, "SIGTERM"),
)


def main() -> int:
    """Run both, print a table, and return 0 if they are the same."""
    runs = Path("runs/demo")
    shutil.rmtree(runs, ignore_errors=True)
    started = time.monotonic()

    print("1. digits, never interrupted\n", flush=True)
    live(runs / "golden", None)

    print("\n2. digits, killed five times, the same command run again each time\n", flush=True)
    ends = []
    for state, visit, name in PLAN:
        code = live(runs / "killed", (state, visit, name))
        ends.append((state, visit, name, code))
    live(runs / "killed", None)

    print("\nkilled in          visit  signal   exit code")
    for state, visit, name, code in ends:
        print(f"{state:<18} {visit:>5}  {name:<8} {code}")
    same = report(runs)
    print(f"\npicture of the loop   {runs}/killed/loop.svg")
    print(f"checkpoints           {runs}/golden  {runs}/killed")
    print(f"metrics               {runs}/golden/metrics.csv  {runs}/killed/metrics.csv")
    print(f"time                  {time.monotonic() - started:.0f} s")
    return 0 if same else 1


def live(url: Path, kill: tuple[str, int, str] | None) -> int:
    """Run digits in a process of its own, and return its exit code (negative: the signal)."""
    environment = dict(os.environ)
    if kill is not None:
        environment["DIGITS_KILL"] = " ".join(map(str, kill))
    command = [sys.executable, str(HERE / "digits.py"), str(url)]
    code = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603
    expected = {None: 0, "SIGTERM": 75, "SIGKILL": -signal.SIGKILL}[kill and kill[2]]
    if code != expected:
        raise SystemExit(f"{' '.join(command)} ended with {code}, not {expected}")
    if kill is not None:
        print(f"    -- {kill[2]} in {kill[0]!r}: exit code {code}; the same command again --")
    return code


def report(runs: Path) -> bool:
    """Compare the last checkpoints and the logs, and print the result."""
    golden, killed = (newest(runs / name) for name in ("golden", "killed"))
    parts: dict[str, Callable[[Snapshot], Any]] = {
        "model": lambda s: s.run["module"],
        "optimizer": lambda s: s.run["optimizers"],
        "schedulers": lambda s: s.run["schedulers"],
        "the run's other fields": lambda s: {
            k: v for k, v in s.run.items() if k not in ("module", "optimizers", "schedulers")
        },
        "random streams": lambda s: s.random,
    }
    print("\ncompared, bit for bit      values   different")
    same = True
    for name, part in parts.items():
        different = unequal(part(golden), part(killed))
        print(f"{name:<25} {len(list(leaves(part(golden)))):>7}   {len(different):>9}")
        same &= not different
    logs = [(runs / name / "metrics.csv").read_bytes() for name in ("golden", "killed")]
    differing = sum(a != b for a, b in zip(*(log.splitlines() for log in logs), strict=False))
    print(f"{'lines of metrics.csv':<25} {len(logs[0].splitlines()):>7}   {differing:>9}")
    same &= logs[0] == logs[1]
    print("\n" + ("identical" if same else "NOT IDENTICAL"))
    return same


def newest(url: Path) -> Snapshot:
    """Return the newest checkpoint at `url`."""
    found = Checkpoints(url).newest()
    if found is None:
        raise SystemExit(f"no checkpoint at {url}")
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
