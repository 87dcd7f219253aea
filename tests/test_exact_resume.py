"""Interrupted after every transition, a run ends with the bits of one that never was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import torch

import statetrain as st
from statetrain.persist.checkpoint import Snapshot
from statetrain.persist.compare import unequal
from statetrain.persist.parts import Part
from statetrain.supervised.loop import Window

REPLAYED = ("forward", "forward_d", "forward_g")


class Life:
    """One program in one directory, lived through several starts."""

    def __init__(self, name: str, folder: Path) -> None:
        self.build = programs.PROGRAMS[name]
        self.folder = folder
        self.trace: list[Any] = []
        self.watched = 0
        self.used: dict[str, list[int]] = {}

    def run(
        self,
        *,
        stop_after: int | None = None,
        checkpoints: Any = st.Checkpoints,
        watch: Callable[[Any], None] | None = None,
    ) -> None:
        at = [state for state in REPLAYED if state in self.states]
        saved = checkpoints(self.folder, every=None, at=at)
        trainer, arguments = self.build(saved, self.trace, str(self.folder / "log.csv"))
        if stop_after is not None:
            programs.interrupt(trainer, stop_after)
        for state in self.states if watch is not None else ():
            trainer.on(state, priority=-99)(watch)
        trainer.fit(*arguments)

    @property
    def states(self) -> tuple[str, ...]:
        return (st.supervised() if self.build is programs.rich else programs.LOOP).names

    @property
    def end(self) -> Snapshot:
        found = st.Checkpoints(self.folder).newest()
        assert found is not None
        return found[1]

    @property
    def log(self) -> bytes:
        return (self.folder / "log.csv").read_bytes()

    @property
    def transitions(self) -> int:
        """How many states there were: each leaves one entry with its counters."""
        return sum(1 for entry in self.trace if len(entry) == 5 and entry[0] in self.states)


@pytest.fixture(scope="module", params=["rich", "gan"])
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Life:
    life = Life(request.param, tmp_path_factory.mktemp("golden"))
    life.run()
    return life


@pytest.fixture(scope="module")
def rich_golden(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A golden run that knows after which transitions a field was not what it is at the start."""
    life = Life("rich", tmp_path_factory.mktemp("golden"))
    life.used = {name: [] for name in FIELDS}

    def watch(run: Any) -> None:
        life.watched += 1
        for name in FIELDS:
            if unequal(getattr(run, name), getattr(fresh_run(), name)):
                life.used[name].append(life.watched)

    life.run(watch=watch)
    return life


def fresh_run() -> Any:
    fresh = st.SupervisedRun(module=programs.Rich(), train_loader=st.resumable([1]))
    fresh.windows = [Window() for _ in range(2)]
    return fresh


def same(life: Life, golden: Life) -> bool:
    assert unequal(golden.end, life.end) == []
    assert life.trace == golden.trace
    assert life.log == golden.log
    return True


def again(golden: Life, folder: Path) -> Life:
    name = next(name for name, build in programs.PROGRAMS.items() if build is golden.build)
    folder.mkdir()
    return Life(name, folder)


def test_the_programs_do_what_they_are_for(golden: Life) -> None:
    states = [entry[0] for entry in golden.trace]
    assert set(states) >= set(golden.states)
    if golden.build is programs.rich:
        run = golden.end.run
        assert run["shelf"], "parameters of two optimizers have gradients of each"
        assert (run["epochs"], run["finishing"]) == (3, True)
        assert [p.state["scheduler"].state["class"] for p in run["schedulers"]] == [
            "torch.optim.lr_scheduler.StepLR",
            "torch.optim.lr_scheduler.ReduceLROnPlateau",
            "torch.optim.lr_scheduler.ExponentialLR",
        ]


def test_two_runs_without_a_stop_are_the_same(golden: Life, tmp_path: Path) -> None:
    life = again(golden, tmp_path / "second")
    life.run()
    assert same(life, golden)


@pytest.mark.parametrize("part", range(4))
def test_stopped_after_any_transition_it_ends_the_same(
    golden: Life, tmp_path: Path, part: int
) -> None:
    for k in range(1 + part, golden.transitions, 4):
        life = again(golden, tmp_path / str(k))
        life.run(stop_after=k)
        assert life.transitions == k
        life.run()
        assert same(life, golden), f"stopped after transition {k}"


