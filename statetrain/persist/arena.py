"""A copy of a tree's data: the file up to its index, to be written while training goes on.

The memory is asked for once and used again, page-aligned and with its pages there, so that a copy
runs at the speed of memory. Forked processes share it and get no copy of their own.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import torch

from statetrain.persist.layout import CHUNK, HEAD, Segment
from statetrain.persist.plan import Plan, Writable, push

__all__ = ["Arena", "Image"]


class Image:
    """A tree as it was when it was copied; good until its arena takes the next one."""

    def __init__(self, plan: Plan, data: memoryview, events: list[torch.cuda.Event]) -> None:
        self._plan = plan
        self._data = data
        self._events = events

    def write(self, file: Writable, *, check: Callable[[], None] = lambda: None) -> Segment:
        """Write it as one segment; `check` is called before each slice and may raise."""
        for event in self._events:
            event.synchronize()
        parts = [self._data[at : at + CHUNK] for at in range(0, len(self._data), CHUNK)]

        def checked(part: memoryview) -> list[memoryview]:
            check()
            return [part]

        return push(self._plan, file, map(checked, parts), aside=False)


class Arena:
    """Memory for one image: as much as the tree's tensors and large arrays take."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._spans: list[tuple[int, int]] = []
        self._targets: list[torch.Tensor] = []

    def take(self, tree: object) -> Image:
        """Copy `tree`; what happens to it afterwards does not change the image.

        Raises:
            CheckpointError: something in it cannot be stored.
            OSError, MemoryError, RuntimeError: there is no memory for a copy.
        """
        plan = Plan(tree)
        memory = self._fitting(plan)
        if plan.spans != self._spans:
            self._lay_out(plan, memory)
        data = memory.numpy().data
        data[:HEAD] = plan.header
        events = self._copy(plan)
        plan.forget()
        return Image(plan, data[: plan.index_off], events)

    def release(self) -> None:
        """Give the memory back."""
        self._memory, self._spans, self._targets = None, [], []

    def _fitting(self, plan: Plan) -> torch.Tensor:
        pinned = any(blob.device.type == "cuda" for blob in plan.blobs)
        memory = self._memory
        if memory is None or memory.nbytes < plan.index_off or memory.is_pinned() < pinned:
            memory = None
            self.release()  # first, so that there are never two
            memory = self._memory = _allocate(plan.index_off, pinned=pinned)
        return memory

    def _lay_out(self, plan: Plan, memory: torch.Tensor) -> None:
        """Make the places of the blobs, once for all saves of the same shapes."""
        data, end = memory.numpy(), HEAD
        for offset, nbytes in [*plan.spans, (plan.index_off, 0)]:
            data[end:offset] = 0
            end = offset + nbytes
        self._targets = [memory[offset : offset + nbytes] for offset, nbytes in plan.spans]
        self._spans = plan.spans

    def _copy(self, plan: Plan) -> list[torch.cuda.Event]:
        groups: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for blob, target in zip(plan.blobs, self._targets, strict=True):
            if isinstance(blob.source, np.ndarray):
                target.numpy()[:] = blob.array()
            else:
                targets, sources = groups.setdefault(blob.device, ([], []))
                targets.append(target)
                sources.append(blob.bytes())
        return [
            event
            for device, group in groups.items()
            if (event := _copy_from(device, *group)) is not None
        ]


def _copy_from(
    device: torch.device, targets: list[torch.Tensor], sources: list[torch.Tensor]
) -> torch.cuda.Event | None:
    """Copy bytes from one device; from CUDA beside the host, which waits for the event."""
    if device.type != "cuda":
        _foreach_copy(targets, sources)
        return None
    current, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stub
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        _foreach_copy(targets, sources)
    current.wait_stream(beside)  # or the next optimizer step would change what is being copied
    event: torch.cuda.Event = beside.record_event()
    return event


def _foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    copy = getattr(torch, "_foreach_copy_", None)  # what torch.optim uses
    if copy is not None:
        copy(targets, sources, non_blocking=True)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    size = nbytes + nbytes // 64 + mmap.PAGESIZE  # a batch in hand is not always of one size
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    if hasattr(mmap, "MAP_POPULATE"):
        pages = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    else:
        pages = mmap.mmap(-1, size)
    return torch.frombuffer(pages, dtype=torch.uint8)
