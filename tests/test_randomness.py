"""Streams come back bit for bit, lanes leave them alone, and generators are found."""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from statetrain.persist import container, randomness
from statetrain.persist.compare import unequal
from statetrain.persist.randomness import Lane, generators

KINDS: dict[str, Callable[[], Any]] = {
    "python": lambda: random.Random(1),
    "torch": lambda: torch.Generator().manual_seed(1),
    "legacy": lambda: np.random.RandomState(1),
    "legacy pcg": lambda: np.random.RandomState(np.random.PCG64(1)),
    **{
        name: functools.partial(lambda kind: np.random.Generator(kind(1)), getattr(np.random, name))
        for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    },
}


def draw() -> list[float]:
    """Draw from all three, an odd number of normals too: half a pair is kept for the next call."""
    return [
        random.random(),
        random.gauss(),
        np.random.rand(),
        np.random.randn(),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def drawn(rng: Any, count: int = 5) -> list[float]:
    if isinstance(rng, torch.Generator):
        return [float(torch.randn((), generator=rng)) for _ in range(count)]
    if isinstance(rng, np.random.RandomState):
        return [rng.randn() for _ in range(count)]
    if isinstance(rng, np.random.Generator):
        return [int(rng.integers(9, dtype=np.int32)) + rng.normal() for _ in range(count)]
    return [rng.gauss() for _ in range(count)]


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    before = randomness.capture()
    randomness.seed_everything(7)
    yield
    randomness.restore(before)


def unmoved(before: dict[str, Any]) -> bool:
    return unequal(before, randomness.capture()) == []


@pytest.mark.parametrize("odd", [False, True])
def test_streams_come_back_bit_for_bit(odd: bool) -> None:
    if odd:
        draw()
    saved = randomness.capture()
    first = draw()
    randomness.restore(saved)
    assert draw() == first
    assert draw() != first


@pytest.mark.parametrize("left_out", ["python", "numpy", "torch"])
def test_a_stream_that_is_not_restored_is_noticed(left_out: str) -> None:
    saved = randomness.capture()
    first = draw()
    randomness.restore({**saved, left_out: randomness.capture()[left_out]})
    assert draw() != first


def test_seeding_everything_is_what_each_package_does_itself() -> None:
    randomness.seed_everything(3)
    found = draw()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    assert draw() == found


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**32, 2**63, 2**64 - 1, 2**64, -(2**70), 2**200])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    randomness.seed_everything(seed)
    first = draw()
    randomness.seed_everything(seed)
    assert draw() == first


@given(some.lists(some.integers() | some.text(max_size=3), max_size=3), some.integers(0, 3))
def test_a_lane_draws_what_its_key_says_and_moves_nothing(key: list[Any], before: int) -> None:
    for _ in range(before):
        draw()
    outside = randomness.capture()
    with Lane(*key):
        first = draw()
    assert unmoved(outside)
    draw()
    with Lane(*key):
        assert draw() == first


def test_a_lane_goes_on_where_it_was() -> None:
    with Lane("whole"):
        whole = [draw(), draw(), draw()]
    lane = Lane("whole")
    parts = []
    for _ in range(3):
        with lane:
            parts.append(draw())
        draw()
    assert parts == whole


def test_a_lane_is_moved_to_another_key_inside_and_outside() -> None:
    with Lane("a"):
        a = draw()
    lane = Lane("b")
    with lane:
        b = draw()
        lane.seed("a")
        assert draw() == a
    lane.seed("b")
    with lane:
        assert draw() == b


def test_keys_do_not_run_into_each_other() -> None:
    keys: list[tuple[Any, ...]] = [(), (1,), ("1",), (1, 1), (11,), ("1, 1",), (0, "a"), (0, "b")]
    found = []
    for key in keys:
        with Lane(*key):
            found.append(tuple(draw()))
    assert len(set(found)) == len(keys)


def test_lanes_stand_inside_each_other() -> None:
    with Lane("inner"):
        alone = draw()
    with Lane("outer"):
        outer = [draw(), draw()]
    before = randomness.capture()
    lane, same = Lane("outer"), Lane("inner")
    with lane:
        first = draw()
        with same, same:
            assert draw() == alone
        assert [first, draw()] == outer
    assert unmoved(before)


