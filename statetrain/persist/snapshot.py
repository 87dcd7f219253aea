"""A run as a plain tree in memory, and back.

Live objects (modules, optimizers, schedulers, loaders, generators) become a `Part` in the tree and
are restored in place; the rest is data. It knows no bytes, no URLs and no ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from statetrain.errors import CheckpointError
from statetrain.persist import randomness
from statetrain.persist.parts import (
    KINDS,
    Part,
    buffers,
    extra_states,
    kind_of,
    parameters,
    submodules,
)
from statetrain.run import KIND, Run

__all__ = [
    "Rehearsal",
    "capture",
    "differences",
    "fields",
    "live_parts",
    "orphans",
    "pairs",
    "restore",
]


def capture(run: Run) -> dict[str, Any]:
    """Return the run's stored fields as a tree.

    Its tensors share memory with the run: encode the tree, or copy it, before the run goes on.

    Raises:
        CheckpointError: the run has an attribute that is no declared field.
    """
    kinds = fields(run)
    for name, value in vars(run).items():
        if name not in kinds and not isinstance(value, partial):  # transitions' triggers are
            raise CheckpointError(
                f"run.{name} is not a declared field, so no checkpoint would hold it: "
                f"declare it in the run's dataclass {type(run).__name__} if that is yours, else "
                "keep it in the module or in a callback object"
            )
    seen: dict[int, str] = {}
    tree = {
        name: _captured(getattr(run, name), f"run.{name}", seen)
        for name, kind in kinds.items()
        if kind == "stored"
    }
    names = _parameter_names(run)
    for _, live, part in pairs(run, tree):
        if isinstance(live, torch.optim.Optimizer) and part.kind == "optimizer":
            part.state["names"] = _named_groups(live, names)
    return tree


def restore(run: Run, tree: dict[str, Any]) -> None:
    """Give the run the state in `tree`, whose tensors belong to the run afterwards.

    It does not ask whether the tree fits: `differences` does, and changes nothing.
    """
    found = list(pairs(run, tree))
    for kind, way in KINDS.items():
        for _, live, part in found:
            if part.kind == kind and not _is_data(live, part):
                way.restore(live, part.state)
    for name, node in tree.items():
        setattr(run, name, _merged(getattr(run, name), node))


def fields(run: Run) -> dict[str, str]:
    """Return each field's name with its kind: `"stored"`, `"static"` or `"transient"`."""
    return {f.name: f.metadata.get(KIND, "stored") for f in dataclasses.fields(run)}


def differences(run: Run, tree: dict[str, Any]) -> list[str]:
    """Name everything in which `tree` does not fit the run, changing nothing."""
    here = {name for name, kind in fields(run).items() if kind == "stored"}
    found = [f"run.{name} is not in the checkpoint" for name in sorted(here - set(tree))]
    found += [f"run.{name} is only in the checkpoint" for name in sorted(set(tree) - here)]
    saved = set()
    names = _parameter_names(run)
    for path, live, part in pairs(run, tree):
        saved.add(path)
        kind = kind_of(live)
        if part.kind == "same" or _is_data(live, part):
            continue
        if kind != part.kind:
            found.append(f"{path}: {part.kind} in the checkpoint, {_named(live)} in this run")
        elif kind in KINDS:
            found += KINDS[kind].differences(live, part.state, path)
        if kind == part.kind == "optimizer" and len(found) == 0:
            was, now = part.state["names"], _named_groups(live, names)
            if was != now:
                found.append(
                    f"{path}: its parameters are, in order, {was} in the checkpoint, {now} here"
                )
    for path, live in live_parts(run):
        if path not in saved and path.split(".")[1].split("[")[0] in tree:
            found.append(f"{path}: nothing in the checkpoint, {_named(live)} in this run")
    return found


def orphans(run: Run) -> list[str]:
    """Name the optimizers' parameters that no stored field holds, and no checkpoint would."""
    names = _parameter_names(run)
    return [
        f"{path}.param_groups[{g}]['params'][{i}] of shape {tuple(parameter.shape)}"
        for path, optimizer in live_parts(run)
        if isinstance(optimizer, torch.optim.Optimizer)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
        if id(parameter) not in names
    ]


def live_parts(run: Run) -> Iterator[tuple[str, Any]]:
    """Yield path and object of every live object in the stored fields."""
    for name, kind in fields(run).items():
        if kind == "stored":
            yield from _live(getattr(run, name), f"run.{name}")


def pairs(run: Run, tree: dict[str, Any]) -> Iterator[tuple[str, Any, Part]]:
    """Yield path, live object (None where there is none) and `Part` of each part in `tree`."""
    for name, node in tree.items():
        yield from _paired(getattr(run, name, None), node, f"run.{name}")


class Rehearsal:
    """What a replayed action needs from before it ran: random streams, buffers, extra states."""

    def __init__(self) -> None:
        self.taken: dict[str, Any] | None = None
        self._modules: list[tuple[str, nn.Module]] | None = None

    def take(self, run: Run) -> None:
        """Copy it, immediately before the action."""
        if self._modules is None:
            self._modules = _modules(run)
        self.taken = {
            "random": randomness.capture(),
            "modules": _volatile(self._modules),
            "streams": _streams(run),
        }

    @staticmethod
    def replay(run: Run, before: dict[str, Any], action: Callable[[Any], None]) -> None:
        """Do `action` again as it was done: from `before`, and not logging a second time.

        What callbacks did to buffers after the action is put back.
        """
        modules = _modules(run)
        after, streams = _volatile(modules), _streams(run)
        rows, metrics = run.rows, dict(run.metrics)
        randomness.restore(before["random"])
        _set_volatile(modules, before["modules"])
        _set_streams(run, before["streams"])
        flush, run.flush = run.flush, None
        run.rows = []
        action(run)
        run.rows, run.metrics, run.flush = rows, metrics, flush
        _set_volatile(modules, after)
        _set_streams(run, streams)


