"""Train a small GPT, character by character, on the sources of Python's standard library.

    python examples/chargpt.py runs/chargpt --steps 400 --bf16

Its text is on every machine that has Python. 400 steps bring the validation loss below 2.3 nats
a character, and the samples begin to look like Python. Stop it with Ctrl-C, SIGTERM or
SIGKILL: the same command goes on, and ends with the bits of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import statetrain as st

CHARACTERS = 128  # ASCII; the few others in the sources are left out


@dataclass(frozen=True, kw_only=True)
class Size:
    """What there is to choose; an epoch is `crops` random crops of the training text."""

    layers: int = 3
    heads: int = 4
    width: int = 128
    block: int = 64
    dropout: float = 0.1
    batch: int = 16
    accumulate: int = 2
    crops: int = 3200
    text: int = 1_200_000
    lr: float = 3e-3
    warmup: int = 40


class Block(nn.Module):
    """Causal attention and an MLP, each behind a LayerNorm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.dropout, width = size.heads, size.dropout, size.width
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to (N, T, width)."""
        qkv = self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.before_mlp(x)), self.dropout, self.training)


class GPT(st.Module):
    """A transformer that guesses the next character; its head is its embedding's matrix."""

    def __init__(self, size: Size, *, steps: int, bf16: bool = False) -> None:
        super().__init__()
        self.size, self.steps, self.bf16 = size, steps, bf16
        self.characters = nn.Embedding(CHARACTERS, size.width)
        self.positions = nn.Embedding(size.block, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, CHARACTERS, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of each next character, (N, T, 128), for (N, T) characters."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            x = self.characters(text) + self.positions.weight[: text.size(1)]
            x = F.dropout(x, self.size.dropout, self.training)
            return torch.as_tensor(self.head(self.norm(self.blocks(x)))).float()

    def training_step(self, batch: Tensor, batch_nb: int, *_: int) -> Tensor:
        """Return the cross entropy of (N, block + 1) characters, in nats a character."""
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_nb: int) -> dict[str, Tensor]:
        """Return the same, without dropout."""
        scores = self(batch[:, :-1])
        return {"val_loss": F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())}

    def configure_optimizers(self) -> Any:
        """Return AdamW that decays matrices only, and a rate that warms up and falls each step."""
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}]
        optimizer = torch.optim.AdamW(groups, lr=self.size.lr, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def rate(self, step: int) -> float:
        """Return the share of the learning rate at `step`: a linear rise, then half a cosine."""
        rise = (step + 1) / self.size.warmup
        fall = min(1.0, step / self.steps)
        return min(rise, 0.55 + 0.45 * math.cos(math.pi * fall))

    @torch.no_grad()
    def sample(self, prompt: str, length: int, random: torch.Generator) -> str:
        """Write on from `prompt`; it draws from `random` alone."""
        training = self.training
        self.eval()
        text = torch.tensor([list(prompt.encode("ascii"))])
        for _ in range(length):
            scores = self(text[:, -self.size.block :])[:, -1]
            chosen = torch.multinomial((scores / 0.8).softmax(-1), 1, generator=random)
            text = torch.cat([text, chosen], dim=1)
        self.train(training)
        return bytes(text[0].tolist()).decode("ascii")


class Pieces(Dataset[Tensor]):
    """Pieces of `block` + 1 characters: `crops` random ones, or all, one after the other."""

    def __init__(self, text: Tensor, block: int, crops: int | None = None) -> None:
        self.text, self.block, self.crops = text, block, crops

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.block if self.crops is None else self.crops

    def __getitem__(self, i: int) -> Tensor:
        last = len(self.text) - self.block - 1
        start = i * self.block if self.crops is None else int(torch.randint(last + 1, ()))
        return self.text[start : start + self.block + 1].long()


def loaders(size: Size) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    """Return loaders of the first nine tenths of the text, and of the last."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
    joined = "\n\n".join(file.read_text("utf-8") for file in files).encode("ascii", "ignore")
    text = torch.frombuffer(bytearray(joined[: size.text]), dtype=torch.uint8)
    train, val = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    crops = Pieces(train, size.block, size.crops)
    return DataLoader(crops, size.batch), DataLoader(Pieces(val, size.block), 4 * size.batch)


def trainer(
    size: Size, *, steps: int, seed: int, checkpoints: st.Checkpoints | None = None
) -> st.Trainer:
    """Return a trainer that prints losses, and a sample after each validation."""
    loop = st.supervised(accumulate_grad_batches=size.accumulate, gradient_clip_val=1.0)
    made = st.Trainer(loop, max_steps=steps, seed=seed, checkpoints=checkpoints)

    @made.on("step", every=10)
    def progress(run: st.SupervisedRun) -> None:
        rate = run.optimizers[0].param_groups[0]["lr"]
        print(f"step {run.step:4}  lr {rate:.5f}  train {float(run.metrics['train_loss']):.3f}")

    @made.on("validation_end")
    def write(run: st.SupervisedRun) -> None:
        random = torch.Generator().manual_seed(run.step)  # the run's own streams stay where they are
        print(f"step {run.step:4}  val {run.metrics['val_loss']:.3f}", flush=True)
        print(run.module.sample("def ", 120, random), flush=True)  # type: ignore[operator]

    return made


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's own sources.")
    parser.add_argument("url", nargs="?", default="runs/chargpt", help="where the run is saved")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where that is safe")
    given = parser.parse_args()

    torch.set_num_threads(1)
    size, steps = Size(), given.steps
    made = trainer(
        size, steps=steps, seed=given.seed, checkpoints=st.Checkpoints(given.url, every="50 steps")
    )
    made.fit(GPT(size, steps=steps, bf16=given.bf16), *loaders(size))


if __name__ == "__main__":
    main()