def fail_after(work: Callable[[], object]) -> None:
    work()
    raise KeyError(work.__name__)


def test_an_error_inside_a_lane_leaves_the_streams_where_they_were() -> None:
    draw()
    before = randomness.capture()
    lane = Lane("a")
    with pytest.raises(KeyError, match="draw"), lane:
        fail_after(draw)
    assert unmoved(before)


def test_a_lane_puts_a_bit_generator_of_the_users_back() -> None:
    kept = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        before = randomness.capture()
        with Lane("a"):
            first = draw()
            np.random.seed(0)
        assert unmoved(before)
    finally:
        np.random.set_bit_generator(kept)
    with Lane("a"):
        assert draw() == first


@pytest.mark.parametrize("when", ["seeded", "left", "inside"])
def test_a_lane_is_saved_and_goes_on_in_another(when: str) -> None:
    lane = Lane("a")
    if when != "seeded":
        with lane:
            draw()
            state = stored(lane.state_dict())
            inside = draw()
    if when != "inside":
        state = stored(lane.state_dict())
    other = Lane("another")
    other.load_state_dict(state)
    with lane, Lane("between"):
        pass
    with other:
        found = draw()
    if when == "inside":
        assert found == inside
    else:
        with lane:
            assert draw() == found


def stored(state: Any) -> Any:
    """Return what a checkpoint makes of it."""
    container.check(state)
    return state


def test_a_lane_that_does_not_last_is_seeded_before_each_use() -> None:
    lane = Lane("a", lasting=False)
    before = randomness.capture()
    with lane:
        first = draw()
    with pytest.raises(RuntimeError, match="is seeded before each use"), lane:
        pass
    assert unmoved(before)
    lane.seed("a")
    with lane:
        assert draw() == first


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_comes_back_bit_for_bit(kind: str) -> None:
    rng = KINDS[kind]()
    drawn(rng, 3)
    state = stored(randomness.state_of(rng))
    first = drawn(rng)
    randomness.set_state(rng, state)
    assert drawn(rng) == first
    other = KINDS[kind]()
    assert drawn(other) != first
    randomness.set_state(other, state)
    assert drawn(other) == first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_a_generator_is_seeded_in_place_whatever_it_did(kind: str, seed: int) -> None:
    rng, other = KINDS[kind](), KINDS[kind]()
    drawn(other, 3)
    randomness.reseed(rng, seed)
    randomness.reseed(other, seed)
    first = drawn(rng)
    assert drawn(other) == first
    randomness.reseed(rng, 1)
    assert drawn(rng) != first


# --- where generators are found

MADE = random.Random(0)
UNUSED = random.Random(0)
CALLED = types.SimpleNamespace(rng=random.Random(0))


class Transform:
    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __call__(self, value: float) -> float:
        return value + self.rng.random()


TRANSFORM = Transform()


def used_elsewhere() -> float:
    return MADE.random()


class Pair(NamedTuple):
    a: object
    b: object


class Slotted:
    __slots__ = ("rng",)

    def __init__(self, rng: object) -> None:
        self.rng = rng


class Held:
    def __init__(self, **held: object) -> None:
        self.__dict__.update(held)


class Lazy(Mapping[str, object]):
    """A mapping whose values cost something to read."""

    def __getitem__(self, key: str) -> object:
        raise AssertionError("read")

    def __iter__(self) -> Iterator[str]:
        return iter(("a",))

    def __len__(self) -> int:
        return 1


def closed_over(rng: random.Random) -> Callable[[], float]:
    return lambda: rng.random() + 1


def places(rng: random.Random) -> dict[str, object]:
    def default(x: object = rng) -> object:
        return x

    def keyword(*, x: object = rng) -> object:
        return x

    return {
        "itself": rng,
        "attribute": Held(a=rng),
        "nested": Held(a=Held(b=[{"c": (rng,)}])),
        "slot": Slotted(rng),
        "named tuple": Pair(1, rng),
        "deque": deque([rng]),
        "partial": functools.partial(print, rng, end=""),
        "closure": closed_over(rng),
        "default": default,
        "keyword": keyword,
        "method": Slotted(rng).__init__,
        "cycle": _cycle(rng),
        "module": _sequential(rng),
    }


