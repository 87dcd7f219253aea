"""Whether a checkpoint fits the program that takes it up: what is refused, and what is said.

And first weights, which another run's checkpoint gives. It changes nothing else.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from statetrain.cluster.determinism import numerics
from statetrain.errors import CheckpointError
from statetrain.loop import Loop
from statetrain.persist import container, snapshot
from statetrain.persist.checkpoint import Checkpoints, Snapshot, changed, misfits
from statetrain.persist.compare import unequal
from statetrain.persist.parts import (
    COMPILED,
    Part,
    buffers,
    parameters,
    restore_weights,
    submodules,
    weight_differences,
)
from statetrain.run import Run

__all__ = [
    "IMPORTED",
    "as_snapshot",
    "check_fit",
    "first_weights",
    "modules_of",
    "named_loggers",
    "other_bits",
    "other_loggers",
    "other_settings",
    "static_fields",
]

log = logging.getLogger("statetrain")

IMPORTED = "imported"  # the state of a snapshot that holds a file's weights and no run


def check_fit(loop: Loop, run: Run, saved: Snapshot, where: str) -> None:
    """Refuse a checkpoint of another loop, or of a run with other parts or static fields.

    Raises:
        CheckpointError: every difference is named.
    """
    if _is_imported(saved):
        raise CheckpointError(
            f"{where} holds imported weights and no run to go on from: give its place as "
            "init_from=, and another as checkpoints="
        )
    found = misfits(loop, run, saved)
    for name, value in static_fields(run).items():
        found += changed("run", {name: saved.static.get(name)}, {name: value})
    if found:
        lines = "\n  - ".join([f"{where} does not fit this run:", *found])
        raise CheckpointError(f"{lines}\ngive the run what it had, or start another at a new URL")


def other_bits(loop: Loop, run: Run, saved: Snapshot) -> list[str]:
    """Say which of the loop's options, and of what else the bits depend on, differ."""
    options = changed("option", saved.options, loop.options)
    rest = changed("machine's", saved.numerics, numerics(modules_of(run)))
    return [*(f"{line} (this run's is used)" for line in options), *rest]


def other_settings(run: Run, saved: Snapshot, *, seeded: bool) -> list[str]:
    """Say which settings differ, and whose are used."""
    here = changed("limit", saved.limits, dataclasses.asdict(run.limits))
    seeds = changed("run", {"seed": saved.run["seed"]}, {"seed": run.seed}) if seeded else ()
    return [
        *(f"{line} (this run's is used)" for line in here),
        *(f"{line} (the checkpoint's is used)" for line in (*_rates(run, saved), *seeds)),
    ]


def static_fields(run: Run) -> dict[str, Any]:
    """Return the static fields as they are compared."""
    kinds = snapshot.fields(run)
    return {name: _plain(getattr(run, name)) for name, kind in kinds.items() if kind == "static"}


def named_loggers(loggers: Iterable[Any]) -> dict[str, Any]:
    """Name each logger by its type, and its place among those of this type."""
    named: dict[str, Any] = {}
    for logger in loggers:
        kind = type(logger).__qualname__
        ordinal = sum(1 for name in named if name.rpartition(" #")[0] == kind)
        named[f"{kind} #{ordinal}"] = logger
    return named


