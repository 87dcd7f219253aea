"""What a run is, on one page of plain text for its start.

Nothing of the user's is executed, but for the lengths of the loaders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from signal import SIGINT, Signals
from typing import Any

import torch
from torch import nn

from statetrain.callbacks import Callback, Callbacks
from statetrain.data.loader import Loader
from statetrain.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from statetrain.loop import Loop
from statetrain.persist.checkpoint import Checkpoints
from statetrain.run import Run
from statetrain.supervised.loop import supervised

__all__ = ["summary"]

LIMITS = {
    "train_loader": "train_limit",
    "val_loader": "val_limit",
    "loader": "limit",
}  # the field of a supervised run that says how many batches of a loader are used
KIB = 1024


def summary(
    run: Run,
    loop: Loop,
    callbacks: Callbacks,
    *,
    checkpoints: Checkpoints | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Describe a run that is ready to be driven: a line a thing, without a newline at the end.

    `notes` are lines to end with, such as the reasons why the run cannot go on exactly.
    """
    sections = {
        "model": _models(run),
        "optimizer": _optimizers(run),
        "loop": _loop(loop),
        "data": _data(run),
        "callbacks": _callbacks(loop, callbacks),
        "checkpoints": _saving(checkpoints),
        "limits": _settings({k: v for k, v in asdict(run.limits).items() if v is not None}),
        "notes": list(notes),
    }
    width = max(map(len, sections)) + 2
    return "\n".join(
        f"{title if i == 0 else '':{width}}{line}"
        for title, lines in sections.items()
        for i, line in enumerate(lines)
    )


def _fields(run: Run, kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the run's objects of a kind, those in lists and tuples too, with their names."""
    for name, value in vars(run).items():
        if isinstance(value, kind):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, kind))


def _models(run: Run) -> list[str]:
    found = [(name, model) for name, model in _fields(run, nn.Module)]
    return [f"{name}: {_model(model)}" for name, model in found]


def _model(model: nn.Module) -> str:
    parameters = list(model.parameters())
    if any(isinstance(each, nn.parameter.UninitializedParameter) for each in parameters):
        return f"{type(model).__name__}, lazy: it has no parameters yet"
    total = sum(each.numel() for each in parameters)
    trainable = sum(each.numel() for each in parameters if each.requires_grad)
    held = [*parameters, *model.buffers()]
    size = sum(each.numel() * each.element_size() for each in held)
    frozen = "" if trainable == total else f" ({trainable:,} trainable)"
    parts = [type(model).__name__, f"{total:,} parameters{frozen}", _bytes(size)]
    if parameters:
        types = _each_once(str(each.dtype).removeprefix("torch.") for each in parameters)
        parts.append(f"{types} on {_each_once(each.device for each in parameters)}")
    return ", ".join(parts)


def _optimizers(run: Run) -> list[str]:
    lines = []
    for name, optimizer in _fields(run, torch.optim.Optimizer):
        groups = optimizer.param_groups
        rates = _each_once(_number(group["lr"]) for group in groups if "lr" in group)
        many = f", {len(groups)} groups" if len(groups) > 1 else ""
        lines.append(f"{name}: {type(optimizer).__name__}{many}{rates and f', lr {rates}'}")
    return lines


def _number(value: Any) -> str:
    """Return a learning rate; one that is a tensor on a device would have to be waited for."""
    if isinstance(value, torch.Tensor):
        return f"{value.item():g}" if value.device.type == "cpu" else f"on {value.device}"
    return f"{value:g}" if isinstance(value, (int, float)) else type(value).__name__


def _loop(loop: Loop) -> list[str]:
    replayed = [state.name for state in loop.states if state.replay]
    parts = [f"{len(loop.states)} states from {loop.initial!r}"]
    if replayed:
        parts.append(f"replays {', '.join(replayed)}")
    known = supervised()
    usual = known.options if loop.begin is known.begin else {}
    options = {k: v for k, v in loop.options.items() if k not in usual or usual[k] != v}
    return ["; ".join(parts), *_settings(options)]


def _data(run: Run) -> list[str]:
    lines = []
    for name, loader in _fields(run, Loader):
        length, limit = loader.length, getattr(run, LIMITS.get(name, ""), None)
        known = "an unknown number of" if length is None else f"{length:,}"
        limited = limit is not None and (length is None or limit < length)
        first = f", the first {limit:,} are used" if limited else ""
        lines.append(f"{name}: {known} {'batch' if length == 1 else 'batches'} an epoch{first}")
    return lines


def _callbacks(loop: Loop, callbacks: Callbacks) -> list[str]:
    """Return a line for each point that has some, in the order of the loop and of firing."""
    points: list[tuple[str, list[Callback]]] = []
    for state in loop.names:
        points.append((f"before {state}", callbacks.firing(state, leading=True)))
        points.append((state, callbacks.firing(state)))
        points += [(edge.name, callbacks.firing(edge.name)) for edge in loop.leaving(state)]
    return [f"{place}: {', '.join(map(_callback, found))}" for place, found in points if found]


def _callback(callback: Callback) -> str:
    where = callback.point
    filters = [
        *([] if where.every is None else [f"every={where.every}"]),
        *(["once"] if where.once else []),
        *([] if where.at is None else [f"at={', '.join(map(str, where.at))}"]),
        *([] if where.when is None else [f"when={_name(where.when)}"]),
    ]
    label = callback.label.rpartition("<locals>.")[2]
    return label + (f" ({', '.join(filters)})" if filters else "")


def _saving(checkpoints: Checkpoints | None) -> list[str]:
    if checkpoints is None:
        return ["none: give Trainer(checkpoints=...) to be able to go on after a stop"]
    lines = [checkpoints.url, f"saved {_when(checkpoints)}; {checkpoints.keep} are kept"]
    interrupt = [each for each in checkpoints.signals if each == SIGINT]
    others = [each for each in checkpoints.signals if each != SIGINT]
    codes = ((others, EXIT_PREEMPTED), (interrupt, EXIT_INTERRUPTED))
    found = [f"{_joined(received)}: exit code {code}" for received, code in codes if received]
    return [*lines, *([f"saved and left on {'; '.join(found)}"] if found else [])]


def _when(checkpoints: Checkpoints) -> str:
    seconds, steps, epochs = checkpoints._seconds, checkpoints._steps, checkpoints._epochs  # noqa: SLF001 - nobody else needs them
    intervals = [
        *([] if seconds is None else [f"{seconds / 60:g} min"]),
        *([] if steps is None else [_count(steps, "step")]),
        *([] if epochs is None else [_count(epochs, "epoch")]),
    ]
    if not intervals:
        return "when asked for, and at the end"
    where = f" in {', '.join(sorted(checkpoints.at))}" if checkpoints.at else ""
    return f"every {' and '.join(intervals)}{where}, and at the end"


def _settings(settings: Mapping[str, Any]) -> list[str]:
    shown = [f"{name}={_value(value)}" for name, value in settings.items()]
    return [", ".join(shown)] if shown else []


def _value(value: object) -> str:
    """Return the repr of a plain value, and the type of any other: its repr may be the user's."""
    plain = (bool, int, float, str, bytes, type(None))
    return repr(value) if type(value) in plain else type(value).__name__


def _name(function: object) -> str:
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    return name.rpartition("<locals>.")[2]


def _joined(received: Iterable[Signals]) -> str:
    return ", ".join(each.name for each in received)


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}" if number == 1 else f"{number:,} {unit}s"


def _each_once(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))


def _bytes(size: int) -> str:
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < KIB:
            break
        amount, unit = amount / KIB, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
