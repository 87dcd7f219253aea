"""What a module or a setting has wrong, and what the error says about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import statetrain as st

BATCHES = [torch.ones(2, 2), torch.ones(2, 2)]


class Good(st.Module):
    """A module that trains; each case replaces one of its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        return self.layer(batch).mean()

    def validation_step(self, batch: Any, batch_nb: int) -> Any:
        return {"val_loss": self.layer(batch).mean()}

    def configure_optimizers(self) -> Any:
        return sgd(self)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def fit(module: Any, train: Any = BATCHES, val: Any = None, *, epochs: int = 1) -> Any:
    return st.Trainer(max_epochs=epochs).fit(module, train, val)


def changed(**methods: Any) -> st.Module:
    """Return a good module of a class with these methods, None standing for those of st.Module."""
    found = {name: m or getattr(st.Module, name) for name, m in methods.items()}
    module: st.Module = type("Mine", (Good,), found)()
    return module


def two(self: nn.Module) -> list[torch.optim.Optimizer]:
    return [sgd(self), sgd(self)]


def foreign(self: nn.Module) -> Any:
    return [sgd(self)], [StepLR(sgd(self), 1)]


def on_plateau(self: nn.Module) -> Any:
    optimizer = sgd(self)
    scheduler = ReduceLROnPlateau(optimizer)
    return [optimizer], [{"scheduler": scheduler, "monitor": "val_acc"}]


def scheduled(**settings: Any) -> Callable[[nn.Module], Any]:
    def configure(self: nn.Module) -> Any:
        optimizer = sgd(self)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1), **settings}]

    return configure


TRAINING: dict[str, tuple[dict[str, Any], str]] = {
    "no training_step": (
        {"training_step": None},
        "Mine has no training_step: write def training_step(self, batch, batch_nb) and return the "
        "loss",
    ),
    "a training_step of other arguments": (
        {"training_step": lambda self, batch: None},
        "Mine.training_step must be def training_step(self, batch, batch_nb)",
    ),
    "an optimizer_i for one optimizer": (
        {"training_step": lambda self, batch, batch_nb, optimizer_i: None},
        "Mine.training_step must be def training_step(self, batch, batch_nb)",
    ),
    "no optimizer_i for two optimizers": (
        {"configure_optimizers": two},
        "Mine.training_step must be def training_step(self, batch, batch_nb, optimizer_i): there "
        "are several optimizers",
    ),
    "on_batch_start with other arguments": (
        {"on_batch_start": lambda self, batch, batch_nb: None},
        "Mine.on_batch_start must be def on_batch_start(self, batch)",
    ),
    "optimizer_step with other arguments": (
        {"optimizer_step": lambda self, optimizer: None},
        "Mine.optimizer_step must be def optimizer_step(self, current_epoch, batch_nb, optimizer, "
        "optimizer_i, second_order_closure)",
    ),
    "a loss that is no scalar": (
        {"training_step": lambda self, batch, batch_nb: self.layer(batch)},
        "training_step returned a loss of shape (2, 1): reduce it to a scalar, for example with "
        ".mean()",
    ),
    "a loss that is no tensor": (
        {"training_step": lambda self, batch, batch_nb: 0.5},
        "training_step returned 0.5: return a scalar tensor, the loss",
    ),
    "a dict without a loss": (
        {"training_step": lambda self, batch, batch_nb: {"log": {}}},
        "training_step returned a dict without 'loss', only ['log']: return "
        '{"loss": loss, "log": {...}}',
    ),
    "a loss without a gradient": (
        {"training_step": lambda self, batch, batch_nb: self.layer(batch).mean().detach()},
        "the loss depends on no parameter of optimizer 0 that requires a gradient: do not detach "
        "it, and give that optimizer the parameters that it should train",
    ),
    "no configure_optimizers": (
        {"configure_optimizers": None},
        "Mine has no configure_optimizers: write it and return an optimizer, such as "
        "torch.optim.AdamW(self.parameters(), lr=1e-3)",
    ),
    "a scheduler of another optimizer": (
        {"configure_optimizers": foreign},
        "StepLR schedules an optimizer that configure_optimizers did not return: return both",
    ),
    "a plateau of a metric that is not there": (
        {"configure_optimizers": on_plateau},
        "ReduceLROnPlateau looks at the metric 'val_acc', which is not logged: log it, or give "
        '{"scheduler": ..., "monitor": name} with one of []',
    ),
    "a scheduler's interval": (
        {"configure_optimizers": scheduled(interval="steps")},
        'interval=\'steps\': give "epoch" or "step"',
    ),
    "a scheduler's frequency": (
        {"configure_optimizers": scheduled(frequency=0)},
        "frequency=0: give a whole number from 1",
    ),
    "a scheduler's unknown key": (
        {"configure_optimizers": scheduled(every=2)},
        "a scheduler's dict takes ['frequency', 'interval', 'monitor', 'name', 'scheduler', "
        "'strict'] and needs 'scheduler': ",
    ),
    "something that is no scheduler": (
        {"configure_optimizers": scheduled(scheduler=3)},
        "configure_optimizers returned the scheduler 3: give one of torch.optim.lr_scheduler",
    ),
}