def _cycle(rng: random.Random) -> object:
    a = Held(rng=rng)
    a.a = a
    return a


def _sequential(rng: random.Random) -> object:
    module = torch.nn.Sequential(torch.nn.Identity())
    module[0].rng = rng
    return module


@pytest.mark.parametrize("place", places(random.Random(0)))
def test_a_generator_is_found_in(place: str) -> None:
    rng = random.Random(0)
    assert [found for _, found in generators(places(rng)[place])] == [rng]


def in_a_comprehension() -> object:
    return [MADE.random() for _ in range(2)]


def by_a_function() -> object:
    return used_elsewhere()


def by_a_transform() -> object:
    return TRANSFORM(1.0)


def by_an_attribute_of_the_same_name() -> object:
    return CALLED.UNUSED


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (used_elsewhere, [MADE]),
        (in_a_comprehension, [MADE]),
        (by_a_function, [MADE]),
        (by_a_transform, [TRANSFORM.rng]),
        (by_an_attribute_of_the_same_name, []),
    ],
)
def test_a_global_generator_is_found_where_it_is_used(
    function: Any, expected: list[object]
) -> None:
    assert [rng for _, rng in generators(function)] == expected


def test_each_generator_is_found_once_and_not_in_what_is_skipped() -> None:
    a, b = random.Random(0), np.random.default_rng(0)
    inner = Held(b=b)
    assert [path for path, _ in generators(Held(a=[a, a], inner=inner, again=a))] == [
        "again",
        "inner.b",
    ]
    assert [path for path, _ in generators(Held(a=a, inner=inner), skip=[inner])] == ["a"]


def test_the_global_streams_are_no_generators_of_the_users() -> None:
    streams = [torch.default_generator, np.random.mtrand._rand, random._inst]  # type: ignore[attr-defined]
    assert generators([*streams, random.random, np.random.rand, random.SystemRandom()]) == []


def test_looking_for_generators_reads_no_data() -> None:
    assert generators(Held(a=Lazy(), b=range(10**9), c=np.zeros(3), d=torch.zeros(3))) == []


def test_looking_ends_in_a_big_tree() -> None:
    tree: Any = 0
    for _ in range(5000):
        tree = [tree]
    assert generators([tree, [[i] for i in range(10_000)]]) == []


# --- cuda's streams, in the place of which stand generators of the CPU: each device has one


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    found = [torch.Generator().manual_seed(i) for i in range(2)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(found))
    return found


@pytest.mark.parametrize("lasting", [True, False])
def test_a_lane_leaves_the_streams_of_devices_too(
    devices: list[torch.Generator], lasting: bool
) -> None:
    before = [rng.get_state() for rng in devices]
    lane = Lane("a", lasting=lasting)
    with lane:
        first = [drawn(rng) for rng in devices]
    assert unequal([rng.get_state() for rng in devices], before) == []
    for rng in devices:
        drawn(rng)
    lane.seed("a")
    with lane:
        assert [drawn(rng) for rng in devices] == first


def test_a_lane_goes_on_where_it_was_on_each_device(devices: list[torch.Generator]) -> None:
    with Lane("a"):
        whole = [[drawn(rng) for rng in devices] for _ in range(2)]
    lane, other = Lane("a"), Lane("b")
    with lane:
        assert [drawn(rng) for rng in devices] == whole[0]
    other.load_state_dict(stored(lane.state_dict()))
    for each in (lane, other):
        drawn(devices[0])
        with each:
            assert [drawn(rng) for rng in devices] == whole[1]


def test_a_device_that_is_first_used_inside_a_lane_is_exchanged_from_the_next_time_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, same = (torch.Generator().manual_seed(1) for _ in range(2))
    lane = Lane("a")
    with lane:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "default_generators", (rng,))
        assert drawn(rng) == drawn(same)
    assert drawn(rng) == drawn(same)
    with lane:
        drawn(rng)
    assert drawn(rng) == drawn(same)
