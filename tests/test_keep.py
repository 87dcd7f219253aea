from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import statetrain as st
from statetrain.persist.keep import Keep, metric_tags
from statetrain.persist.record import Record
from statetrain.persist.store import Store

BATCHES = [torch.full((2, 3), float(n)) for n in range(4)]


class Line(st.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(3, 1)
        self.losses = iter([5.0, 1.0, 3.0, 2.0, 4.0, 6.0])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.line(batch).mean()

    def validation_step(self, batch: torch.Tensor, _: int) -> dict[str, float]:
        return {"val_loss": next(self.losses)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    folder: Path, *, epochs: int = 6, callback: Any = None, **settings: Any
) -> st.SupervisedRun:
    checkpoints = st.Checkpoints(folder, **{"every": "1 epoch", **settings})
    trainer = st.Trainer(max_epochs=epochs, checkpoints=checkpoints, loggers=[], progress=False)
    if callback is not None:
        trainer.on("batch_end")(callback)
    return trainer.fit(Line(), BATCHES, BATCHES[:1])


def steps(folder: Path) -> list[int]:
    return [record.step for record in Store(folder).records()]


def records(*each: tuple[int, dict[str, float]]) -> list[Record]:
    made = [
        Record(run_id="r", gen=1, save=n, uid="0" * 8, step=step, state="s", tags=metric_tags(tags))
        for n, (step, tags) in enumerate(each, 1)
    ]
    return made[::-1]


def kept(keep: Keep, made: list[Record]) -> list[int]:
    return [record.step for record in made if record.id in keep.chosen(made)]


def test_the_newest_stay(tmp_path: Path) -> None:
    fit(tmp_path, keep=3)
    assert steps(tmp_path) == [24, 24, 20]  # the end of an epoch, and that of training


def test_the_best_by_a_metric_stay(tmp_path: Path) -> None:
    fit(tmp_path, keep=st.Keep(best=2, metric="val_loss"))
    assert steps(tmp_path) == [24, 24, 16, 8]  # losses 5 1 3 2 4 6, after 4 8 12 16 20 24 steps


def test_the_largest_are_the_best_where_the_mode_says_so(tmp_path: Path) -> None:
    fit(tmp_path, keep=st.Keep(best=2, metric="val_loss", mode="max"))
    assert steps(tmp_path) == [24, 24]  # 6 and, at the end of training, 6 again


def test_a_metric_counts_only_at_the_step_where_it_was_logged(tmp_path: Path) -> None:
    def save(run: st.SupervisedRun) -> None:
        if run.step % 4 == 1:  # the newest val_loss is that of other weights
            run.save()

    fit(tmp_path, keep=st.Keep(best=1, metric="val_loss"), callback=save, every=None)
    assert steps(tmp_path) == [24, 21]
    tags = [record.tags for record in Store(tmp_path).records()]
    assert tags == [("metric:val_loss=6.0",), ()]


def test_one_of_every_so_many_steps_stays() -> None:
    made = records(*((step, {}) for step in (3, 7, 11, 18, 20, 29, 31, 32, 33)))
    assert kept(Keep(last=1, steps=10), made) == [33, 31, 20, 11]
    assert kept(Keep(last=1), made) == [33]


def test_what_is_not_a_number_is_not_the_best() -> None:
    nan, inf = float("nan"), float("inf")
    made = records((1, {"a": nan}), (2, {"a": -inf}), (3, {"a": 2.0}), (4, {"b": 0.0}), (5, {}))
    assert kept(Keep(last=1, best=3, metric="a"), made) == [5, 3]


def test_the_policy_holds_over_resumes(tmp_path: Path) -> None:
    for epochs in range(1, 7):
        module = Line()
        for _ in range(epochs - 1):
            next(module.losses)
        checkpoints = st.Checkpoints(
            tmp_path, every="1 epoch", keep=st.Keep(best=1, metric="val_loss")
        )
        st.Trainer(max_epochs=epochs, checkpoints=checkpoints, loggers=[], progress=False).fit(
            module, BATCHES, BATCHES[:1]
        )
    assert 8 in steps(tmp_path)


def test_a_metric_that_is_not_logged_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, keep=st.Keep(best=1, metric="val_los"))
    said = [text for text in caplog.messages if "val_los'" in text]
    assert said == ["Keep(metric='val_los'): nothing is logged as that: did you mean 'val_loss'?"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"last": 0}, "keep=0: give a whole number from 1"),
        ({"steps": 0}, "steps=0: give a whole number from 1"),
        ({"best": 2}, "give best and metric together"),
        ({"metric": "val_loss"}, "give best and metric together"),
        ({"best": 1, "metric": "a", "mode": "low"}, 'give "min" or "max"'),
    ],
)
def test_what_means_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(st.CheckpointError, match=said):
        Keep(**given)


def test_a_pinned_checkpoint_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    def save(run: st.SupervisedRun) -> None:
        if run.step == 6:
            run.save(pin="before the drop")

    fit(tmp_path, callback=save)
    assert steps(tmp_path) == [24, 24, 6]
    store = Store(tmp_path)
    (key,) = store.pins()
    assert store.pins() == {key: "before the drop"}
    assert store.prune(2) == []
    store.unpin(key)
    assert store.prune(2) == [key]


def test_the_pin_of_a_save_that_was_never_committed_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(self: Store, record: Record) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Store, "_commit", cut)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path, epochs=1, callback=lambda run: run.save(pin="x"), asynchronous=False)
    assert Store(tmp_path).pins() != {}  # the control
    fit(tmp_path, epochs=1)
    assert Store(tmp_path).pins() == {}
