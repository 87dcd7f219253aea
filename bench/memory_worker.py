"""One process of `memory.py`: trains in the way it is told and prints its peak memory in MiB."""

from __future__ import annotations

import resource
import sys
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def model() -> nn.Module:
    """Return four layers of a transformer."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def raw(net: nn.Module, batches: list[Any]) -> None:
    """Train as people write it."""
    optimizer = torch.optim.AdamW(net.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()


def by_statetrain(net: nn.Module, batches: list[Any], checkpoints: Any = None) -> None:
    """Train by statetrain."""
    import statetrain as st

    module = st.Module.wrap(net, loss=F.mse_loss, optimizer=torch.optim.AdamW)
    trainer = st.Trainer(max_epochs=1, loggers=[], progress=False, checkpoints=checkpoints)
    trainer.fit(module, batches)


def main(how: str) -> None:
    """Train."""
    torch.set_num_threads(1)
    net, batches = model(), [(torch.randn(8, 64, 256), torch.randn(8, 64, 256)) for _ in range(12)]
    if how == "imported":
        import statetrain  # noqa: F401
    if how in ("raw", "imported"):
        raw(net, batches)
    elif how == "statetrain":
        by_statetrain(net, batches)
    else:
        import statetrain as st

        with tempfile.TemporaryDirectory() as url:
            by_statetrain(net, batches, st.Checkpoints(url, every="4 steps"))
    bytes_each = 1 if sys.platform == "darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_each / 2**20)


if __name__ == "__main__":
    main(sys.argv[1])
