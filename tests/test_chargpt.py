"""The GPT example learns, goes on bit for bit after real kills, and is the loop one writes by hand.

Run as a script it trains a tiny one: `test_chargpt.py URL fp32|bf16 [STATE VISIT SIGNAL]` sends
itself the signal at that visit of the state.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import statetrain as st
from statetrain.persist.checkpoint import Snapshot
from statetrain.persist.compare import unequal

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "chargpt.py"
SEED = 3


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("chargpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules["chargpt"] = example  # its dataclasses look themselves up
    spec.loader.exec_module(example)
    return example


# An epoch is 39 pieces: 3 windows of 3 micro-batches and one of 1; it ends in the second epoch.
chargpt = load_example()
TINY = chargpt.Settings(
    layers=2,
    heads=2,
    width=16,
    block=16,
    batch=4,
    accumulate=3,
    validate_every=8,
    characters=700,
    warmup=3,
    steps=7,
)


def tiny(precision: str) -> Any:
    return dataclasses.replace(TINY, bf16=precision == "bf16")


def train(folder: Path, precision: str, *kill: str, seed: int = SEED) -> st.SupervisedRun:
    torch.set_num_threads(1)
    saved = st.Checkpoints(folder, every="2 steps", at=("forward", "backward"))
    trainer = chargpt.trainer(TINY, seed=seed, checkpoints=saved)
    if kill:
        state, visit, name = kill
        trainer.on(state, at=int(visit), name=f"kill {state} {visit}")(
            lambda _run: os.kill(os.getpid(), signal.Signals[name])
        )
    module = chargpt.GPT(tiny(precision))
    run: st.SupervisedRun = trainer.fit(module, *chargpt.loaders(TINY))
    return run


def process(folder: Path, precision: str, *kill: str) -> int:
    command = [sys.executable, "-W", "error", __file__, str(folder), precision, *kill]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def environment() -> dict[str, str]:
    source = [str(Path(st.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, source))}


def newest(folder: Path) -> Snapshot:
    found = st.Checkpoints(folder).newest()
    assert found is not None
    counters = found[1].callbacks["counters"]  # the killing callback is no part of the program
    found[1].callbacks["counters"] = {k: v for k, v in counters.items() if "kill" not in k}
    return found[1]


def same(golden: Path, other: Path) -> bool:
    logs = [(folder / "metrics.csv").read_bytes() for folder in (golden, other)]
    return unequal(newest(golden), newest(other)) == [] and logs[0] == logs[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_killed_in_mid_accumulation_and_in_forward_it_ends_the_same(
    tmp_path: Path, precision: str
) -> None:
    assert train(tmp_path / "golden", precision).state == "done"
    killed = tmp_path / "killed"
    with pytest.raises(st.Preempted):
        train(killed, precision, "forward", "8", "SIGTERM")
    assert at(killed) == ("forward", 2, 1)
    assert process(killed, precision, "forward", "7", "SIGKILL") == -signal.SIGKILL
    # the newest periodic save, or the one before if it was not whole yet; 5 batches on from it
    on = {("forward", 4, 0): ("backward", 5, 2), ("forward", 2, 1): ("backward", 4, 2)}[at(killed)]
    with pytest.raises(st.Preempted):
        train(killed, precision, "backward", "5", "SIGTERM")
    assert at(killed) == on
    assert train(killed, precision).state == "done"
    assert same(tmp_path / "golden", killed)


def at(folder: Path) -> tuple[str, int, int]:
    """Return where a run was saved: state, step, and micro-batches whose gradients it holds."""
    run = newest(folder).run
    return run["state"], run["step"], run["windows"][0].summed


def test_another_seed_or_precision_is_noticed(tmp_path: Path) -> None:
    for name, precision, seed in (("a", "fp32", 3), ("b", "fp32", 4), ("c", "bf16", 3)):
        train(tmp_path / name, precision, seed=seed)
    assert same(tmp_path / "a", tmp_path / "a")
    assert not same(tmp_path / "a", tmp_path / "b")
    assert not same(tmp_path / "a", tmp_path / "c")
    different = unequal(newest(tmp_path / "a").run["module"], newest(tmp_path / "c").run["module"])
    assert any("parameters" in path for path in different)


def by_hand(module: Any, train_loader: Any, *, seed: int) -> list[float]:
    """Train as one would without the library, but for the loader's order; return the losses."""
    torch.set_num_threads(1)
    loader = st.resumable(train_loader, seed=seed)
    loader.name = "run.train_loader"
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0},
        ],
        lr=TINY.lr,
        betas=(0.9, 0.99),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, module.rate)
    clipped = [p for group in optimizer.param_groups for p in group["params"]]  # order tells
    losses: list[float] = []
    steps = 0
    while True:
        for nb, (text,) in enumerate(loader):
            window = min(TINY.accumulate, len(loader) - nb // TINY.accumulate * TINY.accumulate)
            scores = module(text[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
            losses.append(loss.item())
            (loss / window).backward()
            if (nb + 1) % TINY.accumulate and nb + 1 < len(loader):
                continue
            torch.nn.utils.clip_grad_norm_(clipped, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            steps += 1
            if steps == TINY.steps:
                return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_has_the_bits_of_a_loop_written_by_hand(tmp_path: Path, precision: str) -> None:
    run = train(tmp_path, precision)
    rows = re.findall(r"train_loss,(.+)", (tmp_path / "metrics.csv").read_text())

    def hand(seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(SEED)
        module = chargpt.GPT(tiny(precision))
        losses = by_hand(module, chargpt.loaders(TINY)[0], seed=seed)
        return losses, module.state_dict()

    losses, parameters = hand(SEED)
    assert [float(row) for row in rows] == losses
    assert unequal(run.module.state_dict(), parameters) == []
    other_losses, other = hand(SEED + 1)  # the same model in another order
    assert other_losses != losses
    assert unequal(run.module.state_dict(), other) != []


@pytest.mark.slow
def test_it_keeps_its_promise(tmp_path: Path) -> None:
    promised = re.search(r"below (\d\.\d+) nats", SCRIPT.read_text())
    assert promised is not None
    started = time.monotonic()
    command = [sys.executable, str(SCRIPT), str(tmp_path / "run")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loss = newest(tmp_path / "run").run["metrics"]["val_loss"]
    print(f"val_loss {loss:.3f} after {time.monotonic() - started:.0f} s")  # noqa: T201
    assert loss < float(promised[1])


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:])
