"""The run: its kinds of fields, its requests, its log; and snapshots of it."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import statetrain as st
from statetrain.persist import container, snapshot
from statetrain.persist.compare import unequal


def loop(action: Any) -> st.Loop:
    return st.Loop(
        initial="go",
        states=[st.State("go", action), st.State("end", final=True)],
        transitions=[
            st.Transition("go", "end", when=lambda run: run.step >= 3),
            st.Transition("go", "go"),
        ],
    )


def count(run: Any) -> None:
    run.step += 1
    run.log("step", run.step)


@dataclass(kw_only=True)
class Fields(st.Run):
    stored: list[int] = field(default_factory=list)
    config: dict[str, Any] = st.static(default_factory=dict)
    cache: dict[str, int] = st.transient(default_factory=dict)


def fields_run(url: Any, config: dict[str, Any], *, stop: bool) -> Fields:
    def work(run: Fields) -> None:
        count(run)
        run.stored.append(run.step)
        run.cache["newest"] = run.step

    trainer = st.Trainer(loop(work), checkpoints=url)
    if stop:
        trainer.on("go", at=2)(lambda run: run.stop())
    result: Fields = trainer.fit(Fields(config=config))
    return result


def test_stored_static_and_transient_fields(tmp_path: Any) -> None:
    fields_run(tmp_path, {"width": 3}, stop=True)
    run = fields_run(tmp_path, {"width": 3}, stop=False)
    assert run.stored == [1, 2, 3]
    assert run.cache == {"newest": 3}


def test_a_static_field_that_changed_is_an_error(tmp_path: Any) -> None:
    fields_run(tmp_path, {"width": 3}, stop=True)
    with pytest.raises(st.CheckpointError, match=r"run config: \{'width': 3\} in the checkpoint"):
        fields_run(tmp_path, {"width": 4}, stop=False)


def test_log_keeps_the_newest_value_and_hands_rows_to_the_loggers(tmp_path: Any) -> None:
    log = tmp_path / "log.csv"
    run = st.Trainer(loop(count), loggers=[st.CSVLogger(log)]).fit(st.Run())
    assert run.metrics == {"step": 3}
    assert log.read_text().splitlines() == [
        "epoch,step,name,value", "0,1,step,1", "0,2,step,2", "0,3,step,3"
    ]  # fmt: skip


def test_a_logged_tensor_is_detached() -> None:
    run = st.Run()
    run.log("x", torch.ones((), requires_grad=True) * 2)
    assert not run.metrics["x"].requires_grad


def test_the_log_is_cut_to_what_the_checkpoint_knows(tmp_path: Any) -> None:
    log = tmp_path / "log.csv"

    def life(*, fail: bool) -> None:
        trainer = st.Trainer(
            loop(count),
            checkpoints=st.Checkpoints(tmp_path / "run", every=None),
            loggers=[st.CSVLogger(log)],
        )
        trainer.on("go", at=1)(lambda run: run.save())
        if fail:

            @trainer.on("go", at=2)
            def crash(run: Any) -> None:
                raise RuntimeError("crash")

        trainer.fit(st.Run())

    with pytest.raises(RuntimeError, match="crash"):
        life(fail=True)
    assert len(log.read_text().splitlines()) == 3  # the second row will be written again
    life(fail=False)
    assert log.read_text().splitlines()[1:] == ["0,1,step,1", "0,2,step,2", "0,3,step,3"]


def test_a_log_that_cannot_be_written_is_an_error_that_says_what_to_do(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(st.StatetrainError, match=r"loggers=\[st.CSVLogger\(path\)\]"):
        st.Trainer(loop(count), loggers=[st.CSVLogger(tmp_path / "file" / "log.csv")]).fit(st.Run())


# Snapshots.


@dataclass(kw_only=True)
class Everything(st.Run):
    model: nn.Module
    copy: nn.Module | None = None
    optimizer: Any = None
    pair: dict[str, Any] = field(default_factory=dict)
    python: random.Random = field(default_factory=lambda: random.Random(1))
    numpy: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    torch: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))
    weight: torch.Tensor = field(default_factory=lambda: torch.ones(2, requires_grad=True))


def everything() -> Everything:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(2, 2))
    model[2].weight = nn.Parameter(torch.randn(2, 2).t())
    run = Everything(model=model)
    run.copy = run.model
    run.optimizer = torch.optim.NAdam([*model.parameters(), run.weight], foreach=True)
    run.pair = {"a": [nn.Linear(1, 1), 3], "b": (torch.optim.SGD(model.parameters(), lr=1),)}
    return run


def train(run: Everything) -> None:
    for parameter in [*run.model.parameters(), run.weight]:
        parameter.grad = torch.randn_like(parameter)
    run.optimizer.step()
    run.model[1](torch.randn(2, 3, 1, 1))
    run.pair["a"][0].weight.data += 1
    _ = run.python.random(), run.numpy.random(), torch.rand(1, generator=run.torch)


def through_bytes(tree: Any) -> Any:
    file = io.BytesIO()
    container.write(snapshot_of(tree), file)
    file.seek(0)
    return container.read(file)


def snapshot_of(run: Any) -> Any:
    return snapshot.capture(run) if isinstance(run, st.Run) else run


def test_everything_comes_back_and_goes_on_the_same() -> None:
    run, other = everything(), everything()
    train(run)
    tree = through_bytes(run)
    assert snapshot.differences(other, tree) == []
    snapshot.restore(other, tree)
    assert unequal(snapshot.capture(run), snapshot.capture(other)) == []
    assert other.copy is other.model, "an object in two fields stays one object"
    assert other.model[2].weight.stride() == (1, 2), "strides are kept: kernels choose by them"
    for each in (run, other):
        torch.manual_seed(5)
        train(each)
    assert unequal(snapshot.capture(run), snapshot.capture(other)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_optimizer_state_comes_back_in_its_own_dtype(dtype: torch.dtype) -> None:
    class Master(torch.optim.Optimizer):
        """Keeps float32 state for parameters of any dtype, as fp32-master optimizers do."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    master = self.state[p].setdefault("master", p.detach().float() + 1 / 3)
                    master -= 0.1 * p.grad.float()
                    p.data.copy_(master)

    def make() -> Everything:
        model = nn.Linear(2, 2).to(dtype)
        return Everything(model=model, optimizer=Master(model.parameters()))

    run, other = make(), make()
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()
    snapshot.restore(other, through_bytes(run))
    saved = other.optimizer.state[other.model.weight]["master"]
    assert saved.dtype == torch.float32
    assert torch.equal(saved, run.optimizer.state[run.model.weight]["master"])


def test_differences_name_what_only_one_side_has() -> None:
    tree = through_bytes(everything())
    other = Everything(model=nn.Sequential(nn.Conv2d(2, 3, 3)))
    del tree["batch"]
    found = "\n".join(snapshot.differences(other, tree))
    assert "run.batch is not in the checkpoint" in found
    assert "run.model.2.weight: a parameter only in the checkpoint" in found
    assert "run.optimizer: optimizer in the checkpoint, nothing in this run" in found


def test_extra_state_and_buffers_that_are_not_persistent_are_kept() -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("hidden", torch.zeros(1), persistent=False)
            self.register_buffer("late", None)

        def get_extra_state(self) -> int:
            return self.calls

        def set_extra_state(self, state: int) -> None:
            self.calls = state

    run, other = Everything(model=Extra()), Everything(model=Extra())
    run.model.calls, run.model.hidden, run.model.late = 3, torch.ones(1), torch.ones(4)
    snapshot.restore(other, through_bytes(run))
    assert (other.model.calls, other.model.hidden, other.model.late.tolist()) == (3, 1, [1.0] * 4)
