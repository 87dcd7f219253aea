"""Live objects of a run: how each kind is captured, restored in place, and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from statetrain.errors import CheckpointError
from statetrain.persist import randomness

__all__ = [
    "KINDS",
    "Kind",
    "Part",
    "buffers",
    "extra_states",
    "kind_of",
    "parameters",
    "restore_weights",
    "submodules",
    "weight_differences",
]


@dataclass(frozen=True)
class Part:
    """The state of a live object in a snapshot; `kind` is a key of `KINDS`, or `"dataclass"`.

    `"same"` is an object that stands elsewhere in the run too: its state is the path there.
    """

    kind: str
    state: Any


COMPILED = "_orig_mod"  # where torch.compile(module) keeps the module it wraps
CLASSES = ((nn.Module, "module"), (Optimizer, "optimizer"), (randomness.Rng, "generator"))


class Kind(NamedTuple):
    """What can be done with the live objects of a kind."""

    capture: Callable[[Any], Any]
    restore: Callable[[Any, Any], None]
    differences: Callable[[Any, Any, str], list[str]]


def kind_of(value: Any) -> str | None:
    """Return the kind of a live object, or None for data."""
    for cls, kind in CLASSES:
        if isinstance(value, cls):
            return kind
    if isinstance(value, torch.Tensor):
        trained = isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf)
        return "parameter" if trained else None
    if isinstance(value, type):
        return None
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return "stateful"
    if dataclasses.is_dataclass(value):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return "dataclass" if _any_part(items) else None
    return None


def submodules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the module and all in it by name; `torch.compile` around one changes no name."""
    return {_canonical(name): owner for name, owner in module.named_modules()}


def _canonical(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != COMPILED)


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names, as `submodules` has them."""
    return {_canonical(name): parameter for name, parameter in module.named_parameters()}


def buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield all buffers, also None and those that `state_dict` leaves out as not persistent."""
    for prefix, owner in submodules(module).items():
        for name, buffer in owner._buffers.items():  # noqa: SLF001 - named_buffers() skips None
            yield f"{prefix}.{name}" if prefix else name, buffer


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return what submodules with `get_extra_state` keep beside parameters and buffers."""
    return {
        name: owner.get_extra_state()
        for name, owner in submodules(module).items()
        if type(owner).get_extra_state is not nn.Module.get_extra_state
    }


def _any_part(items: list[Any]) -> bool:
    return any(
        kind_of(item) is not None
        or (type(item) in (list, tuple) and _any_part(list(item)))
        or (type(item) is dict and _any_part(list(item.values())))
        for item in items
    )


def _capture_module(module: nn.Module) -> dict[str, Any]:
    live = parameters(module)
    for name, parameter in live.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise CheckpointError(
                f"parameter {name!r} of {type(module).__name__} has no shape yet: call the module "
                "with a batch before fit, so that its lazy layers are made"
            )
    return {
        "parameters": {name: p.detach() for name, p in live.items()},
        "requires_grad": {name: p.requires_grad for name, p in live.items()},
        "gradients": {name: _gradient(p) for name, p in live.items()},
        "buffers": {name: None if b is None else b.detach() for name, b in buffers(module)},
        "training": {name: owner.training for name, owner in submodules(module).items()},
        "extra": extra_states(module),
        "aliases": _aliases(module),
        "unsaved": _unsaved(module),
    }


def _aliases(module: nn.Module) -> dict[str, str]:
    """Return the further names in `state_dict` of what has one already, for other tools."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    for name, tensor in named:
        first.setdefault(id(tensor), _canonical(name))
    every = ((_canonical(name), first[id(tensor)]) for name, tensor in named)
    return {name: owner for name, owner in every if name != owner}


