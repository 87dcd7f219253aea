"""The supervised loop: its trace, its invariants, its numbers, and the hooks of a module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transitions
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset

import statetrain as st
from statetrain.persist.compare import unequal

TRAINED = ("batch_start", "forward", "backward", "step", "zero_grad", "pass_end")
VALIDATION = ("validation_start", "validation_step", "validation_end")


def batches(count: int, *, size: int = 2) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(count)
    return [torch.randn(size, 2, generator=made) for _ in range(count)]


class Recording(st.Module):
    """Record every hook; `end_at` are the batches of each epoch that on_batch_start ends."""

    def __init__(self, *, optimizers: int = 1, end_at: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 1) for _ in range(optimizers))
        self.end_at = end_at
        self.trace: list[str] = []

    def training_step(self, batch: Any, batch_nb: int, optimizer_i: int = 0) -> torch.Tensor:
        self.trace.append(f"training_step({batch_nb},{optimizer_i})")
        return self.layers[optimizer_i](batch).pow(2).mean()

    def validation_step(self, batch: Any, batch_nb: int) -> dict[str, torch.Tensor]:
        self.trace.append(f"validation_step({batch_nb})")
        return {"val_loss": self.layers[0](batch).pow(2).mean()}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        made = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.layers]
        for i, optimizer in enumerate(made):
            optimizer.register_step_post_hook(partial(self._stepped, i))
        return made

    def _stepped(self, i: int, *_: Any) -> None:
        self.trace.append(f"optimizer{i}.step()")

    def on_epoch_start(self) -> None:
        self.trace.append("on_epoch_start()")

    def on_epoch_end(self) -> None:
        self.trace.append("on_epoch_end()")

    def on_batch_start(self, batch: Any) -> int | None:
        self.trace.append("on_batch_start()")
        assert self.run is not None
        return -1 if self.run.batch_nb in self.end_at else None

    def on_batch_end(self) -> None:
        self.trace.append("on_batch_end()")

    def on_after_backward(self) -> None:
        self.trace.append("on_after_backward()")

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.trace.append("on_before_zero_grad()")

    def on_pre_performance_check(self) -> None:
        self.trace.append("on_pre_performance_check()")

    def on_post_performance_check(self) -> None:
        self.trace.append("on_post_performance_check()")


def words(text: str) -> list[str]:
    return text.split()


def states_of(trainer: st.Trainer, *arguments: Any) -> list[str]:
    """Fit, and return the names of the states that were gone through."""
    found: list[str] = []
    for name in trainer.loop.names:
        trainer.on(name)(lambda run: found.append(run.state))
    trainer.fit(*arguments)
    return found


def trace_of(trainer: st.Trainer, module: Recording, *loaders: Any) -> list[str]:
    """Fit, and return the states and hooks in their order."""
    for name in trainer.loop.names:
        trainer.on(name)(lambda run: module.trace.append(run.state))
    trainer.fit(module, *loaders)
    return module.trace


# The trace.


def test_hooks_and_callbacks_fire_in_the_drawn_order() -> None:
    module = Recording()
    trainer = st.Trainer(max_epochs=1)
    for edge in trainer.loop.transitions:
        trainer.on(edge.name)(lambda _, name=edge.name: module.trace.append(name.replace(" ", "")))
    for name in trainer.loop.names:
        trainer.before(name)(lambda _, name=name: module.trace.append(f"+{name}"))
    expected = words("""
        +epoch_start on_epoch_start() epoch_start
        epoch_start->batch_start +batch_start on_batch_start() batch_start
        batch_start->forward +forward training_step(0,0) forward
        forward->backward +backward on_after_backward() backward
        backward->step +step optimizer0.step() step
        step->zero_grad +zero_grad on_before_zero_grad() zero_grad
        zero_grad->pass_end +pass_end pass_end
        pass_end->batch_end +batch_end on_batch_end() batch_end
        batch_end->validation_start +validation_start on_pre_performance_check() validation_start
        validation_start->validation_step +validation_step validation_step(0) validation_step
        validation_step->validation_end +validation_end on_post_performance_check() validation_end
        validation_end->epoch_end +epoch_end on_epoch_end() epoch_end
        epoch_end->done +done done
    """)
    assert trace_of(trainer, module, batches(1), batches(1)) == expected


def test_two_optimizers_take_turns_and_step_once_per_window() -> None:
    module = Recording(optimizers=2)
    trainer = st.Trainer(st.supervised(accumulate_grad_batches=2), max_epochs=1)
    expected = words("""
        on_epoch_start() epoch_start
        on_batch_start() batch_start
        training_step(0,0) forward on_after_backward() backward pass_end
        training_step(0,1) forward on_after_backward() backward pass_end
        on_batch_end() batch_end
        on_batch_start() batch_start
        training_step(1,0) forward on_after_backward() backward
        optimizer0.step() step on_before_zero_grad() zero_grad pass_end
        training_step(1,1) forward on_after_backward() backward
        optimizer1.step() step on_before_zero_grad() zero_grad pass_end
        on_batch_end() batch_end
        on_batch_start() batch_start
        training_step(2,0) forward on_after_backward() backward
        optimizer0.step() step on_before_zero_grad() zero_grad pass_end
        training_step(2,1) forward on_after_backward() backward
        optimizer1.step() step on_before_zero_grad() zero_grad pass_end
        on_batch_end() batch_end
        on_epoch_end() epoch_end done
    """)
    assert trace_of(trainer, module, batches(3)) == expected
    assert trainer.global_step == 2


def test_validation_comes_inside_an_epoch_and_at_its_end_once() -> None:
    trainer = st.Trainer(st.supervised(val_check_interval=2), max_epochs=1)
    batch = ["batch_start", "forward", "backward", "step", "zero_grad", "pass_end", "batch_end"]
    assert states_of(trainer, Recording(), batches(4), batches(2)) == [
        "epoch_start", *batch, *batch,
        "validation_start", "validation_step", "validation_step", "validation_end",
        *batch, *batch,
        "validation_start", "validation_step", "validation_step", "validation_end",
        "epoch_end", "done",
    ]  # fmt: skip


ENDED = {
    0: "batch_start pass_end",
    1: """batch_start forward backward pass_end batch_end
          batch_start pass_end step zero_grad pass_end""",
    2: """batch_start forward backward pass_end batch_end
          batch_start forward backward step zero_grad pass_end batch_end
          batch_start pass_end""",
}


@pytest.mark.parametrize("batch", ENDED)
def test_minus_one_ends_the_epoch_at_any_batch(batch: int) -> None:
    trainer = st.Trainer(st.supervised(accumulate_grad_batches=2), max_epochs=2)
    module = Recording(end_at=(batch,))
    epoch = f"epoch_start {ENDED[batch]} {' '.join(VALIDATION)} epoch_end"
    assert states_of(trainer, module, batches(3), batches(1)) == f"{epoch} {epoch} done".split()
    assert module.trace.count("on_batch_end()") == 2 * batch


PLAIN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"accumulate_grad_batches": 2}, {"optimizers": 2}),
    ({"accumulate_grad_batches": 4, "val_check_interval": 2}, {"optimizers": 2, "end_at": (3,)}),
    ({"limit_train_batches": 0}, {}),
    ({"val_check_interval": 0.5, "limit_val_batches": 0}, {"end_at": (0,)}),
]


@pytest.mark.parametrize(("options", "how"), PLAIN)
def test_transitions_own_triggers_go_the_same_way(
    options: dict[str, Any], how: dict[str, Any]
) -> None:
    trainer = st.Trainer(st.supervised(**options), max_epochs=2)
    ours = Recording(**how)
    walked = states_of(trainer, ours, batches(5), batches(2))
    theirs = Recording(**how)
    assert plain_machine(trainer.loop, theirs, batches(5), batches(2)) == walked
    assert theirs.trace == ours.trace


def plain_machine(loop: st.Loop, *arguments: Any) -> list[str]:
    """Walk the loop by the triggers of a `transitions.Machine` built from its declaration."""
    assert loop.begin is not None
    run = loop.begin(loop.options, *arguments)
    run.limits, run.seed = st.Limits(max_epochs=2), 0
    for loader in (run.train_loader, run.val_loader):
        loader.seed = 0
    run.ready()
    transitions.Machine(
        model=run,
        states=[
            {"name": s.name, "on_enter": [partial(s.action, run)] if s.action else []}
            for s in loop.states
        ],
        transitions=[
            {
                "trigger": "advance",
                "source": edge.source,
                "dest": edge.dest,
                "conditions": partial(edge.when, run) if edge.when else None,
            }
            for edge in loop.transitions
        ],
        initial=loop.initial,
        auto_transitions=False,
    )
    loop.state(loop.initial).action(run)  # type: ignore[misc]  # it has one
    found = [run.state]
    while not loop.state(run.state).final:
        assert run.advance()
        found.append(run.state)
    run.close()
    return found


# The invariants of the table, on situations that hypothesis finds.


class Stream(IterableDataset):  # type: ignore[type-arg]
    """A set of unknown length."""

    def __init__(self, items: list[torch.Tensor]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.items)


class Situated(st.Module):
    """A loss whose gradient is a number of its own for each batch, and so are windows' means."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(plan["optimizers"])
        )
        self.plan = plan
        self.fetched = self.steps = 0  # batches and steps of all epochs
        self.added: list[list[float]] = [[] for _ in self.weights]  # in the open window
        self.states: list[str] = []

    def get_extra_state(self) -> dict[str, Any]:
        names = ("fetched", "steps", "added", "states")
        return {name: copy.deepcopy(getattr(self, name)) for name in names}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        vars(self).update(copy.deepcopy(state))

    def on_batch_start(self, batch: Any) -> int | None:
        self.fetched += 1
        return -1 if self.fetched in self.plan["ended"] else None

    def training_step(self, batch: Any, batch_nb: int, optimizer_i: int = 0) -> Any:
        if (self.fetched, optimizer_i) in self.plan["without_loss"]:
            return None
        return self.weights[optimizer_i] * self.fetched

    def on_after_backward(self) -> None:
        assert self.run is not None
        self.added[self.run.pass_i].append(float(self.fetched))

    def validation_step(self, batch: Any, batch_nb: int) -> dict[str, float]:
        return {"val": 1.0}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([w], lr=0.1, momentum=0.9) for w in self.weights]

    def check_mean(self, i: int) -> None:
        gradient, added = self.weights[i].grad, self.added[i]
        assert gradient is not None
        assert float(gradient) == pytest.approx(sum(added) / len(added))
        self.added[i] = []

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.plan["lazy"]:
            weight = optimizer.param_groups[0]["params"][0]
            self.check_mean(next(i for i, mine in enumerate(self.weights) if mine is weight))


