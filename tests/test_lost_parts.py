"""What a run keeps outside the usual places is saved too, or refused: never lost in silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import statetrain as st
from statetrain.persist.compare import unequal

BATCHES = [(torch.randn(3, 4, generator=torch.Generator().manual_seed(i)),) for i in range(4)]


class Plain(st.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        return self.line(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(
    make: Callable[[], Any],
    url: Any,
    *,
    stop: int | None = None,
    callbacks: Any = (),
    kind: type[st.Checkpoints] = st.Checkpoints,
) -> Any:
    torch.manual_seed(0)
    checkpoints = kind(url, every=None, at="forward")
    trainer = st.Trainer(
        seed=1, max_epochs=3, checkpoints=checkpoints, callbacks=callbacks, progress=False
    )
    if stop is not None:
        programs.interrupt(trainer, stop)
    samples = [x for (batch,) in BATCHES for x in batch]
    data = DataLoader(TensorDataset(torch.stack(samples)), batch_size=3)
    return trainer.fit(make(), data)


def end(url: Any) -> Any:
    found = st.Checkpoints(url).newest()
    assert found is not None
    return found[1]


def exact(
    make: Callable[[], Any],
    folder: Path,
    *,
    stops: Any = range(1, 60, 5),
    callbacks: Callable[[], Any] = tuple,
) -> list[str]:
    """Return what differs at the end, over several stops."""
    fit(make, folder / "golden", callbacks=callbacks())
    golden, found = end(folder / "golden"), []
    for k in stops:
        fit(make, folder / str(k), stop=k, callbacks=callbacks())
        fit(make, folder / str(k), callbacks=callbacks())
        found += unequal(golden, end(folder / str(k)))
    return found


class Attributes(Plain):
    """Keeps state in plain attributes: a factor, a tensor, lists, and generators of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.average, self.history = 1.0, torch.zeros(1), {"losses": [0.0]}
        self.noise = torch.Generator().manual_seed(4)
        self.numpy = np.random.default_rng(4)
        self.drop = nn.Dropout(0.1)

    def on_epoch_start(self) -> None:
        assert self.run is not None
        self.factor = 0.1 * (self.run.epoch + 1)
        self.drop.p = 0.1 * (self.run.epoch + 1)

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        noise = torch.rand(1, generator=self.noise) + self.numpy.random()
        loss = super().training_step((self.drop(batch[0]),), batch_nb)
        return loss * self.factor + (self.line.weight * noise * self.average).sum()

    def on_batch_end(self) -> None:
        assert self.run is not None
        self.average = 0.9 * self.average + self.run.loss
        self.history["losses"].append(float(self.run.loss))


def test_plain_attributes_and_generators_of_modules_are_state(tmp_path: Path) -> None:
    assert exact(Attributes, tmp_path) == []


def test_without_them_the_end_differs(tmp_path: Path) -> None:
    class Lossy(st.Checkpoints):
        def newest(self) -> Any:
            found = super().newest()
            if found is not None:
                found[1].attributes = {}
            return found

    fit(Attributes, tmp_path / "golden")
    fit(Attributes, tmp_path / "run", stop=23)
    fit(Attributes, tmp_path / "run", kind=Lossy)
    assert unequal(end(tmp_path / "golden").run, end(tmp_path / "run").run)


def test_an_attribute_that_training_does_not_change_is_the_programs(tmp_path: Path) -> None:
    class Configured(Plain):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width

    fit(lambda: Configured(3), tmp_path, stop=9)
    assert fit(lambda: Configured(5), tmp_path).module.width == 5


def test_the_attributes_of_callback_objects_without_state_dict_are_state(tmp_path: Path) -> None:
    class Patience:
        def __init__(self) -> None:
            self.best, self.bad = float("inf"), 0

        @st.on("batch_end")
        def look(self, run: Any) -> None:
            self.bad = 0 if run.loss < self.best else self.bad + 1
            self.best = min(self.best, float(run.loss))
            run.log("bad", self.bad)
            if self.bad > 3:
                run.finish()

    assert exact(Plain, tmp_path, callbacks=lambda: [Patience()]) == []


def test_parameters_of_an_optimizer_in_no_module_are_refused(tmp_path: Path) -> None:
    class Hidden(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.heads = [nn.Linear(4, 1)]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.parameters(), *self.heads[0].parameters()], lr=0.1)

    with pytest.raises(st.CheckpointError, match=r"are in no module.*\n.*\[2\] of shape \(1, 4\)"):
        fit(Hidden, tmp_path)


