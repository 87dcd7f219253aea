"""Every public error message in one table, from wrong input to what it says to do.

The details stand in the tests of each module; here they are read side by side, as a person would.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import statetrain as st
from statetrain.cli.main import main

S, T = st.State, st.Transition
DATA = TensorDataset(torch.randn(6, 3), torch.randn(6, 1))


def work(run: Any) -> None:
    """Do nothing."""


def loop(states: Any, transitions: Any, initial: str = "a") -> st.Loop:
    return st.Loop(initial=initial, states=states, transitions=transitions)


END = S("end", final=True)


class Net(st.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        return (self.line(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def net(**methods: Any) -> st.Module:
    made: st.Module = type("Net", (Net,), methods)()
    return made


def fit(module: Any = None, data: Any = None, val: Any = None, **settings: Any) -> Any:
    settings = {"max_epochs": 1, "progress": False, **settings}
    given = Net() if module is None else module
    return st.Trainer(**settings).fit(given, DataLoader(DATA, 2) if data is None else data, val)


def returning(value: Any) -> st.Module:
    return net(training_step=lambda self, batch, batch_nb: value(self, batch))


def resumed(folder: Path, module: Any = None, **settings: Any) -> None:
    trainer = st.Trainer(max_epochs=1, checkpoints=folder, progress=False)
    trainer.on("step", once=True)(lambda run: run.stop())
    trainer.fit(Net(), DataLoader(DATA, 2))
    fit(module, checkpoints=folder, **settings)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


def a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file"


def stray(folder: Path) -> None:
    trainer = st.Trainer(max_epochs=1, checkpoints=folder, progress=False)
    trainer.on("batch_start")(lambda run: setattr(run, "extra", 1))
    trainer.fit(Net(), DataLoader(DATA, 2))


Wrong = Callable[[Path], Any]

MESSAGES: dict[str, tuple[Wrong, str]] = {
    # declaring a loop
    "unknown state": (
        lambda _: loop([S("a"), END], [T("a", "edn")]),
        "transition 'a -> edn' names the unknown state 'edn': did you mean 'end'?",
    ),
    "initial": (lambda _: loop([S("a"), END], [T("a", "end")], "b"), "initial='b' is not a state"),
    "unreachable": (
        lambda _: loop([S("a"), S("b"), END], [T("a", "end"), T("b", "end")]),
        "state 'b' is unreachable from 'a': add a transition to it, or remove it",
    ),
    "dead end": (
        lambda _: loop([S("a"), S("b"), END], [T("a", "b", bool), T("a", "end")]),
        "state 'b' is a dead end: give it a transition, or final=True",
    ),
    "no way out": (
        lambda _: loop([S("a"), S("b")], [T("a", "b"), T("b", "a")]),
        "the loop has no way out: add State('done', final=True) and a way to it",
    ),
    "never taken": (
        lambda _: loop([S("a"), END], [T("a", "end"), T("a", "a")]),
        "transition 'a -> a' can never be taken: 'a -> end' before it has no guard; give that one",
    ),
    "declared twice": (
        lambda _: loop([S("a"), END], [T("a", "end", bool), T("a", "end")]),
        "transition 'a -> end' is declared twice: join the guards with 'or' in one",
    ),
    "action without run": (
        lambda _: S("a", lambda: None),
        "the action of state 'a' must take one argument, the run",
    ),
    "stuck": (
        lambda _: st.Trainer(loop([S("a"), END], [T("a", "end", lambda run: False)])).fit(st.Run()),
        "no transition out of state 'a' is open: let the last one have no guard",
    ),
    "path": (lambda _: st.path("a"), "path needs two names or more"),
    # attaching callbacks
    "callback at no state": (
        lambda _: st.Trainer().on("bakward")(work),
        "on('bakward'): no such state: did you mean 'backward'?",
    ),
    "callback without run": (
        lambda _: st.Trainer().on("step")(lambda: None),
        "must take one argument, the run: write def",
    ),
    "every": (lambda _: st.Trainer().on("step", every=0), "every=0: give a whole number from 1"),
    "no callbacks in an object": (
        lambda _: st.Trainer(callbacks=[object()]),
        "object has no callback: mark its methods with @st.on('state')",
    ),
    # the module and its optimizers
    "plain module": (lambda _: fit(nn.Linear(3, 1)), "write st.Module.wrap(model, loss=...,"),
    "no training_step": (
        lambda _: fit(net(training_step=st.Module.training_step)),
        "Net has no training_step: write def training_step(self, batch, batch_nb)",
    ),
    "no optimizer": (
        lambda _: fit(net(configure_optimizers=lambda self: None)),
        "configure_optimizers returned no optimizer: return an optimizer, a list of optimizers",
    ),
    "no configure_optimizers": (
        lambda _: fit(net(configure_optimizers=st.Module.configure_optimizers)),
        "Net has no configure_optimizers: write it and return an optimizer, such as",
    ),
    "vector loss": (
        lambda _: fit(returning(lambda self, batch: self.line(batch[0]))),
        "training_step returned a loss of shape (2, 1): reduce it to a scalar, for example with",
    ),
    "detached loss": (
        lambda _: fit(returning(lambda self, batch: torch.ones(()))),
        "the loss depends on no parameter of optimizer 0 that requires a gradient: do not detach",
    ),
    "float loss": (
        lambda _: fit(returning(lambda self, batch: 1.0)),
        "training_step returned 1.0: return a scalar tensor, the loss",
    ),
    "no validation_step": (
        lambda _: fit(val=[1]),
        "Net has no validation_step, but fit was given a validation loader: write",
    ),
    "no test_step": (
        lambda _: st.Trainer(progress=False).test(Net(), DataLoader(DATA, 2)),
        "Net has no test_step: write def test_step(self, batch, batch_nb)",
    ),
    "vector logged": (
        lambda _: st.Run().log("x", torch.ones(2)),
        "log('x') was given shape (2,): log a number or a scalar tensor",
    ),
    # settings
    "no end": (lambda _: fit(max_epochs=None), "training has no end: give Trainer(max_epochs=...)"),
    "max_epochs": (lambda _: st.Trainer(max_epochs=0), "max_epochs=0: give a whole number from 1"),
    "max_time": (lambda _: st.Trainer(max_time="soon"), "max_time='soon': give seconds, a timedel"),
    "accumulate": (
        lambda _: st.supervised(accumulate_grad_batches=0),
        "accumulate_grad_batches=0: give a whole number from 1",
    ),
    "fraction": (
        lambda _: st.supervised(limit_train_batches=1.5),
        "limit_train_batches=1.5: give a whole number from 0, or a fraction of the epoch",
    ),
    "loop not called": (
        lambda _: st.Trainer(st.supervised),  # type: ignore[arg-type]
        "its first argument is a st.Loop: call it, as st.supervised()",
    ),
    "resume": (lambda _: st.Trainer(resume="x"), 'resume=\'x\': give "auto" or "never"'),
    "kind": (
        lambda _: st.evaluation("tset"),
        "evaluation('tset'): no such kind: did you mean 'tes",
    ),
    "arguments": (
        lambda _: st.Trainer(max_epochs=1).fit(Net()),
        "it is called as fit(module, train_loader, val_loader)",
    ),
    "keyword of fit": (
        lambda _: st.Trainer(max_epochs=1).fit(Net(), [1], val_loder=[1]),
        "fit(val_loder=[1]): no such argument: did you mean 'val_loader'?",
    ),
    "keyword of a loop of one's own": (
        lambda _: st.Trainer(loop([S("a"), END], [T("a", "end")])).fit(st.Run(), val_loader=[1]),
        "this loop is driven with fit(run), a run of your Run subclass, not fit(Run, val_loader=",
    ),
    "keyword of Trainer": (
        lambda _: st.Trainer(max_epoch=1),  # type: ignore[call-arg]
        "Trainer(max_epoch=1): no such argument: did you mean 'max_epochs'?",
    ),
    "keyword of supervised": (
        lambda _: st.supervised(acumulate_grad_batches=2),  # type: ignore[call-arg]
        "supervised(acumulate_grad_batches=2): no such argument: did you mean 'accumulate_grad_bat",
    ),
    "seed": (lambda _: st.Trainer(seed="a"), "seed='a': give a whole number, or None"),  # type: ignore[arg-type]
    "max_time of no kind": (lambda _: st.Trainer(max_time=[1]), "max_time=[1]: give seconds, a t"),  # type: ignore[arg-type]
    "loggers without a list": (
        lambda _: st.Trainer(loggers=st.CSVLogger),  # type: ignore[arg-type]
        "give a list, as loggers=[CSVLogger(...)]",
    ),
    "a class among loggers": (
        lambda _: st.Trainer(loggers=[st.CSVLogger]),
        "loggers has the class CSVLogger: give an object, CSVLogger(...)",
    ),
    "no logger": (
        lambda _: st.Trainer(loggers=[3]),
        "loggers has 3, which has no start, write, state_dict, close",
    ),
    "callbacks without a list": (
        lambda _: st.Trainer(callbacks=work),  # type: ignore[arg-type]
        "give a list, as callbacks=[",
    ),
    "checkpoints of no kind": (
        lambda _: st.Trainer(checkpoints=3),  # type: ignore[arg-type]
        "checkpoints=3: give a path or a URL",
    ),
    "init_from of no kind": (
        lambda _: st.Trainer(init_from=3),  # type: ignore[arg-type]
        "init_from=3: give a path or a URL",
    ),
    "prediction file": (
        lambda _: st.Trainer(progress=False).predict(Net(), [1], to="out.txt"),
        "to='out.txt': give a path that ends with .jsonl",
    ),
    "exactness of nothing": (
        lambda _: st.Trainer().exactness(),
        "exactness() looks at a run: give it what fit is given",
    ),
    # loaders
    "empty loader": (lambda _: fit(data=[]), "the training loader is empty: check the dataset"),
    "dataset": (lambda _: fit(data=DATA), "is a dataset: give DataLoader(dataset, batch_size=...)"),
    "generator": (
        lambda _: fit(data=iter([1])),
        "can be read only once: give a DataLoader or a list",
    ),
    "workers": (
        lambda f: fit(data=DataLoader(DATA, num_workers=2), checkpoints=f),
        "num_workers=2 cannot be resumed exactly yet: use num_workers=0, or train without checkpo",
    ),
    "unknown length": (
        lambda f: fit(data=DataLoader(Stream(), 2), checkpoints=f),
        "its dataset is an IterableDataset, whose position is not saved yet: use a map-style",
    ),
    # checkpoints
    "every when": (lambda _: st.Checkpoints("x", every=5), 'every=5: write "10 min", "500 steps"'),
    "unknown url": (lambda _: st.Checkpoints("nowhere://x"), "check the URL and its credentials"),
    "no place": (lambda _: st.Checkpoints(""), "is no place for checkpoints: give a path or a URL"),
    "not writable": (lambda f: fit(checkpoints=a_file(f) / "run"), "name another place"),
    "another model": (
        lambda f: resumed(
            f, net(configure_optimizers=lambda self: torch.optim.Adam([*self.parameters()]))
        ),
        "give the run what it had, or start another at a new URL",
    ),
    "never": (lambda f: resumed(f, resume="never"), "give another URL, or remove them"),
    "no first weights": (lambda f: fit(init_from=f), "holds no checkpoint"),
    "damaged": (
        lambda f: [(d.write_bytes(b"x"), fit(checkpoints=f)) for d in a_run(f)],
        "name another place to start afresh",
    ),
    "metrics not writable": (
        lambda f: fit(loggers=[st.CSVLogger(a_file(f) / "log.csv")]),
        "Give loggers=[st.CSVLogger(path)] another path, or loggers=[]",
    ),
    "stray attribute": (
        stray,
        "run.extra is not a declared field, so no checkpoint would hold it: declare it in",
    ),
    # pictures
    "picture": (lambda f: st.Trainer().draw(f / "loop.gif"), ".svg"),
}


def a_run(folder: Path) -> list[Path]:
    fit(checkpoints=st.Checkpoints(folder, every=None))
    return [*folder.glob("data/*/*.sts")]


@pytest.mark.parametrize("name", MESSAGES)
def test_a_mistake_is_told_what_to_do(name: str, tmp_path: Path) -> None:
    wrong, message = MESSAGES[name]
    with pytest.raises(st.StatetrainError) as error:
        wrong(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["draw", "statetrain:supervise"], "did you mean 'supervised'"),
        (["draw", "nowhere:loop"], "nowhere"),
        (["ls", "memory://nothing"], "nothing"),
        (["show", "memory://nothing"], "nothing"),
    ],
)
def test_a_command_says_what_is_wrong_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) in (1, 2)
    said = capsys.readouterr().err
    assert re.fullmatch(r"statetrain: [^\n]*\n", said)
    assert message in said