class Lazy(Situated):
    """One whose optimizers do not always step."""

    def optimizer_step(
        self, epoch: int, batch_nb: int, optimizer: Any, i: int, second_order_closure: Any = None
    ) -> None:
        self.steps += 1
        self.added[i] = []
        if self.steps not in self.plan["lazy"]:
            optimizer.step()


PLANS = some.fixed_dictionaries(
    {
        "optimizers": some.integers(1, 3),
        "batches": some.integers(1, 6),
        "known": some.booleans(),
        "val": some.none() | some.integers(0, 2),
        "options": some.fixed_dictionaries(
            {
                "accumulate_grad_batches": some.integers(1, 4),
                "val_check_interval": some.none() | some.integers(1, 4),
                "limit_train_batches": some.none() | some.integers(0, 5),
                "limit_val_batches": some.none() | some.integers(0, 1),
            }
        ),
        "limits": some.fixed_dictionaries(
            {
                "max_epochs": some.integers(1, 3),
                "max_steps": some.none() | some.integers(1, 4),
            }
        ),
        "ended": some.sets(some.integers(1, 9), max_size=2),
        "without_loss": some.sets(some.tuples(some.integers(1, 9), some.integers(0, 2))),
        "lazy": some.sets(some.integers(1, 9), max_size=3),
        "asked": some.dictionaries(
            some.tuples(some.sampled_from(st.supervised().names[:-1]), some.integers(1, 4)),
            some.sampled_from(["skip_batch", "end_epoch", "finish"]),
            max_size=4,
        ),
    }
)


