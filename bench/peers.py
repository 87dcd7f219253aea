"""Other trainers on the tiny job, where they are installed: each with what is not needed off.

Each one reads the same ready batches; none moves data or logs.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from tiny import Job, Train


class Ready:
    """Ready batches as a loader: a list means several loaders to some."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def peers() -> list[tuple[str, str, Train]]:
    """Return name, what it clears and calls, and training, of those that are installed."""
    warnings.simplefilter("ignore")
    known = {
        "ignite": [("Ignite", "optimizer.zero_grad(); Engine(update)", ignite)],
        "accelerate": [
            ("Accelerate", "optimizer.zero_grad(); backward, prepared optimizer", accelerate)
        ],
        "lightning": [
            ("Lightning", "optimizer.zero_grad(); training_step, all hooks; barebones", lightning)
        ],
        "transformers": [("HF Trainer", "model.zero_grad(); compute_loss, a scheduler", hf)],
    }
    return [each for package, found in known.items() if find_spec(package) for each in found]


def ignite(batches: list[Any]) -> None:
    """Train with an `Engine` around an update function."""
    from ignite.engine import Engine

    job = Job()
    optimizer = job.configure_optimizers()

    def update(engine: Engine, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = job.training_step(batch, engine.state.iteration)
        loss.backward()
        optimizer.step()
        return loss

    Engine(update).run(batches, max_epochs=1)


def accelerate(batches: list[Any]) -> None:
    """Train with an `Accelerator`'s loop, as its quick tour writes it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    job = Job()
    job, optimizer = accelerator.prepare(job, job.configure_optimizers())
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = job.training_step(batch, number)
        accelerator.backward(loss)
        optimizer.step()


def lightning(batches: list[Any]) -> None:
    """Train with a Lightning `Trainer` that has all off that costs time."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(32, 1)

        training_step = Job.training_step
        configure_optimizers = Job.configure_optimizers

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, barebones=True)
    trainer.fit(Module(), Ready(batches))


def hf(batches: list[Any]) -> None:
    """Train with Hugging Face's `Trainer`; the loss is the same `training_step`."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class Tiny(Trainer):
        def get_train_dataloader(self) -> Any:
            return Ready(batches)

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            return model.training_step(inputs, 0)

    job = Job()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=1, use_cpu=True, max_grad_norm=0, disable_tqdm=True,
            report_to=[], logging_strategy="no", logging_nan_inf_filter=False, save_strategy="no",
        )  # fmt: skip
        trainer = Tiny(job, arguments, optimizers=(job.configure_optimizers(), None))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
