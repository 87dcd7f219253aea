"""Programs that the tests interrupt: a rich supervised one, and a GAN with a loop of its own.

Run as a script it trains one of them: `programs.py NAME URL [STATE VISIT SIGNAL]` sends itself the
signal at that visit of the state.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import statetrain as st

SAMPLES, VAL = 10, 6


class Points(Dataset):
    """Noisy points: the noise is drawn from all three global streams at each access."""

    def __init__(self, length: int, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.x = torch.randn(length, 4, generator=made)
        self.y = torch.randn(length, 1, generator=made)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        noise = random.random() + float(np.random.rand()) + torch.rand(4)
        return self.x[i] + 0.1 * noise, self.y[i], i


class Rich(st.Module):
    """Two optimizers that share a layer, BatchNorm, dropout, a frozen BatchNorm in eval mode."""

    def __init__(self, *, missing: bool = True) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 8)
        self.body = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.side = nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Linear(8, 1))
        self.side[0].eval()
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.missing = missing
        self.trace: list[Any] = []

    def training_step(self, batch: Any, batch_nb: int, optimizer_i: int) -> Any:
        x, y, _ids = batch
        if self.missing and batch_nb == 1 and optimizer_i == 1:
            return None
        self.calls += 1
        hidden = self.shared(x)
        out = self.body(hidden) if optimizer_i == 0 else self.side(hidden) + self.body(hidden)
        loss = F.mse_loss(out * (1 + 0.01 * self.calls), y)
        self.log(f"loss{optimizer_i}", loss)
        return loss

    def validation_step(self, batch: Any, batch_nb: int) -> dict[str, torch.Tensor]:
        x, y, _ = batch
        self.log("val_noise", torch.rand(()))
        return {"val_loss": F.mse_loss(self.body(self.shared(x)), y)}

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW([*self.shared.parameters(), *self.body.parameters()], lr=0.01)
        side = [*self.side.parameters(), *self.shared.parameters()]
        second = torch.optim.SGD(side, lr=0.1, momentum=0.9)
        return [first, second], [
            torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5),
            {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(second, patience=0),
                "monitor": "val_loss",
            },
            {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(second, 0.9),
                "interval": "step",
            },
        ]


class Best:
    """A callback object with state: the best metric so far, and when it was."""

    def __init__(self) -> None:
        self.best, self.since = float("inf"), 0

    @st.on("validation_end")
    def look(self, run: Any) -> None:
        value = run.metrics["val_loss"]
        self.since = 0 if value < self.best else self.since + 1
        self.best = min(value, self.best)
        run.log("since", self.since)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.since = state["best"], state["since"]


def attach(trainer: st.Trainer, trace: list[Any], *, draws: bool = True) -> None:
    """Attach callbacks that draw from every stream, count visits, and note what they saw."""

    def draw(run: Any) -> None:
        noise = (random.random(), float(np.random.rand()), float(torch.rand(()))) if draws else ()
        trace.append((run.state, run.epoch, run.step, run.batch_nb, noise))

    for state in trainer.loop.names:
        trainer.on(state)(draw)

    def note(run: Any) -> None:
        trace.append(("note", run.state))
        run.log("note", run.step)

    for edge in trainer.loop.transitions[:4]:
        trainer.on(edge.name, every=3)(note)


def interrupt(trainer: st.Trainer, transition: int) -> None:
    """Stop after so many states of this life."""
    count = 0

    def stop(run: Any) -> None:
        nonlocal count
        count += 1
        if count == transition:
            run.stop()

    for state in trainer.loop.names:
        trainer.on(state, priority=-99)(stop)


def rich(
    checkpoints: st.Checkpoints, trace: list[Any], log: str | None = None, **limits: Any
) -> tuple[st.Trainer, tuple[Any, ...]]:
    """Build the supervised program anew: a trainer, and what its `fit` takes."""
    trainer = st.Trainer(
        st.supervised(accumulate_grad_batches=2, val_check_interval=2, gradient_clip_val=1.0),
        seed=3,
        checkpoints=checkpoints,
        callbacks=[Best()],
        loggers=[] if log is None else [st.CSVLogger(log)],
        **(limits or {"max_epochs": 4}),
    )
    attach(trainer, trace)

    @trainer.on("batch_start")
    def ids(run: Any) -> None:
        trace.append(("ids", *run.batch[2].tolist()))

    @trainer.on("batch_start", when=lambda run: (run.epoch, run.batch_nb) == (1, 3))
    def skip(run: Any) -> None:
        run.skip_batch()

    @trainer.on("batch_start", when=lambda run: (run.epoch, run.batch_nb) == (1, 4))
    def short(run: Any) -> None:
        run.end_epoch()

    @trainer.on("zero_grad", when=lambda run: run.epoch == 2, once=True)
    def over(run: Any) -> None:
        run.finish()

    train = DataLoader(Points(SAMPLES, 1), batch_size=2, shuffle=True)
    val = DataLoader(Points(VAL, 2), batch_size=4)
    return trainer, (Rich(), train, val)


@dataclass(kw_only=True)
class GAN(st.Run):
    """The GAN of the documentation, over two epochs, with a schedule and a noise stream."""

    g: nn.Module
    d: nn.Module
    opt_g: torch.optim.Optimizer
    opt_d: torch.optim.Optimizer
    slower: Any
    loader: st.Loader
    noise: torch.Generator
    fake: list[torch.Tensor] = field(default_factory=list)
    temperature: torch.Tensor
    loss: torch.Tensor | None = None


def batch_start(run: GAN) -> None:
    run.batch = next(run.loader, None)
    run.batch_nb = run.loader.position


def forward_d(run: GAN) -> None:
    real = run.batch[0]
    made = run.g(torch.randn(len(real), 2)).detach()
    scores = run.d(torch.cat([real, made])) / run.temperature.exp()
    want = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
    run.loss = F.binary_cross_entropy_with_logits(scores, want)
    run.log("loss_d", run.loss)


def forward_g(run: GAN) -> None:
    made = run.g(torch.randn(len(run.batch[0]), 2))
    run.loss = F.binary_cross_entropy_with_logits(run.d(made), torch.ones(len(made), 1))
    run.log("loss_g", run.loss)


def backward(run: GAN) -> None:
    run.loss.backward()
    run.loss = run.loss.detach()


def step_d(run: GAN) -> None:
    run.opt_d.step()
    run.opt_d.zero_grad()


def step_g(run: GAN) -> None:
    run.opt_g.step()
    run.opt_g.zero_grad()
    run.opt_d.zero_grad()  # forward_g left gradients in d
    run.step += 1
    run.fake = [*run.fake[-1:], torch.randn(2, generator=run.noise)]


def epoch_end(run: GAN) -> None:
    run.epoch += 1
    run.slower.step()


def has_batch(run: GAN) -> bool:
    return run.batch is not None


def finished(run: GAN) -> bool:
    return run.finishing or run.epoch >= run.limits.max_epochs


LOOP = st.Loop(
    initial="batch_start",
    states=[
        st.State("batch_start", batch_start),
        st.State("forward_d", forward_d, replay=True),
        st.State("backward_d", backward),
        st.State("step_d", step_d),
        st.State("forward_g", forward_g, replay=True),
        st.State("backward_g", backward),
        st.State("step_g", step_g),
        st.State("epoch_end", epoch_end),
        st.State("done", final=True),
    ],
    transitions=[
        st.Transition("batch_start", "forward_d", when=has_batch),
        st.Transition("batch_start", "epoch_end"),
        *st.path(
            "forward_d", "backward_d", "step_d", "forward_g", "backward_g", "step_g", "batch_start"
        ),
        st.Transition("epoch_end", "done", when=finished),
        st.Transition("epoch_end", "batch_start"),
    ],
)


def gan(
    checkpoints: st.Checkpoints, trace: list[Any], log: str | None = None, **limits: Any
) -> tuple[st.Trainer, tuple[Any, ...]]:
    """Build the GAN program anew."""
    trainer = st.Trainer(
        LOOP,
        seed=5,
        checkpoints=checkpoints,
        loggers=[] if log is None else [st.CSVLogger(log)],
        **(limits or {"max_epochs": 2}),
    )
    attach(trainer, trace)
    g = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    d = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.LeakyReLU(), nn.Linear(8, 1))
    temperature = torch.zeros((), requires_grad=True)
    opt_g = torch.optim.Adam(g.parameters(), lr=0.01)
    run = GAN(
        g=g,
        d=d,
        opt_g=opt_g,
        opt_d=torch.optim.RMSprop([*d.parameters(), temperature], lr=0.01),
        slower=torch.optim.lr_scheduler.ExponentialLR(opt_g, 0.5),
        loader=st.resumable(DataLoader(Points(6, 4), batch_size=2, shuffle=True)),
        noise=torch.Generator().manual_seed(9),
        temperature=temperature,
    )
    return trainer, (run,)


PROGRAMS = {"rich": rich, "gan": gan}


def main() -> None:
    """Train a program in this process, and send it the signal it was told to."""
    name, url, *kill = sys.argv[1:]
    torch.set_num_threads(1)
    at = ("forward", "pass_end", "epoch_end") if name == "rich" else ("forward_g", "step_d")
    options = json.loads(os.environ.get("STORAGE_OPTIONS", "null"))
    log = os.environ.get("LOG", os.path.join(url, "metrics.csv"))
    checkpoints = st.Checkpoints(
        url, every=("2 steps", "1 epoch"), at=at, storage_options=options or None
    )
    trainer, arguments = PROGRAMS[name](checkpoints, [], log)
    if kill:
        state, visit, number = kill

        @trainer.on(state, at=int(visit), name=f"kill {state} {visit}")
        def send(_run: Any) -> None:
            os.kill(os.getpid(), signal.Signals[number])

    trainer.fit(*arguments)


if __name__ == "__main__":
    main()