@pytest.mark.parametrize("case", TRAINING)
def test_a_faulty_module_is_told_what_to_write(case: str) -> None:
    methods, message = TRAINING[case]
    with pytest.raises(st.TrainingError) as caught:
        fit(changed(**methods))
    assert str(caught.value).startswith(message)


EARLY = [case for case in TRAINING if "loss" not in case and "plateau" not in case]


@pytest.mark.parametrize("case", EARLY)
def test_what_can_be_known_before_training_is_said_before_it(case: str) -> None:
    trainer = st.Trainer(max_epochs=1)
    trainer.before("epoch_start")(lambda run: pytest.fail("training has begun"))
    with pytest.raises(st.TrainingError):
        trainer.fit(changed(**TRAINING[case][0]), BATCHES)


FORMS = (
    ": return an optimizer, a list of optimizers, ([optimizers], [schedulers]), or "
    '{"optimizer": ..., "lr_scheduler": ...}'
)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "configure_optimizers returned no optimizer"),
        ([], "configure_optimizers returned no optimizer"),
        (([], []), "configure_optimizers returned no optimizer"),
        ("adam", "configure_optimizers returned 'adam'"),
        ([3], "configure_optimizers returned 3"),
        ({"lr_scheduler": 1}, "configure_optimizers returned {'lr_scheduler': 1}"),
        (
            {"optimizer": 1, "scheduler": 2},
            "configure_optimizers returned {'optimizer': 1, 'scheduler': 2}",
        ),
    ],
)
def test_an_unknown_form_of_optimizers_is_told_the_known_ones(returned: Any, message: str) -> None:
    with pytest.raises(st.TrainingError) as caught:
        fit(changed(configure_optimizers=lambda self: returned))
    assert str(caught.value) == message + FORMS


VALIDATION: dict[str, tuple[dict[str, Any], str]] = {
    "no validation_step": (
        {"validation_step": None},
        "Mine has no validation_step, but fit was given a validation loader: write def "
        "validation_step(self, batch, batch_nb) and return a dict of metrics",
    ),
    "other arguments": (
        {"validation_step": lambda self, batch: None},
        "Mine.validation_step must be def validation_step(self, batch, batch_nb)",
    ),
    "a metric of a shape": (
        {"validation_step": lambda self, batch, batch_nb: {"acc": batch}},
        "metric 'acc' has shape (2, 2): reduce it to a scalar, for example with .mean()",
    ),
    "a loss of a shape": (
        {"validation_step": lambda self, batch, batch_nb: batch},
        "metric 'val_loss' has shape (2, 2): reduce it to a scalar, for example with .mean()",
    ),
    "a metric that is no number": (
        {"validation_step": lambda self, batch, batch_nb: {"acc": "good"}},
        "metric 'acc' is 'good': give a number or a scalar tensor",
    ),
    "no dict": (
        {"validation_step": lambda self, batch, batch_nb: 0.5},
        "validation_step returned 0.5: return a dict of metrics",
    ),
}


@pytest.mark.parametrize("case", VALIDATION)
def test_a_faulty_validation_is_told_what_to_write(case: str) -> None:
    methods, message = VALIDATION[case]
    with pytest.raises(st.TrainingError) as caught:
        fit(changed(**methods), val=BATCHES)
    assert str(caught.value) == message


def test_without_a_validation_loader_no_validation_step_is_needed() -> None:
    assert fit(changed(validation_step=None)).step == 2


FRACTION = ", or a fraction of the epoch as a float up to 1.0"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("accumulate_grad_batches", 0, "give a whole number from 1"),
        ("accumulate_grad_batches", None, "give a whole number from 1"),
        ("accumulate_grad_batches", 2.0, "give a whole number from 1"),
        ("accumulate_grad_batches", True, "give a whole number from 1"),
        ("gradient_clip_val", 0, "give a norm above 0, or None"),
        ("gradient_clip_val", -1.0, "give a norm above 0, or None"),
        ("gradient_clip_val", float("nan"), "give a norm above 0, or None"),
        ("gradient_clip_val", "1", "give a norm above 0, or None"),
        ("val_check_interval", 0, f"give a whole number from 1{FRACTION}"),
        ("val_check_interval", "half", f"give a whole number from 1{FRACTION}"),
        ("val_check_interval", 2.0, f"give a whole number from 1{FRACTION}"),
        ("val_check_interval", float("nan"), f"give a whole number from 1{FRACTION}"),
        ("limit_train_batches", -1, f"give a whole number from 0{FRACTION}"),
        ("limit_train_batches", 1.5, f"give a whole number from 0{FRACTION}"),
        ("limit_val_batches", False, f"give a whole number from 0{FRACTION}"),
    ],
)  # fmt: skip
def test_a_setting_without_meaning_is_told_which_have_one(
    option: str, value: Any, message: str
) -> None:
    with pytest.raises(st.TrainingError) as caught:
        st.supervised(**{option: value})
    assert str(caught.value) == f"{option}={value!r}: {message}"


