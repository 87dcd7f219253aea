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
from statetrain.persist.parts import Part, restore_weights, weight_differences
from statetrain.run import Run

__all__ = [
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


def check_fit(loop: Loop, run: Run, saved: Snapshot, where: str) -> None:
    """Refuse a checkpoint of another loop, or of a run with other parts or static fields.

    Raises:
        CheckpointError: every difference is named.
    """
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
    parts = {path: part for path, _, part in snapshot.pairs(Run(), found[1].run)}
    saved = {path: _module_part(path, parts) for path in modules}
    lacking = [f"{path}: no module in the checkpoint" for path, part in saved.items() if not part]
    pairs = [(path, live, part) for path, live in modules.items() if (part := saved[path])]
    lacking += [line for path, live, part in pairs for line in weight_differences(live, part, path)]
    if lacking or not modules:
        lines = lacking or ["this run has no module"]
        raise CheckpointError("\n  - ".join([f"init_from={url!r} does not fit:", *lines]))
    for _, live, part in pairs:
        restore_weights(live, part)
    log.info("first weights from %s at %s", found[0].id, url)


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
