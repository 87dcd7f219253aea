"""The page at the start of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import statetrain as st
from statetrain.callbacks import Callbacks, point
from statetrain.run import Limits
from statetrain.summary import summary


class Model(st.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_nb: int) -> torch.Tensor:
        raise AssertionError

    def validation_step(self, batch: Any, batch_nb: int) -> None:
        raise AssertionError

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[1].parameters()}, {"params": [self.net[2].weight], "lr": 0.1}]
        return torch.optim.AdamW(groups, lr=3e-4)


def report(run: Any) -> None:
    raise AssertionError


def after_two(run: Any) -> bool:
    raise AssertionError


def test_a_run_is_described_on_one_page() -> None:
    loop = st.supervised(accumulate_grad_batches=2, limit_train_batches=0.5)
    assert loop.begin is not None
    data = [torch.ones(1, 20)] * 10
    run = loop.begin(loop.options, Model(), data, data[:1])
    run.limits = Limits(max_epochs=5, max_time=60.0)
    run.ready()
    callbacks = Callbacks(loop)

    def local(run: Any) -> None:
        raise AssertionError

    for function, where in (
        (report, point("validation_end")),
        (report, point("step", every=20, priority=-1)),
        (local, point("step", at=(1, 2), when=after_two)),
        (report, point("batch_end -> validation_start", once=True)),
        (local, point("forward", leading=True)),
    ):
        callbacks.attach(function, where)
    checkpoints = st.Checkpoints(
        "memory://summary", every=("10 min", "1 epoch"), at=("epoch_end", "batch_end"), keep=3
    )
    assert summary(run, loop, callbacks, checkpoints=checkpoints, notes=["not exact"]) == (
        """\
model        module: Model, 1,537 parameters (193 trainable), 6.5 KiB, float32 on cpu
optimizer    optimizers[0]: AdamW, 2 groups, lr 0.0003, 0.1
loop         13 states from 'epoch_start'; replays forward
             accumulate_grad_batches=2, limit_train_batches=0.5
data         train_loader: 10 batches an epoch, the first 5 are used
             val_loader: 1 batch an epoch
callbacks    before forward: local
             step: local (at=1, 2, when=after_two), report (every=20)
             batch_end -> validation_start: report (once)
             validation_end: report
checkpoints  memory://summary
             saved every 10 min and 1 epoch in batch_end, epoch_end, and at the end; """
        """the newest 3 are kept
             saved and left on SIGTERM, SIGUSR1, SIGUSR2: exit code 75; SIGINT: exit code 130
limits       max_epochs=5, max_time=60.0
notes        not exact"""
    )


class Rude:
    def __repr__(self) -> str:
        raise AssertionError


@dataclass(kw_only=True)
class Own(st.Run):
    pair: list[nn.Module]
    empty: nn.Module
    loader: st.Loader


def test_a_loop_of_its_own_is_described_too_and_no_repr_of_the_users_is_called() -> None:
    loop = st.Loop(
        initial="go",
        states=(st.State("go"), st.State("end", final=True)),
        transitions=st.path("go", "end"),
        options={"rate": 0.5, "thing": Rude()},
    )

    def endless() -> Any:
        while True:
            yield 1

    class Endless:
        def __iter__(self) -> Any:
            return endless()

    run = Own(
        pair=[nn.Linear(1, 1), nn.LazyLinear(2)],
        empty=nn.ReLU(),
        loader=st.resumable(Endless()),
    )
    assert (
        summary(run, loop, Callbacks(loop))
        == """\
model        pair[0]: Linear, 2 parameters, 8 B, float32 on cpu
             pair[1]: LazyLinear, lazy: it has no parameters yet
             empty: ReLU, 0 parameters, 0 B
loop         2 states from 'go'
             rate=0.5, thing=Rude
data         loader: an unknown number of batches an epoch
checkpoints  none: give Trainer(checkpoints=...) to be able to go on after a stop"""
    )


def test_devices_and_types_are_named_once_each() -> None:
    model = nn.ModuleList([nn.Linear(600, 600), nn.Linear(1, 1, dtype=torch.float64)])
    model.append(nn.Linear(1, 1, device="meta"))
    loop = st.Loop(
        initial="go",
        states=(st.State("go"), st.State("end", final=True)),
        transitions=st.path("go", "end"),
    )
    run = Own(pair=[], empty=model, loader=st.resumable([1]))
    assert summary(run, loop, Callbacks(loop)).splitlines()[0] == (
        "model        empty: ModuleList, 360,604 parameters, 1.4 MiB, float32, float64 on cpu, meta"
    )
