"""The power goes at any moment, and a store on a real file system keeps what it acknowledged.

A process saves on ext4 in an image file, which is the disk. Before a system call drawn from a seed
it stops, and the image is copied as it is: what only memory has is lost. The copy is mounted, which
replays the journal, and is looked into. What a drive loses from its own cache, and calls that are
half done, are not covered. Without syncs the same must be noticed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import statetrain
from statetrain.persist import container
from statetrain.persist.store import Store

pytestmark = pytest.mark.slow

SIZE = 32 << 20
SAVER = """
    import os, random, signal, sys
    import torch
    from statetrain.persist import container, local
    from statetrain.persist.store import Store

    url, seed, without = sys.argv[1:]
    draw = random.Random(int(seed))
    left = draw.randint(1, 40)
    torch.ones(1)

    def count():
        global left
        left -= 1
        if left == 0:
            left = draw.randint(1, 40)
            os.kill(os.getpid(), signal.SIGSTOP)  # the power goes

    def counted(call):
        def once(*args, **options):
            count()
            return call(*args, **options)
        return once

    if without == "fsync":
        os.fsync = lambda file: None
    elif without == "folders":
        local._sync_folder = lambda path: None
    for name in ("open", "mkdir", "fsync", "link", "unlink", "replace", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))

    store = Store(url)
    for value in range(1, 1_000_000):
        def write(file):
            class Half:
                def write(self, data):
                    count()
                    return file.write(data[: max(1, len(data) // 2)])
            return container.write({"value": value, "t": torch.full((20_000,), value)}, Half())

        store.save(write, step=value, state="step")
        print(value, flush=True)
        count()
        store.prune(2)
"""


def ran(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[None]:
    at.mkdir(exist_ok=True)
    ran("mount", "-o", "loop,data=ordered,commit=300", image, at)  # no commit of its own accord
    try:
        yield
    finally:
        try:
            ran("umount", at)  # and the loop device goes with it
        except subprocess.CalledProcessError:  # something still looks at it: gone when that is
            ran("umount", "--lazy", at)
            raise


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Return a file with an empty ext4, where one can be mounted."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("POWER CUTS ARE NOT TESTED: mounting an image needs root on Linux")
    missing = [name for name in ("mkfs.ext4", "mount", "umount") if not shutil.which(name)]
    if missing:
        pytest.skip(f"POWER CUTS ARE NOT TESTED: no {', '.join(missing)} here")
    image = tmp_path / "disk"
    with open(image, "wb") as file:
        file.truncate(SIZE)
    ran("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
    try:
        with mounted(image, tmp_path / "trial"):
            pass
    except subprocess.CalledProcessError as error:
        pytest.skip(f"POWER CUTS ARE NOT TESTED: no loop device can be mounted: {error.stderr}")
    return image


class Machine:
    """A process that saves on a disk of its own, and stops when the power goes."""

    def __init__(self, folder: Path, *, seed: int, without: str) -> None:
        code = [sys.executable, "-c", textwrap.dedent(SAVER), str(folder), str(seed), without]
        self.process = subprocess.Popen(
            code,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(statetrain.__file__).parents[1])},
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.acknowledged = 0

    def runs_until_the_power_goes(self) -> None:
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self.process.returncode = os.waitstatus_to_exitcode(status)
            raise AssertionError(self.process.communicate()[1].decode())
        assert self.process.stdout is not None
        said = self.process.stdout.read() or b"0"
        self.acknowledged = max(self.acknowledged, int(said.split()[-1]))

    def goes_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def ends(self) -> None:
        self.process.kill()
        self.process.communicate()


def copied(image: Path, mount: Path, copy: Path) -> None:
    """Copy the image at one moment: again, if the kernel has written to it meanwhile."""
    device = Path(ran("findmnt", "-n", "-o", "SOURCE", mount).strip()).name
    counters = [Path(f"/sys/block/{device}/{name}") for name in ("stat", "inflight")]
    for _ in range(100):
        before = [counter.read_text("ascii").split() for counter in counters]
        shutil.copyfile(image, copy)
        after = [counter.read_text("ascii").split() for counter in counters]
        if before == after and after[1] == ["0", "0"]:
            return
    raise AssertionError("the disk is never idle")


def found(copy: Path, at: Path) -> int:
    """Return which checkpoint is the newest that is whole after the power is back; 0 if none."""
    with mounted(copy, at):
        newest: Any = Store(at / "run").newest(container.read)
    if newest is None:
        return 0
    value: int = newest[1]["value"]
    assert newest[0].step == value
    assert newest[1]["t"].tolist() == [value] * 20_000
    return value


def lost(image: Path, *, cuts: int, seed: int, without: str = "") -> list[tuple[int, int]]:
    """Return (acknowledged, found) of the cuts after which something acknowledged is not there."""
    folder = image.parent
    losses, acknowledged = [], 0
    with mounted(image, folder / "mounted"):
        machine = Machine(folder / "mounted" / "run", seed=seed, without=without)
        try:
            for _ in range(cuts):
                machine.runs_until_the_power_goes()
                acknowledged = machine.acknowledged
                copied(image, folder / "mounted", folder / "copy")
                try:
                    value = found(folder / "copy", folder / "again")
                except statetrain.CheckpointError:
                    value = 0
                if not acknowledged <= value <= acknowledged + 1:
                    losses.append((acknowledged, value))
                machine.goes_on()
        finally:
            machine.ends()
    assert acknowledged > cuts / 4  # it was saving all the time
    return losses


@pytest.mark.parametrize("seed", range(3))
def test_no_power_cut_loses_what_was_acknowledged(image: Path, seed: int) -> None:
    assert lost(image, cuts=60, seed=seed) == []


@pytest.mark.parametrize("without", ["fsync", "folders"])
def test_a_store_that_does_not_sync_is_noticed(image: Path, without: str) -> None:
    assert lost(image, cuts=30, seed=1, without=without) != []
