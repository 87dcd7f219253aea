"""A complete GAN on a loop of its own: a dataclass, six functions and a table.

    python examples/gan.py runs/gan

It learns to draw points on a circle. Kill it and run it again: it goes on, bit for bit.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import statetrain as st


@dataclass(kw_only=True)
class GAN(st.Run):
    """What the loop carries; these fields are what a checkpoint holds."""

    g: nn.Module
    d: nn.Module
    opt_g: torch.optim.Optimizer
    opt_d: torch.optim.Optimizer
    loader: st.Loader
    loss: torch.Tensor | None = None  # stored detached


def batch_start(run: GAN) -> None:
    """Fetch a batch; None once at an epoch's end."""
    run.batch = next(run.loader, None)


def forward_d(run: GAN) -> None:
    """Let d tell real points from those that g made."""
    (real,) = run.batch
    fake = run.g(torch.randn(len(real), 4)).detach()
    scores = run.d(torch.cat([real, fake]))
    run.loss = F.binary_cross_entropy_with_logits(scores, _labels(len(real), len(fake)))


def forward_g(run: GAN) -> None:
    """Let g make points that d takes for real ones."""
    (real,) = run.batch
    scores = run.d(run.g(torch.randn(len(real), 4)))
    run.loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


def backward(run: GAN) -> None:
    """Compute gradients, and let the graph go."""
    assert run.loss is not None
    run.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    run.loss = run.loss.detach()


def step_d(run: GAN) -> None:
    """Step the discriminator."""
    run.log("loss_d", run.loss)
    run.opt_d.step()
    run.opt_d.zero_grad()


def step_g(run: GAN) -> None:
    """Step the generator."""
    run.log("loss_g", run.loss)
    run.opt_g.step()
    run.opt_g.zero_grad()
    run.opt_d.zero_grad()  # forward_g left gradients in d
    run.step += 1


def epoch_end(run: GAN) -> None:
    """Count the epoch."""
    run.epoch += 1


def has_batch(run: GAN) -> bool:
    """Whether the epoch goes on."""
    return run.batch is not None


def finished(run: GAN) -> bool:
    """Whether that was the last epoch."""
    return run.finishing or run.epoch >= (run.limits.max_epochs or 1)


def _labels(ones: int, zeros: int) -> torch.Tensor:
    return torch.cat([torch.ones(ones, 1), torch.zeros(zeros, 1)])


LOOP = st.Loop(
    initial="batch_start",
    states=(
        st.State("batch_start", batch_start),
        st.State("forward_d", forward_d, replay=True),  # leaves an autograd graph
        st.State("backward_d", backward),
        st.State("step_d", step_d),
        st.State("forward_g", forward_g, replay=True),
        st.State("backward_g", backward),
        st.State("step_g", step_g),
        st.State("epoch_end", epoch_end),
        st.State("done", final=True),
    ),
    transitions=(
        st.Transition("batch_start", "forward_d", when=has_batch),  # the first open one is taken
        st.Transition("batch_start", "epoch_end"),
        *st.path(
            "forward_d", "backward_d", "step_d", "forward_g", "backward_g", "step_g", "batch_start"
        ),
        st.Transition("epoch_end", "done", when=finished),
        st.Transition("epoch_end", "batch_start"),
    ),
)


def main() -> None:
    """Train for twenty epochs, and say how far from the circle the points are."""
    parser = argparse.ArgumentParser(description="Learn to draw points on a circle.")
    parser.add_argument("url", nargs="?", default="runs/gan", help="where the run is saved")
    url = parser.parse_args().url

    torch.set_num_threads(1)
    trainer = st.Trainer(LOOP, max_epochs=20, seed=0, checkpoints=url)
    angles = torch.rand(1024) * 2 * math.pi
    data = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))
    g = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    d = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    run = GAN(
        g=g,
        d=d,
        opt_g=torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        opt_d=torch.optim.Adam(d.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        loader=st.resumable(DataLoader(data, batch_size=64, shuffle=True)),
    )

    @trainer.on("epoch_end", every=5)
    def report(run: GAN) -> None:
        with torch.no_grad():
            points = run.g(torch.randn(512, 4))
        off = (points.norm(dim=1) - 1).abs().mean()
        print(f"epoch {run.epoch:2}  mean distance from the circle {off:.3f}", flush=True)

    trainer.fit(run)


if __name__ == "__main__":
    main()
