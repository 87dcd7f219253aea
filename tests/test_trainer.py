"""The trainer: starting, going on, stopping by request and by signal, and saying no in time."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

import statetrain as st
from statetrain.persist.compare import unequal

BATCHES = [(torch.full((2, 3), float(i)), torch.ones(2, 1)) for i in range(4)]


class Line(st.Module):
    def __init__(self, width: int = 1, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__()
        self.line = nn.Linear(3, width)
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_nb: int) -> torch.Tensor:
        x, y = batch
        return ((self.line(x) - y) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.01)


def trainer(url: Any, **settings: Any) -> st.Trainer:
    settings = {"max_epochs": 2, "seed": 1, **settings}
    return st.Trainer(checkpoints=url, **settings)


def newest(url: Any) -> Any:
    found = st.Checkpoints(url).newest()
    assert found is not None
    return found[1]


@pytest.fixture
def url() -> Iterator[str]:
    name = f"memory://{uuid.uuid4().hex}"
    yield name
    if fsspec.filesystem("memory").exists(name):
        fsspec.filesystem("memory").rm(name, recursive=True)


def test_the_same_call_starts_goes_on_and_then_does_nothing(url: str) -> None:
    states: list[str] = []

    def start(*, stop: bool) -> st.SupervisedRun:
        job = trainer(url)
        for name in job.loop.names:
            job.on(name)(lambda run: states.append(run.state))
        if stop:
            job.on("backward", at=3)(lambda run: run.stop())
        return job.fit(Line(), BATCHES)

    assert start(stop=True).state == "backward"
    first = len(states)
    assert start(stop=False).state == "done"
    assert states[first] == "step"
    done = list(states)
    run = start(stop=False)
    assert (run.state, run.epochs, run.step) == ("done", 2, 8)
    assert states == done


def test_a_raised_limit_goes_on_and_equals_a_run_that_had_it_at_once(url: str) -> None:
    whole = trainer(f"{url}/whole", max_epochs=3).fit(Line(), BATCHES)
    trainer(f"{url}/parts", max_epochs=1).fit(Line(), BATCHES)
    parts = trainer(f"{url}/parts", max_epochs=3).fit(Line(), BATCHES)
    assert whole.step == parts.step == 12
    assert unequal(newest(f"{url}/whole"), newest(f"{url}/parts")) == []


@pytest.mark.parametrize("first", [1, 3, 4, 6])
def test_raised_max_steps_goes_on_in_the_middle_of_an_epoch(url: str, first: int) -> None:
    whole = trainer(f"{url}/whole", max_epochs=None, max_steps=9).fit(Line(), BATCHES)
    paused = trainer(f"{url}/parts", max_epochs=None, max_steps=first).fit(Line(), BATCHES)
    assert (paused.state, paused.step) == ("done", first)
    trainer(f"{url}/parts", max_epochs=None, max_steps=9).fit(Line(), BATCHES)
    assert whole.step == 9
    assert unequal(newest(f"{url}/whole"), newest(f"{url}/parts")) == []


def test_without_came_from_a_raised_limit_does_not_go_on(url: str) -> None:
    class Lossy(st.Checkpoints):
        def newest(self) -> Any:
            record, saved = super().newest() or pytest.fail("nothing saved")
            saved.run["came_from"] = ""
            return record, saved

    trainer(url, max_steps=3).fit(Line(), BATCHES)
    assert trainer(Lossy(url), max_steps=5).fit(Line(), BATCHES).step == 3


def test_finish_is_for_good(url: str) -> None:
    job = trainer(url, max_epochs=5)
    job.on("epoch_end")(lambda run: run.finish())
    assert job.fit(Line(), BATCHES).epochs == 1
    assert trainer(url, max_epochs=9).fit(Line(), BATCHES).epochs == 1


def test_save_saves_where_it_was_asked_and_goes_on(url: str) -> None:
    saved: list[str] = []

    class Noting(st.Checkpoints):
        def save(self, run: Any, snapshot: Any, state: str, **how: Any) -> Any:
            saved.append(state)
            return super().save(run, snapshot, state, **how)

    job = trainer(Noting(url, every=None), max_epochs=1)
    job.on("zero_grad", at=2)(lambda run: run.save())
    job.on("forward", at=3)(lambda run: run.save())  # cannot be stored there: in the next state
    job.fit(Line(), BATCHES)
    assert saved == ["zero_grad", "backward", "done"]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("1 epoch", ["epoch_end", "epoch_end", "done"]),
        ("2 epochs", ["epoch_end", "done"]),
        ("3 steps", ["step", "step", "done"]),
        (("3 steps", "1 epoch"), ["step", "epoch_end", "step", "epoch_end", "done"]),
        (None, ["done"]),
    ],
)
def test_periodic_saves_come_when_they_are_due(url: str, every: Any, expected: list[str]) -> None:
    saved: list[str] = []

    class Noting(st.Checkpoints):
        def save(self, run: Any, snapshot: Any, state: str, **how: Any) -> Any:
            saved.append(state)
            return super().save(run, snapshot, state, **how)

    trainer(Noting(url, every=every)).fit(Line(), BATCHES)
    assert saved == expected


def test_minutes_are_counted_by_the_clock(url: str) -> None:
    now = 0.0
    saved: list[int] = []

    class Noting(st.Checkpoints):
        def save(self, run: Any, snapshot: Any, state: str, **how: Any) -> Any:
            saved.append(run.step)
            return super().save(run, snapshot, state, **how)

    job = trainer(Noting(url, every="2 min", at="zero_grad", clock=lambda: now))

    @job.on("step")
    def minute(run: Any) -> None:
        nonlocal now
        now += 60.0

    job.fit(Line(), BATCHES)
    assert saved == [2, 4, 6, 8, 8]


def test_keep_bounds_the_number_of_checkpoints(url: str) -> None:
    trainer(st.Checkpoints(url, every="1 steps", keep=3)).fit(Line(), BATCHES)
    assert len(st.Checkpoints(url).store.records()) == 3


def test_checkpoints_on_or_off_change_no_number(url: str) -> None:
    runs = [trainer(place, seed=4).fit(Line(), BATCHES) for place in (None, url)]
    weights = [list(run.module.parameters()) for run in runs]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_fit_neither_seeds_nor_draws(url: str) -> None:
    data = torch.utils.data.DataLoader(BATCHES, batch_size=None, shuffle=True)  # type: ignore[arg-type]
    job, module = trainer(url), Line()
    before = torch.get_rng_state()
    job.fit(module, data)
    assert torch.equal(before, torch.get_rng_state())


def test_no_seed_takes_the_initial_one_and_saves_it(url: str) -> None:
    torch.manual_seed(77)
    assert trainer(url, seed=None).fit(Line(), BATCHES).seed == 77
    torch.manual_seed(78)
    assert trainer(url, seed=None).fit(Line(), BATCHES).seed == 77


# Signals.

SCRIPT = """
import os, signal, sys
import statetrain as st
sys.path.insert(0, os.path.dirname({tests!r}))
from test_trainer import BATCHES, Line
job = st.Trainer(max_epochs=2, seed=1, checkpoints={url!r})
for number in {numbers!r}:
    job.on({state!r}, at=2)(lambda run, number=number: os.kill(os.getpid(), number))
