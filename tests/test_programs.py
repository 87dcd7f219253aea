"""The programs that the documentation shows, run as they are written there."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import statetrain as st
from statetrain.persist.compare import unequal

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def digits(samples: int = 48) -> tuple[DataLoader[Any], DataLoader[Any]]:
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(samples, 1, 8, 8, generator=made), torch.arange(samples) % 10
    data = TensorDataset(x, y)
    return DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=16)


def readme(folder: Path, callbacks: str = "") -> dict[str, Any]:
    """Run the README's first program in `folder`, with `callbacks` before `fit`."""
    first = blocks()[0].replace("runs/digits", str(folder))
    first = first.replace("trainer.fit(", f"{callbacks}\nrun = trainer.fit(")
    train, val = digits()
    names: dict[str, Any] = {"train_loader": train, "val_loader": val}
    exec(compile(first, "README.md", "exec"), names)  # noqa: S102 - the README's own code
    return names


def test_the_readme_program_trains_stops_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert readme(tmp_path / "golden")["run"].epochs == 5
    stop = "trainer.on('backward', at=13)(lambda run: run.stop())"
    assert readme(tmp_path / "run", stop)["run"].state == "backward"
    again = readme(tmp_path / "run")["run"]
    assert again.state == "done"
    ends = [st.Checkpoints(tmp_path / name).newest() for name in ("golden", "run")]
    assert unequal(ends[0][1].run, ends[1][1].run) == []  # type: ignore[index]


def test_the_readme_callbacks_fire_where_they_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("pygraphviz")
    names = readme(tmp_path / "run", callbacks=textwrap.indent(blocks()[1], ""))
    out = capsys.readouterr().out
    assert "flowchart" in out
    assert re.findall(r"^(\d+) [\d.]+$", out, re.MULTILINE) == ["20"]
    picture = (tmp_path / "loop.svg").read_text()
    assert "batch_end" in picture
    assert names["trainer"].loop == st.supervised(accumulate_grad_batches=2, val_check_interval=50)


@dataclass(kw_only=True)
class GAN(st.Run):  # these fields are what a checkpoint holds
    g: nn.Module
    d: nn.Module
    opt_g: torch.optim.Optimizer
    opt_d: torch.optim.Optimizer
    loader: st.Loader
    loss: torch.Tensor | None = None  # stored detached; None again after step


def step_d(run: GAN) -> None:
    programs.step_d(run)  # type: ignore[arg-type]
    run.loss = None


def step_g(run: GAN) -> None:
    run.opt_g.step()
    run.opt_g.zero_grad()
    run.opt_d.zero_grad()
    run.step += 1
    run.loss = None


def forward_d(run: GAN) -> None:
    real = run.batch
    scores = run.d(torch.cat([real, run.g(torch.randn(len(real), 2)).detach()]))
    want = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
    run.loss = F.binary_cross_entropy_with_logits(scores, want)


def forward_g(run: GAN) -> None:
    scores = run.d(run.g(torch.randn(len(run.batch), 2)))
    run.loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


def test_the_gan_without_a_base_class_runs_and_goes_on_from_any_state(tmp_path: Path) -> None:
    gan = st.Loop(
        initial="batch_start",
        states=[
            st.State("batch_start", programs.batch_start),
            st.State("forward_d", forward_d, replay=True),  # leaves an autograd graph
            st.State("backward_d", programs.backward),
            st.State("step_d", step_d),
            st.State("forward_g", forward_g, replay=True),
            st.State("backward_g", programs.backward),
            st.State("step_g", step_g),
            st.State("done", final=True),
        ],
        transitions=[
            st.Transition("batch_start", "forward_d", when=programs.has_batch),
            st.Transition("batch_start", "done"),
            *st.path(
                "forward_d", "backward_d", "step_d",
                "forward_g", "backward_g", "step_g", "batch_start",
            ),
        ],
    )  # fmt: skip
    batches = list(torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(0)))

    def fit(folder: Path, stop_after: int | None = None) -> GAN:
        at = ("forward_d", "forward_g")
        trainer = st.Trainer(gan, seed=1, checkpoints=st.Checkpoints(folder, every=None, at=at))
        if stop_after is not None:
            programs.interrupt(trainer, stop_after)
        g, d = nn.Linear(2, 2), nn.Linear(2, 1)
        opt_g = torch.optim.Adam(g.parameters())
        opt_d = torch.optim.Adam(d.parameters())
        run: GAN = trainer.fit(
            GAN(g=g, d=d, opt_g=opt_g, opt_d=opt_d, loader=st.resumable(batches))
        )
        return run

    assert fit(tmp_path / "golden").step == 3
    golden = st.Checkpoints(tmp_path / "golden").newest()
    for k in range(1, 23):
        fit(tmp_path / str(k), stop_after=k)
        assert fit(tmp_path / str(k)).state == "done"
        found = st.Checkpoints(tmp_path / str(k)).newest()
        assert unequal(golden[1], found[1]) == [], k  # type: ignore[index]


def test_a_changed_loop_trains_and_is_drawn(tmp_path: Path) -> None:
    def my_forward(run: st.SupervisedRun) -> None:
        x, y = run.batch
        run.loss = F.cross_entropy(run.module(x), y)

    averages: list[int] = []

    def update_ema(run: st.SupervisedRun) -> None:
        averages.append(run.step)

    loop = st.supervised().replacing("forward", my_forward)
    loop = loop.inserting("ema", update_ema, after="step")
    trainer = st.Trainer(loop, max_epochs=2, seed=0)
    module = st.Module.wrap(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    run = trainer.fit(module, digits()[0])
    assert averages == list(range(1, run.step + 1))
    trainer.draw(tmp_path / "loop.mmd")
    assert "step --> ema" in (tmp_path / "loop.mmd").read_text()
    assert "ema" in st.mermaid(loop)
    assert "ema" not in st.mermaid(st.supervised())


@pytest.mark.parametrize("name", ["gan.py", "digits.py"])
def test_the_examples_train(name: str, tmp_path: Path) -> None:
    import subprocess
    import sys

    script = ROOT / "examples" / name
    command = [sys.executable, str(script), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("epoch ") >= 4