def test_parameters_of_an_optimizer_in_another_order_are_refused(tmp_path: Path) -> None:
    class Turned(Plain):
        turned = False

        def __init__(self) -> None:
            super().__init__()
            self.line, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def configure_optimizers(self) -> Any:
            order = [*self.parameters()][:: -1 if Turned.turned else 1]
            return torch.optim.SGD(order, lr=0.1, momentum=0.9)

    fit(Turned, tmp_path, stop=9)
    Turned.turned = True
    with pytest.raises(st.CheckpointError, match=r"its parameters are, in order, \[\['run.module"):
        fit(Turned, tmp_path)


@pytest.mark.parametrize("what", ["parameter", "callback"])
def test_a_replay_that_ends_elsewhere_is_an_error(tmp_path: Path, what: str) -> None:
    class Momentum(Plain):
        """Updates a parameter in training_step: a second time on replay."""

        def __init__(self) -> None:
            super().__init__()
            self.slow = nn.Parameter(torch.ones(4), requires_grad=False)

        def training_step(self, batch: Any, batch_nb: int) -> Any:
            if what == "parameter":
                self.slow.data.mul_(0.9).add_(0.1 * self.line.weight.data[0])
            return super().training_step(batch, batch_nb)

    class Doubling:
        @st.on("forward")
        def double(self, run: Any) -> None:
            if what == "callback":
                run.loss = run.loss * 2

    fit(Momentum, tmp_path, stop=3, callbacks=[Doubling()])
    assert end(tmp_path).run["state"] == "forward"
    name = r"run\['module'\].*slow" if what == "parameter" else "loss"
    with pytest.raises(st.CheckpointError, match=r"was done again and left other values"):
        fit(Momentum, tmp_path, callbacks=[Doubling()])
    assert name


def test_buffers_that_appear_or_grow_in_forward_are_replayed(tmp_path: Path) -> None:
    class Growing(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("late", None)
            self.register_buffer("queue", torch.zeros(0))

        def training_step(self, batch: Any, batch_nb: int) -> Any:
            first = self.late is None
            self.late = torch.ones(1) if first else self.late + 1
            self.queue = torch.cat([self.queue, batch[0][:1, 0]])
            return super().training_step(batch, batch_nb) * self.late * len(self.queue)

    assert exact(Growing, tmp_path, stops=[3, 4, 8, 9, 20]) == []


def test_a_batch_tensor_that_wants_a_gradient_is_data(tmp_path: Path) -> None:
    class Penalty(Plain):
        def training_step(self, batch: Any, batch_nb: int) -> Any:
            batch[0].requires_grad_()
            return super().training_step(batch, batch_nb)

    assert exact(Penalty, tmp_path, stops=[4, 5, 6, 12]) == []


def test_gradients_with_a_graph_are_stored_without_it(tmp_path: Path) -> None:
    class Hessian(Plain):
        def backward(self, use_amp: bool, loss: torch.Tensor, optimizer: Any) -> None:
            loss.backward(create_graph=True)

    with pytest.warns(UserWarning, match="create_graph"):
        assert exact(Hessian, tmp_path, stops=[4, 5, 6, 12]) == []


def test_lazy_layers_are_told_to_be_made_first(tmp_path: Path) -> None:
    class Lazy(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.LazyLinear(1)

    with pytest.raises(st.CheckpointError, match="has no shape yet: call the module with a batch"):
        fit(Lazy, tmp_path)


def test_a_logged_tensor_is_what_it_was_when_it_was_logged(tmp_path: Path) -> None:
    class Counting(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def training_step(self, batch: Any, batch_nb: int) -> Any:
            self.calls += 1
            self.log("calls", self.calls)
            return super().training_step(batch, batch_nb)

    fit(Counting, tmp_path)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    assert [line.split(",")[-1] for line in lines] == [f"{i}.0" for i in range(1, 13)]


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2), None, {}, [1]])
def test_only_numbers_are_logged(value: Any) -> None:
    with pytest.raises(st.TrainingError, match="log a number or a scalar tensor"):
        st.Run().log("x", value)