def _captured(value: Any, path: str, seen: dict[int, str]) -> Any:
    kind = kind_of(value)
    if kind is not None:
        if id(value) in seen:
            return Part("same", seen[id(value)])
        seen[id(value)] = path
        if kind != "dataclass":
            return Part(kind, KINDS[kind].capture(value))
    if isinstance(value, torch.Tensor):
        return value.detach()
    if (items := _items(value, path)) is None:
        return value
    return _rebuilt(value, [_captured(item, place, seen) for _, place, item in items])


def _items(value: Any, path: str) -> list[tuple[Any, str, Any]] | None:
    """Return key, path and value of what a container holds; None if it is gone into by nobody."""
    if type(value) is dict:
        return [(key, f"{path}[{key!r}]", item) for key, item in value.items()]
    if type(value) in (list, tuple):
        return [(index, f"{path}[{index}]", item) for index, item in enumerate(value)]
    if kind_of(value) == "dataclass":
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, f"{path}.{name}", getattr(value, name)) for name in names]
    return None


def _rebuilt(value: Any, items: list[Any]) -> Any:
    if type(value) is dict:
        return dict(zip(value, items, strict=True))
    if type(value) in (list, tuple):
        return type(value)(items)
    names = [field.name for field in dataclasses.fields(value)]
    return Part("dataclass", dict(zip(names, items, strict=True)))


def _live(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if kind_of(value) is not None:
        yield path, value
    if kind_of(value) in (None, "dataclass"):
        for _, place, item in _items(value, path) or ():
            yield from _live(item, place)


def _paired(live: Any, node: Any, path: str) -> Iterator[tuple[str, Any, Part]]:
    if isinstance(node, Part):
        yield path, live, node
        if node.kind == "dataclass":
            for name, item in node.state.items():
                yield from _paired(getattr(live, name, None), item, f"{path}.{name}")
        return
    there = {key: item for key, _, item in _items(live, path) or ()}
    for key, place, item in _items(node, path) or ():
        yield from _paired(there.get(key), item, place)


def _is_data(live: Any, part: Part) -> bool:
    """Whether a leaf tensor that requires a gradient has nothing here that it would go into."""
    return part.kind == "parameter" and not isinstance(live, torch.Tensor)


def _data(part: Part) -> torch.Tensor:
    tensor: torch.Tensor = part.state["data"]
    tensor.requires_grad_(part.state["requires_grad"])
    tensor.grad = part.state["gradient"]
    return tensor


def _parameter_names(run: Run) -> dict[int, str]:
    names: dict[int, str] = {}
    for path, live in live_parts(run):
        if isinstance(live, nn.Module):
            names.update({id(p): f"{path}.{name}" for name, p in parameters(live).items()})
        elif isinstance(live, torch.Tensor):
            names[id(live)] = path
    return names


def _named_groups(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[list[str]]:
    return [
        [names.get(id(parameter), "?") for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def _merged(live: Any, node: Any) -> Any:
    """Return the value that belongs where `node` is: parts are the live objects themselves."""
    if isinstance(node, Part):
        if node.kind == "dataclass":
            for name, item in node.state.items():
                object.__setattr__(live, name, _merged(getattr(live, name), item))
        return _data(node) if _is_data(live, node) else live
    items = _items(node, "")
    if items is None:
        return node
    there = {key: item for key, _, item in _items(live, "") or ()}
    return _rebuilt(node, [_merged(there.get(key), item) for key, _, item in items])


def _modules(run: Run) -> list[tuple[str, nn.Module]]:
    return [(path, value) for path, value in live_parts(run) if isinstance(value, nn.Module)]


def _volatile(modules: list[tuple[str, nn.Module]]) -> dict[str, Any]:
    return {
        path: {
            "buffers": {n: None if b is None else b.detach().clone() for n, b in buffers(module)},
            "extra": extra_states(module),
        }
        for path, module in modules
    }


def _set_volatile(modules: list[tuple[str, nn.Module]], taken: dict[str, Any]) -> None:
    for path, module in modules:
        owners = submodules(module)
        for name, saved in taken[path]["buffers"].items():
            prefix, _, leaf = name.rpartition(".")
            owner = owners[prefix]._buffers  # noqa: SLF001 - torch has no setter
            live = owner.get(leaf)
            if live is None or saved is None or live.shape != saved.shape:
                owner[leaf] = None if saved is None else saved.clone()
            elif not torch.equal(live, saved):
                live.data.copy_(saved)  # .data: autograd must not see the graph's buffers change
        for name, extra in taken[path]["extra"].items():
            owners[name].set_extra_state(extra)


def _streams(run: Run) -> dict[str, Any]:
    """Return the states of the random generators and lanes in the run's fields."""
    found: dict[str, Any] = {}
    for path, live in live_parts(run):
        if isinstance(live, randomness.Rng):
            found[path] = randomness.state_of(live)
        elif isinstance(live, randomness.Lane):
            found[path] = live.state_dict()
    return found


def _set_streams(run: Run, states: dict[str, Any]) -> None:
    for path, live in live_parts(run):
        if isinstance(live, randomness.Rng):
            randomness.set_state(live, states[path])
        elif isinstance(live, randomness.Lane):
            live.load_state_dict(states[path])


def _named(live: Any) -> str:
    return "nothing" if live is None else kind_of(live) or type(live).__name__
