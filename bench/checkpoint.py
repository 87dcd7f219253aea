"""What a checkpoint costs: saving, loading, and saving while training goes on; time and memory.

    python bench/checkpoint.py [--json FILE] [--quick]

Two states of 400 MB: 8 tensors, and 3,000. Files lie in a temporary folder beside the project, so
on its disk. A save ends when the bytes are synced, for all alike, and the disk is idle when it
begins. A load finds its file in the page cache and ends when the live tensors have the values. Time
is that of the clock on the wall; a gate compares the best run with the reference's best run.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from compare import Contender, Gate, Table, against, at_least, at_most, compare, main
from torch import Tensor, nn

from statetrain.persist import container
from statetrain.persist.store import Store
from statetrain.persist.writer import Writer

ROOT = Path(__file__).parents[1]
SIZES = {"8 × 50 MB": (8, 12_500_000), "3,000 × 133 KB": (3000, 33_250)}
BIG, SMALL = SIZES
FASTEST = {BIG: 0.90, SMALL: 0.80}  # of a raw write
SLICE = 8 << 20
MIB = 1 << 20

Tree = dict[str, Tensor]
Prepare = Callable[[Tree, Path], Callable[[], Any]]


def state(size: str, *, fill: float = 1.0) -> Tree:
    """Return tensors whose pages are there."""
    count, length = SIZES[size]
    return {f"layer{i}.weight": torch.full((length,), fill + i) for i in range(count)}


def views(tree: Tree) -> list[memoryview]:
    """Return the bytes of the tensors, 8 MiB at most in each."""
    whole = [tensor.view(torch.uint8).numpy().data for tensor in tree.values()]
    return [view[at : at + SLICE] for view in whole for at in range(0, len(view), SLICE)]


# Saving: each of these prepares what is not timed, and returns what is.


def raw_write(tree: Tree, place: Path) -> Callable[[], None]:
    """Write the bytes from one warm buffer, and sync."""
    flat = {"flat": torch.cat([tensor.view(torch.uint8) for tensor in tree.values()])}

    def save() -> None:
        with open(place / "raw", "wb", buffering=0) as file:
            file.writelines(views(flat))
            os.fsync(file.fileno())

    return save


def by_statetrain(tree: Tree, place: Path) -> Callable[[], Any]:
    """Save a checkpoint: synced, committed, and read back."""
    store = Store(place)
    store.claim()
    return partial(store.save, partial(container.write, tree), step=1, state="step")


def by_torch(tree: Tree, place: Path) -> Callable[[], None]:
    """Use `torch.save`, and sync."""

    def save() -> None:
        with open(place / "torch", "wb") as file:
            torch.save(tree, file)
            file.flush()
            os.fsync(file.fileno())

    return save


def by_safetensors(tree: Tree, place: Path) -> Callable[[], None]:
    """Use `save_file`, and sync."""
    from safetensors.torch import save_file

    def save() -> None:
        save_file(tree, place / "safetensors")
        with open(place / "safetensors", "rb") as file:
            os.fsync(file.fileno())

    return save


def by_dcp(tree: Tree, place: Path) -> Callable[[], Any]:
    """Use torch's distributed checkpoint, which syncs by itself."""
    import torch.distributed.checkpoint as dcp

    return partial(dcp.save, tree, checkpoint_id=place / "dcp", no_dist=True)


# Loading into live tensors.


def raw_read(tree: Tree, place: Path) -> Callable[[], None]:
    """Read the bytes into a warm buffer."""
    raw_write(tree, place)()
    buffer = torch.ones(sum(tensor.nbytes for tensor in tree.values()), dtype=torch.uint8)

    def load() -> None:
        with open(place / "raw", "rb", buffering=0) as file:
            for view in views({"buffer": buffer}):
                file.readinto(view)

    return load


def in_place(tree: Tree, place: Path) -> Callable[[], Any]:
    """Verify, and read into the live tensors."""
    by_statetrain(tree, place)()
    store = Store(place)
    return partial(store.newest, partial(container.read_into, tree=tree))


def resumed(tree: Tree, place: Path) -> Callable[[], None]:
    """Read and verify at once into new tensors and copy them: what a run that goes on does."""
    by_statetrain(tree, place)()
    store = Store(place)

    def load() -> None:
        found: Any = store.newest(container.read)
        copied(tree, found[1])

    return load


def with_torch(tree: Tree, place: Path) -> Callable[[], None]:
    """Use `torch.load` and copy."""
    by_torch(tree, place)()
    return lambda: copied(tree, torch.load(place / "torch", weights_only=True))


def with_safetensors(tree: Tree, place: Path) -> Callable[[], None]:
    """Use `load_file` and copy."""
    from safetensors.torch import load_file

    by_safetensors(tree, place)()
    return lambda: copied(tree, load_file(place / "safetensors"))