def test_rows_reach_the_log_long_before_the_end(tmp_path: Path) -> None:
    run = st.Run()
    logger = st.CSVLogger(tmp_path / "log.csv")
    loop = st.Loop(
        initial="go",
        states=[st.State("go", lambda run: run.log("x", 1)), st.State("end", final=True)],
        transitions=[
            st.Transition("go", "end", when=lambda run: run.finishing),
            st.Transition("go", "go"),
        ],
    )
    trainer = st.Trainer(loop, loggers=[logger])

    @trainer.on("go", at=250)
    def look(run: Any) -> None:
        assert len((tmp_path / "log.csv").read_text().splitlines()) == 201
        assert len(run.rows) == 50
        run.finish()

    trainer.fit(run)


def a_function() -> None:
    """Something to hold in a static field."""


@pytest.mark.parametrize(
    ("value", "other"),
    [(torch.ones(2), torch.zeros(2)), (float("nan"), 1.0), (a_function, exact), (np.ones(2), 3)],
    ids=["tensor", "nan", "function", "array"],
)
def test_static_fields_of_any_kind_are_compared(tmp_path: Path, value: Any, other: Any) -> None:
    @dataclass(kw_only=True)
    class Config(st.Run):
        given: Any = st.static(default=None)

    def go(run: Config) -> Any:
        loop = st.Loop(
            initial="go",
            states=[st.State("go"), st.State("on"), st.State("end", final=True)],
            transitions=st.path("go", "on", "end"),
        )
        trainer = st.Trainer(loop, checkpoints=tmp_path)
        trainer.on("go")(lambda run: run.stop())
        return trainer.fit(run)

    go(Config(given=value))
    with pytest.raises(st.CheckpointError, match="run given"):
        go(Config(given=other))
    assert go(Config(given=value)).state == "end"


def test_a_frozen_parameter_in_a_field_stays_the_optimizers_own(tmp_path: Path) -> None:
    @dataclass(kw_only=True)
    class Own(st.Run):
        p: Any
        optimizer: Any

    def work(run: Own) -> None:
        run.step += 1
        run.p.requires_grad_(run.step > 2)
        run.p.grad = torch.ones(2)
        run.optimizer.step()

    def go(url: Path, stop: int | None = None) -> Own:
        loop = st.Loop(
            initial="go",
            states=[st.State("go", work), st.State("end", final=True)],
            transitions=[
                st.Transition("go", "end", when=lambda run: run.step == 5),
                st.Transition("go", "go"),
            ],
        )
        trainer = st.Trainer(loop, checkpoints=url)
        if stop:
            trainer.on("go", at=stop)(lambda run: run.stop())
        p = nn.Parameter(torch.zeros(2), requires_grad=False)
        result: Own = trainer.fit(Own(p=p, optimizer=torch.optim.Adam([p])))
        return result

    go(tmp_path / "golden")
    for k in range(1, 5):
        go(tmp_path / str(k), k)
        run = go(tmp_path / str(k))
        assert run.optimizer.param_groups[0]["params"][0] is run.p
        assert unequal(end(tmp_path / "golden").run, end(tmp_path / str(k)).run) == []


# Stopping and starting in one process.


def test_a_stop_without_checkpoints_is_over_at_the_next_fit() -> None:
    trainer = st.Trainer(max_epochs=1, progress=False)
    trainer.on("step", at=2)(lambda run: run.stop())
    assert trainer.fit(Plain(), BATCHES).state == "step"
    trainer = st.Trainer(programs.LOOP, max_epochs=1)
    _, (run,) = programs.gan(None, [])  # type: ignore[arg-type]
    run.stop()
    assert trainer.fit(run).state == "done"


def test_a_stopped_window_leaves_no_gradients_to_the_next_run() -> None:
    module = Plain()
    start = {name: value.clone() for name, value in module.state_dict().items()}

    def run(*, stop: bool) -> torch.Tensor:
        module.load_state_dict(start)
        trainer = st.Trainer(st.supervised(accumulate_grad_batches=2), max_epochs=1, progress=False)
        if stop:
            trainer.on("backward", once=True)(lambda run: run.stop())
        trainer.fit(module, BATCHES)
        return module.line.weight.detach().clone()

    golden = run(stop=False)
    run(stop=True)
    assert torch.equal(golden, run(stop=False))


def test_one_checkpoints_object_serves_one_fit_at_a_time(tmp_path: Path) -> None:
    shared = st.Checkpoints(tmp_path)
    outer = st.Trainer(max_epochs=1, checkpoints=shared, progress=False)

    @outer.on("step", once=True)
    def inner(_run: Any) -> None:
        with pytest.raises(st.CheckpointError, match="in use by another fit of this process"):
            st.Trainer(max_epochs=1, checkpoints=shared, progress=False).fit(Plain(), BATCHES)
        with pytest.raises(st.TrainingError, match="at work already"):
            outer.fit(Plain(), BATCHES)

    assert outer.fit(Plain(), BATCHES).state == "done"


