"""Train a small CNN on scikit-learn's handwritten digits; run it again and it goes on.

    python examples/digits.py runs/digits

Stop it with Ctrl-C, SIGTERM or SIGKILL, in any state, as often as you like: the same command goes
on, and ends with the bits of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import statetrain as st


class Digits(st.Module):
    """A CNN with BatchNorm and dropout for 8x8 grey images of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(32 * 4 * 4, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_nb: int, *_: int) -> Tensor:
        """Return the cross entropy of (N, 1, 8, 8) images and N labels."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_nb: int) -> dict[str, Tensor]:
        """Return loss and accuracy."""
        images, labels = batch
        scores = self.net(images)
        right = (scores.argmax(1) == labels).float().mean()
        return {"val_loss": F.cross_entropy(scores, labels), "val_acc": right}

    def configure_optimizers(self) -> Any:
        """Return AdamW with a rate that falls after each epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the shuffled training loader (1,500 images) and the validation loader (297)."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    data = TensorDataset(pixels, torch.tensor(labels))
    split = torch.Generator().manual_seed(0)
    train, val = random_split(data, [1500, len(data) - 1500], generator=split)
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=64)


def main() -> None:
    """Train five epochs; accumulate two batches a step, validate every twenty."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("url", nargs="?", default="runs/digits", help="where the run is saved")
    url = parser.parse_args().url

    torch.set_num_threads(1)
    trainer = st.Trainer(
        st.supervised(accumulate_grad_batches=2, val_check_interval=20),
        max_epochs=5,
        seed=0,
        checkpoints=st.Checkpoints(url, every=("20 steps", "1 epoch"), at=_states()),
    )

    _kill_where_asked(trainer)
    trainer.fit(Digits(), *loaders())
    trainer.draw(os.path.join(url, "loop.svg"))


def _states() -> tuple[str, ...]:
    """Let saves happen in every state, the replayed `forward` too: a plain job needs no `at`."""
    return st.supervised().names


def _kill_where_asked(trainer: st.Trainer) -> None:
    """Send this process a signal at a state's n-th visit: DIGITS_KILL="forward 57 SIGTERM"."""
    if "DIGITS_KILL" not in os.environ:
        return
    state, visit, name = os.environ["DIGITS_KILL"].split()

    @trainer.on(state, at=int(visit), name=f"kill {state} {visit}")
    def kill(_run: st.SupervisedRun) -> None:
        os.kill(os.getpid(), signal.Signals[name])


if __name__ == "__main__":
    main()