def with_dcp(tree: Tree, place: Path) -> Callable[[], None]:
    """Use torch's distributed checkpoint, which loads in place."""
    import torch.distributed.checkpoint as dcp

    by_dcp(tree, place)()
    return partial(dcp.load, tree, checkpoint_id=place / "dcp", no_dist=True)


def copied(tree: Tree, found: Tree) -> None:
    """Give the live tensors the values that were found."""
    for name, tensor in tree.items():
        tensor.copy_(found[name])


def saving(name: str, does: str, prepare: Prepare, tree: Tree, folder: Path) -> Contender:
    """Measure the ms of a save into an empty folder, once the disk is idle."""

    def measure() -> float:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            save = prepare(tree, Path(place))
            gc.collect()
            os.sync()
            return milliseconds(save)

    return Contender(name=name, does=does, measure=measure)


def loading(name: str, does: str, prepare: Prepare, tree: Tree, folder: Path) -> Contender:
    """Measure the ms of a load, again and again from one file."""
    load = prepare(tree, Path(tempfile.mkdtemp(dir=folder)))
    return Contender(name=name, does=does, measure=lambda: milliseconds(load))


def milliseconds(work: Callable[[], Any]) -> float:
    """Return how long it takes."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def installed(*contenders: tuple[str, str, Prepare]) -> list[tuple[str, str, Prepare]]:
    """Leave out what cannot be imported here."""
    return [each for each in contenders if each[0] != "safetensors" or find_spec("safetensors")]


def saves(size: str, folder: Path, rounds: int) -> Table:
    """Measure saving over a raw write."""
    tree = state(size)
    raw, *others = (
        saving(*each, tree, folder)
        for each in installed(
            ("raw write", "8 MiB a call, fsync", raw_write),
            ("statetrain", "synchronous, committed", by_statetrain),
            ("torch.save", "fsync", by_torch),
            ("safetensors", "save_file, fsync", by_safetensors),
            ("DCP", "save, no_dist=True", by_dcp),
        )
    )
    table = compare(f"saving {size}", against(raw, *others), rounds=rounds, unit="ms")
    limit = FASTEST[size]
    gates = [at_least(f"save, of a raw write ({size})", limit, 1 / best(table, "statetrain"))]
    return replace(table, gates=gates + faster("save", table, size, "statetrain"))


def loads(size: str, folder: Path, rounds: int) -> Table:
    """Measure loading over a raw read."""
    tree = state(size)
    raw, *others = (
        loading(*each, tree, folder)
        for each in installed(
            ("raw read", "8 MiB a call, into warm memory", raw_read),
            ("read_into", "verified, into the live tensors", in_place),
            ("resume", "verified, new tensors, copied", resumed),
            ("torch.load", "weights_only=True, copied", with_torch),
            ("safetensors", "load_file, copied", with_safetensors),
            ("DCP", "load, no_dist=True, in place", with_dcp),
        )
    )
    table = compare(f"loading {size}", against(raw, *others), rounds=rounds, unit="ms")
    gates = []
    for name in ("read_into", "resume"):
        gates += [at_least(f"{name}, of a raw read ({size})", 0.5, 1 / best(table, name))]
        gates += faster(name, table, size, name)
    return replace(table, gates=gates)


def best(table: Table, name: str) -> float:
    """Return the best run of a contender over the best run of its reference."""
    return next(row.best for row in table.rows if row.name == name)


def faster(what: str, table: Table, size: str, name: str) -> list[Gate]:
    """Return the gates of the small tensors: no other one is faster."""
    if size != SMALL:
        return []
    return [
        at_least(f"{what}, of {row.name}'s speed ({size})", 1.0, row.best / best(table, name))
        for row in table.rows
        if row.name in {"torch.save", "torch.load", "safetensors", "DCP"}
    ]


# While training goes on.


class Saving:
    """Asynchronous saves of a state, one after another, as `Checkpoints` makes them."""

    def __init__(self, tree: Tree, place: Path) -> None:
        self.tree = tree
        self.store = Store(place)
        self.writer = Writer(lambda: None)

    def start(self) -> None:
        """Return when training may go on."""
        self.writer.start(self.tree, self._save)

    def finish(self) -> None:
        """Wait, and say what went wrong."""
        self.writer.wait()
        error = self.writer.take_error()
        if error is not None:
            raise error

    def _save(self, write: Any) -> None:
        self.store.save(write, step=1, state="step")
        self.store.prune(2)


def blocked(size: str, folder: Path, rounds: int) -> Table:
    """Measure how long training waits for an asynchronous save, over a copy of its bytes."""
    tree = state(size)
    source = torch.cat([tensor.view(torch.uint8) for tensor in tree.values()])
    target = torch.zeros_like(source)
    saves = Saving(tree, folder / f"blocked {len(tree)}")

    def block(*, first: bool = False) -> float:
        if first:
            saves.writer.close()
        passed = milliseconds(saves.start)
        saves.finish()
        return passed

    copy = Contender(
        name="memcpy",
        does="into warm memory",
        measure=lambda: milliseconds(lambda: target.copy_(source)),
    )
    later = Contender(name="blocked", does="a save, its memory kept", measure=block)
    first = Contender(name="first", does="and asking for it", measure=partial(block, first=True))
    table = compare(
        f"training waits for an asynchronous save of {size}",
        against(copy, later, first),
        rounds=rounds,
        unit="ms",
    )
    saves.writer.close()
    gate = at_most(f"blocked, over memcpy ({size})", 2.5, best(table, "blocked"))
    return replace(table, gates=[gate])


class Steps:
    """Training that does little but call Python and torch."""

    def __init__(self) -> None:
        layers = [part for _ in range(8) for part in (nn.Linear(64, 64), nn.Tanh())]
        self.net = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), foreach=False)
        self.x = torch.randn(32, 64)

    def step(self) -> None:
        """Do one optimizer step."""
        self.optimizer.zero_grad()
        loss = self.net(self.x).square().mean()
        loss.backward()
        self.optimizer.step()


def in_flight(size: str, folder: Path, rounds: int) -> Table:
    """Measure steps while a save is written, over steps alone: means, so that no stall is lost."""
    steps = Steps()
    saves = Saving(state(size), folder / f"flight {SIZES[size][0]}")

    def during() -> float:
        saves.start()
        times = [milliseconds(steps.step)]
        while saves.writer.busy:
            times.append(milliseconds(steps.step))
        saves.finish()
        return mean(times)

    alone = Contender(
        name="alone", does="100 steps",
        measure=lambda: mean(milliseconds(steps.step) for _ in range(100)),
    )  # fmt: skip
    flight = Contender(name="in flight", does="steps until it is saved", measure=during)
    table = compare(
        f"a training step while {size} are saved",
        against(alone, flight),
        rounds=rounds,
        unit="ms",
    )
    saves.writer.close()
    gate = at_most(f"a step in flight, over alone ({size})", 1.10, best(table, "in flight"))
    return replace(table, gates=[gate])


# Memory: a fresh process each, which runs this file.


def memory(size: str, folder: Path, rounds: int) -> Table:
    """Measure what a save adds to the peak of a process."""

    def peak(name: str, does: str, how: str) -> Contender:
        command = [sys.executable, __file__, "peak", how, size, str(folder)]

        def measure() -> float:
            return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

        return Contender(name=name, does=does, measure=measure)

    matches = against(
        peak("no save", "the state alone", "none"),
        peak("synchronous", "one save", "sync"),
        peak("asynchronous", "one save", "async"),
    )
    table = compare(f"peak memory of a process with {size}", matches, rounds=rounds, unit="MiB")
    more = {row.name: row.difference for row in table.rows}
    arena = container.check(state(size)) / MIB
    gates = [
        at_most(f"synchronous, MiB more ({size})", 16, more["synchronous"]),
        at_most(f"asynchronous, MiB more ({size})", arena + 64, more["asynchronous"]),
    ]
    return replace(table, gates=gates)


def peak_of(how: str, size: str, folder: str) -> None:
    """Be the process: print the peak in MiB after one save."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        Saving({}, Path(place) / "warm").store.save(
            partial(container.write, {"t": torch.ones(3 << 20)}), step=1, state="step"
        )
        saves = Saving(state(size), Path(place) / "run")
        if how == "sync":
            saves.store.save(partial(container.write, saves.tree), step=1, state="step")
        elif how == "async":
            saves.start()
            saves.finish()
        print(peak_rss() / MIB)


def peak_rss() -> int:
    """Return this process's peak in bytes; Linux's `ru_maxrss` begins with that of the parent."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text("utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def tables(quick: bool) -> Iterator[Table]:
    """Measure everything for the large tensors and for the small ones."""
    warnings.simplefilter("ignore")  # DCP says that it is not distributed
    logging.disable(logging.WARNING)
    rounds = 2 if quick else 5  # best of 5
    with tempfile.TemporaryDirectory(dir=ROOT.parent, prefix="bench-") as name:
        folder = Path(name)
        for measured in (saves, loads, blocked, in_flight, memory):
            for size in SIZES:
                table = measured(size, folder, rounds)
                yield replace(table, title=f"{table.title}, {disk(folder)}")
                for left in folder.iterdir():
                    shutil.rmtree(left)


def disk(folder: Path) -> str:
    """Name the file system and the device that `folder` lies on, where Linux tells."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    except OSError:
        return "local disk"
    above = {str(folder), *map(str, folder.parents)}
    device, _, kind, *_ = max((m for m in mounts if m[1] in above), key=lambda m: len(m[1]))
    return f"{kind} on {device}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        peak_of(*sys.argv[2:])
    else:
        main("checkpoint", tables)
