"""What a checkpoint's index tells about a run: its position, its objects, its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from statetrain.cli.tree import brief, nbytes
from statetrain.errors import CheckpointError
from statetrain.persist.container import Index, Opaque, TensorInfo
from statetrain.run import Run

__all__ = ["Facts", "Thing", "counter", "facts"]

SNAPSHOT, PART = "statetrain.Snapshot", "statetrain.Part"  # as persist/checkpoint.py registers them
LOADER = "statetrain.data.loader.Loader"
OWN = frozenset(field.name for field in dataclasses.fields(Run))


@dataclass(frozen=True, kw_only=True)
class Thing:
    """An object of the run: its field, its kind as in `persist.parts`, its class, and its state.

    The class of a module, a generator or a dataclass is the program's to know: none is stored.
    """

    name: str
    kind: str
    cls: str | None
    told: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What can be told of a snapshot without the program that made it."""

    state: str
    came_from: str
    replayed: bool
    step: int
    epoch: int
    batch_nb: int
    seed: int | None
    elapsed: float
    finishing: bool
    metrics: Mapping[str, Any]
    things: tuple[Thing, ...]
    fields: tuple[str, ...]
    random: tuple[str, ...]
    counters: Mapping[str, Any]
    objects: Mapping[str, Any]
    attributes: Mapping[str, Any]
    loggers: tuple[Any, ...]
    loop: Mapping[str, Any]
    options: Mapping[str, Any]
    limits: Mapping[str, Any]
    static: Mapping[str, Any]


def counter(index: Index, name: str) -> int | None:
    """Return one of the run's counters; None if the segment holds no snapshot of a run."""
    root = index.tree
    run = _state(root).get("run") if isinstance(root, Opaque) and root.kind == SNAPSHOT else None
    value = run.get(name) if isinstance(run, dict) else None
    return value if type(value) is int else None


def facts(index: Index) -> Facts:
    """Return what the snapshot in `index` tells.

    Raises:
        CheckpointError: it holds something else, or a snapshot that this version does not know.
    """
    root = index.tree
    if not isinstance(root, Opaque) or root.kind != SNAPSHOT:
        raise CheckpointError("it holds no snapshot of a run: look at it with --tree or --tensors")
    try:
        return _facts(_state(root))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"its snapshot is not as this statetrain makes them ({error!r}): look at it with --tree"
        ) from error


def _facts(snapshot: dict[str, Any]) -> Facts:
    run = snapshot["run"]
    things = tuple(_things(run))
    live = {thing.name.split(".")[0].split("[")[0] for thing in things}
    own = {f.name: run[f.name] for f in dataclasses.fields(Facts) if f.name in run}
    return Facts(
        **own,
        replayed=snapshot["replay"] is not None,
        things=things,
        fields=tuple(name for name in run if name not in OWN | live),
        random=tuple(snapshot["random"]),
        counters=snapshot["callbacks"]["counters"],
        objects=snapshot["callbacks"]["objects"],
        attributes=snapshot["attributes"],
        loggers=tuple(snapshot["loggers"].items()),
        loop=snapshot["loop"],
        options=snapshot["options"],
        limits=snapshot["limits"],
        static=snapshot["static"],
    )


def _things(value: Any, name: str = "") -> Iterator[Thing]:
    if isinstance(value, Opaque) and value.kind == PART:
        part = _state(value)
        if part["kind"] != "dataclass":
            yield _thing(name, part["kind"], part["state"])
            return
        value = part["state"]
        yield from (each for key, item in value.items() for each in _things(item, f"{name}.{key}"))
    elif type(value) is dict:
        for key, item in value.items():
            yield from _things(item, f"{name}[{key!r}]" if name else key)
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            yield from _things(item, f"{name}[{number}]")


def _thing(name: str, kind: str, state: Any) -> Thing:
    cls = state.get("class") if isinstance(state, dict) else None
    told = ""
    if kind == "module":
        told = _module(state)
    elif kind == "optimizer":
        told = _optimizer(state["state"])
    elif kind == "parameter":
        told = brief(state["data"])
    elif kind == "same":
        told = f"the same object as {state}"
    elif cls == LOADER:
        told = _loader(state["state"])
    return Thing(name=name, kind=kind, cls=cls, told=told)


def _module(state: dict[str, Any]) -> str:
    parameters = [info for info in state["parameters"].values() if isinstance(info, TensorInfo)]
    count = sum(_count(info) for info in parameters)
    frozen = [name for name, trained in state["requires_grad"].items() if not trained]
    parts = [f"{count:,} parameters in {len(parameters)} tensors"]
    parts += [", ".join(dict.fromkeys(info.dtype for info in parameters))] if parameters else []
    parts += [f"{len(frozen)} of them frozen"] if frozen else []
    parts += [f"{len(state['buffers'])} buffers"] if state["buffers"] else []
    held = [name for name, gradient in state["gradients"].items() if gradient is not None]
    return ", ".join([*parts, *([f"{len(held)} gradients held"] if held else [])])


def _count(info: TensorInfo) -> int:
    return nbytes(info) // max(nbytes(dataclasses.replace(info, shape=())), 1)


def _optimizer(state: dict[str, Any]) -> str:
    groups = state["param_groups"]
    rates = dict.fromkeys(_number(group["lr"]) for group in groups if "lr" in group)
    parts = [f"lr {', '.join(rates)}"] if rates else []
    count = sum(len(group["params"]) for group in groups)
    return ", ".join([*parts, f"{count} parameter tensors, {len(state['state'])} with state"])


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else brief(value)


def _loader(state: dict[str, Any]) -> str:
    known = state["facts"].get("number of batches")
    of = "" if known is None else f" of {known}"
    return f"epoch {state['epoch']}, {state['position']}{of} batches handed out"


def _state(value: Opaque) -> dict[str, Any]:
    state = value.parts[1]
    if not isinstance(state, dict):
        raise CheckpointError("it is not as this statetrain makes them: look at it with --tree")
    return state
