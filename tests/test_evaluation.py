"""Evaluation loops, limits, first weights, dry runs: each exact where it can be stopped."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import programs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import statetrain as st
from statetrain import trainer as trainers
from statetrain.persist.compare import unequal
from statetrain.supervised import evaluation


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
    runs: list[Any] = []
    for name in names:
        trainer.on(name)(runs.append)
    if stop_after is not None:
        count = iter(range(1, 100))
        for name in names:
            trainer.on(name)(lambda run: next(count) == stop_after and run.stop())
    torch.manual_seed(0)
    module = Line()
    result = getattr(trainer, kind)(module, data(), **more)
    assert [m.training for m in module.modules()] == [True] * 5
    return runs[-1], result


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


# Exactness on other devices, other modules, other arguments.


def test_a_device_without_promise_is_found_before_training_begins() -> None:
    report = st.Trainer(max_epochs=1).exactness(Line().to("meta"), data())
    assert report.numeric == (
        "kernels of device 'meta' give no promise of equal bits: use cpu or cuda",
    )
    assert report.lost == ()


@pytest.mark.parametrize(
    ("exact", "saving", "outcome"),
    [
        (True, False, "error"),
        (True, True, "error"),
        (False, False, "warning"),
        (False, True, "warning"),
        (None, True, "warning"),
        (None, False, "silence"),
    ],
)
def test_numeric_doubts_are_errors_only_with_exact_true(
    exact: bool | None, saving: bool, outcome: str, tmp_path: Path, caplog: Any
) -> None:
    trainer = st.Trainer(max_epochs=1, exact=exact, checkpoints=tmp_path if saving else None)
    trainer.before("epoch_start")(lambda run: (_ for _ in ()).throw(KeyError("begun")))
    with pytest.raises(st.TrainingError if outcome == "error" else Exception) as error:
        trainer.fit(Line().to("meta"), data())
    assert ("give no promise of equal bits" in str(error.value)) == (outcome == "error")
    assert ("give no promise of equal bits" in caplog.text) == (outcome == "warning")


def test_lost_data_is_a_warning_with_exact_false_without_checkpoints_too(caplog: Any) -> None:
    workers = DataLoader(programs.Points(4, 1), num_workers=1)
    trainer = st.Trainer(max_epochs=1, exact=False)
    trainer.before("epoch_start")(lambda run: (_ for _ in ()).throw(KeyError("begun")))
    with pytest.raises(KeyError):
        trainer.fit(Line(), workers)
    assert "num_workers=1" in caplog.text


def test_a_complete_evaluation_leaves_nothing_behind(tmp_path: Path) -> None:
    for kind in ("validate", "test", "predict"):
        evaluate(kind, tmp_path, stop_after=3)
        assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == [kind]
        evaluate(kind, tmp_path)
        assert list(tmp_path.iterdir()) == []
    st.Trainer(checkpoints="memory://left").validate(Line(), data())
    assert fsspec.filesystem("memory").glob("memory://left/*") == []


def test_without_checkpoints_no_weights_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Any] = []
    digest = evaluation.weights_digest
    for module in (evaluation, trainers):
        monkeypatch.setattr(
            module, "weights_digest", lambda module: hashed.append(module) or digest(module)
        )
    st.Trainer().validate(Line(), data())
    assert hashed == []
    st.Trainer(checkpoints="memory://hashed").validate(Line(), data())
    assert len(hashed) == 1


def test_a_digest_is_taken_of_any_parameter() -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.ones(2, dtype=torch.complex64).conj())
    module.b = nn.Parameter(torch.ones(2, dtype=torch.complex64).conj().imag)
    module.c = nn.LazyLinear(2)
    first = evaluation.weights_digest(module)
    module.a.data = module.a.data * 1j
    assert evaluation.weights_digest(module) != first


def test_the_training_run_stays_the_trainers_after_an_evaluation() -> None:
    trainer = st.Trainer(seed=1, max_epochs=2)
    run = trainer.fit(Line(), data(8))
    trainer.validate(run.module, data())
    assert trainer.run is run
    assert (trainer.global_step, trainer.current_epoch) == (8, 1)
    assert trainer.exactness().exact


def test_a_callback_fires_wherever_the_trainer_has_its_point() -> None:
    trainer, kinds = st.Trainer(seed=1, max_epochs=1), []
    trainer.on("validation_end")(lambda run: kinds.append(type(run).__name__))
    module = trainer.fit(Line(), data(8), data(4)).module
    trainer.validate(module, data())
    assert kinds == ["SupervisedRun", "EvaluationRun"]


# Predictions in a file.


def predict(returned: Any, file: Path) -> list[Any]:
    class Returning(Line):
        def predict_step(self, batch: Any, batch_nb: int) -> Any:
            return returned

    st.Trainer(progress=False).predict(Returning(), [1], to=file)
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("returned", "lines"),
    [
        ("text", ["text"]),
        (0.5, [0.5]),
        (["a", "b"], ["a", "b"]),
        (np.arange(3), [0, 1, 2]),
        (np.float32(0.5), [0.5]),
        (np.ones((2, 2)), [[1, 1], [1, 1]]),
        (torch.tensor(2), [2]),
        ([torch.ones(2), np.zeros(1)], [[1, 1], [0]]),
        ({"n": np.arange(2), "t": ["x", "y"]}, [{"n": 0, "t": "x"}, {"n": 1, "t": "y"}]),
        ([{"n": np.int64(1)}], [{"n": 1}]),
    ],
)
def test_arrays_numbers_and_texts_are_written(returned: Any, lines: Any, tmp_path: Path) -> None:
    assert predict(returned, tmp_path / "out.jsonl") == lines


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "predict_step returned None: return the predictions of the batch"),
        (object(), "which a .jsonl file cannot hold: return tensors"),
        (torch.ones(1, dtype=torch.complex64), "which a .jsonl file cannot hold: Object of type"),
        ({"a": [1], "b": [1, 2]}, "returned samples of different numbers: {'a': 1, 'b': 2}"),
    ],
)
def test_what_a_file_cannot_hold_is_an_error(returned: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(st.TrainingError) as error:
        predict(returned, tmp_path / "out.jsonl")
    assert message in str(error.value)


def test_a_file_that_lost_predictions_is_refused_not_padded(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    evaluate("predict", tmp_path / "run", stop_after=4, to=file)
    length = file.stat().st_size
    file.write_text("short\n")
    with pytest.raises(st.TrainingError, match=rf"has 6 bytes, but {length} were written"):
        evaluate("predict", tmp_path / "run", to=file)
    assert file.read_text() == "short\n"


def test_no_batch_leaves_no_old_predictions(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text("old\n")
    st.Trainer(progress=False).predict(Line(), data(), to=file, limit_batches=0)
    assert file.read_text() == ""


# First weights of several modules.


@dataclass(kw_only=True)
class Nets(st.Run):
    nets: list[nn.Module]
    spare: nn.Module | None = None


def nets(url: Any = None, *, init_from: Any = None, value: float, spare: bool = False) -> Nets:
    loop = st.Loop(
        initial="go",
        states=[st.State("go", lambda run: None), st.State("end", final=True)],
        transitions=[st.Transition("go", "end")],
    )
    made = [nn.Linear(1, 1), nn.Linear(1, 1)]
    for net in made:
        nn.init.constant_(net.weight, value)
    run = Nets(nets=list(made), spare=nn.Linear(1, 1) if spare else None)
    settings = {"checkpoints": url, "init_from": init_from, "progress": False}
    done: Nets = st.Trainer(loop, **settings).fit(run)
    return done


def test_first_weights_reach_modules_in_lists(tmp_path: Path) -> None:
    nets(tmp_path, value=3.0)
    run = nets(init_from=tmp_path, value=0.0)
    assert [net.weight.item() for net in run.nets] == [3.0, 3.0]


def test_a_module_without_first_weights_is_an_error(tmp_path: Path) -> None:
    nets(tmp_path, value=3.0)
    with pytest.raises(st.CheckpointError, match=r"run\.spare: no module in the checkpoint"):
        nets(init_from=tmp_path, value=0.0, spare=True)


# Dry runs are driven as others are.


def test_a_dry_run_refuses_another_fit_within() -> None:
    trainer, (run,) = programs.gan(None, [])  # type: ignore[arg-type]
    trainer.on(trainer.loop.initial)(trainer.fit)
    with pytest.raises(st.TrainingError, match="at work already"):
        trainer.fit(run, dry_run=True)
    assert run.limits == trainer.limits


def test_a_fit_refuses_a_dry_run_within() -> None:
    trainer, (run,) = programs.gan(None, [])  # type: ignore[arg-type]
    trainer.on(trainer.loop.initial)(lambda run: trainer.fit(run, dry_run=True))
    with pytest.raises(st.TrainingError, match="at work already"):
        trainer.fit(run)
    assert run.limits == trainer.limits


def test_a_dry_run_leaves_the_limits_as_they_were() -> None:
    trainer, (run,) = programs.gan(None, [])  # type: ignore[arg-type]
    trainer.fit(run, dry_run=True)
    assert run.limits == trainer.limits
