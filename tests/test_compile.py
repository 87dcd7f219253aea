"""torch.compile: the same names in a checkpoint, exact resume, and a switch that is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statetrain as st
from statetrain.persist.compare import unequal

BATCHES = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)),) for i in range(5)]


class Net(st.Module):
    """A model with dropout and a buffer; `wrapped` compiles its inner part as users do."""

    def __init__(self, *, wrapped: bool = False) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        if wrapped:
            self.net = torch.compile(self.net, backend="eager")

    def training_step(self, batch: Any, batch_nb: int) -> torch.Tensor:
        result: torch.Tensor = self.net(batch[0]).square().mean()
        return result

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.fixture(autouse=True)
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with dynamo alone: the code generator takes many seconds."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: plain(f, backend="eager"))


def trained(
    folder: Path, *, wrapped: bool = False, compiled: bool = False, stop: int = 0, **settings: Any
) -> tuple[Any, Any]:
    checkpoints = st.Checkpoints(folder, every=None)
    trainer = st.Trainer(
        st.supervised(compile=compiled), max_epochs=2, seed=1, checkpoints=checkpoints, **settings
    )

    @trainer.on("backward", name="stop")
    def stopping(run: st.SupervisedRun) -> None:
        if run.step == stop - 1:
            run.stop()

    run = trainer.fit(Net(wrapped=wrapped), BATCHES)
    found = checkpoints.newest()
    assert found is not None
    return run, found[1]


@pytest.mark.parametrize("how", [{"wrapped": True}, {"compiled": True}])
def test_a_compiled_run_goes_on_bit_for_bit(how: dict[str, bool], tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "whole", **how)
    trained(tmp_path / "parts", **how, stop=4)
    run, end = trained(tmp_path / "parts", **how)
    assert run.step == 10
    assert unequal(whole.run, end.run) == []
    assert unequal(whole.random, end.random) == []
    _, other = trained(tmp_path / "other", **how, stop=4)
    assert unequal(whole.run, other.run) != []  # the control: it can differ


def test_a_checkpoint_has_the_names_of_the_plain_module(tmp_path: Path) -> None:
    _, plain = trained(tmp_path / "plain")
    _, wrapped = trained(tmp_path / "wrapped", wrapped=True)
    for part in ("parameters", "buffers", "training", "gradients"):
        assert list(plain.run["module"].state[part]) == list(wrapped.run["module"].state[part])
    assert any("_orig_mod" in name for name, _ in Net(wrapped=True).named_parameters())


@pytest.mark.parametrize("first", [False, True])
def test_a_run_goes_on_with_the_other_and_this_is_said(
    first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, wrapped=first, stop=4)
    with caplog.at_level(logging.WARNING, logger="statetrain"):
        run, _ = trained(tmp_path, wrapped=not first)
    assert run.step == 10
    assert "may end with other bits" in caplog.text
    assert "compiled submodules" in caplog.text


def test_a_switch_of_the_option_is_an_error_where_exact_is_asked_for(tmp_path: Path) -> None:
    trained(tmp_path, stop=4)
    with pytest.raises(st.CheckpointError, match="option compile: False in the checkpoint, True"):
        trained(tmp_path, compiled=True, exact=True)
    run, _ = trained(tmp_path, compiled=False, exact=True)
    assert run.step == 10


def test_another_number_of_threads_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    trained(tmp_path, stop=4)
    torch.set_num_threads(threads + 1)
    try:
        with caplog.at_level(logging.WARNING, logger="statetrain"):
            trained(tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert f"threads: {threads} in the checkpoint, {threads + 1} here" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the code generator
def test_generated_code_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real torch.compile
    _, whole = trained(tmp_path / "whole", compiled=True)
    trained(tmp_path / "parts", compiled=True, stop=4)
    _, end = trained(tmp_path / "parts", compiled=True)
    assert unequal(whole.run, end.run) == []