def other_loggers(loggers: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Name the loggers that only one of this run and the saved one has."""
    return [
        *(f"logger {name} is only in the checkpoint" for name in saved if name not in loggers),
        *(
            f"logger {name} is not in the checkpoint: its log begins here"
            for name in loggers
            if name not in saved
        ),
    ]


def modules_of(run: Run) -> dict[str, nn.Module]:
    """Return the modules in the run's stored fields by their path."""
    parts = dict(snapshot.live_parts(run))
    return {path: live for path, live in parts.items() if isinstance(live, nn.Module)}


def first_weights(modules: Mapping[str, nn.Module], url: str) -> None:
    """Give modules, by their path in the run, the weights of another run's newest checkpoint.

    Raises:
        CheckpointError: there is none, or it does not fit; every difference is named.
    """
    found = Checkpoints(url).newest()
    if found is None:
        raise CheckpointError(f"init_from={url!r} holds no checkpoint")
    parts, lacking = _saved_parts(modules, found[1])
    saved = {path: _module_part(path, parts) for path in modules}
    lacking += [f"{path}: no module in the checkpoint" for path, part in saved.items() if not part]
    pairs = [(path, live, part) for path, live in modules.items() if (part := saved[path])]
    lacking += [line for path, live, part in pairs for line in weight_differences(live, part, path)]
    if lacking or not modules:
        lines = lacking or ["this run has no module"]
        raise CheckpointError("\n  - ".join([f"init_from={url!r} does not fit:", *lines]))
    for _, live, part in pairs:
        restore_weights(live, part)
    log.info("first weights from %s at %s", found[0].id, url)


def as_snapshot(tensors: Mapping[str, torch.Tensor], source: str) -> Snapshot:
    """Return the weights of a file as a snapshot that no loop made: it gives first weights only."""
    state = {
        "parameters": dict(tensors),
        "requires_grad": dict.fromkeys(tensors, True),
        "gradients": dict.fromkeys(tensors),
        "buffers": {},
        "training": {},
        "extra": {},
        "aliases": {},
        "unsaved": [],
    }
    return Snapshot(
        run={**snapshot.capture(Run(state=IMPORTED)), "weights": Part("module", state)},
        static={},
        random={},
        callbacks={"counters": {}, "objects": {}},
        loggers={},
        attributes={},
        loop={"initial": IMPORTED, "states": [], "transitions": []},
        options={"file": source},
        limits={},
        numerics={},
    )


def _is_imported(saved: Snapshot) -> bool:
    return not saved.loop["states"]  # a loop has at least one


def _saved_parts(
    modules: Mapping[str, nn.Module], saved: Snapshot
) -> tuple[dict[str, Part], list[str]]:
    """Return the parts of a snapshot by their path, and what it has that fits no module."""
    if _is_imported(saved):
        return _imported_parts(modules, saved.run["weights"].state["parameters"])
    return {path: part for path, _, part in snapshot.pairs(Run(), saved.run)}, []


def _imported_parts(
    modules: Mapping[str, nn.Module], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Part], list[str]]:
    """Return a file's tensors as the parts of `modules`, and the names that belong to none.

    The names of several modules begin with the field.
    """
    named = {_canonical(name): tensor for name, tensor in tensors.items()}
    parts: dict[str, Part] = {}
    for path, live in modules.items():
        prefix = f"{path.removeprefix('run.')}." if len(modules) > 1 else ""
        own = [name for name in named if name.startswith(prefix)]
        found = {name.removeprefix(prefix): named.pop(name) for name in own}
        parts[path] = _imported_part(live, found)
    return parts, [f"{name}: a tensor of no module of this run" for name in named]


def _imported_part(module: nn.Module, tensors: dict[str, torch.Tensor]) -> Part:
    """Return tensors under the names that a checkpoint of `module` has.

    A tied parameter has its first name, and what `state_dict` leaves out stays as the module has
    it.
    """
    held = dict(buffers(module))
    live = {**held, **parameters(module)}
    first = {id(t): name for name, t in live.items() if t is not None}
    tied = {_canonical(n): first.get(id(t)) for n, t in module.state_dict(keep_vars=True).items()}
    kept = {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in submodules(module).items()
        for name in owner._non_persistent_buffers_set  # noqa: SLF001 - torch has no getter
    }
    rest = {name: held[name] for name in held if name in kept or held[name] is None}
    for name, tensor in tensors.items():
        owner = tied.get(name) or name
        other = tensors.get(owner, rest.get(owner))
        if owner == name or other is None:
            rest[owner] = _laid_out(tensor, live.get(owner))
        elif unequal(other, tensor):
            rest[name] = tensor  # tied here and not in the file: that is a difference
    return Part(
        "module",
        {
            "parameters": {name: t for name, t in rest.items() if name not in held},
            "buffers": {name: t for name, t in rest.items() if name in held},
        },
    )


def _laid_out(tensor: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor in the layout of `live`, which no safetensors file has."""
    if live is None or (live.shape, live.dtype) != (tensor.shape, tensor.dtype):
        return tensor
    same = live.stride() == tensor.stride()
    return tensor if same else torch.empty_like(live, device="cpu").copy_(tensor)


def _canonical(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != COMPILED)


def _module_part(path: str, parts: Mapping[str, Part]) -> Part | None:
    part = parts.get(path)
    while part is not None and part.kind == "same":  # it stands elsewhere in the saved run too
        part = parts.get(part.state)
    return part if part is not None and part.kind == "module" else None


def _plain(value: Any) -> Any:
    """Return a static field as it is compared: itself if it can be stored, else its name."""
    try:
        container.check(value)
    except CheckpointError:
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return value


def _given(group: dict[str, Any]) -> dict[str, Any]:
    """Return what an optimizer's group was built with: the first rate, not the scheduled one."""
    rest = {k: v for k, v in group.items() if k not in ("params", "initial_lr", "param_names")}
    return {**rest, "lr": group.get("initial_lr", group["lr"])} if "lr" in group else rest


def _rates(run: Run, saved: Snapshot) -> list[str]:
    """Say where an optimizer was built with other settings than the saved one."""
    found: list[str] = []
    for path, live, part in snapshot.pairs(run, saved.run):
        if isinstance(live, torch.optim.Optimizer):
            groups = zip(part.state["state"]["param_groups"], live.param_groups, strict=True)
            for i, (old, new) in enumerate(groups):
                was, now = _given(old), _given(new)
                found += changed(f"{path}.param_groups[{i}]", was, now)
    return found