@pytest.mark.parametrize("url", ["", "runs/a::b"])
def test_a_url_that_names_no_place_is_refused(url: str) -> None:
    with pytest.raises(st.CheckpointError, match="is no place for checkpoints"):
        st.Checkpoints(url)


def test_every_second_epoch_stays_every_second_after_a_stop(tmp_path: Path) -> None:
    saved: list[int] = []

    class Noting(st.Checkpoints):
        def save(self, run: Any, snapshot: Any, state: str, **how: Any) -> Any:
            if state == "epoch_end":
                saved.append(run.epochs)
            return super().save(run, snapshot, state, **how)

    for stop in (9, None):
        trainer = st.Trainer(
            max_epochs=6, checkpoints=Noting(tmp_path, every="2 epochs"), progress=False
        )
        if stop:
            trainer.on("step", at=stop)(lambda run: run.stop())
        trainer.fit(Plain(), BATCHES)
    assert saved == [2, 4, 6]


def test_signals_on_the_way_out_do_not_change_the_exit_code(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import statetrain as st
from test_lost_parts import BATCHES, Plain
trainer = st.Trainer(max_epochs=1, checkpoints={str(tmp_path)!r}, progress=False)
trainer.on("step", at=2)(lambda run: os.kill(os.getpid(), signal.SIGTERM))
try:
    trainer.fit(Plain(), BATCHES)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
"""
    source = os.pathsep.join([str(Path(st.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 75, done.stderr
    assert done.returncode != -signal.SIGTERM


# Several fits in one process.


class Counting(Plain):
    """Counts in one attribute and toggles another; `factor` is the program's."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.counter, self.toggle, self.factor = 0, "off", factor

    def on_epoch_start(self) -> None:
        assert self.run is not None
        if self.run.epoch == 0:
            self.counter += 1
        self.toggle = "on" if self.run.epoch == 0 else "off"
        self.made = self.run.epoch


def again(module: Any, url: Any, epochs: int, *, stop: bool = False, callbacks: Any = ()) -> Any:
    trainer = st.Trainer(
        seed=1, max_epochs=epochs, checkpoints=url, callbacks=callbacks, progress=False
    )
    if stop:
        trainer.on("step", once=True)(lambda run: run.stop())
    return trainer.fit(module, BATCHES)


def test_what_an_earlier_fit_changed_is_saved_by_the_next_one_too(tmp_path: Path) -> None:
    class Still(Counting):
        on_epoch_start = st.Module.on_epoch_start

    module = Counting()
    again(module, None, 1)
    assert (module.counter, module.toggle) == (1, "on")
    module.__class__ = Still  # the next fits change nothing
    again(module, tmp_path / "other", 1)
    assert end(tmp_path / "other").attributes["run.module"]["counter"] == 1
    fresh = Still()
    again(fresh, tmp_path / "other", 2)
    assert (fresh.counter, fresh.toggle) == (1, "on")
    again(module, tmp_path / "other", 3)
    assert end(tmp_path / "other").attributes["run.module"]["counter"] == 1


def test_what_the_program_sets_between_two_fits_stays_the_programs(tmp_path: Path) -> None:
    module = Counting()
    again(module, None, 1)
    module.factor = 0.5
    again(module, tmp_path / "run", 1)
    assert "factor" not in end(tmp_path / "run").attributes["run.module"]
    fresh = Counting(0.3)
    again(fresh, tmp_path / "run", 2)
    assert fresh.factor == 0.3


def test_a_resume_in_the_same_process_undoes_what_the_checkpoint_does_not_know(
    tmp_path: Path,
) -> None:
    class Late(Plain):
        best: Any

        def __init__(self) -> None:
            super().__init__()
            self.best = None
            self.seen: list[Any] = []

        def on_batch_end(self) -> None:
            self.seen.append((self.best, hasattr(self, "made")))
            self.best = self.made = 1

    again(Late(), tmp_path, 1, stop=True)
    module = Late()
    again(module, None, 1)
    assert module.best == 1
    again(module, tmp_path, 1)
    assert module.seen == [(None, False), (1, True), (1, True), (1, True)]


def test_a_dry_run_puts_plain_attributes_back() -> None:
    module = Counting()
    module.history = {"losses": [1.0]}
    module.on_batch_end = lambda: module.history["losses"].append(2.0)  # type: ignore[method-assign]
    st.Trainer(max_epochs=3, progress=False).fit(module, BATCHES, dry_run=True)
    assert (module.counter, module.toggle, module.history) == (0, "off", {"losses": [1.0]})
    assert not hasattr(module, "made")


def test_a_large_attribute_that_cannot_be_put_back_is_an_error() -> None:
    module = Counting()
    module.table = torch.zeros(1 << 20)
    module.on_batch_end = lambda: module.table.add_(1)  # type: ignore[method-assign]
    with pytest.raises(st.CheckpointError, match=r"run\.module\.table has changed .* too large"):
        st.Trainer(max_epochs=3, progress=False).fit(module, BATCHES, dry_run=True)


def test_a_module_that_was_trained_is_pickled_without_its_memory() -> None:
    module = Counting()
    again(module, None, 1)
    assert "_statetrain_memory" in vars(module)
    assert "_statetrain_memory" not in module.__getstate__()


# Rows, loggers and counters.


class Early(Plain):
    """Logs before the first action."""

    def configure_optimizers(self) -> Any:
        self.log("early", 1)
        return super().configure_optimizers()


def rows(file: Path) -> list[str]:
    return [line.split(",")[2] for line in file.read_text().splitlines()[1:]]


def test_rows_from_before_the_start_are_logged_once_with_and_without_checkpoints(
    tmp_path: Path,
) -> None:
    log = st.CSVLogger(tmp_path / "plain.csv")
    st.Trainer(max_epochs=1, progress=False, loggers=[log]).fit(Early(), BATCHES)
    again(Early(), tmp_path / "run", 1, stop=True)
    again(Early(), tmp_path / "run", 1)
    assert rows(tmp_path / "plain.csv") == rows(tmp_path / "run" / "metrics.csv") == ["early"]


class Lines:
    """A logger of lines, kept in memory."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.started: Any = "never"

    def start(self, state: Any) -> None:
        self.started = state

    def write(self, found: Any) -> None:
        self.lines += found

    def state_dict(self) -> dict[str, int]:
        return {"lines": len(self.lines)}

    def close(self) -> None:
        """Close nothing."""


def logged(url: Path, loggers: Any, **settings: Any) -> None:
    trainer = st.Trainer(
        max_epochs=2, seed=1, checkpoints=url, loggers=loggers, progress=False, **settings
    )
    trainer.on("epoch_end", once=True)(lambda run: run.stop())
    trainer.fit(Plain(), BATCHES)


def test_loggers_are_matched_by_their_type_and_not_by_their_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = Lines(), Lines(), Lines()
    logged(tmp_path / "run", [first, st.CSVLogger(tmp_path / "a.csv")])
    assert first.started is None
    logged(tmp_path / "run", [st.CSVLogger(tmp_path / "a.csv"), second, third])
    assert (second.started, third.started) == ({"lines": 0}, None)
    assert "logger Lines #1 is not in the checkpoint: its log begins here" in caplog.text
    logged(tmp_path / "run", [second])
    assert "logger CSVLogger #0 is only in the checkpoint" in caplog.text


def test_a_renamed_callback_that_counts_is_said_with_both_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit_with(name: str, key: str | None = None) -> None:
        def note(run: Any) -> None:
            """Note nothing."""

        note.__qualname__ = name
        trainer = st.Trainer(max_epochs=2, checkpoints=tmp_path / f"{key}", progress=False)
        trainer.on("step", every=3, name=key)(note)
        trainer.on("step")(lambda run: run.stop() if run.step == 2 else None)
        trainer.fit(Plain(), BATCHES)

    fit_with("old")
    fit_with("new")
    assert (
        "counter of callback \"at state 'step': old #0\" is only in the checkpoint; "
        "\"at state 'step': new #0\" is counted from 0; name=... keeps a counter"
    ) in caplog.text
    caplog.clear()
    fit_with("old", "mine")
    fit_with("new", "mine")
    assert "counter of callback" not in caplog.text


def test_a_resume_counts_from_the_checkpoint_alone(tmp_path: Path) -> None:
    again(Plain(), tmp_path, 1)
    trainer = st.Trainer(max_epochs=2, seed=1, checkpoints=tmp_path, progress=False)
    fired: list[int] = []
    trainer.on("step", at=3)(lambda run: fired.append(run.step))
    callback = next(iter(trainer._callbacks))
    callback.visits = 2  # from a fit that came before
    trainer.fit(Plain(), BATCHES)
    assert fired == [7]