@pytest.mark.parametrize("stops", [[7, 5], [1, 1, 1], [20, 30, 2]])
def test_stopped_several_times_it_ends_the_same(
    golden: Life, tmp_path: Path, stops: list[int]
) -> None:
    life = again(golden, tmp_path / "life")
    for k in stops:
        life.run(stop_after=k)
    life.run()
    assert same(life, golden)


def test_stopped_at_every_single_transition_it_ends_the_same(golden: Life, tmp_path: Path) -> None:
    life = again(golden, tmp_path / "life")
    for _ in range(golden.transitions):
        life.run(stop_after=1)
    assert same(life, golden)
    before = list(life.trace)
    life.run()  # complete: nothing happens
    assert life.trace == before
    assert unequal(golden.end, life.end) == []


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("rich", [("forward", 5, "SIGKILL"), ("backward", 6, "SIGTERM"), ("step", 4, "SIGKILL")]),
        ("rich", [("validation_step", 2, "SIGTERM"), ("zero_grad", 5, "SIGKILL")]),
        ("gan", [("forward_g", 2, "SIGKILL"), ("backward_d", 3, "SIGUSR1")]),
        ("gan", [("step_d", 2, "SIGINT"), ("epoch_end", 1, "SIGKILL")]),
    ],
)  # fmt: skip
def test_killed_by_real_signals_fresh_processes_end_the_same(
    tmp_path: Path, name: str, kills: list[tuple[str, int, str]]
) -> None:
    golden, killed = tmp_path / "golden", tmp_path / "killed"
    assert process(name, golden) == 0
    for state, visit, sent in kills:
        expected = {"SIGKILL": -signal.SIGKILL, "SIGINT": 130}.get(sent, 75)
        assert process(name, killed, state, str(visit), sent) == expected
    assert process(name, killed) == 0
    ends = [st.Checkpoints(folder).newest() for folder in (golden, killed)]
    assert ends[0] is not None
    assert ends[1] is not None
    for _, end in ends:  # the killing callback is no part of the program
        counters = end.callbacks["counters"]
        end.callbacks["counters"] = {k: v for k, v in counters.items() if "kill" not in k}
    assert unequal(ends[0][1], ends[1][1]) == []
    assert (golden / "metrics.csv").read_bytes() == (killed / "metrics.csv").read_bytes()


