"""Whether a run could go on exactly, and why not: what `trainer.exactness()` returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from statetrain.cluster.determinism import indeterminate
from statetrain.data.loader import Loader
from statetrain.persist import snapshot
from statetrain.run import Run

__all__ = ["Exactness", "exactness_of"]


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """A report: `lost` is what would be lost or repeated, `numeric` what may give other bits.

    Each reason says what to change. `print` it.
    """

    lost: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether nothing stands in the way."""
        return not self.lost and not self.numeric

    def __str__(self) -> str:
        if self.exact:
            return "exact: a stopped run ends with the bits of one that was not"
        return "\n  - ".join(["not exact, because:", *self.lost, *self.numeric])


def exactness_of(run: Run) -> Exactness:
    """Look at a run's loaders and devices."""
    lost = [
        f"{path.removeprefix('run.')}: {problem}"
        for path, loader in snapshot.live_parts(run)
        if isinstance(loader, Loader)
        for problem in loader.problems()
    ]
    numeric = [line for device in _devices(run) for line in indeterminate(device)]
    return Exactness(lost=tuple(lost), numeric=tuple(dict.fromkeys(numeric)))


def _devices(run: Run) -> list[torch.device]:
    """Return where the run's modules are, also before `ready` has found that out."""
    found = {getattr(run, "device", None): None}
    for _, live in snapshot.live_parts(run):
        if isinstance(live, nn.Module):
            found.update(dict.fromkeys(t.device for t in (*live.parameters(), *live.buffers())))
    return [device for device in found if isinstance(device, torch.device)]
