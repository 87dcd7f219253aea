"""What users of other trainers ran into, tried here: in one process, without workers.

The numbers name the scenarios. Golden is the same run, never interrupted. A start builds everything
anew, as a new process does; what is seen is noted over all starts of a job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, Dataset, Sampler

import statetrain as st
from statetrain.persist.checkpoint import Snapshot, read
from statetrain.persist.compare import unequal


class Ids(Dataset):  # type: ignore[type-arg]
    """A set whose samples are their own numbers."""

    def __init__(self, length: int = 16) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([float(i)])


def loader(length: int = 16, **how: Any) -> DataLoader[Any]:
    return DataLoader(Ids(length), **{"batch_size": 2, **how})


class Net(st.Module):
    """A small network with dropout, momentum, and a validation loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.net(batch / 16), batch.cos())

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_nb: int) -> dict[str, torch.Tensor]:
        return {"val_loss": self.loss(batch)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Killed(Exception):  # noqa: N818 - it stands for SIGKILL
    pass


@dataclass(kw_only=True)
class Job:
    """One program with one URL, started several times."""

    url: Path | str
    module: Callable[[], st.Module] = Net
    train: Callable[[], Any] = loader
    val: Callable[[], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    saving: Mapping[str, Any] = field(default_factory=lambda: {"every": None})
    callbacks: Callable[[], list[object]] = list
    attach: Callable[[st.Trainer], None] | None = None
    limits: Mapping[str, Any] = field(default_factory=lambda: {"max_epochs": 2})
    states: list[str] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)  # step, batch, at batch_start
    rates: list[float] = field(default_factory=list)  # at batch_end
    losses: list[torch.Tensor] = field(default_factory=list)  # at backward

    def start(
        self,
        *,
        stop: tuple[str, int] | None = None,
        kill: tuple[str, int] | None = None,
        **limits: Any,
    ) -> Any:
        """Train until the end, or until that visit of a state in this start."""
        trainer = st.Trainer(
            st.supervised(**self.options),
            seed=3,
            checkpoints=st.Checkpoints(self.url, **self.saving),
            callbacks=self.callbacks(),
            **(limits or self.limits),
        )
        for name in trainer.loop.names:
            trainer.on(name)(self.note)
        if self.attach is not None:
            self.attach(trainer)
        for where, what in ((stop, st.Run.stop), (kill, die)):
            if where is not None:
                trainer.on(where[0], priority=-9)(counted(where[1], what))
        train, val = self.train(), None if self.val is None else self.val()
        return trainer.fit(self.module(), train, val)

    def note(self, run: Any) -> None:
        self.states.append(run.state)
        if run.state == "batch_start":
            self.ids.append(run.batch.flatten().int().tolist())
            self.pairs.append((run.step, run.batch_nb))
        elif run.state == "backward":
            self.losses.append(run.loss.clone())
        elif run.state == "batch_end":
            self.rates.append(run.optimizers[0].param_groups[0]["lr"])

    @property
    def end(self) -> Snapshot:
        found = st.Checkpoints(self.url).newest()
        assert found is not None
        return found[1]

    @property
    def saved(self) -> list[tuple[Any, Snapshot]]:
        store = st.Checkpoints(self.url).store
        found = []
        for record in reversed(store.records()):  # the oldest first
            with store.open(record) as file:
                found.append((record, read(file)))
        return found


def counted(number: int, what: Callable[[Any], None]) -> Callable[[Any], None]:
    visits = 0

    def visit(run: Any) -> None:
        nonlocal visits
        visits += 1
        if visits == number:
            what(run)

    return visit


def die(_run: Any) -> None:
    raise Killed


def finished(job: Job, **limits: Any) -> Job:
    job.start(**limits)
    return job


def same(job: Job, golden: Job) -> bool:
    assert unequal(golden.end, job.end) == []
    for name in ("states", "ids", "pairs", "rates", "losses"):
        assert unequal(getattr(golden, name), getattr(job, name)) == [], name
    return True


# Position in the data.


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("stop", "done"), [(("batch_end", 3), 3), (("epoch_end", 1), 8)])
def test_a_resume_goes_on_with_the_next_batch(
    tmp_path: Path, stop: tuple[str, int], done: int, *, shuffled: bool
) -> None:  # 1
    golden = finished(Job(url=tmp_path / "golden", train=lambda: loader(shuffle=shuffled)))
    job = Job(url=tmp_path / "job", train=lambda: loader(shuffle=shuffled))
    job.start(stop=stop)
    assert len(job.ids) == done
    job.start()
    assert same(job, golden)
    assert job.pairs[done][1] == done % 8