def process(name: str, folder: Path, *kill: str) -> int:
    script = Path(programs.__file__)
    command = [sys.executable, "-W", "error", str(script), name, str(folder), *kill]
    source = os.pathsep.join(
        filter(None, [str(Path(st.__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


# Negative controls: each saved component is left out once, and then the end must differ.


def lossy(damage: Callable[[Snapshot], None]) -> type[st.Checkpoints]:
    class Lossy(st.Checkpoints):
        def newest(self) -> Any:
            found = super().newest()
            if found is not None:
                damage(found[1])
            return found

    return Lossy


def module(snapshot: Snapshot) -> dict[str, Any]:
    return snapshot.run["module"].state


def other_torch() -> torch.Tensor:
    return torch.Generator().manual_seed(99).get_state()


def drop_gradients(s: Snapshot) -> None:
    module(s)["gradients"] = dict.fromkeys(module(s)["gradients"])


def drop_parameters(s: Snapshot) -> None:
    module(s)["parameters"] = {n: p.new_zeros(p.shape) for n, p in module(s)["parameters"].items()}


def drop_buffers(s: Snapshot) -> None:
    module(s)["buffers"] = {n: b.new_zeros(b.shape) for n, b in module(s)["buffers"].items()}


def drop_one_buffer(s: Snapshot) -> None:
    module(s)["buffers"]["calls"] = torch.zeros(())


def drop_requires_grad(s: Snapshot) -> None:
    module(s)["requires_grad"] = dict.fromkeys(module(s)["requires_grad"], True)


def drop_training(s: Snapshot) -> None:
    module(s)["training"] = dict.fromkeys(module(s)["training"], True)


def drop_optimizer_state(s: Snapshot) -> None:
    for part in s.run["optimizers"]:
        part.state["state"]["state"] = {}


def drop_learning_rate(s: Snapshot) -> None:
    for part in s.run["optimizers"]:
        for group in part.state["state"]["param_groups"]:
            group["lr"] = 0.5


def drop_scheduler(index: int) -> Callable[[Snapshot], None]:
    def drop(s: Snapshot) -> None:
        fresh = {"last_epoch": 0, "num_bad_epochs": 0, "best": float("inf")}
        state = s.run["schedulers"][index].state["scheduler"].state["state"]
        state.update({key: value for key, value in fresh.items() if key in state})

    return drop


def drop_python_random(s: Snapshot) -> None:
    import random

    s.random["python"] = random.Random(99).getstate()


def drop_numpy_random(s: Snapshot) -> None:
    s.random["numpy"] = np.random.RandomState(99).get_state(legacy=False)


def drop_torch_random(s: Snapshot) -> None:
    s.random["torch"] = other_torch()


def drop_replay_random(s: Snapshot) -> None:
    if s.replay is not None:
        s.replay["random"]["torch"] = other_torch()


def drop_replay_buffers(s: Snapshot) -> None:
    if s.replay is not None:
        for state in s.replay["modules"].values():
            state["buffers"]["calls"] = module(s)["buffers"]["calls"]


def drop_loader(s: Snapshot) -> None:
    s.run["train_loader"].state["state"]["position"] = 0


def drop_loader_epoch(s: Snapshot) -> None:
    s.run["train_loader"].state["state"]["epoch"] = 0


def drop_val_loader(s: Snapshot) -> None:
    s.run["val_loader"].state["state"]["position"] = 0


def drop_val_random(s: Snapshot) -> None:
    s.run["val_random"] = Part("same", "run.val_random")


def drop_counters(s: Snapshot) -> None:
    s.callbacks["counters"] = {}


def drop_callback_object(s: Snapshot) -> None:
    s.callbacks["objects"]["Best"] = {"best": float("inf"), "since": 0}


def drop_log_length(s: Snapshot) -> None:
    s.loggers = {}


DROPS: dict[str, Callable[[Snapshot], None]] = {
    name.removeprefix("drop_"): drop
    for name, drop in list(globals().items())
    if name.startswith("drop_") and name != "drop_scheduler"
} | {f"scheduler_{i}": drop_scheduler(i) for i in range(3)}

FIELDS = (
    "epoch", "step", "batch", "batch_nb", "metrics", "finishing", "epoch_ending", "batch_skipped",
    "windows", "loss", "epochs", "batches", "batch_open", "pass_i", "pass_open", "served",
    "stepped", "counted", "frozen", "owner", "shelf", "validated", "validations", "modes", "totals",
)  # fmt: skip


def resumed_differs(
    golden: Life, folder: Path, damage: Callable[[Snapshot], None], stops: list[int]
) -> bool:
    for k in stops:
        life = again(golden, folder / str(k))
        life.run(stop_after=k)
        try:
            life.run(checkpoints=lossy(damage))
        except Exception:  # noqa: BLE001 - damaged so much that it cannot even go on
            return True
        if unequal(golden.end, life.end) or life.trace != golden.trace or life.log != golden.log:
            return True
    return False


def stops_to_try(golden: Life) -> list[int]:
    """All stops from the second epoch on: first one in each state, then another in each, ..."""
    states = [entry for entry in golden.trace if len(entry) == 5 and entry[0] in golden.states]
    visits: dict[str, int] = {}
    ranked = []
    for k, entry in enumerate(states[:-1], start=1):
        if entry[1] > 0:
            visits[entry[0]] = visits.get(entry[0], 0) + 1
            ranked.append((visits[entry[0]], k))
    return [k for _, k in sorted(ranked)]


@pytest.mark.parametrize("name", DROPS)
def test_a_component_left_out_is_noticed(rich_golden: Life, tmp_path: Path, name: str) -> None:
    assert resumed_differs(rich_golden, tmp_path, DROPS[name], stops_to_try(rich_golden))


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_left_out_is_noticed(rich_golden: Life, tmp_path: Path, name: str) -> None:
    def drop(s: Snapshot) -> None:
        s.run[name] = getattr(fresh_run(), name)

    used = set(rich_golden.used[name])
    stops = [k for k in stops_to_try(rich_golden) if k in used]
    assert resumed_differs(rich_golden, tmp_path, drop, stops)


def test_every_stored_field_has_a_control() -> None:
    from statetrain.persist.snapshot import fields

    run = st.SupervisedRun(module=programs.Rich(), train_loader=st.resumable([1]))
    stored = {name for name, kind in fields(run).items() if kind == "stored"}
    by_parts = {"module", "train_loader", "val_loader", "optimizers", "schedulers", "val_random"}
    elsewhere = {
        "state",
        "came_from",
        "seed",
        "elapsed",
    }  # test_trainer: without them nothing goes on
    assert stored == {*FIELDS} | by_parts | elsewhere