def test_a_plain_model_is_told_how_to_be_wrapped() -> None:
    with pytest.raises(st.TrainingError) as caught:
        fit(nn.Linear(2, 1))
    assert str(caught.value) == (
        "fit was given a Linear to train: write st.Module.wrap(model, loss=..., optimizer=...), or "
        "subclass st.Module"
    )


def test_a_training_without_an_end_is_told_to_have_one() -> None:
    with pytest.raises(st.TrainingError) as caught:
        st.Trainer().fit(Good(), BATCHES)
    assert str(caught.value) == (
        "training has no end: give Trainer(max_epochs=...), max_steps or max_time"
    )


def test_an_empty_training_loader_is_told_what_to_check() -> None:
    with pytest.raises(st.DataError) as caught:
        fit(Good(), [])
    assert str(caught.value) == (
        "the training loader is empty: check the dataset, batch_size and drop_last"
    )


def test_a_fraction_of_an_unknown_length_is_told_to_be_a_number() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(BATCHES)

    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    trainer = st.Trainer(st.supervised(val_check_interval=0.5), max_epochs=1)
    with pytest.raises(st.DataError) as caught:
        trainer.fit(Good(), loader, BATCHES)
    assert str(caught.value) == (
        "val_check_interval=0.5 is a fraction of an epoch of unknown length: give a number of "
        "batches"
    )


def test_a_module_that_is_not_trained_cannot_log() -> None:
    with pytest.raises(st.TrainingError) as caught:
        Good().log("loss", 1)
    assert str(caught.value) == "log('loss'): the module is not being trained by a Trainer now"


def test_an_error_in_a_hook_is_the_users_own_with_a_note_where() -> None:
    def fails(self: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        fit(changed(on_batch_end=fails))
    assert caught.value.__notes__ == ["in the action of state 'batch_end' (epoch 0, step 1)"]


# Methods that look like hooks.


def nothing(self: Any, *_: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("traning_step", "did you mean 'training_step'?"),
        ("validation_stpe", "did you mean 'validation_step'?"),
        ("on_epoch_strat", "did you mean 'on_epoch_start'?"),
        ("on_train_epoch_start", "did you mean 'on_epoch_start'?"),
        ("on_train_batch_end", "did you mean 'on_batch_end'?"),
        ("on_validation_epoch_end", "did you mean 'on_post_performance_check'?"),
        ("configure_optimizer", "did you mean 'configure_optimizers'?"),
        ("optimizer_stp", "did you mean 'optimizer_step'?"),
        ("backwrad", "did you mean 'backward'?"),
        ("on_xyz", "attach a function with trainer.on"),
    ],
)
def test_a_misspelt_hook_is_said(name: str, meant: str, caplog: pytest.LogCaptureFixture) -> None:
    fit(changed(**{name: nothing}))
    assert [record.message for record in caplog.records] == [
        f"Mine.{name} is no hook and is never called: {meant}"
    ]


def test_other_methods_are_not_taken_for_hooks(caplog: pytest.LogCaptureFixture) -> None:
    def on_epoch_start(self: Any) -> None:
        self.training_helper()

    made = changed(
        training_helper=nothing,
        on_epoch_start=on_epoch_start,
        step=nothing,
        evaluate=nothing,
        _on_private=nothing,
        validation_step=nothing,
    )
    fit(made)
    assert caplog.messages == []


def test_a_training_step_without_a_loss_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fit(changed(training_step=nothing), epochs=3)
    assert caplog.messages == [
        "Mine.training_step has returned no loss in the whole first epoch, so nothing was "
        "trained: return it"
    ]


def test_a_loss_that_is_no_number_is_said_at_the_epochs_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def diverged(self: Any, batch: Any, batch_nb: int) -> Any:
        return Good.training_step(self, batch, batch_nb) * (float("nan") if batch_nb else 1.0)

    fit(changed(training_step=diverged), epochs=2)
    assert caplog.messages == [f"the loss of epoch {n}'s last batch is nan" for n in range(2)]