def test_step_and_batch_of_periodic_checkpoints_go_on(tmp_path: Path) -> None:  # 2
    saving = {"every": "3 steps", "keep": 99}
    golden = finished(Job(url=tmp_path / "golden", saving=saving))
    job = Job(url=tmp_path / "job", saving=saving)
    with pytest.raises(Killed):
        job.start(kill=("batch_end", 7))
    assert job.end.run["step"] == 6
    before, job.pairs = job.pairs, []
    job.start()
    assert before == golden.pairs[:7]
    assert job.pairs == golden.pairs[6:]
    assert unequal(golden.end, job.end) == []
    assert [record.step for record, _ in golden.saved] == [3, 6, 9, 12, 15, 16]
    for record, snapshot in golden.saved:
        assert record.step == snapshot.run["step"]


def test_three_starts_of_an_epoch_each_make_all_steps(tmp_path: Path) -> None:  # 3
    stepped: list[int] = []

    class Counted(Net):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            made.register_step_post_hook(lambda *_: stepped.append(1))
            return made

    job = Job(url=tmp_path, module=Counted, train=lambda: loader(6))
    assert [job.start(max_epochs=n).step for n in (1, 2, 3)] == [3, 6, 9]
    assert len(stepped) == 9


def test_a_raised_max_steps_makes_exactly_the_missing_steps(tmp_path: Path) -> None:  # 4
    job = Job(url=tmp_path, train=lambda: loader(40))
    assert job.start(max_steps=20).step == 20
    seen = len(job.states)
    assert job.start(max_steps=20).step == 20
    assert len(job.states) == seen
    run = job.start(max_steps=40)
    assert (run.step, run.epoch, len(job.ids)) == (40, 1, 40)
    assert job.ids == finished(Job(url=tmp_path / "golden", train=job.train), max_steps=40).ids


def test_a_max_steps_in_mid_epoch_goes_on_there_when_raised(tmp_path: Path) -> None:  # 4
    job = Job(url=tmp_path / "job", train=lambda: loader(shuffle=True), val=loader)
    assert job.start(max_steps=5).step == 5
    golden = Job(url=tmp_path / "golden", train=job.train, val=loader)
    golden.start(max_steps=19)
    assert job.start(max_steps=19).step == 19
    assert job.states.pop(job.states.index("done")) == "done"
    assert same(job, golden)


def test_the_state_at_an_epochs_end_leads_to_the_next_full_epoch() -> None:  # 5
    def fresh() -> st.Loader:
        return st.resumable(loader(8, shuffle=True), seed=1)

    def epoch(of: st.Loader) -> list[list[float]]:
        return [batch.flatten().tolist() for batch in of]

    first = fresh()
    golden = [epoch(first) for _ in range(3)]
    second, third = fresh(), fresh()
    epoch(second)
    state = second.state_dict()
    third.load_state_dict(state)
    assert third.state_dict() == state
    assert [epoch(third), epoch(third)] == golden[1:]
    assert all(len(found) == 4 for found in golden)


def test_a_later_epochs_permutation_goes_on_and_none_is_used_twice(tmp_path: Path) -> None:  # 7
    golden = Job(url=tmp_path / "golden", train=lambda: loader(shuffle=True))
    golden.start(max_epochs=4)
    job = Job(url=tmp_path / "job", train=golden.train)
    job.start(stop=("batch_end", 2 * 8 + 3), max_epochs=4)
    job.start(max_epochs=4)
    assert same(job, golden)
    orders = [str(job.ids[8 * i : 8 * i + 8]) for i in range(4)]
    assert len(set(orders)) == 4


def test_an_order_from_the_global_stream_and_what_others_draw_go_on(tmp_path: Path) -> None:  # 8
    drawn: list[float] = []

    def attach(trainer: st.Trainer) -> None:
        trainer.on("batch_end")(lambda _: drawn.append(float(torch.rand(()))))

    golden = Job(url=tmp_path / "golden", train=lambda: loader(shuffle=True), attach=attach)
    golden.start()
    expected, drawn = drawn, []
    job = Job(url=tmp_path / "job", train=golden.train, attach=attach)
    job.start(stop=("forward", 5))
    job.start()
    assert same(job, golden)
    assert drawn == expected