class Watch:
    """Look at the run after each state, and ask at some of them for something."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.states: list[str] = []
        self.positions: list[int] = []  # validated in this epoch
        self.fetched = 0  # in this epoch
        self.open = False  # a batch was fetched and is to be ended
        self.skipped = False  # it is not to be trained on any more
        self.last = False  # finish was asked for: no other batch is fetched
        self.over = False  # ... and in validation: this one is not trained on

    def __call__(self, run: Any) -> None:
        self.states.append(run.state)
        assert len(self.states) < 1000, "the machine goes round in circles"
        getattr(self, run.state, lambda _: None)(run)
        asked = self.plan["asked"].get((run.state, self.states.count(run.state)))
        if asked is None:
            return
        getattr(run, asked)()
        self.skipped = self.skipped or (asked == "skip_batch" and run.state in TRAINED)
        self.open = self.open and not (asked == "end_epoch" and run.state == "batch_start")
        self.last = self.last or asked == "finish"
        self.over = self.over or (asked == "finish" and run.state in VALIDATION)

    def epoch_start(self, run: Any) -> None:
        self.positions, self.fetched = [], 0
        self.check_closed(run)

    def batch_start(self, run: Any) -> None:
        assert not self.open, "the batch before it had no batch_end"
        assert not self.last, "finish was asked for"
        self.fetched += 1
        self.open, self.skipped = not run.epoch_ending, False
        limit = run.limits.max_steps
        assert limit is None or run.step < limit

    def forward(self, run: Any) -> None:
        assert not self.over, "finish was asked for in validation"
        assert not self.skipped, "the batch was skipped"

    def backward(self, run: Any) -> None:
        assert not self.skipped, "the batch was skipped"

    def batch_end(self, run: Any) -> None:
        assert self.open
        self.open = False

    def validation_start(self, run: Any) -> None:
        self.positions.append(run.batches)

    def epoch_end(self, run: Any) -> None:
        self.check_closed(run)
        self.check_validations(run, at_end=run.epoch_ending or self.fetched >= self.length)

    def done(self, run: Any) -> None:
        assert not self.open
        limit = run.limits.max_steps
        assert limit is None or run.step <= limit
        if self.states[-2] != "epoch_end":
            self.check_validations(run, at_end=False)

    @property
    def length(self) -> int:
        limit = self.plan["options"]["limit_train_batches"]
        return self.plan["batches"] if limit is None else min(limit, self.plan["batches"])

    def check_closed(self, run: Any) -> None:
        assert not self.open
        if run.state == "epoch_end":
            assert all(window.summed == 0 for window in run.windows)
        else:
            assert all((w.seen, w.summed) == (0, 0) for w in run.windows)
        if not self.plan["lazy"]:
            assert all(p.grad is None for p in run.module.parameters())

    def check_validations(self, run: Any, *, at_end: bool) -> None:
        interval = self.plan["options"]["val_check_interval"] or 1000
        expected = {p for p in range(1, run.batches + 1) if p % interval == 0}
        expected |= {run.batches} if at_end else set()
        if self.plan["val"] is None or self.plan["options"]["limit_val_batches"] == 0:
            expected = set()
        assert self.positions == sorted(expected)


def loaded(items: list[torch.Tensor], *, known: bool) -> Any:
    return items if known else DataLoader(Stream(items), batch_size=None)


def plan_of(**chosen: Any) -> dict[str, Any]:
    options = {"accumulate_grad_batches": 2, "val_check_interval": None}
    options |= {"limit_train_batches": None, "limit_val_batches": None}
    plan = {"optimizers": 2, "batches": 3, "known": True, "val": 1, "options": options}
    plan |= {"limits": {"max_epochs": 2, "max_steps": None}, "asked": {}}
    return {**plan, "ended": set(), "without_loss": set(), "lazy": set(), **chosen}


@example(plan_of(known=False, without_loss={(1, 0)}, asked={("batch_end", 1): "end_epoch"}))
@example(plan_of(val=None, asked={("batch_end", 1): "end_epoch"}))
@example(plan_of(asked={("batch_start", 2): "skip_batch", ("pass_end", 3): "end_epoch"}))
@example(plan_of(asked={("forward", 3): "skip_batch", ("backward", 3): "skip_batch"}))
@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.too_slow])
@given(PLANS)
def test_no_situation_breaks_an_invariant(plan: dict[str, Any]) -> None:
    trainer = st.Trainer(st.supervised(**plan["options"]), **plan["limits"])
    module = (Lazy if plan["lazy"] else Situated)(plan)
    watch = Watch(plan)
    for name in trainer.loop.names:
        trainer.on(name)(watch)
    val = None if plan["val"] is None else batches(plan["val"])
    run = trainer.fit(module, loaded(batches(plan["batches"]), known=plan["known"]), val)
    assert run.state == "done"
    assert watch.states[-1] == "done"


def life(plan: dict[str, Any], url: Path, *, stop: int | None = None) -> Any:
    """Start a situated run, or go on with it, up to the end or to that state."""
    saving = st.Checkpoints(url, every=None, at="forward")
    trainer = st.Trainer(
        st.supervised(**plan["options"]), **plan["limits"], checkpoints=saving, seed=1
    )
    lived = 0

    def ask(run: Any) -> None:
        nonlocal lived
        lived += 1
        run.module.states.append(run.state)
        asked = plan["asked"].get((run.state, run.module.states.count(run.state)))
        if asked is not None:
            getattr(run, asked)()
        if lived == stop:
            run.stop()

    for name in trainer.loop.names:
        trainer.on(name)(ask)
    val = None if plan["val"] is None else batches(plan["val"])
    trainer.fit((Lazy if plan["lazy"] else Situated)(plan), batches(plan["batches"]), val)
    found = st.Checkpoints(url).newest()
    assert found is not None
    return found[1]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(PLANS, some.lists(some.integers(1, 40), min_size=1, max_size=3))
def test_any_situation_stopped_anywhere_ends_the_same(
    plan: dict[str, Any], stops: list[int]
) -> None:
    with TemporaryDirectory() as folder:
        golden = life(plan, Path(folder, "golden"))
        for stop in stops:
            life(plan, Path(folder, "job"), stop=stop)
        end = life(plan, Path(folder, "job"))
    assert unequal(golden, end) == []


# The numbers are those of a loop written by hand, bit for bit.


class Net(st.Module):
    """A small network with dropout; its forward is what the hand-written loops call too."""

    def __init__(self, configure: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.a = nn.Linear(2, 4)
        self.b = nn.Linear(4, 1)
        self.drop = nn.Dropout(0.5)
        self.configure = configure or (lambda net: torch.optim.Adam(net.parameters(), lr=0.05))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.b(self.drop(self.a(batch).relu())), batch.sum(1, keepdim=True))

    def training_step(self, batch: Any, batch_nb: int) -> torch.Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_nb: int) -> dict[str, torch.Tensor]:
        return {"val_loss": self.loss(batch)}

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    return unequal(a.state_dict(), b.state_dict()) == []


def test_plain_training_has_the_bits_of_a_plain_loop() -> None:
    data = batches(5)
    ours = Net()
    st.Trainer(max_epochs=3).fit(ours, data)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for batch in data * 3:
        optimizer.zero_grad()
        net.loss(batch).backward()
        optimizer.step()
    assert same_bits(ours, net)
    other = Net()
    st.Trainer(max_epochs=3).fit(other, data[1:])
    assert not same_bits(ours, other)


def test_accumulation_takes_the_mean_of_a_short_last_window_too() -> None:
    data = batches(5)
    ours = Net()
    trainer = st.Trainer(
        st.supervised(accumulate_grad_batches=2, gradient_clip_val=0.1), max_epochs=2
    )
    trainer.fit(ours, data)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for window in (data[:2], data[2:4], data[4:]) * 2:
        for batch in window:
            (net.loss(batch) / len(window)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert same_bits(ours, net)
    assert trainer.global_step == 6


def test_a_window_without_some_losses_is_the_mean_of_the_others() -> None:
    class Holes(Net):
        def training_step(self, batch: Any, batch_nb: int) -> torch.Tensor | None:
            return None if batch_nb in (1, 4, 5) else self.loss(batch)

    data = batches(6)
    ours = Holes()
    trainer = st.Trainer(st.supervised(accumulate_grad_batches=2), max_epochs=1)
    trainer.fit(ours, data)
    net = Holes()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for window in ([data[0]], data[2:4]):  # the third has no loss, and no step
        for batch in window:
            (net.loss(batch) / 2).backward()
        for p in net.parameters():
            p.grad *= 2 / len(window)
        optimizer.step()
        optimizer.zero_grad()
    assert same_bits(ours, net)
    assert trainer.global_step == 2


class Pair(Net):
    """Two optimizers, each for one layer, and a loss that goes through both."""

    def training_step(self, batch: Any, batch_nb: int, optimizer_i: int = 0) -> torch.Tensor:
        assert [p.requires_grad for p in self.parameters()] == [optimizer_i == 0] * 2 + [
            optimizer_i == 1
        ] * 2
        return self.loss(batch) * (1 + optimizer_i)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.a.parameters(), lr=0.05),
            torch.optim.SGD(self.b.parameters(), lr=0.1, momentum=0.9),
        ]


def test_two_optimizers_have_the_bits_of_a_loop_that_freezes_by_hand() -> None:
    data = batches(4)
    ours = Pair()
    st.Trainer(max_epochs=2).fit(ours, data)
    assert all(p.requires_grad for p in ours.parameters())
    net = Pair()
    for _ in (optimizers := net.configure_optimizers()):
        pass
    for batch in data * 2:
        for i, optimizer in enumerate(optimizers):
            net.a.requires_grad_(i == 0)
            net.b.requires_grad_(i == 1)
            (net.loss(batch) * (1 + i)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same_bits(ours, net)


def test_a_parameter_of_two_optimizers_has_a_gradient_of_each() -> None:
    class Shared(Net):
        def training_step(self, batch: Any, batch_nb: int, optimizer_i: int) -> torch.Tensor:
            return self.b(self.a(batch)).pow(2).mean() * (1 + 2 * optimizer_i)

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(self.parameters(), lr=lr) for lr in (0.1, 0.02)]

    data = batches(4)
    ours = Shared()
    st.Trainer(st.supervised(accumulate_grad_batches=2), max_epochs=2).fit(ours, data)
    net = Shared()
    for window in (data[:2], data[2:]) * 2:
        parameters = list(net.parameters())
        sums = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
        for k, batch in enumerate(window):
            for i, lr in enumerate((0.1, 0.02)):
                loss = net.b(net.a(batch)).pow(2).mean() * (1 + 2 * i) / 2
                for total, gradient in zip(
                    sums[i], torch.autograd.grad(loss, parameters), strict=True
                ):
                    total.add_(gradient)
                if k == 1:
                    with torch.no_grad():
                        for p, total in zip(parameters, sums[i], strict=True):
                            p.sub_(total, alpha=lr)
    assert same_bits(ours, net)


def test_gradients_of_a_shared_parameter_stay_apart_when_windows_close_afterwards() -> None:
    class Shared(st.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_nb: int, optimizer_i: int) -> torch.Tensor:
            return self.weight * (1 + 2 * optimizer_i)

        def on_batch_start(self, batch: Any) -> int | None:
            return -1 if batch is None else None

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD([self.weight], lr=lr) for lr in (0.1, 0.02)]

    module = Shared()
    data = [torch.zeros(()), None, torch.zeros(()), torch.zeros(())]
    st.Trainer(st.supervised(accumulate_grad_batches=4), max_epochs=1).fit(module, data)
    assert module.weight.item() == pytest.approx(-(0.1 * 1 + 0.02 * 3))
    assert module.weight.grad is None


def test_schedulers_step_at_epochs_at_steps_and_on_plateaus() -> None:
    class Scheduled(Pair):
        def configure_optimizers(self) -> Any:
            first, second = super().configure_optimizers()
            return [first, second], [
                StepLR(first, 2, gamma=0.1),
                {"scheduler": ExponentialLR(second, 0.5), "interval": "step", "frequency": 2},
                {"scheduler": ReduceLROnPlateau(second, mode="max", patience=0, factor=0.1),
                 "monitor": "val_loss"},
            ]  # fmt: skip

        def validation_step(self, batch: Any, batch_nb: int) -> dict[str, float]:
            return {"val_loss": 1.0}

    rates: list[tuple[float, ...]] = []
    trainer = st.Trainer(st.supervised(accumulate_grad_batches=2), max_epochs=4)
    trainer.on("epoch_end")(
        lambda run: rates.append(tuple(o.param_groups[0]["lr"] for o in run.optimizers))
    )
    trainer.fit(Scheduled(), batches(4), batches(1))
    assert rates == [
        pytest.approx(pair)
        for pair in ((0.05, 0.05), (0.005, 0.0025), (0.005, 0.000125), (0.0005, 0.00000625))
    ]


def test_an_epoch_scheduler_steps_before_the_epoch_end_hook() -> None:
    class Looking(Net):
        rates: tuple[float, ...] = ()

        def on_epoch_end(self) -> None:
            assert self.run is not None
            self.rates = (*self.rates, self.run.optimizers[0].param_groups[0]["lr"])

    def configure(net: Any) -> Any:
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, gamma=0.5)}

    module = Looking(configure)
    st.Trainer(max_epochs=3).fit(module, batches(1))
    assert module.rates == (0.5, 0.25, 0.125)


def test_validation_means_are_weighted_by_samples() -> None:
    class Measured(Net):
        def validation_step(self, batch: Any, batch_nb: int) -> dict[str, Any]:
            self.log("logged", float(batch_nb))
            return {"mean": batch.mean(), "size": len(batch)}

    val = [*batches(1, size=5), *batches(1, size=1)]
    run = st.Trainer(max_epochs=1).fit(Measured(), batches(1), val)
    assert run.metrics["mean"] == pytest.approx(float(torch.cat(val).mean()))
    assert run.metrics["size"] == (5 * 5 + 1 * 1) / 6
    assert run.metrics["logged"] == 1 / 6


def test_validation_moves_no_random_stream_and_no_gradient() -> None:
    class Drawing(Net):
        def validation_step(self, batch: Any, batch_nb: int) -> dict[str, torch.Tensor]:
            assert not torch.is_grad_enabled()
            return {"val_loss": torch.rand(())}

    data = batches(4)
    loop = st.supervised(accumulate_grad_batches=4, val_check_interval=1)
    ours, never = Drawing(), Drawing()
    torch.manual_seed(1)
    st.Trainer(loop, max_epochs=2).fit(ours, data, batches(2))
    torch.manual_seed(1)
    st.Trainer(loop, max_epochs=2).fit(never, data)
    assert same_bits(ours, never)


# What configure_optimizers may return.


def one(net: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1.0)


def with_scheduler(net: Any) -> tuple[Any, Any]:
    optimizer = one(net)
    return optimizer, StepLR(optimizer, 1, gamma=0.5)


def halved(how: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda net: how(*with_scheduler(net))


FORMS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "an optimizer": (one, 1.0),
    "a list": (lambda net: [one(net)], 1.0),
    "a tuple": (lambda net: (one(net),), 1.0),
    "two lists": (halved(lambda o, s: ([o], [s])), 0.5),
    "two lists in a list": (halved(lambda o, s: [[o], [s]]), 0.5),
    "an empty list of schedulers": (halved(lambda o, s: ([o], [])), 1.0),
    "a scheduler's dict": (halved(lambda o, s: ([o], [{"scheduler": s}])), 0.5),
    "a dict": (halved(lambda o, s: {"optimizer": o, "lr_scheduler": s}), 0.5),
    "a dict without a scheduler": (halved(lambda o, s: {"optimizer": o}), 1.0),
    "a dict with None": (halved(lambda o, s: {"optimizer": o, "lr_scheduler": None}), 1.0),
    "a dict of dicts": (
        halved(lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}}),
        0.25,
    ),
    "a tuple of dicts": (halved(lambda o, s: ({"optimizer": o, "lr_scheduler": s},)), 0.5),
    "a scheduler's frequency": (
        halved(lambda o, s: ([o], [{"scheduler": s, "interval": "epoch", "frequency": 2}])),
        1.0,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_configure_optimizers_may_return_each_customary_form(form: str) -> None:
    configure, rate = FORMS[form]
    run = st.Trainer(max_epochs=1).fit(Net(configure), batches(2))
    assert [o.param_groups[0]["lr"] for o in run.optimizers] == [rate]


@pytest.mark.parametrize("inside", [True, False])
def test_a_dicts_monitor_names_the_plateaus_metric(*, inside: bool) -> None:
    def configure(net: Any) -> Any:
        optimizer = one(net)
        scheduler = ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
        if inside:
            scheduler = {"scheduler": scheduler, "monitor": "acc"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "acc"}

    class Measured(Net):
        def validation_step(self, batch: Any, batch_nb: int) -> dict[str, float]:
            return {"acc": 0.5}

    run = st.Trainer(max_epochs=2).fit(Measured(configure), batches(1), batches(1))
    assert run.optimizers[0].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("made", [True, False])
def test_a_plain_model_is_wrapped(*, made: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    twin = copy.deepcopy(model)
    data = [(x, x.sum(1, keepdim=True)) for x in batches(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module = st.Module.wrap(
        model,
        loss=mse_loss,
        optimizer=optimizer if made else lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    run = st.Trainer(max_epochs=2).fit(module, data, data[:1])
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.1)
    for x, y in data * 2:
        by_hand.zero_grad()
        mse_loss(twin(x), y).backward()
        by_hand.step()
    assert same_bits(model, twin)
    assert run.metrics["val_loss"] == mse_loss(module(data[0][0]), data[0][1]).item()
    assert (run.optimizers[0] is optimizer) is made


# The hooks.


def test_a_dict_of_a_loss_and_things_to_log_will_do() -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_nb: int) -> Any:
            self.log("nb", batch_nb)
            loss = self.loss(batch)
            return {"loss": loss, "log": {"l": loss}, "progress_bar": {"p": 2 * loss}}

    seen: list[Any] = []
    trainer = st.Trainer(max_epochs=1)

    @trainer.on("backward")
    def look(run: Any) -> None:
        assert not run.metrics["l"].requires_grad
        assert run.metrics["l"] == run.loss
        assert run.metrics["p"] == 2 * run.loss
        seen.append((run.metrics["nb"], [(row.epoch, row.step, row.name) for row in run.rows]))

    trainer.fit(Logging(), batches(2))
    first = [(0, 0, "nb"), (0, 0, "l"), (0, 0, "p")]
    assert seen == [(0, first), (1, [*first, (0, 1, "nb"), (0, 1, "l"), (0, 1, "p")])]


def test_on_batch_start_need_not_take_the_batch() -> None:
    class Short(Net):
        started = 0

        def on_batch_start(self) -> None:  # type: ignore[override]
            self.started += 1

    module = Short()
    st.Trainer(max_epochs=1).fit(module, batches(3))
    assert module.started == 3


class Cleared(Net):
    """Count the calls of on_before_zero_grad, each of which must still find the gradients."""

    def __init__(self) -> None:
        super().__init__(lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
        self.called: list[bool] = []

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.called.append(all(p.grad is not None for p in self.parameters()))


def test_gradients_add_up_while_optimizer_step_does_not_step() -> None:
    class Every(Cleared):
        def optimizer_step(
            self, epoch: int, batch_nb: int, optimizer: Any, i: int, closure: Any = None
        ) -> None:
            if (batch_nb + 1) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()

    data = batches(6)
    ours = Every()
    trainer = st.Trainer(max_epochs=1)
    states = states_of(trainer, ours, data)
    net = Every()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for k, batch in enumerate(data, start=1):
        net.loss(batch).backward()
        if k % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert same_bits(ours, net)
    assert ours.called == [True, True]
    assert (states.count("step"), states.count("zero_grad"), trainer.global_step) == (6, 2, 2)


@pytest.mark.parametrize("clears", [True, False])
def test_an_overridden_optimizer_step_gets_on_before_zero_grad_once(*, clears: bool) -> None:
    class Clearing(Cleared):
        def optimizer_step(
            self, epoch: int, batch_nb: int, optimizer: Any, i: int, closure: Any = None
        ) -> None:
            super().optimizer_step(epoch, batch_nb, optimizer, i, closure)
            if clears:
                optimizer.zero_grad()

    trained = []
    for build in (Clearing, Cleared):
        trained.append(build())
        st.Trainer(max_epochs=1).fit(trained[-1], batches(3))
        assert trained[-1].called == [True, True, True]
    assert same_bits(*trained)


def test_a_gan_may_step_its_generator_on_a_schedule_of_its_own() -> None:
    class Alternating(Pair):
        def optimizer_step(
            self, epoch: int, batch_nb: int, optimizer: Any, i: int, closure: Any = None
        ) -> None:
            if i == 1 or batch_nb % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()

    ours = Alternating()
    run = st.Trainer(max_epochs=1).fit(ours, data := batches(5))
    assert [window.steps for window in run.windows] == [2, 5]
    assert run.step == 5
    net = Pair()
    first, second = net.configure_optimizers()
    for k, batch in enumerate(data):
        for i, optimizer in enumerate((first, second)):
            net.a.requires_grad_(i == 0)
            net.b.requires_grad_(i == 1)
            (net.loss(batch) * (1 + i)).backward()
            if i == 1 or k % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
    assert same_bits(ours, net)


def test_an_optimizers_own_zero_grad_is_called() -> None:
    class Own(torch.optim.SGD):
        cleared = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.cleared += 1
            super().zero_grad(set_to_none)

    run = st.Trainer(max_epochs=1).fit(Net(lambda net: Own(net.parameters(), lr=0.1)), batches(3))
    assert run.optimizers[0].cleared == 3


# What is left behind, also by an exception.


class Broken(Exception):  # noqa: N818 - what a user's code raises
    pass


def break_it(_run: Any) -> None:
    raise Broken


@pytest.mark.parametrize("where", ["training_step", "forward", "backward", "batch_end"])
def test_an_exception_leaves_every_parameter_as_it_was(where: str) -> None:
    class Breaking(Pair):
        def training_step(self, batch: Any, batch_nb: int, optimizer_i: int = 0) -> torch.Tensor:
            if where == "training_step" and optimizer_i == 1:
                raise Broken
            return self.loss(batch)

    module = Breaking()
    module.register_parameter("fixed", nn.Parameter(torch.ones(2), requires_grad=False))
    before = [p.requires_grad for p in module.parameters()]
    trainer = st.Trainer(max_epochs=1)
    if where != "training_step":
        trainer.on(where)(break_it)
    with pytest.raises(Broken):
        trainer.fit(module, batches(2))
    assert [p.requires_grad for p in module.parameters()] == before
    assert module.run is None


@pytest.mark.parametrize("where", ["validation_start", "validation_step", "validation_end", ""])
def test_an_exception_in_validation_leaves_the_modes_of_training(where: str) -> None:
    class Breaking(Net):
        def validation_step(self, batch: Any, batch_nb: int) -> dict[str, torch.Tensor]:
            assert not self.training
            if not where:
                raise Broken
            return super().validation_step(batch, batch_nb)

    module = Breaking()
    module.b.eval()
    trainer = st.Trainer(max_epochs=1)
    if where:
        trainer.on(where)(break_it)
    with pytest.raises(Broken):
        trainer.fit(module, batches(2), batches(1))
    assert [m.training for m in module.modules()] == [True, True, False, True]
    assert torch.is_grad_enabled()


def test_an_overridden_optimizer_step_leaves_no_hook_behind() -> None:
    class Stepping(Cleared):
        def optimizer_step(
            self, epoch: int, batch_nb: int, optimizer: Any, i: int, closure: Any = None
        ) -> None:
            optimizer.step()

    module = Stepping()
    run = st.Trainer(max_epochs=1).fit(module, batches(1))
    module.called = []
    module.loss(batches(1)[0]).backward()
    run.optimizers[0].step()
    assert module.called == []


def test_a_copy_of_a_module_in_training_does_not_drag_the_run_along() -> None:
    copies: list[st.Module] = []
    trainer = st.Trainer(max_epochs=1)

    @trainer.on("backward")
    def take(run: Any) -> None:
        run.module.configure = None  # a lambda cannot be pickled
        copies.extend((copy.deepcopy(run.module), pickle.loads(pickle.dumps(run.module))))
        assert run.module.run is run
        assert run.module.trainer is trainer

    module = Net()
    trainer.fit(module, batches(1))
    for taken in copies:
        assert taken.run is None
        assert taken.trainer is None
        assert not {"run", "trainer"} & set(vars(taken))
        assert [p.shape for p in taken.parameters()] == [p.shape for p in module.parameters()]
    with pytest.raises(st.TrainingError, match="not being trained"):
        copies[0].log("x", 1)
