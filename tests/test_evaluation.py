"""Evaluation loops, limits, first weights, dry runs: each exact where it can be stopped."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import statetrain as st
from statetrain.persist.compare import unequal


class Line(st.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.net[2].train()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_nb: int) -> torch.Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_nb: int) -> dict[str, torch.Tensor]:
        self.log("noise", torch.rand(()))
        return {"val_mean": self(batch[0]).mean() + random.random()}

    def test_step(self, batch: Any, batch_nb: int) -> torch.Tensor:
        return self(batch[0]).mean() + torch.rand(())

    def predict_step(self, batch: Any, batch_nb: int) -> dict[str, torch.Tensor]:
        return {"id": batch[2], "out": self(batch[0]) + torch.rand(())}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data(length: int = 7) -> DataLoader[Any]:
    return DataLoader(programs.Points(length, 1), batch_size=2, shuffle=True)


def evaluate(kind: str, folder: Path | None, *, stop_after: int | None = None, **more: Any) -> Any:
    every = None if folder is None else st.Checkpoints(folder, every=None)
    trainer = st.Trainer(seed=3, checkpoints=every)
    names = st.evaluation(kind).names
    if stop_after is not None:
        count = iter(range(1, 100))
        for name in names:
            trainer.on(name)(lambda run: next(count) == stop_after and run.stop())
    torch.manual_seed(0)
    module = Line()
    result = getattr(trainer, kind)(module, data(), **more)
    assert [m.training for m in module.modules()] == [True] * 5
    assert trainer.run is not None
    return trainer.run, result


@pytest.mark.parametrize("kind", ["validate", "test", "predict"])
def test_stopped_after_any_transition_an_evaluation_ends_the_same(
    kind: str, tmp_path: Path
) -> None:
    golden, result = evaluate(kind, None)
    assert golden.state == "done"
    assert golden.metrics or len(golden.predictions.batches) == 4
    for k in range(1, 7):
        stopped, _ = evaluate(kind, tmp_path / str(k), stop_after=k)
        assert stopped.state != "done"
        resumed, again = evaluate(kind, tmp_path / str(k))
        assert unequal(result, again) == [], k
        assert unequal(golden.metrics, resumed.metrics) == []


@pytest.mark.parametrize("drop", ["totals", "random", "loader"])
def test_a_part_of_an_evaluation_left_out_is_noticed(drop: str, tmp_path: Path) -> None:
    class Lossy(st.Checkpoints):
        def beside(self, name: str) -> st.Checkpoints:
            return Lossy(f"{self.url}/{name}", every=None)

        def newest(self) -> Any:
            found = super().newest()
            if found is not None:
                saved = found[1].run
                if drop == "totals":
                    saved["totals"] = {}
                elif drop == "random":
                    saved["random"].state["state"] = {"digest": bytes(32)}
                else:
                    saved["loader"].state["state"]["position"] = 1
            return found

    _, golden = evaluate("validate", None)
    evaluate("validate", tmp_path, stop_after=3)
    trainer = st.Trainer(seed=3, checkpoints=Lossy(tmp_path))
    torch.manual_seed(0)
    try:
        assert trainer.validate(Line(), data()) != golden
    except st.StatetrainError:
        assert drop == "loader"


def test_evaluation_moves_no_stream_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(7)
    module = Line()
    before = (torch.get_rng_state(), random.getstate())
    trainer = st.Trainer(checkpoints=st.Checkpoints(tmp_path))
    first = trainer.validate(module, data())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert not list(tmp_path.rglob("*.stc"))
    assert trainer.validate(module, data()) == first
    module.net[0].weight.data += 1
    assert trainer.validate(module, data()) != first, "other weights are evaluated anew"


def test_other_weights_do_not_take_up_a_stopped_evaluation(tmp_path: Path) -> None:
    evaluate("test", tmp_path, stop_after=3)
    trainer = st.Trainer(seed=3, checkpoints=st.Checkpoints(tmp_path, every=None))
    torch.manual_seed(1)
    module = Line()
    assert trainer.test(module, data()) == st.Trainer(seed=3).test(module, data())


def test_predictions_are_written_as_they_come_and_cut_on_resume(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    evaluate("predict", None, to=file)
    golden = file.read_text()
    lines = [json.loads(line) for line in golden.splitlines()]
    assert sorted(line["id"] for line in lines) == list(range(7))
    assert all(len(line["out"]) == 4 for line in lines)
    file.unlink()
    evaluate("predict", tmp_path / "run", stop_after=4, to=file)
    with file.open("a") as more:
        more.write("lost\n")
    evaluate("predict", tmp_path / "run", to=file)
    assert file.read_text() == golden


def test_the_default_prediction_calls_the_module() -> None:
    class Plain(Line):
        predict_step = st.Module.predict_step

    torch.manual_seed(0)
    module = Plain()
    (first, *_), x = st.Trainer().predict(module, [(torch.ones(2, 4), 1)]), torch.ones(2, 4)
    assert torch.equal(first, module.eval()(x))


def test_evaluations_are_drawn_and_validated_like_any_loop() -> None:
    assert "test_step" in st.mermaid(st.evaluation("test"))
    with pytest.raises(st.TrainingError, match="did you mean 'predict'"):
        st.evaluation("predit")


def test_limits_of_evaluations(tmp_path: Path) -> None:
    module = Line()
    assert len(st.Trainer().predict(module, data(), limit_batches=3)) == 3
    assert len(st.Trainer().predict(module, data(), limit_batches=0.5)) == 2


# Limits of training.


def fit(url: Any = None, *, loop: Any = None, module: Any = None, **settings: Any) -> Any:
    trainer = st.Trainer(loop, seed=1, checkpoints=url, **settings)
    torch.manual_seed(0)
    return trainer.fit(Line() if module is None else module, data(8), data(4))


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"limit_train_batches": 0.5}, 2),
        ({"limit_train_batches": 0.01}, 1),
        ({"limit_train_batches": 3}, 3),
        ({"limit_train_batches": 1.0}, 4),
    ],
)
def test_limits_may_be_fractions(options: dict[str, Any], batches: int) -> None:
    run = fit(loop=st.supervised(**options), max_epochs=1)
    assert run.step == batches


def test_a_fraction_of_an_unknown_length_is_an_error() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.ones(2, 4), 1)])

    loader = DataLoader(Stream(), batch_size=None)
    trainer = st.Trainer(st.supervised(limit_train_batches=0.5), max_epochs=1)
    with pytest.raises(st.DataError, match=r"limit_train_batches=0\.5 is a fraction of an epoch"):
        trainer.fit(Line(), loader)


def test_overfit_trains_and_validates_on_the_same_batches() -> None:
    seen: list[Any] = []

    class Noting(Line):
        def training_step(self, batch: Any, batch_nb: int) -> torch.Tensor:
            seen.append(("train", batch[2].tolist()))
            return super().training_step(batch, batch_nb)

        def validation_step(self, batch: Any, batch_nb: int) -> Any:
            seen.append(("val", batch[2].tolist()))
            return super().validation_step(batch, batch_nb)

    fit(loop=st.supervised(overfit_batches=2), module=Noting(), max_epochs=2)
    ids = [ids for _, ids in seen]
    assert ids == [ids[0], ids[1]] * 4
    assert [kind for kind, _ in seen] == ["train", "train", "val", "val"] * 2


@pytest.mark.parametrize(("least", "epochs"), [(None, 1), (3, 3), (9, 4)])
def test_finish_waits_for_min_epochs(least: int | None, epochs: int) -> None:
    trainer = st.Trainer(seed=1, max_epochs=4, min_epochs=least)
    trainer.on("step", once=True)(lambda run: run.finish())
    run = trainer.fit(Line(), data(8))
    assert run.epochs == epochs


def timed(url: str, limit: float, ticks: list[float]) -> Any:
    trainer = st.Trainer(seed=1, max_epochs=3, max_time=limit, checkpoints=url)
    now = iter(ticks)

    @trainer.before("epoch_start", once=True)
    def clock(run: Any) -> None:
        run.clock = lambda: next(now)

    torch.manual_seed(0)
    return trainer.fit(Line(), data(8), data(4))


def test_max_time_pauses_and_a_higher_one_goes_on_exactly(tmp_path: Path) -> None:
    run = timed(str(tmp_path / "run"), 3.5, [float(i) for i in range(50)])
    assert (run.state, run.epochs, run.batches, run.elapsed) == ("done", 0, 4, 4.0) or (
        run.state == "done" and run.epochs < 3
    )
    stopped = run.elapsed
    assert stopped >= 3.5
    again = st.Trainer(seed=1, max_epochs=3, checkpoints=str(tmp_path / "run"))
    torch.manual_seed(0)
    done = again.fit(Line(), data(8), data(4))
    golden = fit(str(tmp_path / "golden"), max_epochs=3)
    ends = [st.Checkpoints(tmp_path / name).newest()[1].run for name in ("run", "golden")]  # type: ignore[index]
    assert (done.epochs, golden.epochs) == (3, 3)
    assert unequal(*({k: v for k, v in end.items() if k != "elapsed"} for end in ends)) == []


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(90, 90.0), (timedelta(hours=1), 3600.0), ("00:01:30", 90.0), ("01:02:03:04", 93784.0)],
)
def test_max_time_in_every_form(given: Any, seconds: float) -> None:
    assert st.Trainer(max_time=given).limits.max_time == seconds


@pytest.mark.parametrize("given", ["soon", 0, -1, "1:2:3"])
def test_a_time_without_meaning_is_an_error(given: Any) -> None:
    with pytest.raises(st.TrainingError, match="give seconds, a timedelta"):
        st.Trainer(max_time=given)


# First weights.


def test_init_from_gives_weights_and_nothing_else(tmp_path: Path) -> None:
    source = fit(tmp_path / "first", max_epochs=2)
    trainer = st.Trainer(seed=5, max_epochs=1, init_from=tmp_path / "first")
    weights: list[Any] = []
    trainer.before("forward", once=True)(
        lambda run: weights.extend(t.clone() for t in run.module.state_dict().values())
    )
    run = trainer.fit(Line(), data(8))
    assert (run.epochs, run.step, run.optimizers[0].param_groups[0]["momentum"]) == (1, 4, 0.9)
    assert all(
        torch.equal(a, b) for a, b in zip(weights, source.module.state_dict().values(), strict=True)
    )


def test_own_checkpoints_come_before_first_weights(tmp_path: Path) -> None:
    fit(tmp_path / "first", max_epochs=1)
    fit(tmp_path / "own", max_epochs=1)
    own = fit(tmp_path / "own", max_epochs=2, init_from=tmp_path / "first")
    golden = fit(tmp_path / "golden", max_epochs=2)
    assert torch.equal(own.module.net[0].weight, golden.module.net[0].weight)


def test_first_weights_that_do_not_fit_or_are_not_there(tmp_path: Path) -> None:
    fit(tmp_path / "first", max_epochs=1)

    class Wider(Line):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(1, 1)

    with pytest.raises(st.CheckpointError, match=r"run\.module\.more\.weight: a parameter only"):
        fit(max_epochs=1, module=Wider(), init_from=tmp_path / "first")
    with pytest.raises(st.CheckpointError, match="holds no checkpoint"):
        fit(max_epochs=1, init_from=tmp_path / "nothing")


# Dry run, determinism, exactness.


def test_a_dry_run_visits_every_state_and_changes_nothing(tmp_path: Path) -> None:
    trainer = st.Trainer(seed=1, max_epochs=5, checkpoints=tmp_path / "run")
    visited: set[str] = set()
    for name in trainer.loop.names:
        trainer.on(name)(lambda run: visited.add(run.state))
    torch.manual_seed(0)
    module = Line()
    before = ({k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state())
    trainer.fit(module, data(8), data(8), dry_run=True)
    assert visited == set(trainer.loop.names) - {"done"}
    assert unequal(before[0], dict(module.state_dict())) == []
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(before[1], torch.get_rng_state())
    assert not list((tmp_path).rglob("*.stc"))
    assert not (tmp_path / "run" / "metrics.csv").exists()
    rehearsed = trainer.fit(module, data(8), data(8))
    golden = st.Trainer(seed=1, max_epochs=5)
    torch.manual_seed(0)
    same = golden.fit(Line(), data(8), data(8))
    assert torch.equal(rehearsed.module.net[0].weight, same.module.net[0].weight)


def test_a_dry_run_of_a_loop_of_ones_own_puts_everything_back() -> None:
    trainer, (run,) = programs.gan(None, [])  # type: ignore[arg-type]
    weights = [p.clone() for p in (*run.g.parameters(), *run.d.parameters())]
    trainer.fit(run, dry_run=True)
    now = [*run.g.parameters(), *run.d.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, now, strict=True))
    assert (run.step, run.epoch) == (0, 0)


def test_a_dry_run_raises_what_training_would() -> None:
    class Bad(Line):
        def validation_step(self, batch: Any, batch_nb: int) -> Any:
            raise RuntimeError("mine")

    module = Bad()
    before = module.net[0].weight.clone()
    with pytest.raises(RuntimeError, match="mine"):
        st.Trainer(max_epochs=1).fit(module, data(8), data(8), dry_run=True)
    assert torch.equal(before, module.net[0].weight)


def test_deterministic_makes_torch_refuse_what_is_not() -> None:
    try:
        st.Trainer(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_exactness_says_what_stands_in_the_way() -> None:
    trainer = st.Trainer(max_epochs=1)
    good = trainer.exactness(Line(), data())
    assert (good.exact, str(good).split(":")[0]) == (True, "exact")
    workers = DataLoader(programs.Points(4, 1), num_workers=2)
    bad = trainer.exactness(Line(), data(), workers)
    assert not bad.exact
    assert "val_loader: num_workers=2 cannot be resumed exactly yet" in str(bad)
    with pytest.raises(st.TrainingError, match="give it what fit is given"):
        trainer.exactness()
    gan, (run,) = programs.gan(None, [])  # type: ignore[arg-type]
    assert gan.exactness(run).exact


def test_exact_true_refuses_even_without_checkpoints() -> None:
    workers = DataLoader(programs.Points(4, 1), num_workers=2)
    with pytest.raises(st.DataError, match="num_workers=2"):
        st.Trainer(max_epochs=1, exact=True).fit(Line(), workers)


def test_evaluation_takes_first_weights_too(tmp_path: Path) -> None:
    trained = fit(tmp_path / "run", max_epochs=2).module
    expected = st.Trainer(seed=3).validate(trained, data())
    torch.manual_seed(9)
    assert st.Trainer(seed=3).validate(Line(), data()) != expected
    torch.manual_seed(9)
    trainer = st.Trainer(seed=3, init_from=tmp_path / "run")
    assert trainer.validate(Line(), data()) == expected
    with pytest.raises(st.CheckpointError, match="holds no checkpoint"):
        st.Trainer(init_from=tmp_path / "nothing").predict(Line(), data())
    trainer = st.Trainer(seed=3, max_epochs=1, init_from=tmp_path / "run")
    further = trainer.fit(Line(), data(8)).module
    weights = further.net[0].weight.detach().clone()
    trainer.validate(further, data())
    assert torch.equal(weights, further.net[0].weight), "what was trained since is kept"