def _unsaved(module: nn.Module) -> list[str]:
    """Return the names of the buffers that `state_dict` leaves out."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in submodules(module).items()
        for name in sorted(owner._non_persistent_buffers_set)  # noqa: SLF001 - torch has no getter
    ]


def _restore_module(module: nn.Module, state: dict[str, Any]) -> None:
    for name, parameter in parameters(module).items():
        _restore_parameter(parameter, {
            "data": state["parameters"][name],
            "gradient": state["gradients"][name],
            "requires_grad": state["requires_grad"][name],
        })  # fmt: skip
    owners = submodules(module)
    for name, saved in state["buffers"].items():
        prefix, _, leaf = name.rpartition(".")
        _restore_buffer(owners[prefix], leaf, saved)
    for name, owner in module.named_modules():
        owner.training = state["training"][_canonical(name)]
    for name, extra in state["extra"].items():
        owners[name].set_extra_state(extra)


def _restore_buffer(owner: nn.Module, name: str, saved: torch.Tensor | None) -> None:
    live = owner._buffers[name]  # noqa: SLF001 - buffers() found it there
    if live is None or saved is None or (live.shape, live.dtype) != (saved.shape, saved.dtype):
        device = torch.device("cpu") if live is None else live.device
        owner._buffers[name] = None if saved is None else saved.to(device)  # noqa: SLF001
    else:
        _set_data(live, saved)


def _module_differences(module: nn.Module, state: dict[str, Any], path: str) -> list[str]:
    found: list[str] = []
    for what, word, live in (
        ("parameters", "parameter", parameters(module)),
        ("buffers", "buffer", dict(buffers(module))),
        ("training", "submodule", submodules(module)),
        ("extra", "extra state", extra_states(module)),
    ):
        saved = state[what]
        found += [f"{path}.{n}: a {word} only in this run" for n in live if n not in saved]
        found += [f"{path}.{n}: a {word} only in the checkpoint" for n in saved if n not in live]
    for name, parameter in parameters(module).items():
        if name in state["parameters"]:
            found += _tensor_differences(parameter, state["parameters"][name], f"{path}.{name}")
    return found


def weight_differences(module: nn.Module, part: Part, path: str) -> list[str]:
    """Name the parameters and buffers in which a saved module does not fit `module`."""
    state = {**part.state, "training": dict.fromkeys(submodules(module), True)}
    return _module_differences(module, {**state, "extra": extra_states(module)}, path)


def restore_weights(module: nn.Module, part: Part) -> None:
    """Give the module the parameters and buffers of a saved one, and nothing else."""
    owners = submodules(module)
    for name, parameter in parameters(module).items():
        _set_data(parameter, part.state["parameters"][name])
    for name, saved in part.state["buffers"].items():
        prefix, _, leaf = name.rpartition(".")
        _restore_buffer(owners[prefix], leaf, saved)


def _capture_parameter(value: torch.Tensor) -> dict[str, Any]:
    requires = value.requires_grad
    return {"data": value.detach(), "gradient": _gradient(value), "requires_grad": requires}


def _restore_parameter(value: torch.Tensor, state: dict[str, Any]) -> None:
    gradient = state["gradient"]
    _set_data(value, state["data"])
    value.requires_grad_(state["requires_grad"])
    value.grad = None if gradient is None else gradient.to(value.device)


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    return None if parameter.grad is None else parameter.grad.detach()


def _parameter_differences(value: torch.Tensor, state: dict[str, Any], path: str) -> list[str]:
    return _tensor_differences(value, state["data"], path)


def _tensor_differences(live: torch.Tensor, saved: torch.Tensor, path: str) -> list[str]:
    if (live.shape, live.dtype) == (saved.shape, saved.dtype):
        return []
    was, now = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (saved, live))
    return [f"{path}: {was} in the checkpoint, {now} in this run"]


def _set_data(live: torch.Tensor, saved: torch.Tensor) -> None:
    if live.stride() == saved.stride():
        live.data.copy_(saved)
    else:  # kernels choose by layout: another one would give other bits
        live.data = saved.to(live.device)


def _capture_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    stepped = getattr(optimizer, "_opt_called", False)  # what schedulers warn by
    return {"class": _class(optimizer), "state": optimizer.state_dict(), "stepped": stepped}


def _restore_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the groups, then each tensor as it was saved: `load_state_dict` may cast it."""
    optimizer.load_state_dict(state["state"])
    if state["stepped"]:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in state["state"]["state"].items():
        live = optimizer.state[parameters[index]]
        for key, saved in entries.items():
            if isinstance(saved, torch.Tensor):
                live[key] = saved.to(live[key].device)


def _optimizer_differences(optimizer: Optimizer, state: dict[str, Any], path: str) -> list[str]:
    if state["class"] != _class(optimizer):
        return [f"{path}: {state['class']} in the checkpoint, {_class(optimizer)} in this run"]
    was = [len(group["params"]) for group in state["state"]["param_groups"]]
    now = [len(group["params"]) for group in optimizer.param_groups]
    if was != now:
        return [f"{path}: groups of {was} parameters in the checkpoint, {now} in this run"]
    return []


def _capture_stateful(value: Any) -> dict[str, Any]:
    return {"class": _class(value), "state": value.state_dict()}


def _restore_stateful(value: Any, state: dict[str, Any]) -> None:
    value.load_state_dict(state["state"])


def _stateful_differences(value: Any, state: dict[str, Any], path: str) -> list[str]:
    if state["class"] == _class(value):
        return []
    return [f"{path}: {state['class']} in the checkpoint, {_class(value)} in this run"]


def _no_differences(_value: Any, _state: Any, _path: str) -> list[str]:
    return []


def _class(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


KINDS: dict[str, Kind] = {  # in the order of restoring: each may look at those before it
    "module": Kind(_capture_module, _restore_module, _module_differences),
    "parameter": Kind(_capture_parameter, _restore_parameter, _parameter_differences),
    "optimizer": Kind(_capture_optimizer, _restore_optimizer, _optimizer_differences),
    "stateful": Kind(_capture_stateful, _restore_stateful, _stateful_differences),
    "generator": Kind(randomness.state_of, randomness.set_state, _no_differences),
}