job.fit(Line(), BATCHES)
"""


def run_script(url: Path, state: str, *numbers: int) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(
        tests=__file__, url=str(url), numbers=[int(n) for n in numbers], state=state
    )
    source = os.pathsep.join([str(Path(st.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": source}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def test_exit_codes_are_distinct_and_documented(tmp_path: Path) -> None:
    codes = {
        name: run_script(tmp_path / name, "step", *numbers)
        for name, numbers in {
            "SIGTERM": [signal.SIGTERM],
            "SIGUSR1": [signal.SIGUSR1],
            "SIGINT": [signal.SIGINT],
            "none": [],
        }.items()
    }
    assert {name: done.returncode for name, done in codes.items()} == {
        "SIGTERM": 75,
        "SIGUSR1": 75,
        "SIGINT": 130,
        "none": 0,
    }
    assert "SIGTERM: saved in state 'step'" in codes["SIGTERM"].stderr
    assert "Traceback" not in codes["SIGTERM"].stderr + codes["SIGINT"].stderr
    assert newest(tmp_path / "SIGTERM").run["step"] == 2


def test_a_second_and_third_sigterm_change_nothing(tmp_path: Path) -> None:
    done = run_script(tmp_path / "run", "step", *[signal.SIGTERM] * 3)
    assert done.returncode == 75
    assert newest(tmp_path / "run").run["state"] == "step"


def test_a_second_ctrl_c_interrupts_at_once(tmp_path: Path) -> None:
    done = run_script(tmp_path / "run", "step", signal.SIGINT, signal.SIGINT)
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode in (-signal.SIGINT, 130, 1)


def test_a_second_ctrl_c_interrupts_at_once_after_a_sigterm_too(tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGINT)
    assert "KeyboardInterrupt" in run_script(tmp_path / "run", "step", *numbers).stderr


def test_one_loader_for_training_and_validation_is_refused() -> None:
    loader = st.resumable(BATCHES)
    with pytest.raises(st.DataError, match=r"give each an st\.resumable"):
        trainer(None).fit(Line(), loader, loader)


def test_a_signal_in_forward_is_honoured_in_the_next_state(tmp_path: Path) -> None:
    assert run_script(tmp_path / "run", "forward", signal.SIGTERM).returncode == 75
    assert newest(tmp_path / "run").run["state"] == "backward"


def test_handlers_from_before_are_called_and_put_back(url: str) -> None:
    seen: list[int] = []
    handler = lambda number, frame: seen.append(number)  # noqa: E731 - compared by identity
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        job = trainer(url)
        job.on("step", at=2)(lambda run: os.kill(os.getpid(), signal.SIGUSR2))
        with pytest.raises(st.Preempted) as stop:
            job.fit(Line(), BATCHES)
        assert (stop.value.code, stop.value.state, stop.value.url) == (75, "step", url)
        assert seen == [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_outside_the_main_thread_training_works_and_says_what_is_missing(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(trainer(url).fit(Line(), BATCHES)))
    with caplog.at_level(logging.WARNING, "statetrain"):
        thread.start()
        thread.join()
    assert done[0].state == "done"
    assert "signals do not save" in caplog.text


# What does not fit, or cannot be.


def saved_run(url: str) -> None:
    job = trainer(url)
    job.on("backward", at=3)(lambda run: run.stop())
    job.fit(Line(), BATCHES)


def refused(url: str, module: Any, data: Any = BATCHES, **settings: Any) -> str:
    before = newest(url)
    with pytest.raises(st.CheckpointError) as error:
        trainer(url, **settings).fit(module, data)
    assert unequal(before, newest(url)) == [], "nothing is lost"
    return str(error.value)


def test_a_checkpoint_that_does_not_fit_names_every_difference(url: str) -> None:
    saved_run(url)

    class Other(Line):
        def __init__(self) -> None:
            super().__init__(width=2, optimizer=torch.optim.Adam)
            self.more = nn.BatchNorm1d(2)

    message = refused(url, Other())
    for difference in (
        "run.module.line.weight: (1, 3) torch.float32 in the checkpoint, (2, 3) torch.float32 in",
        "run.module.more.running_mean: a buffer only in this run",
        "run.module.more.weight: a parameter only in this run",
        "run.optimizers[0]: torch.optim.sgd.SGD in the checkpoint, torch.optim.adam.Adam in this",
    ):
        assert difference in message


def test_another_loop_is_refused_with_the_difference(url: str) -> None:
    saved_run(url)
    loop = st.supervised().inserting("ema", lambda run: None, after="step")
    message = refused(url, Line(), loop=loop)
    assert "state 'ema' is only in this loop" in message
    assert "transition 'step -> zero_grad' [stepped] is only in the checkpoint's loop" in message


def test_other_options_limits_and_rates_are_reported_and_used_or_not(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved_run(url)
    module = Line(optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=0.5))
    with caplog.at_level(logging.WARNING, "statetrain"):
        run = trainer(url, loop=st.supervised(gradient_clip_val=1.0), max_epochs=3).fit(
            module, BATCHES
        )
    assert "option gradient_clip_val: None in the checkpoint, 1.0 here" in caplog.text
    assert "limit max_epochs: 2 in the checkpoint, 3 here" in caplog.text
    assert "run.optimizers[0].param_groups[0] lr: 0.01 in the checkpoint, 0.5 here" in caplog.text
    assert run.optimizers[0].param_groups[0]["lr"] == 0.01


def test_callback_state_that_would_be_lost_is_an_error_unless_allowed(url: str) -> None:
    class Counter:
        count = 0

        @st.on("step")
        def add(self, run: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    job = trainer(url, callbacks=[Counter()])
    job.on("step", at=3)(lambda run: run.stop())
    job.fit(Line(), BATCHES)
    assert "Counter' has saved state, but is not attached" in refused(url, Line())
    counter = Counter()
    trainer(url, callbacks=[counter]).fit(Line(), BATCHES)
    assert counter.count == 8


def test_missing_callback_state_is_a_warning_with_exact_false(url: str) -> None:
    saved_run(url)
    assert trainer(url, exact=False).fit(Line(), BATCHES).state == "done"


def test_what_cannot_be_stored_is_an_error_at_the_first_batch(url: str) -> None:
    class Opaque:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    class Odd(Line):
        def training_step(self, batch: Any, batch_nb: int) -> torch.Tensor:
            return self.line(batch.x).mean()

    with pytest.raises(st.CheckpointError, match=r"run.*batch.*Opaque.*register"):
        trainer(url).fit(Odd(), [Opaque(torch.ones(2, 3))] * 3)


def test_a_callback_whose_state_cannot_be_stored_is_an_error_before_training(url: str) -> None:
    class Odd:
        @st.on("step")
        def work(self, run: Any) -> None:
            pytest.fail("training began")

        def state_dict(self) -> dict[str, Any]:
            return {"lock": threading.Lock()}

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(st.CheckpointError, match=r"callbacks\.objects.*lock"):
        trainer(url, callbacks=[Odd()]).fit(Line(), BATCHES)


def test_an_undeclared_attribute_of_the_run_is_an_error(url: str) -> None:
    job = trainer(url)

    @job.on("batch_start", once=True)
    def add(run: Any) -> None:
        run.extra = 1

    with pytest.raises(st.CheckpointError, match=r"run\.extra is not a declared field"):
        job.fit(Line(), BATCHES)


def test_workers_and_iterables_are_refused_only_with_checkpoints(url: str) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(BATCHES)

    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    with pytest.raises(st.DataError, match=r"train_loader: its dataset is an IterableDataset"):
        trainer(url).fit(Line(), loader)
    assert trainer(None).fit(Line(), loader).step == 8


def test_resume_never_refuses_to_write_over_a_run(url: str) -> None:
    saved_run(url)
    assert 'resume="never", but' in refused(url, Line(), resume="never")
    trainer(f"{url}/new", resume="never").fit(Line(), BATCHES)


def test_a_url_that_cannot_be_written_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = trainer(tmp_path / "file" / "run")
    job.on("epoch_start")(lambda run: pytest.fail("training began"))
    with pytest.raises(st.CheckpointError, match="file"):
        job.fit(Line(), BATCHES)


def test_a_url_of_an_unknown_kind_is_an_error_at_construction() -> None:
    with pytest.raises(st.CheckpointError, match="nowhere"):
        trainer("nowhere://bucket/run")


def test_an_error_in_training_says_where_and_loses_nothing(url: str) -> None:
    saved_run(url)
    job = trainer(url)

    @job.on("zero_grad")
    def fail(run: Any) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as error:
        job.fit(Line(), BATCHES)
    assert "in callback" in error.value.__notes__[0]
    assert "after state 'zero_grad' (epoch 0, step 3)" in error.value.__notes__[0]
    assert trainer(url).fit(Line(), BATCHES).state == "done"


def test_a_damaged_newest_checkpoint_falls_back_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = trainer(tmp_path / "whole").fit(Line(), BATCHES)
    trainer(st.Checkpoints(tmp_path / "run", keep=3)).fit(Line(), BATCHES)
    data = max((tmp_path / "run" / "data").glob("*/*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with caplog.at_level(logging.WARNING, "statetrain"):
        run = trainer(tmp_path / "run").fit(Line(), BATCHES)
    assert data.parent.name in caplog.text
    assert run.step == whole.step
    assert unequal(newest(tmp_path / "whole").run, newest(tmp_path / "run").run) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_epochs": 0}, "max_epochs=0: give a whole number from 1"),
        ({"max_steps": 1.5}, "max_steps=1.5"),
        ({"resume": "yes"}, 'resume=\'yes\': give "auto" or "never"'),
        ({"loop": 3}, "its first argument is a st.Loop"),
        ({"checkpoints": {"url": "memory://x", "every": "ten minutes"}}, 'write "10 min"'),
        ({"checkpoints": {"url": "memory://x", "keep": 0}}, "keep=0"),
        ({"checkpoints": {"url": "memory://x", "at": "bakward"}}, "did you mean 'backward'"),
        ({"checkpoints": {"url": "memory://x", "signals": ["SIGKILL"]}}, "no process can catch"),
        ({"checkpoints": {"url": "memory://x", "signals": ["SIGTREM"]}}, "did you mean 'SIGTERM'"),
    ],
)
def test_settings_without_meaning_are_errors_at_construction(
    settings: dict[str, Any], message: str
) -> None:
    def construct(checkpoints: dict[str, Any] | None = None, **rest: Any) -> st.Trainer:
        return st.Trainer(checkpoints=checkpoints and st.Checkpoints(**checkpoints), **rest)

    with pytest.raises(st.StatetrainError) as error:
        construct(**settings)
    assert message in str(error.value)


def test_a_loop_of_ones_own_takes_a_run() -> None:
    loop = st.Loop(
        initial="go",
        states=[st.State("go", lambda run: None), st.State("end", final=True)],
        transitions=[st.Transition("go", "end")],
    )
    run = st.Run()
    assert st.Trainer(loop).fit(run) is run
    assert run.state == "end"
    with pytest.raises(st.TrainingError, match=r"fit\(run\)"):
        st.Trainer(loop).fit(Line(), BATCHES)


# What a newcomer gets wrong, or would like to know.


def test_on_without_a_name_is_an_error() -> None:
    def callback(run: Any) -> None: ...

    with pytest.raises(st.CallbackError, match=r'as @trainer\.on\("step"\)'):
        st.Trainer(max_epochs=1).on(callback)  # type: ignore[arg-type]


def test_fit_with_too_few_arguments_says_what_it_takes() -> None:
    with pytest.raises(st.TrainingError, match=r"fit\(module, train_loader, val_loader\)"):
        st.Trainer(max_epochs=1).fit(Line())


def test_state_outside_a_function_is_warned_about(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = 0

    def counting(run: Any) -> None:
        nonlocal bad
        bad += 1

    def looking(run: Any) -> int:
        return bad

    job = trainer(url, progress=False)
    job.on("step")(counting)
    job.on("step")(looking)
    with caplog.at_level(logging.WARNING, "statetrain"):
        job.fit(Line(), BATCHES)
    warned = [r.message for r in caplog.records if "keep it in a callback object" in r.message]
    assert len(warned) == 1
    assert "counting' sets 'bad' outside itself" in warned[0]


def test_a_module_in_eval_mode_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "statetrain"):
        trainer(None).fit(Line().eval(), BATCHES)
    assert "call module.train() first" in caplog.text


def test_a_resumed_and_a_complete_run_say_so(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = trainer(url)
    job.on("backward", at=3)(lambda run: run.stop())
    job.fit(Line(), BATCHES)
    assert "going on" not in capsys.readouterr().err
    trainer(url).fit(Line(), BATCHES)
    assert "going on from state 'backward', epoch 0, step 2" in capsys.readouterr().err
    trainer(url).fit(Line(), BATCHES)
    said = capsys.readouterr().err
    assert "complete at epoch 1, step 8: nothing to do (a higher limit would go on)" in said


def test_another_seed_on_resume_is_reported(url: str, caplog: pytest.LogCaptureFixture) -> None:
    saved_run(url)
    with caplog.at_level(logging.WARNING, "statetrain"):
        run = trainer(url, seed=2).fit(Line(), BATCHES)
    assert "run seed: 1 in the checkpoint, 2 here (the checkpoint's is used)" in caplog.text
    assert run.seed == 1


# A second writer, a failing prune, loaders by name.


@pytest.mark.parametrize(("width", "resume"), [(2, "auto"), (1, "never")])
def test_a_run_that_is_refused_stops_no_other_writer(url: str, width: int, resume: str) -> None:
    first = trainer(st.Checkpoints(url, every="1 steps"))

    @first.on("epoch_end", once=True)
    def another(run: Any) -> None:
        with pytest.raises(st.CheckpointError):
            trainer(url, resume=resume).fit(Line(width), BATCHES)

    assert first.fit(Line(), BATCHES).state == "done"


def test_a_run_that_is_complete_stops_no_other_writer(url: str) -> None:
    trainer(url, max_steps=1).fit(Line(), BATCHES)
    first = trainer(st.Checkpoints(url, every=None), max_epochs=1)

    @first.on("step", once=True)
    def another(run: Any) -> None:
        assert trainer(url, max_steps=1).fit(Line(), BATCHES).step == 1

    assert first.fit(Line(), BATCHES).step == 4


def test_a_second_writer_that_is_taken_stops_the_first(url: str) -> None:
    first = trainer(st.Checkpoints(url, every="1 steps"))
    first.on("epoch_end", once=True)(lambda run: trainer(url).fit(Line(), BATCHES))
    with pytest.raises(st.CheckpointError, match="superseded"):
        first.fit(Line(), BATCHES)


def test_a_failing_prune_is_said_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = os.unlink

    def failing(path: Any, **more: Any) -> None:
        if "commits" in str(path) and str(path).endswith(".stc"):
            raise PermissionError(13, "no right to remove", str(path))
        remove(path, **more)

    monkeypatch.setattr(os, "unlink", failing)
    run = trainer(st.Checkpoints(tmp_path, every="1 steps", keep=1)).fit(Line(), BATCHES)
    assert (run.state, run.step) == ("done", 8)
    assert "cannot prune" in caplog.text
    assert "older checkpoints stay" in caplog.text
    assert len(st.Checkpoints(tmp_path).store.records()) == 9
    monkeypatch.undo()
    trainer(st.Checkpoints(tmp_path, keep=1), max_epochs=3).fit(Line(), BATCHES)
    kept = len(st.Checkpoints(tmp_path).store.records())
    assert kept == 3  # the newest two in any case, and the one that this fit went on from


def test_loaders_may_be_given_by_name() -> None:
    assert trainer(None).fit(Line(), train_loader=BATCHES).step == 8
    assert trainer(None).fit(module=Line(), train_loader=BATCHES, val_loader=None).step == 8
    assert trainer(None).exactness(Line(), train_loader=BATCHES).exact
    assert trainer(None).fit(Line(), BATCHES, val_loader=None, dry_run=True).step == 0


def test_settings_may_be_limits_of_an_evaluation_given_to_fit() -> None:
    class Tested(Line):
        def test_step(self, batch: Any, batch_nb: int) -> Any:
            return self.training_step(batch, batch_nb)

    run = st.Trainer(st.evaluation("test"), seed=1).fit(Tested(), BATCHES, limit_batches=2)
    assert (run.state, run.loader.position) == ("done", 2)


def test_timed_counts_the_visits_of_each_state_and_their_time() -> None:
    timed = st.Trainer(max_epochs=2, timed=True)
    timed.fit(Line(), BATCHES)
    visits = {name: each.visits for name, each in timed.spent.items()}
    assert visits["epoch_start"] == visits["epoch_end"] == 2
    assert visits["forward"] == visits["zero_grad"] == 2 * len(BATCHES)
    assert visits["validation_step"] == 0
    assert all(each.nanoseconds > 0 for each in timed.spent.values() if each.visits)
    untimed = st.Trainer(max_epochs=2)
    untimed.fit(Line(), BATCHES)
    assert untimed.spent == {}
