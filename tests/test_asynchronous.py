"""Saves that are written while training goes on: what they hold, and what may go wrong then."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import statetrain as st
from statetrain.persist import container
from statetrain.persist.arena import Arena
from statetrain.persist.checkpoint import Snapshot, read
from statetrain.persist.compare import unequal
from statetrain.persist.store import Store
from statetrain.persist.writer import Writer

BATCHES = [torch.full((2, 3), float(n)) for n in range(6)]


class Line(st.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return (self.line(batch) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def trainer(folder: Path, **settings: Any) -> st.Trainer:
    given = {"every": "1 steps", "keep": 9, **settings}
    checkpoints = st.Checkpoints(folder, **given)
    return st.Trainer(max_epochs=1, checkpoints=checkpoints, loggers=[], progress=False)


def saved(folder: Path) -> dict[tuple[int, str], Snapshot]:
    store = Store(folder)
    return {(r.step, r.state): store.load(r.id, read)[1] for r in store.records()}


class Gate:
    """Holds the saves that are written in a thread where a test wants them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.error: Exception | None = None
        plain = Store.save

        def save(store: Store, *args: Any, **more: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.open.wait(60)
                if self.error is not None:
                    raise self.error
            return plain(store, *args, **more)

        monkeypatch.setattr(Store, "save", save)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


# The copy.


def tree() -> dict[str, Any]:
    torch.manual_seed(1)
    base = torch.randn(50, 40)
    return {
        "tensor": base,
        "view": base[3:7, ::2],
        "tied": base,
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "half": torch.randn(1000).bfloat16(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "sparse": torch.eye(4).to_sparse(),
        "array": np.arange(5000.0),
        "numbers": [1, 2.5, None, "text", b"bytes", 2**70],
    }


def changed(value: Any) -> None:
    for part in value.values():
        if isinstance(part, torch.Tensor) and not part.is_sparse:
            part.add_(1)
        elif isinstance(part, np.ndarray):
            np.add(part, 1, out=part)


def data(file: io.BytesIO, segment: container.Segment) -> bytes:
    """Return the bytes between header and index; the header holds a number of its own."""
    return file.getvalue()[64 : segment.index_off]


def test_a_copy_is_written_as_the_tree_was() -> None:
    value, wanted, arena, found = tree(), io.BytesIO(), Arena(), io.BytesIO()
    segment = container.write(value, wanted)
    image = arena.take(value)
    changed(value)
    written = image.write(found)
    assert (written.nbytes, written.index_off) == (segment.nbytes, segment.index_off)
    assert unequal(container.read(found), container.read(wanted)) == []
    assert unequal(container.read(found), value) != []  # the control
    assert data(found, segment) == data(wanted, segment)


def test_the_memory_is_used_again_also_for_other_shapes() -> None:
    arena = Arena()
    for length in (1000, 1000, 10, 5000, 0, 1000):
        value = {"t": torch.arange(float(length)), "u": torch.ones(3)}
        wanted, found = io.BytesIO(), io.BytesIO()
        segment = container.write(value, wanted)
        arena.take(value).write(found)
        assert unequal(container.read(found), value) == []
        assert data(found, segment) == data(wanted, segment)


def test_what_cannot_be_stored_is_said_when_it_is_copied() -> None:
    with pytest.raises(st.CheckpointError, match="object is not known"):
        Arena().take({"x": object()})


# What a run saves.


def test_what_is_saved_is_the_same(tmp_path: Path) -> None:
    for name, asynchronous in (("a", True), ("b", False)):
        trainer(tmp_path / name, asynchronous=asynchronous).fit(Line(), BATCHES)
    one, other = saved(tmp_path / "a"), saved(tmp_path / "b")
    assert list(one) == list(other)
    assert len(one) == 7
    for key, snapshot in one.items():
        assert unequal(snapshot, other[key]) == []
    assert unequal(one[1, "step"], one[2, "step"]) != []  # the control


def test_training_goes_on_meanwhile_and_the_copy_stays(tmp_path: Path, gate: Gate) -> None:
    seen: list[int] = []
    job = trainer(tmp_path / "a", every="2 steps", busy="skip")
    job.on("step")(lambda run: seen.append(run.step) or (run.step == 6 and gate.open.set()))
    job.fit(Line(), BATCHES)
    assert seen == [1, 2, 3, 4, 5, 6]
    trainer(tmp_path / "b", every="2 steps", asynchronous=False).fit(Line(), BATCHES)
    assert unequal(saved(tmp_path / "a")[2, "step"], saved(tmp_path / "b")[2, "step"]) == []
    assert (4, "step") not in saved(tmp_path / "a")  # it was skipped
    assert (4, "step") in saved(tmp_path / "b")


def test_a_busy_writer_is_waited_for(tmp_path: Path, gate: Gate) -> None:
    timer = threading.Timer(0.5, gate.open.set)
    timer.start()
    trainer(tmp_path, every="2 steps").fit(Line(), BATCHES)
    timer.join()
    assert [step for step, _ in saved(tmp_path)] == [6, 6, 4, 2]


def test_an_error_is_raised_at_the_next_transition(tmp_path: Path, gate: Gate) -> None:
    gate.error = st.CheckpointError("the disk is gone")
    states: list[tuple[int, str]] = []
    job = trainer(tmp_path, every="2 steps")

    def watch(run: Any) -> None:
        states.append((run.step, run.state))
        if (run.step, run.state) == (3, "batch_start"):
            return
        if (run.step, run.state) == (2, "batch_end"):
            gate.open.set()
            while job.checkpoints._writer.busy:
                time.sleep(0.001)

    for state in ("batch_end", "batch_start", "step"):
        job.on(state)(watch)
    with pytest.raises(st.CheckpointError, match="the disk is gone"):
        job.fit(Line(), BATCHES)
    assert states[-1] == (2, "batch_end")
    assert saved(tmp_path) == {}


def test_or_it_is_logged_and_the_next_save_made(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.error = st.CheckpointError("the disk is gone")
    gate.open.set()
    trainer(tmp_path, every="2 steps", on_error="warn").fit(Line(), BATCHES)
    assert sum("the disk is gone" in text for text in caplog.messages) == 3
    assert [step for step, _ in saved(tmp_path)] == [6]  # the last one is made by the main thread


def test_what_was_copied_is_saved_when_training_fails(tmp_path: Path, gate: Gate) -> None:
    def fail(run: Any) -> None:
        assert gate.reached.wait(60)
        threading.Timer(0.2, gate.open.set).start()
        raise ValueError("mine")

    job = trainer(tmp_path, every="2 steps")
    job.on("batch_start", at=4)(fail)
    with pytest.raises(ValueError, match="mine"):
        job.fit(Line(), BATCHES)
    assert [step for step, _ in saved(tmp_path)] == [2]


def test_a_second_ctrl_c_does_not_wait_for_it(tmp_path: Path, gate: Gate) -> None:
    job = trainer(tmp_path, every="2 steps")

    def interrupt(run: Any) -> None:
        assert gate.reached.wait(60)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    job.on("batch_start", at=4)(interrupt)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        job.fit(Line(), BATCHES)
    assert time.monotonic() - begun < 20
    assert saved(tmp_path) == {}


def test_without_memory_training_waits_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr("statetrain.persist.arena._allocate", none)
    trainer(tmp_path).fit(Line(), BATCHES)
    assert len(saved(tmp_path)) == 7
    assert sum("no memory to save asynchronously" in text for text in caplog.messages) == 1


# Little time left.


def hurried(
    folder: Path, gate: Gate, *, grace: float, takes: float, opened: Callable[[], None]
) -> st.Preempted:
    """Stop a run by a signal at step 4, while the save of step 2 is held at the gate."""
    job = trainer(folder, every="2 steps", busy="skip", grace=grace)

    def stop(run: Any) -> None:
        assert gate.reached.wait(60)
        job.checkpoints.time_to_save = takes
        opened()
        os.kill(os.getpid(), signal.SIGUSR1)

    job.on("step", at=4)(stop)
    with pytest.raises(st.Preempted) as stopped:
        job.fit(Line(), BATCHES)
    return stopped.value


def test_enough_time_finishes_the_save_in_flight_and_saves_the_newest(
    tmp_path: Path, gate: Gate
) -> None:
    hurried(tmp_path, gate, grace=60, takes=1, opened=gate.open.set)
    assert [step for step, _ in saved(tmp_path)] == [4, 2]


def test_time_for_one_save_drops_the_one_in_flight(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    hurried(
        tmp_path,
        gate,
        grace=15,
        takes=10,
        opened=lambda: threading.Timer(0.3, gate.open.set).start(),
    )
    assert [step for step, _ in saved(tmp_path)] == [4]
    assert any("is dropped for a newer one" in text for text in caplog.messages)


def test_time_for_none_finishes_the_one_in_flight(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = hurried(tmp_path, gate, grace=15, takes=20, opened=gate.open.set)
    assert [step for step, _ in saved(tmp_path)] == [2]
    assert any("the one in flight is the last" in text for text in caplog.messages)
    assert stopped.state == next(iter(saved(tmp_path)))[1]
    trainer(tmp_path, every=None).fit(Line(), BATCHES)
    trainer(tmp_path / "golden", every=None).fit(Line(), BATCHES)
    (end,), (golden,) = (
        [value for (_, state), value in saved(folder).items() if state == "done"]
        for folder in (tmp_path, tmp_path / "golden")
    )
    assert unequal(end.run, golden.run) == []


@pytest.mark.parametrize("grace", [0, -1, True, float("nan")])
def test_a_grace_without_meaning_is_refused(grace: Any) -> None:
    with pytest.raises(st.CheckpointError, match="grace="):
        st.Checkpoints("memory://grace", grace=grace)


# Processes.


def test_a_forked_process_has_no_save_in_flight(tmp_path: Path) -> None:
    writer, held = Writer(lambda: None), threading.Event()

    def save(write: Any) -> None:
        assert held.wait(60)
        with (tmp_path / "file").open("wb") as file:
            write(file)

    writer.start({"t": torch.ones(3)}, save)
    child = os.fork()
    if child == 0:
        writer.wait()  # it would wait for ever for a thread that is not there
        os._exit(0 if not writer.busy else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert writer.busy
    held.set()
    writer.close()
    with (tmp_path / "file").open("rb") as file:
        assert torch.equal(container.read(file)["t"], torch.ones(3))  # type: ignore[index]


def test_an_interpreter_that_ends_waits_for_it(tmp_path: Path) -> None:
    code = (
        "import sys, time, torch\n"
        "from statetrain.persist.writer import Writer\n"
        "from statetrain.persist.store import Store\n"
        "store = Store(sys.argv[1])\n"
        "def save(write):\n"
        "    time.sleep(0.5)\n"
        "    store.save(write, step=7, state='s')\n"
        "Writer(lambda: None).start({'t': torch.ones(3)}, save)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(st.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    assert [record.step for record in Store(tmp_path).records()] == [7]


def test_loaders_with_workers_go_on_beside_it(tmp_path: Path, gate: Gate) -> None:
    """Workers are forked while a save is in flight, and end without touching it."""
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.ones(8, 3)), 2, num_workers=2
    )

    class Ones(Line):
        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return super().training_step(batch[0], _)

    def look(run: Any) -> None:
        if gate.reached.is_set():
            assert len(list(loader)) == 4
            gate.open.set()

    job = trainer(tmp_path, every="1 steps")
    job.on("batch_end")(look)
    job.fit(Ones(), [[batch] for batch in BATCHES])
    assert len(saved(tmp_path)) == 7


MEMORY = """
    import gc, resource, sys, torch, statetrain as st

    class Wide(st.Module):
        def __init__(self):
            super().__init__()
            self.wide = torch.nn.Linear(1000, 5_000)  # 20 MB

        def training_step(self, batch, _):
            return self.wide(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    every = sys.argv[2] or None
    checkpoints = st.Checkpoints(sys.argv[1], every=every, keep=1)
    trainer = st.Trainer(max_epochs=1, checkpoints=checkpoints, loggers=[], progress=False)
    peaks = {}
    for at in (5, 25):
        trainer.on("batch_end", at=at)(
            lambda run: peaks.update({run.step: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss})
        )
    gc.disable()
    trainer.fit(Wide(), [torch.ones(2, 1000)] * 25)
    print(peaks[5] >> 10, peaks[25] >> 10)
"""


def peaks(folder: Path, every: str) -> tuple[int, int]:
    """Return the MiB that a process has needed at most, after 5 steps and after 25."""
    code, root = textwrap.dedent(MEMORY), str(Path(st.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(folder), every],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    early, late = map(int, done.stdout.split())
    return early, late


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit there")
def test_many_saves_take_the_memory_of_one(tmp_path: Path) -> None:
    early, late = peaks(tmp_path / "saved", "1 steps")
    without = peaks(tmp_path / "not saved", "")[1]
    assert late - early <= 16
    assert late - without <= 39 + 64  # the copy, of gradients too, and 64 MiB
    assert late - without >= 30  # the control: a copy is made
