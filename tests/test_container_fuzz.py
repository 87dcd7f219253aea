"""Hostile files: whatever the bytes say, only a `CheckpointError`, little memory and little time.

What a checksum would notice at once is signed again, so that the checks behind it are tried.
"""

from __future__ import annotations

import gc
import io
import random
import resource
import sys
import time
import tracemalloc
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as hs
from msgpack import ExtType
from test_container import RECORD, resealed, tree, written

from statetrain.errors import CheckpointError
from statetrain.persist import container
from statetrain.persist.codec import pack, unpack
from statetrain.persist.parts import Part
from statetrain.persist.record import END, HEAD, Record

pytestmark = pytest.mark.slow

MEMORY, SECONDS = 64 << 20, 1.0
LONG = settings(
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
)


def everything() -> dict[str, Any]:
    """Return the tree of the other tests, and one value of each kind beside it."""
    return {
        **tree(),
        "part": Part("module", {"parameters": {"w": torch.ones(3, requires_grad=True)}}),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "rngs": [random.Random(1), np.random.default_rng(1), torch.Generator()],
        "kinds": [OrderedDict(a=1), deque([1], maxlen=2), Counter("aa"), {2.5}, frozenset({1})],
        "plain": [1 + 2j, "\ud800", bytearray(b"x"), slice(1, 2), torch.float16, torch.Size([1])],
        "arrays": [np.arange(3), np.asfortranarray(np.ones((2, 3))), np.array(["ab"])],
        "shared": [shared := [1], shared],
    }


DATA, SEGMENT = written(everything())
INDEX = DATA[SEGMENT.index_off : -96]
PAYLOAD = RECORD.to_bytes()[HEAD.size : -24]


# What is changed: bytes, or one node of what they mean.


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


