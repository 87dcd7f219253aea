"""Deterministic kernels, and what stands in their way."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["indeterminate", "make_deterministic", "numerics"]


def make_deterministic() -> None:
    """Let torch use deterministic algorithms only; an operation that has none raises an error.

    See `torch.use_deterministic_algorithms`. cuBLAS reads its workspace setting when it is first
    used, so this comes before the first operation on a GPU.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False


def numerics(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return what the bits of a run depend on besides its program: it is saved, and compared."""
    compiled = {path: sum(map(_compiled, module.modules())) for path, module in modules.items()}
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "compiled submodules": {path: number for path, number in compiled.items() if number},
    }


def _compiled(module: nn.Module) -> bool:
    wrapped = hasattr(module, "_orig_mod")  # torch.compile(module); the other is module.compile()
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def indeterminate(device: torch.device) -> list[str]:
    """Say what lets two equal runs differ on `device`, and what to do about it."""
    if device.type == "cpu":
        return []
    if device.type != "cuda":
        return [f"kernels of device {device.type!r} give no promise of equal bits: use cpu or cuda"]
    found = []
    if torch.backends.cudnn.benchmark:
        found.append("cudnn.benchmark chooses kernels by timing: Trainer(deterministic=True)")
    if not torch.are_deterministic_algorithms_enabled():
        found.append("CUDA kernels may add in any order: Trainer(deterministic=True)")
    return found
