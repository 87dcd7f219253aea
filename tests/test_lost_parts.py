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
        def save(self, run: Any, snapshot: Any, state: str) -> Any:
            if state == "epoch_end":
                saved.append(run.epochs)
            return super().save(run, snapshot, state)

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