def test_epochs_in_processes_of_their_own_have_orders_of_their_own(tmp_path: Path) -> None:  # 9
    golden = Job(url=tmp_path / "golden", train=lambda: loader(shuffle=True))
    golden.start(max_epochs=3)
    job = Job(url=tmp_path / "job", train=golden.train)
    for epochs in (1, 2, 3):
        job.start(max_epochs=epochs)
    assert job.ids == golden.ids
    assert len({str(job.ids[8 * i : 8 * i + 8]) for i in range(3)}) == 3


def test_a_datasets_noise_and_dropout_masks_go_on(tmp_path: Path) -> None:  # 10
    class Noisy(Ids):
        def __getitem__(self, i: int) -> torch.Tensor:
            return super().__getitem__(i) + torch.rand(1) / 2

    seen: list[torch.Tensor] = []

    class Looking(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net[1].register_forward_hook(lambda _m, _i, out: seen.append(out.detach()))

        def training_step(self, batch: Any, batch_nb: int) -> Any:
            seen.append(batch)
            return super().training_step(batch, batch_nb)

    def noisy() -> DataLoader[Any]:
        return DataLoader(Noisy(), batch_size=2, shuffle=True)

    golden = finished(Job(url=tmp_path / "golden", module=Looking, train=noisy))
    expected, seen = seen, []
    job = Job(url=tmp_path / "job", module=Looking, train=noisy)
    job.start(stop=("batch_end", 3))
    job.start()
    assert same(job, golden)
    assert unequal(expected, seen) == []
    assert unequal(expected, seen[::-1]) != []


def test_other_data_than_in_the_checkpoint_is_refused(tmp_path: Path) -> None:  # 12
    Job(url=tmp_path).start(stop=("batch_end", 3))
    for other, word in ((loader(batch_size=4), "batch size"), (loader(18), "dataset length")):
        with pytest.raises(st.DataError, match=word):
            Job(url=tmp_path, train=lambda other=other: other).start()


def test_an_epoch_asks_the_sampler_once_and_a_length_never(tmp_path: Path) -> None:  # 14
    asked: list[int] = []

    class Counting(Sampler[int]):
        def __len__(self) -> int:
            return 16

        def __iter__(self) -> Iterator[int]:
            asked.append(1)
            return iter(range(16))

    made = st.resumable(loader(sampler=Counting()))
    assert (made.length, len(made), asked) == (8, 8, [])

    def attach(trainer: st.Trainer) -> None:
        trainer.on("batch_start")(lambda run: len(run.train_loader))

    Job(url=tmp_path, train=lambda: loader(sampler=Counting()), attach=attach).start(max_epochs=3)
    assert len(asked) == 3


# Validation, metrics, progress.


@pytest.mark.parametrize("stop", [("batch_end", 8), ("validation_step", 2), ("validation_end", 1)])
def test_a_validation_is_never_repeated_nor_dropped(tmp_path: Path, stop: tuple[str, int]) -> None:
    # 16
    golden = finished(Job(url=tmp_path / "golden", val=lambda: loader(10)), max_epochs=1)
    job = Job(url=tmp_path / "job", val=golden.val)
    job.start(stop=stop, max_epochs=1)
    run = job.start(max_epochs=1)
    assert job.states.count("validation_step") == 5
    assert run.metrics == golden.end.run["metrics"]
    assert same(job, golden)


def test_after_a_validation_training_comes_first(tmp_path: Path) -> None:  # 17
    how: dict[str, Any] = {"val": lambda: loader(4), "options": {"val_check_interval": 2}}
    saving = {"every": "2 steps", "keep": 99}
    golden = finished(Job(url=tmp_path / "golden", **how))
    job = Job(url=tmp_path / "job", saving=saving, **how)
    job.start(stop=("validation_end", 1))
    left, before = len(job.states), [record.id for record, _ in job.saved]
    job.start()
    assert job.states[left] == "batch_start"
    assert job.states == golden.states
    after = [record for record, _ in job.saved if record.id not in before]
    assert [record.step for record in after] == [4, 6, 8, 10, 12, 14, 16, 16]
    assert [snapshot.run["state"] for _, snapshot in job.saved][-2:] == ["step", "done"]


def test_one_more_epoch_trains_and_validates(tmp_path: Path) -> None:  # 18
    job = Job(url=tmp_path, val=lambda: loader(4), saving={"every": "1 epoch"})
    job.start(max_epochs=1)
    job.states, job.ids = [], []
    run = job.start(max_epochs=2)
    assert (run.epoch, len(job.ids)) == (1, 8)
    assert [job.states.count(s) for s in ("validation_start", "validation_step")] == [1, 2]
    assert job.states[-2:] == ["epoch_end", "done"]


def test_a_validation_inside_a_window_changes_no_gradient(tmp_path: Path) -> None:  # 19
    gradients: list[torch.Tensor] = []

    def attach(trainer: st.Trainer) -> None:
        @trainer.before("step")
        def take(run: Any) -> None:
            gradients.extend(p.grad.clone() for p in run.module.parameters())

    options = {"accumulate_grad_batches": 4}
    Job(url=tmp_path / "without", options=options, attach=attach).start()
    expected, gradients = gradients, []
    options = {**options, "val_check_interval": 2}
    Job(url=tmp_path / "with", options=options, attach=attach, val=loader).start()
    assert len(expected) == 4 * 4
    assert unequal(expected, gradients) == []


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_log_reads_as_if_never_interrupted(tmp_path: Path, how: str) -> None:  # 20
    def attach(trainer: st.Trainer) -> None:
        trainer.on("step")(lambda run: run.log("loss", run.loss))

    saving = {"every": "3 steps"}
    Job(url=tmp_path / "golden", attach=attach, val=loader, saving=saving).start()
    job = Job(url=tmp_path / "job", attach=attach, val=loader, saving=saving)
    if how == "stop":
        job.start(stop=("step", 7))
    else:
        with pytest.raises(Killed):
            job.start(kill=("step", 7))
    job.start()
    logs = [(tmp_path / name / "metrics.csv").read_text() for name in ("golden", "job")]
    assert logs[0] == logs[1]
    steps = [int(line.split(",")[1]) for line in logs[1].splitlines()[1:]]
    assert steps == sorted(steps)
    assert [steps.count(n) for n in (1, 7, 8, 16)] == [1, 1, 2, 2]


# Retention, and what is taken up.


def test_interrupted_runs_keep_as_many_checkpoints_as_asked(tmp_path: Path) -> None:  # 29
    job = Job(url=tmp_path, saving={"every": "1 steps", "keep": 3})
    counts = []
    for _ in range(4):
        job.start(stop=("batch_end", 3))
        counts.append(len(job.saved))
    job.start()
    assert counts == [3, 4, 4, 4]  # and the one that the run went on from
    assert [record.step for record, _ in job.saved] == [12, 15, 16, 16]


def test_the_newest_by_its_step_is_taken_up_not_the_best_or_last_touched(tmp_path: Path) -> None:
    # 30
    class Worse(Net):
        def validation_step(self, batch: Any, batch_nb: int) -> dict[str, Any]:
            assert self.run is not None
            return {"val_loss": float(self.run.epoch)}

    job = Job(url=tmp_path, module=Worse, val=loader, saving={"every": "1 epoch", "keep": 9})
    with pytest.raises(Killed):
        job.start(kill=("batch_start", 3 * 8 + 1), max_epochs=4)
    oldest = min(record.id for record, _ in job.saved)
    for number, path in enumerate(sorted(tmp_path.rglob("*"), key=lambda p: oldest in p.name)):
        os.utime(path, (2e9 + number, 2e9 + number))
    job.ids = []
    run = job.start(max_epochs=4)
    assert (run.epoch, len(job.ids)) == (3, 8)


def test_parameters_only_one_side_has_are_named(tmp_path: Path) -> None:  # C5
    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(1, 1)

    Job(url=tmp_path / "net").start(stop=("batch_end", 3))
    Job(url=tmp_path / "wider", module=Wider).start(stop=("batch_end", 3))
    with pytest.raises(st.CheckpointError, match=r"extra\.weight: a parameter only in this run"):
        Job(url=tmp_path / "net", module=Wider).start()
    with pytest.raises(
        st.CheckpointError, match=r"extra\.bias: a parameter only in the checkpoint"
    ):
        Job(url=tmp_path / "wider").start()


# Hooks and early exit. 45 is in test_supervised.py.


class Ending(Net):
    """A module whose on_batch_start ends each epoch at batch `last`."""

    last = 3

    def on_batch_start(self, batch: Any) -> int | None:
        assert self.run is not None
        return -1 if self.run.batch_nb == self.last else None


@pytest.mark.parametrize("last", [0, 7])
@pytest.mark.parametrize("stop", ["batch_start", "pass_end", "validation_start", "epoch_end"])
def test_epochs_ended_at_their_first_or_last_batch_go_on(
    tmp_path: Path, last: int, stop: str
) -> None:  # 46
    module = type("Ended", (Ending,), {"last": last})
    golden = finished(Job(url=tmp_path / "golden", module=module, val=loader))
    job = Job(url=tmp_path / "job", module=module, val=loader)
    job.start(stop=(stop, 1))
    run = job.start()
    assert same(job, golden)
    assert (run.epoch, run.step, run.validations) == (1, 2 * last, 2)


def test_an_epoch_ended_by_a_batch_is_validated_scheduled_and_saved(tmp_path: Path) -> None:  # 47
    class Scheduled(Ending):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    job = Job(
        url=tmp_path,
        module=Scheduled,
        val=loader,
        options={"accumulate_grad_batches": 2},
        saving={"every": "1 epoch", "keep": 9},
    )
    run = job.start(max_epochs=1)
    last = [
        "batch_start", "forward", "backward", "pass_end", "batch_end",  # leaves a window open
        "batch_start", "pass_end", "step", "zero_grad", "pass_end",  # ends the epoch: it is stepped
        "validation_start", *["validation_step"] * 8, "validation_end", "epoch_end", "done",
    ]  # fmt: skip
    assert job.states[-len(last) :] == last
    assert (run.step, run.batches, job.pairs[-1]) == (2, 3, (1, 3))
    assert run.optimizers[0].param_groups[0]["lr"] == 0.025
    assert [snapshot.run["state"] for _, snapshot in job.saved] == ["epoch_end", "done"]


class Count:
    """A callback object that counts epochs and losses."""

    def __init__(self) -> None:
        self.epochs, self.total, self.losses = 0, 0.0, 0

    @st.on("epoch_end")
    def count(self, run: Any) -> None:
        self.epochs += 1

    @st.on("backward")
    def add(self, run: Any) -> None:
        self.total += float(run.loss)
        self.losses += 1

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_a_checkpoint_holds_what_callbacks_of_its_state_have_done(tmp_path: Path) -> None:  # 48
    saving = {"every": "1 epoch", "keep": 9}
    job = finished(Job(url=tmp_path, callbacks=lambda: [Count()], saving=saving), max_epochs=3)
    counts = [(s.run["state"], s.callbacks["objects"]["Count"]["epochs"]) for _, s in job.saved]
    assert counts == [("epoch_end", 1), ("epoch_end", 2), ("epoch_end", 3), ("done", 3)]


# Accumulation and several optimizers.


class Frozen(Net):
    """A network that does not move and does not draw, so that gradients can be worked out."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].p = 0.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_short_last_window_is_the_mean_of_its_own(tmp_path: Path) -> None:  # 49
    taken: list[list[torch.Tensor]] = []

    def attach(trainer: st.Trainer) -> None:
        @trainer.on("step")
        def take(run: Any) -> None:
            taken.append([p.grad.clone() for p in run.module.parameters()])

    options = {"accumulate_grad_batches": 4}
    job = Job(url=tmp_path, module=Frozen, train=lambda: loader(20), options=options, attach=attach)
    run = job.start()
    assert run.step == 6
    data = [torch.tensor([[2.0 * i], [2.0 * i + 1]]) for i in range(10)]
    for window, gradients in zip((data[:4], data[4:8], data[8:]) * 2, taken, strict=True):
        run.module.zero_grad()
        for batch in window:
            (run.module.loss(batch) / len(window)).backward()
        assert unequal([p.grad for p in run.module.parameters()], gradients) == []
    run.module.zero_grad()
    assert all(p.grad is None for p in job.start().module.parameters())


@pytest.mark.parametrize("stops", [[3], [7], [3, 4]])
def test_a_window_stopped_in_its_middle_goes_on(tmp_path: Path, stops: list[int]) -> None:
    # 50, 51
    options = {"accumulate_grad_batches": 5}
    golden = finished(Job(url=tmp_path / "golden", options=options, train=lambda: loader(20)))
    job = Job(url=tmp_path / "job", options=options, train=golden.train)
    for stop in stops:
        job.start(stop=("batch_end", stop))
    assert any(
        gradient is not None for gradient in job.end.run["module"].state["gradients"].values()
    )
    job.start()
    assert same(job, golden)
    assert job.pairs[:10] == [(i // 5, i) for i in range(10)]


class Pair(Net):
    """Two optimizers, that are stepped with every batch."""

    def training_step(self, batch: Any, batch_nb: int, optimizer_i: int = 0) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net[i].parameters(), lr=0.05) for i in (0, 2)]


class Scheduled(Pair):
    """Two optimizers, of which the first is stepped with every fifth batch only."""

    def optimizer_step(
        self, epoch: int, batch_nb: int, optimizer: Any, i: int, closure: Any = None
    ) -> None:
        if i == 1 or batch_nb % 5 == 4:
            optimizer.step()


def test_two_optimizers_count_their_own_steps(tmp_path: Path) -> None:  # 53
    job = Job(url=tmp_path, module=Pair, train=lambda: loader(10))
    run = job.start(max_epochs=1)
    assert (run.step, [window.steps for window in run.windows]) == (5, [5, 5])
    assert [window.steps for window in job.end.run["windows"]] == [5, 5]


# Clipping and learning rates.


def test_clipping_multiplies_by_the_norm_over_one_and_eps() -> None:  # 56
    class Known(st.Module):
        def __init__(self) -> None:
            super().__init__()
            zeros = [torch.zeros((), dtype=torch.float64) for _ in range(3)]
            self.weights = nn.ParameterList(map(nn.Parameter, zeros))

        def training_step(self, batch: Any, batch_nb: int) -> torch.Tensor:
            return sum(
                (g * w for g, w in zip((3, 4, 12), self.weights, strict=True)), torch.zeros(())
            )

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    for clip, factor in ((1.0, 1 / (13 + 1e-6)), (20.0, 1.0)):
        module = Known()
        st.Trainer(st.supervised(gradient_clip_val=clip), max_epochs=1).fit(module, [0])
        moved = [-float(w.detach()) for w in module.weights]
        assert moved == pytest.approx([g * factor for g in (3, 4, 12)], rel=1e-12)


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("stop", [("batch_end", 3), ("epoch_end", 1), ("validation_end", 1)])
def test_learning_rates_go_on(tmp_path: Path, interval: str, stop: tuple[str, int]) -> None:  # 59
    class Stepping(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": interval}]

    golden = finished(Job(url=tmp_path / "golden", module=Stepping, val=loader))
    job = Job(url=tmp_path / "job", module=Stepping, val=loader)
    job.start(stop=stop)
    job.start()
    assert same(job, golden)
    assert len(set(job.rates)) == (2 if interval == "epoch" else 16)


def test_one_cycle_and_its_optimizer_agree_after_a_resume(tmp_path: Path) -> None:  # 60
    class Cycling(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=16)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    found: list[tuple[float, float, list[float]]] = []

    def attach(trainer: st.Trainer) -> None:
        @trainer.on("batch_end")
        def look(run: Any) -> None:
            group = run.optimizers[0].param_groups[0]
            found.append(
                (group["lr"], group["momentum"], run.schedulers[0].scheduler.get_last_lr())
            )

    golden = finished(Job(url=tmp_path / "golden", module=Cycling, attach=attach))
    expected, found = found, []
    job = Job(url=tmp_path / "job", module=Cycling, attach=attach)
    job.start(stop=("step", 5))
    job.start()
    assert same(job, golden)
    assert found == expected
    assert all([rate] == last for rate, _, last in found)


def test_the_next_losses_are_equal_to_the_bit_and_a_lost_state_is_named(tmp_path: Path) -> None:
    # 61
    golden = finished(Job(url=tmp_path / "golden", train=lambda: loader(60)), max_epochs=1)
    job = Job(url=tmp_path / "job", train=golden.train)
    job.start(stop=("batch_end", 10), max_epochs=1)
    job.start(max_epochs=1)
    assert unequal(golden.losses[10:], job.losses[10:]) == []
    assert len(job.losses) == 30
    other = job.end
    momentum = other.run["optimizers"][0].state["state"]["state"][0]["momentum_buffer"]
    momentum.view(torch.int32).flatten()[0] += 1  # the last bit
    (name,) = unequal(golden.end, other)
    assert name.startswith("run['optimizers'][0]")
    assert "momentum_buffer" in name


# Callbacks.


def test_early_stopping_stops_at_the_same_epoch(tmp_path: Path) -> None:  # 62
    class Worse(Net):
        def validation_step(self, batch: Any, batch_nb: int) -> dict[str, Any]:
            assert self.run is not None
            return {"val_loss": abs(self.run.epoch - 1.0)}

    class Patience:
        def __init__(self) -> None:
            self.best, self.bad = float("inf"), 0

        @st.on("validation_end")
        def look(self, run: Any) -> None:
            better = run.metrics["val_loss"] < self.best
            self.best = min(run.metrics["val_loss"], self.best)
            self.bad = 0 if better else self.bad + 1
            if self.bad == 3:
                run.finish()

        def state_dict(self) -> dict[str, Any]:
            return dict(vars(self))

        def load_state_dict(self, state: dict[str, Any]) -> None:
            vars(self).update(state)

    how: dict[str, Any] = {"module": Worse, "val": loader, "callbacks": lambda: [Patience()]}
    golden = finished(Job(url=tmp_path / "golden", **how), max_epochs=9)
    job = Job(url=tmp_path / "job", **how)
    job.start(stop=("epoch_end", 4), max_epochs=9)
    run = job.start(max_epochs=9)
    assert same(job, golden)
    assert run.epoch == 4
    assert job.start(max_epochs=20).epoch == 4


# Events, callbacks, loops.


def test_a_resume_in_a_million_samples_reads_only_the_next(tmp_path: Path) -> None:  # E1
    read_ids: list[int] = []

    class Million(Ids):
        def __getitem__(self, i: int) -> Any:
            read_ids.append(i)
            return i

    def train() -> DataLoader[Any]:
        collate: Any = lambda items: torch.tensor(items[:2], dtype=torch.float32)[:, None]  # noqa: E731
        return DataLoader(Million(10**6), batch_size=1000, shuffle=True, collate_fn=collate)

    job = Job(url=tmp_path, train=train)
    job.start(stop=("batch_end", 500), max_epochs=1)
    before, read_ids = read_ids, []
    job.start(stop=("batch_start", 1), max_epochs=1)
    assert len(before) == 500_000
    assert len(read_ids) == 1000
    assert not set(before) & set(read_ids)


@pytest.mark.parametrize("stop", [("zero_grad", 3), ("zero_grad", 5), ("pass_end", 9)])
def test_a_gans_moments_and_its_place_in_the_schedule_go_on(
    tmp_path: Path, stop: tuple[str, int]
) -> None:  # E2
    golden = finished(Job(url=tmp_path / "golden", module=Scheduled))
    job = Job(url=tmp_path / "job", module=Scheduled)
    job.start(stop=stop)
    run = job.start()
    assert same(job, golden)
    assert [window.steps for window in run.windows] == [2, 16]


def test_an_evaluation_after_a_broken_one_starts_at_its_first_batch() -> None:  # E3
    seen: list[int] = []

    class Breaking(Net):
        def validation_step(self, batch: Any, batch_nb: int) -> Any:
            seen.append(batch_nb)
            if len(seen) == 2:
                raise Killed
            return super().validation_step(batch, batch_nb)

    trainer = st.Trainer(max_epochs=1)
    module, train, val = Breaking(), st.resumable(loader()), st.resumable(loader(6))
    with pytest.raises(Killed):
        trainer.fit(module, train, val)
    trainer.fit(module, train, val)
    assert seen == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("way", ["None", "training_step", "batch_start", "forward"])
def test_a_skipped_batch_is_seen_but_not_trained(tmp_path: Path, way: str) -> None:  # E4
    class Skipping(Net):
        def training_step(self, batch: Any, batch_nb: int) -> Any:
            assert self.run is not None
            if batch_nb == 2 and way == "training_step":
                self.run.skip_batch()
            return None if batch_nb == 2 and way == "None" else self.loss(batch)

    def attach(trainer: st.Trainer) -> None:
        if way in trainer.loop.names:
            trainer.on(way, when=lambda run: run.batch_nb == 2)(st.Run.skip_batch)

    options = {"accumulate_grad_batches": 2}
    golden = Job(url=tmp_path / "golden", module=Skipping, attach=attach, options=options)
    run = golden.start()
    states = [golden.states.count(s) for s in ("batch_start", "backward", "step", "batch_end")]
    assert states == [16, 14, 8, 16]
    assert run.step == 8
    for stop in (("batch_start", 3), ("forward", 3), ("pass_end", 3), ("batch_end", 3)):
        url = tmp_path / stop[0]
        job = Job(url=url, module=Skipping, attach=attach, options=options)
        job.saving = {"every": None, "at": "forward"}
        job.start(stop=stop)
        job.start()
        assert same(job, golden)


def test_a_logger_attached_before_its_metric_sees_this_epochs_value() -> None:  # E5
    trainer = st.Trainer(max_epochs=3)
    seen: list[Any] = []
    trainer.on("epoch_end", priority=-1)(lambda run: seen.append(run.metrics["made"]))
    trainer.on("epoch_end")(lambda run: run.log("made", run.epoch))
    trainer.fit(Net(), loader())
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("saved", ["step", "batch_end"])
def test_a_run_killed_before_its_validation_validates_first_and_once(
    tmp_path: Path, saved: str
) -> None:  # E6
    saving = {"every": "8 steps", "at": saved, "keep": 9}
    golden = finished(Job(url=tmp_path / "golden", val=loader, saving=saving))

    def kill(trainer: st.Trainer) -> None:
        trainer.before("validation_start")(die)

    job = Job(url=tmp_path / "job", val=loader, saving=saving, attach=kill)
    with pytest.raises(Killed):
        job.start()
    assert (job.end.run["state"], job.end.run["step"]) == (saved, 8)
    job.states, job.attach = [], None
    job.start()
    trained = job.states.index("batch_start")
    assert job.states[:trained].count("validation_start") == 1
    assert job.states.count("validation_start") == 2
    assert job.states[:trained] == golden.states[-len(job.states) :][:trained]
    assert unequal(golden.end, job.end) == []


def test_the_mean_loss_of_a_whole_run_is_the_same_after_a_resume(tmp_path: Path) -> None:  # E7
    golden = finished(Job(url=tmp_path / "golden", callbacks=lambda: [Count()]))
    job = Job(url=tmp_path / "job", callbacks=golden.callbacks)
    for stop in (("backward", 5), ("epoch_end", 1)):
        job.start(stop=stop)
    job.start()
    assert same(job, golden)
    count = job.end.callbacks["objects"]["Count"]
    assert (count["epochs"], count["losses"]) == (2, 16)
    assert count["total"] == sum(map(float, golden.losses))


def test_two_equal_runs_have_the_same_bits_and_another_seed_has_not(tmp_path: Path) -> None:  # E8
    first, second = (finished(Job(url=tmp_path / name, val=loader)) for name in "ab")
    assert same(second, first)

    class Other(Net):
        def __init__(self) -> None:
            torch.manual_seed(4)
            super().__init__()

    other = finished(Job(url=tmp_path / "c", module=Other, val=loader))
    assert unequal(first.end, other.end) != []


def test_micro_batches_of_another_size_make_as_many_steps(tmp_path: Path) -> None:  # E10
    steps = []
    for size, windows in ((8, 1), (4, 2), (2, 4), (1, 8)):
        options = {"accumulate_grad_batches": windows}
        train = lambda size=size: loader(32, batch_size=size)  # noqa: E731
        job = Job(url=tmp_path / str(size), options=options, train=train)
        steps.append(job.start(max_epochs=3).step)
    assert steps == [12, 12, 12, 12]


def test_extras_of_optimizer_groups_survive(tmp_path: Path) -> None:  # E11
    class Marked(Net):
        def configure_optimizers(self) -> Any:
            groups = [
                {"params": self.net[0].parameters(), "mark": "first"},
                {"params": self.net[2].parameters(), "mark": "second", "lr": 0.1},
            ]
            optimizer = torch.optim.SGD(groups, lr=0.05)
            return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    def attach(trainer: st.Trainer) -> None:
        @trainer.on("epoch_end")
        def mark(run: Any) -> None:
            for group in run.optimizers[0].param_groups:
                group["mark"] += str(run.epoch)

    job = Job(url=tmp_path, module=Marked, attach=attach)
    job.start(stop=("epoch_end", 1))
    groups = job.start().optimizers[0].param_groups
    assert [group["mark"] for group in groups] == ["first01", "second01"]
    assert [group["initial_lr"] for group in groups] == [0.05, 0.1]
