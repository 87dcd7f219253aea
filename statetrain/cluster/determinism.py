"""Deterministic kernels, and what stands in their way."""

from __future__ import annotations

import os

import torch

__all__ = ["indeterminate", "make_deterministic"]


def make_deterministic() -> None:
    """Let torch use deterministic algorithms only; an operation that has none raises an error.

    See `torch.use_deterministic_algorithms`. cuBLAS reads its workspace setting when it is first
    used, so this comes before the first operation on a GPU.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False


def indeterminate(device: torch.device | None) -> list[str]:
    """Say what lets two equal runs differ on `device` (None: the CPU), and what to do about it."""
    if device is None or device.type != "cuda":
        return []
    found = []
    if torch.backends.cudnn.benchmark:
        found.append("cudnn.benchmark chooses kernels by timing: Trainer(deterministic=True)")
    if not torch.are_deterministic_algorithms_enabled():
        found.append("CUDA kernels may add in any order: Trainer(deterministic=True)")
    return found
