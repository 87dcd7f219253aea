from __future__ import annotations

import dataclasses
import datetime
import enum
import io
import math
import random
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from statetrain.errors import CheckpointError
from statetrain.persist import container
from statetrain.persist.codec import DamagedError, Decoder, pack, register, unpack
from statetrain.persist.tensors import DTYPES


def stored(tree):
    file = io.BytesIO()
    container.write(tree, file)
    return container.read(file)


def same(a, b):
    """Equal, of equal types, NaN and signed zero told apart by their bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    return bool(a == b)


def raw(tensor):
    view = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return view.numpy().tobytes()


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Bits(enum.IntFlag):
    A = 1
    B = 2


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    where: object = None


Pair = namedtuple("Pair", "left right")


class Counted:
    def __init__(self, n):
        self.n = n


class Unknown:
    pass


register(Color, "test.color")
register(Bits, "test.bits")
register(Point, "test.point")
register(Pair, "test.pair")
register(Counted, "test.counted", to_state=lambda c: {"n": c.n}, from_state=lambda s: Counted(**s))

UTC = datetime.UTC
VALUES = [
    *[None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**64), 2**1000, -(2**71)],
    *[0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 0.1],
    *["", "plain", "\u00fc\U0001f600", "\ud800 alone", b"", b"\x00\xff"],
    *[[], [1, [2]], {}, {"a": 1, 3: 2}, (), (1, (2,)), set(), {1, "a", (2, 3)}, frozenset({1})],
    *[{(1, 2): 3, None: 4, 1.5: 5, True: 6, "\ud800": 7, 2**70: 8}, {frozenset({1}): {2}}],
    *[deque([1, 2], maxlen=5), deque(), OrderedDict(b=1, a=2), Counter("abca")],
    *[defaultdict(list, {1: [2]}), defaultdict(None), defaultdict(int, a=1)],
    *[1 + 2j, complex(-0.0, math.nan), bytearray(b"abc")],
    *[torch.float32, torch.bfloat16, torch.device("cuda:3"), torch.device("cpu")],
    *[torch.Size([1, 2]), torch.Size([])],
    *[datetime.date(2024, 2, 29), datetime.timedelta(-1, 5, 7)],
    *[datetime.datetime(2024, 1, 2, 3, 4, 5, 6, fold=1), datetime.datetime(2024, 1, 2, tzinfo=UTC)],
    *[Path("/a/b"), PurePosixPath("x"), PureWindowsPath("c:\\x")],
    *[slice(None), slice(1, None, -2), range(3), range(5, 1, -2)],
    *[Decimal("1.50"), Decimal("-Infinity"), uuid.UUID(int=5), Fraction(-1, 3)],
    *[Color.RED, Color.BLUE, Bits.A | Bits.B, Bits(0), Point(1.5, [1]), Pair(1, [2])],
    *[np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), np.str_("x"), np.str_("")],
    *[np.datetime64("2024-01-01"), np.float64(-0.0), np.uint8(3), np.float16(2)],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_a_value_comes_back_equal_and_of_its_type(value):
    assert same(stored(value), value)
    assert same(stored({"in": [value]}), {"in": [value]})


def test_a_default_dict_and_a_deque_keep_factory_and_length():
    back = stored([defaultdict(list), deque([1], 3), OrderedDict(b=1, a=2)])
    assert back[0].default_factory is list
    assert back[1].maxlen == 3
    assert list(back[2]) == ["b", "a"]


def test_the_name_of_a_time_zone_is_kept():
    zone = datetime.timezone(datetime.timedelta(hours=1), "here")
    back = stored(datetime.datetime(2024, 1, 2, tzinfo=zone))
    assert (back.tzname(), back.utcoffset()) == ("here", datetime.timedelta(hours=1))


def test_a_registered_class_comes_back_through_its_functions():
    back = stored({"c": Counted(5)})["c"]
    assert type(back) is Counted
    assert back.n == 5


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers()
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.datetimes()
    | st.timedeltas()
    | st.uuids()
)
KEYS = st.one_of(
    st.text(st.characters()), st.integers(), st.tuples(st.integers(), st.text()), st.binary()
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(inner, max_size=4).map(deque)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_any_tree_comes_back_the_same(tree):
    assert same(stored(tree), tree)
    assert container.check(tree) == container.write(tree, io.BytesIO()).nbytes


def test_equal_sets_have_equal_bytes():
    files = [io.BytesIO(), io.BytesIO()]
    words = [f"w{i}" for i in range(50)]
    for file, order in zip(files, [words, words[::-1]], strict=True):
        container.write(set(order), file, uuid=bytes(16))
    assert files[0].getvalue() == files[1].getvalue()


def test_what_is_shared_is_shared_again():
    inner, key = [1], (1, 2)
    array = np.arange(3)
    tree = {"a": inner, "b": inner, "c": (inner, [1]), "d": {key: inner}, "e": [array, array]}
    back = stored(tree)
    assert back["a"] is back["b"] is back["c"][0] is back["d"][key]
    assert back["c"][1] is not back["a"]  # equal, but another list
    assert back["e"][0] is back["e"][1]


def test_sharing_does_not_multiply():
    value = ()
    for _ in range(100):
        value = (value, value)
    assert container.check(value) < 10_000
    back = stored(value)
    assert back[0] is back[1]


def test_a_cycle_is_refused_with_its_place():
    loop = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(CheckpointError, match=r"cannot store a\[0\]: it contains itself"):
        container.check(loop)


def test_depth_is_limited_and_named():
    deep = []
    for _ in range(127):
        deep = [deep]
    assert stored(deep) == deep
    with pytest.raises(CheckpointError, match="deeper than 128"):
        container.check([deep])


class Str(str):
    __slots__ = ()


class Int(int):
    pass


class Dict(dict):
    pass


class Tensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Unknown(), "Unknown"),
        (Str("x"), "Str"),
        (Int(1), "Int"),
        (Dict(), "Dict"),
        (torch.ones(2).as_subclass(Tensor), "Tensor"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (random.SystemRandom(), "SystemRandom"),
        (len, "builtin_function_or_method"),
    ],
)
def test_an_unknown_type_is_refused_where_it_lies(value, name):
    tree = {"optimizer": {"state": {3: {"foo": value, "b c": 1}}}}
    with pytest.raises(CheckpointError) as error:
        container.check(tree)
    assert str(error.value) == (
        f"cannot store optimizer.state[3].foo: type {name} is not known; statetrain.register"
        f"({name}, {name.lower()!r}) it, or keep it out of the state"
    )
    file = io.BytesIO()
    with pytest.raises(CheckpointError):
        container.write(tree, file)
    assert file.getvalue() == b""  # refused before the first byte


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.array([object()]), "plain bytes"),
        (np.zeros(2, dtype="i4,f4"), "plain bytes"),
        (defaultdict(lambda: 3), "factory"),
        (torch.ones(2, requires_grad=True) * 2, "autograd graph"),
        (datetime.datetime(2024, 1, 1, tzinfo=datetime.tzinfo()), "fixed offset"),
    ],
)
def test_what_cannot_be_stored_exactly_says_why(value, why):
    with pytest.raises(CheckpointError, match=why):
        container.check({"x": value})


def test_registering_twice_under_one_name_is_refused():
    with pytest.raises(CheckpointError, match="is taken by Counted"):
        register(Unknown, "test.counted", to_state=vars, from_state=lambda s: Unknown())
    with pytest.raises(CheckpointError, match="give to_state="):
        register(Unknown, "test.unknown")
    with pytest.raises(CheckpointError, match="registered already"):
        register(Point, "test.point2")


def test_attributes_that_are_no_fields_are_not_lost_in_silence():
    @dataclasses.dataclass
    class Loose:
        x: int

    register(Loose, "test.loose")
    value = Loose(1)
    assert stored(value) == value
    value.y = 2
    with pytest.raises(CheckpointError, match=r"cannot store v: .*Loose has attributes .*\(y\)"):
        container.check({"v": value})


def test_a_class_of_another_version_is_upgraded_or_refused():
    def define(version, **options):
        class Versioned:
            pass

        def build(state):
            value = Versioned()
            value.state = state
            return value

        Versioned.__qualname__ = "Versioned"
        register(
            Versioned,
            "test.versioned",
            version=version,
            to_state=lambda v: {"v": 1},
            from_state=build,
            **options,
        )
        return Versioned

    file = io.BytesIO()
    container.write(define(1)(), file)
    define(2)
    with pytest.raises(CheckpointError, match="version 1 and is version 2 here") as error:
        container.read(file)
    assert not isinstance(error.value, DamagedError)
    define(2, upgrade=lambda state, old: {**state, "from": old})
    assert container.read(file).state == {"v": 1, "from": 1}


def test_a_class_unknown_at_reading_is_named_and_can_be_shown():
    from statetrain.persist import registry

    class Gone:
        pass

    register(Gone, "test.gone", to_state=lambda g: 5, from_state=lambda s: Gone())
    file = io.BytesIO()
    container.write([Gone()], file)
    del registry._by_name["test.gone"], registry._by_class[Gone]
    with pytest.raises(CheckpointError, match=r"'test.gone'.*register"):
        container.read(file)
    shown = container.read_index(file).tree[0]
    assert (shown.kind, shown.parts) == ("test.gone", (1, 5))


# random number generators


def test_generators_go_on_where_they_were():
    mine = [random.Random(3), np.random.default_rng(4), np.random.RandomState(5)]
    mine += [np.random.Generator(kind(6)) for kind in (np.random.MT19937, np.random.Philox)]
    mine += [np.random.Generator(kind(7)) for kind in (np.random.SFC64, np.random.PCG64DXSM)]
    for rng in mine:
        rng.random()
    mine[0].gauss(0, 1)  # leaves a spare one behind
    back = stored(mine)
    assert [r.random() for r in back] == [r.random() for r in mine]
    assert back[0].gauss(0, 1) == mine[0].gauss(0, 1)
    theirs = torch.Generator().manual_seed(3)
    torch.rand(3, generator=theirs)
    again = stored(theirs)
    assert torch.equal(torch.rand(5, generator=again), torch.rand(5, generator=theirs))


def test_a_numpy_generator_spawns_the_same_children():
    rng = np.random.default_rng(5)
    rng.spawn(2)
    back = stored(rng)
    assert back.spawn(1)[0].random() == rng.spawn(1)[0].random()


# arrays


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "<u8", ">i4", "f2", "f8", "c8", "<U3", "S2", "M8[ns]"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 4), (100, 200)])
def test_an_array_comes_back_with_its_order_and_bytes(dtype, shape):
    array = np.arange(math.prod(shape)).reshape(shape)
    array = array.astype("i8").astype(dtype) if dtype != "M8[ns]" else array.astype("M8[ns]")
    for made in (array, np.asfortranarray(array), array[::-1] if shape else array):
        back = stored({"a": made})["a"]
        assert (back.dtype, back.shape) == (made.dtype, made.shape)
        assert back.tobytes() == made.tobytes()
        assert back.flags.f_contiguous == (made.flags.f_contiguous)
        assert back.flags.writeable


# tensors


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_comes_back_bit_for_bit(name):
    dtype = DTYPES[name]
    if name.startswith("q"):
        pytest.skip("quantised tensors are refused")
    bits = torch.arange(256, dtype=torch.int16).to(torch.uint8).repeat(16)
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(bits.untyped_storage(), 0, (4096 // tensor.itemsize,), (1,))
    back = stored({"t": tensor})["t"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert raw(back) == raw(tensor)  # booleans other than 0 and 1 and NaNs too


LAYOUTS = {
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.randn(3, 4).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(3, 1).expand(3, 1000),
    "overlapping": lambda: torch.randn(10).as_strided((4, 4), (1, 2)),
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "offset": lambda: torch.randn(1000)[777:780],
    "empty view": lambda: torch.randn(10)[5:5],
    "bytes view": lambda: torch.arange(6, dtype=torch.uint8)[:4].view(torch.float32),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_kept(name):
    tensor = LAYOUTS[name]()
    back = stored({"t": tensor})["t"]
    assert (back.shape, back.stride(), back.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert (back.is_conj(), back.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert torch.equal(back, tensor)
    if back.numel():  # the same place in a cache line, so kernels take the same path
        assert back.data_ptr() % 64 == tensor.data_ptr() % 64


def test_tied_tensors_are_tied_again():
    weight = torch.nn.Parameter(torch.randn(4, 4))
    tree = {"w": weight, "again": weight, "view": weight.detach()[1:3], "bytes": torch.ones(3)}
    back = stored(tree)
    assert back["w"] is back["again"]
    assert type(back["w"]) is torch.Tensor
    assert back["w"].requires_grad
    assert back["w"].is_leaf
    assert not back["view"].requires_grad
    with torch.no_grad():
        back["w"].fill_(7)
    assert torch.equal(back["view"], torch.full((2, 4), 7.0))
    assert not torch.equal(weight.detach()[1:3], back["view"])  # fresh memory, not the old one


def test_a_small_view_does_not_drag_its_storage_along():
    big = torch.randn(1 << 18)
    size = container.check({"a": big[5000:5010], "b": big[5005:5008]})
    assert size < 8192
    assert container.check({"a": big[: 1 << 17]}) > 1 << 19  # half of it: kept whole, and simple
    back = stored({"a": big[5000:5010], "b": big[5005:5008]})
    back["a"].fill_(1)
    assert back["b"].tolist() == [1, 1, 1]


def test_storages_are_aligned_and_owned():
    back = stored([torch.randn(n) for n in (1, 100, 400_000)])
    assert [t.data_ptr() % 64 for t in back] == [0, 0, 0]
    assert [t.untyped_storage().nbytes() for t in back] == [4, 400, 1_600_000]


def test_a_meta_tensor_is_its_description():
    back = stored(torch.empty(1 << 40, 4, device="meta"))
    assert (back.device.type, back.shape) == ("meta", (1 << 40, 4))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_come_back():
    coo = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    dense = torch.tensor([[0.0, 1], [2, 0], [0, 0], [3, 4]])
    all_of = [coo, coo.coalesce(), dense.to_sparse_csr(), dense.to_sparse_csc()]
    all_of += [dense.to_sparse_bsr((2, 2)), dense.to_sparse_bsc((2, 2))]
    for tensor, back in zip(all_of, stored(all_of), strict=True):
        assert back.layout == tensor.layout
        assert torch.equal(back.to_dense(), tensor.to_dense())
    again = stored([coo, coo])
    assert again[0] is again[1]
    assert not again[0].is_coalesced()
    assert again[0]._nnz() == 3


@pytest.mark.filterwarnings("ignore")  # torch means to remove them
def test_quantised_and_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for tensor, why in [
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised"),
        (nested, "nested"),
    ]:
        with pytest.raises(CheckpointError, match=f"cannot store t: it is .*{why}"):
            container.check({"t": tensor})


# hostile plain values


def decoded(plain):
    def nothing(*_):
        raise IndexError

    return Decoder(nothing, nothing).decode(unpack(pack(plain)))


@pytest.mark.parametrize(
    "data",
    [
        b"\x82\xa1a\x01\xa1a\x02",  # a key twice
        b"\xdd\xff\xff\xff\xff",  # four billion elements in five bytes
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 2000 + b"\xc0",  # nested without end
        b"\x91" * 500 + b"\xc0",
        b"\xc0\xc0",  # more than one value
        b"",
        b"\xc1",
        b"\xa1\xff",  # no utf-8
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\xd4\x63\x00",  # an unknown extension
        b"\x92\xd4\x01\x00\x00",  # a short tensor reference
    ],
)
def test_hostile_bytes_are_damage(data):
    with pytest.raises(DamagedError):
        decoded_bytes(data)


def decoded_bytes(data):
    def nothing(*_):
        raise IndexError

    return Decoder(nothing, nothing).decode(unpack(data))