NUMBERS = hs.sampled_from([-1, 0, 1, 2, 63, 64, 127, 255, 1 << 20, 1 << 32, (1 << 62) - 1, 1 << 62])
SIGNED = NUMBERS | hs.integers(-(1 << 63), (1 << 64) - 1)
EXTENSIONS = hs.builds(
    ExtType,
    hs.sampled_from([*range(1, 13), *range(32, 41), 48, 64, 65, 66, 72, 127]),
    hs.binary(max_size=4) | hs.integers(0, 9).map(lambda n: n.to_bytes(4, "little")),
)
LEAVES = (
    SIGNED
    | EXTENSIONS
    | hs.none()
    | hs.booleans()
    | hs.floats()
    | hs.text(max_size=8)
    | hs.binary(max_size=40)
    | hs.sampled_from(
        ["float32", "complex128", "bits8", "meta", "cuda", "<f8", "|O", "<U999999999"]
    )
)
DEEP = hs.integers(100, 600).map(nested)
VALUES = hs.recursive(LEAVES, lambda inner: hs.lists(inner, max_size=4), max_leaves=6) | DEEP


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container in `node` with each of its keys."""
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in list(keys):
        yield node, key
        yield from places(node[key])


@hs.composite
def restructured(draw: hs.DrawFn, packed: bytes) -> bytes:
    """Change, resize, move or remove one to three parts of what `packed` holds."""
    plain = unpack(packed)
    for _ in range(draw(hs.integers(1, 3))):
        within, key = draw(hs.sampled_from(list(places(plain))))
        match draw(hs.sampled_from(["set", "resize", "swap", "splice", "remove", "repeat"])):
            case "set":
                within[key] = draw(VALUES)
            case "resize":
                within[key] = resized(within[key], draw(hs.integers(-2, 70)), draw(SIGNED))
            case "swap":
                other, there = draw(hs.sampled_from(list(places(plain))))
                within[key], other[there] = unpack(pack(other[there])), unpack(pack(within[key]))
            case "splice":
                other, there = draw(hs.sampled_from(list(places(unpack(INDEX)))))
                within[key] = other[there]
            case "remove":
                del within[key]
            case "repeat":
                within[key] = [within[key]] * draw(hs.integers(0, 70))
        if not list(places(plain)):
            break
    changed = pack(plain)
    assume(len(changed) < 1 << 17)  # repeats of repeats: a large file may take its time
    return changed


def resized(value: Any, by: int, other: int) -> Any:
    if type(value) is int:
        return value + by if -(1 << 63) <= value + by < 1 << 64 else other
    if isinstance(value, ExtType):
        return ExtType(value.code, (value.data * 2)[: max(0, len(value.data) + by)])
    if isinstance(value, (list, bytes, str)):
        return (value * 3)[: max(0, len(value) + by)]
    return other


@hs.composite
def rewritten(draw: hs.DrawFn, data: bytes) -> bytes:
    """Flip bits, cut off, cut out, double, or splice the bytes."""
    changed = bytearray(data)
    for _ in range(draw(hs.integers(1, 4))):
        at = draw(hs.integers(0, max(0, len(changed) - 1)))
        size = draw(hs.sampled_from([1, 2, 8, 64, 96, 4096]))
        match draw(hs.sampled_from(["flip", "cut", "out", "double", "splice", "zero"])):
            case "flip" if changed:
                changed[at] ^= 1 << draw(hs.integers(0, 7))
            case "cut":
                del changed[at:]
            case "out":
                del changed[at : at + size]
            case "double":
                changed[at:at] = changed[at : at + size]
            case "splice":
                other = draw(hs.integers(0, len(data)))
                changed[at : at + size] = data[other : other + size]
            case "zero":
                changed[at : at + size] = bytes(len(changed[at : at + size]))
    return bytes(changed)


@hs.composite
def ended(draw: hs.DrawFn) -> bytes:
    """Change numbers in the header or the trailer, and make their checksums right."""
    data = bytearray(DATA)
    tail = len(data) - 96
    for _ in range(draw(hs.integers(1, 2))):
        at = draw(hs.sampled_from([8, 12, 16, 32, 40, 48, *range(tail, tail + 72, 8)]))
        was = int.from_bytes(data[at : at + 8], "little")
        near = hs.sampled_from([was + 1, was - 1, was + 64, was + 4096, was * 2, was // 2])
        data[at : at + 8] = (draw(near | SIGNED) % (1 << 64)).to_bytes(8, "little")
    for start, size in ((0, 56), (tail, 72)):
        digest = xxhash.xxh3_64_intdigest(bytes(data[start : start + size]))
        data[start + size : start + size + 8] = digest.to_bytes(8, "little")
    return bytes(data)


# What it may do.


def held(read: Callable[[], object]) -> None:
    """See that nothing but a `CheckpointError` comes, in less than a second and 64 MiB."""
    before = peak(anew=True)
    gc.disable()  # it would walk all that the tests themselves keep
    try:
        start = time.process_time()
        with suppress(CheckpointError):
            read()
        took = time.process_time() - start
        tracemalloc.start()  # the second time: it makes reading slow
        with suppress(CheckpointError):
            read()
        traced = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert took < SECONDS
    assert traced < MEMORY
    assert peak() - before < MEMORY


def peak(*, anew: bool = False) -> int:
    """Return the peak of this process's memory, torch's in it; on Linux it can begin anew."""
    status = Path("/proc/self/status")
    if not status.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if anew:
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    found = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(found.split()[1]) * 1024


def read_everything(data: bytes) -> None:
    held(lambda: container.identify(io.BytesIO(data)))
    held(lambda: container.read_index(io.BytesIO(data)))
    held(lambda: container.read(io.BytesIO(data)))
    held(lambda: container.read_into(io.BytesIO(data), everything()))


def test_the_files_that_are_changed_are_whole() -> None:
    again = resealed(DATA, lambda index: index)
    assert again == DATA
    container.read(io.BytesIO(again))
    container.read_into(io.BytesIO(again), everything())
    assert Record.from_bytes(signed(PAYLOAD)) == RECORD


@pytest.mark.parametrize("size", [MEMORY // 2, MEMORY + (8 << 20)])
@pytest.mark.parametrize("allocate", [bytearray, lambda size: torch.ones(size, dtype=torch.uint8)])
def test_memory_is_seen(allocate: Callable[[int], Any], size: int) -> None:
    if size < MEMORY:
        held(lambda: allocate(size))
    else:
        with pytest.raises(AssertionError):
            held(lambda: allocate(size))


def test_other_errors_are_seen() -> None:
    with pytest.raises(ZeroDivisionError):
        held(lambda: 1 // 0)


@settings(LONG, max_examples=2500)
@given(restructured(INDEX))
def test_a_signed_index_with_other_parts(index: bytes) -> None:
    read_everything(resealed(DATA, lambda _: index))


@settings(LONG, max_examples=1500)
@given(rewritten(INDEX))
def test_a_signed_index_with_other_bytes(index: bytes) -> None:
    read_everything(resealed(DATA, lambda _: index))


@settings(LONG, max_examples=1000)
@given(ended())
def test_signed_ends_with_other_numbers(data: bytes) -> None:
    read_everything(data)


@settings(LONG, max_examples=1500)
@given(rewritten(DATA))
def test_a_segment_with_other_bytes(data: bytes) -> None:
    read_everything(data)


@settings(LONG, max_examples=3000)
@given(restructured(PAYLOAD) | rewritten(PAYLOAD))
def test_a_signed_record_with_other_parts(payload: bytes) -> None:
    held(lambda: Record.from_bytes(signed(payload)))


@settings(LONG, max_examples=1500)
@given(rewritten(RECORD.to_bytes()))
def test_a_record_with_other_bytes(data: bytes) -> None:
    held(lambda: Record.from_bytes(data))


def signed(payload: bytes) -> bytes:
    """Return a record whose checksum and length are right."""
    magic, version, _ = HEAD.unpack(RECORD.to_bytes()[: HEAD.size])
    head = HEAD.pack(magic, version, len(payload))
    return head + payload + xxhash.xxh3_128_digest(payload) + END
