from __future__ import annotations

import io
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from statetrain.errors import CheckpointError
from statetrain.persist import container
from statetrain.persist.codec import DamagedError, pack, unpack
from statetrain.persist.compare import unequal
from statetrain.persist.record import Parent, Record, Shard, order_of

UUID = bytes(range(16))


def tree():
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return {
        "model": {"w": weight, "v": weight.t()},
        "rng": [2**70, (1, "x"), {3}],
        "a": np.arange(2000, dtype="<f8"),
        "s": np.float32(1),
        "d": {(1, 2): b"x"},
    }


def written(value, **options):
    file = io.BytesIO()
    segment = container.write(value, file, uuid=UUID, **options)
    return file.getvalue(), segment


def reading(data):
    return container.read(io.BytesIO(data))


def resealed(data, change):
    """The segment with its index changed, and every checksum made right again."""
    segment = container.identify(io.BytesIO(data))
    index = data[segment.index_off : segment.index_off + segment.index_len]
    index = change(index)
    tail = bytearray(data[-96:])
    tail[8:16] = len(index).to_bytes(8, "little")
    tail[16:24] = (segment.index_off + len(index) + 96).to_bytes(8, "little")
    tail[32:48] = xxhash.xxh3_128_digest(index)
    tail[72:80] = xxhash.xxh3_64_intdigest(bytes(tail[:72])).to_bytes(8, "little")
    return data[: segment.index_off] + index + bytes(tail)


def test_a_small_segment_has_its_frozen_bytes():
    data, segment = written({"w": torch.tensor([1.0, 2.0]), "n": (1, 2**64)})
    assert data[:64].hex() == HEADER
    assert data[64:72].hex() == "0000803f00000040"
    assert not any(data[72:4096])
    assert data[4096:-96].hex() == INDEX
    assert data[-96:].hex() == TRAILER
    assert len(data) == segment.nbytes == 4096 + segment.index_len + 96


def test_a_record_has_its_frozen_bytes():
    assert RECORD.to_bytes().hex() == RECORD_BYTES
    assert Record.from_bytes(bytes.fromhex(RECORD_BYTES)) == RECORD


def test_a_record_is_named_and_ordered_by_generation_save_and_writer():
    assert RECORD.id == "g000002-n000003-s000000000007-0badcafe"
    assert order_of(RECORD.id) == RECORD.order == (2, 3, "0badcafe")
    assert order_of("LATEST") is None


def test_the_same_tree_gives_the_same_bytes():
    assert written(tree())[0] == written(tree())[0]
    other = io.BytesIO()
    container.write(tree(), other)
    assert other.getvalue() != written(tree())[0]  # the uuid is random unless given


def test_check_says_what_write_takes():
    assert container.check(tree()) == written(tree())[1].nbytes


class Counting:
    """A pipe: it only goes forward, takes less than it is given, and knows the largest slice."""

    def __init__(self, most):
        self.most, self.largest, self.data = most, 0, bytearray()

    def write(self, data):
        self.largest = max(self.largest, len(data))
        self.data += data[: self.most]
        return min(len(data), self.most)


@pytest.mark.parametrize("most", [1 << 30, 100_000])
def test_writing_is_one_forward_pass_of_slices(most):
    value = {"big": torch.arange(5 << 20, dtype=torch.int32), "small": torch.ones(3)}
    sink = Counting(most)
    segment = container.write(value, sink)
    assert sink.largest <= 8 << 20
    assert segment.nbytes == len(sink.data)
    back = reading(bytes(sink.data))
    assert torch.equal(back["big"], value["big"])


def test_large_blobs_begin_on_pages():
    data, segment = written([torch.ones(3), torch.ones(1 << 19), torch.ones(3)])
    index = unpack(data[segment.index_off : segment.index_off + segment.index_len])
    assert [offset for offset, *_ in index["blobs"]] == [64, 4096, 4096 + (1 << 21)]
    assert segment.index_off % 4096 == 0


def test_the_index_is_read_without_the_data():
    data, segment = written(tree())
    broken = bytearray(data)
    broken[64:5000] = bytes(4936)  # the tensors' bytes are gone
    index = container.read_index(io.BytesIO(bytes(broken)))
    assert index.segment == segment == container.identify(io.BytesIO(data))
    w = index.tensors["model/w"]
    assert (w.dtype, w.shape, w.stride, w.device) == ("float32", (2, 3), (3, 1), "cpu")
    assert index.tree["model"]["v"].storage == w.storage
    assert index.tree["a"].shape == (2000,)
    assert index.tree["rng"] == [2**70, (1, "x"), {3}]
    with pytest.raises(DamagedError, match="not what was written"):
        reading(bytes(broken))


# damage


def test_every_flipped_byte_outside_the_data_is_noticed():
    data, segment = written({"w": torch.arange(4), "x": [1, "a"]})
    assert reading(data)["x"] == [1, "a"]  # the control: whole, it reads
    for at in [*range(64), *range(64, 4096, 61), *range(segment.index_off, len(data))]:
        for flip in (0x01, 0x80):
            bad = bytearray(data)
            bad[at] ^= flip
            with pytest.raises(CheckpointError):
                reading(bytes(bad))


def test_every_flipped_data_byte_is_noticed():
    data, _ = written({"w": torch.arange(16)})
    for at in range(64, 64 + 128):
        bad = bytearray(data)
        bad[at] ^= 4
        with pytest.raises(DamagedError, match="not what was written"):
            reading(bytes(bad))


def test_every_truncation_is_noticed():
    data, segment = written(tree())
    cuts = [
        0,
        1,
        63,
        64,
        159,
        160,
        *range(200, len(data), 997),
        *range(segment.index_off, len(data)),
    ]
    for cut in cuts:
        with pytest.raises(DamagedError):
            reading(data[:cut])
    with pytest.raises(DamagedError):
        reading(data + b"\0")


def test_a_lost_extent_is_noticed():
    data, segment = written({"w": torch.randn(5 << 20)})
    half = len(data) // 2
    bad = data[:half] + bytes(segment.index_off - half) + data[segment.index_off :]
    with pytest.raises(DamagedError, match="not what was written"):
        reading(bad)


def test_two_segments_cannot_be_spliced():
    one, _ = written({"w": torch.zeros(4)})
    other = io.BytesIO()
    container.write({"w": torch.zeros(4)}, other, uuid=bytes(16))
    with pytest.raises(DamagedError, match="two segments"):
        reading(one[:64] + other.getvalue()[64:])


def test_a_newer_format_is_not_called_damage():
    data = bytearray(written(1)[0])
    data[8] = 2
    data[56:64] = xxhash.xxh3_64_intdigest(bytes(data[:56])).to_bytes(8, "little")
    with pytest.raises(CheckpointError, match="upgrade") as error:
        reading(bytes(data))
    assert not isinstance(error.value, DamagedError)


def test_random_changes_to_a_sealed_index_only_ever_raise_checkpoint_errors():
    rng = random.Random(1)
    data, _ = written(tree())

    def change(index):
        index = bytearray(index)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(index))
            match rng.randrange(3):
                case 0:
                    index[at] = rng.randrange(256)
                case 1:
                    del index[at]
                case 2:
                    index.insert(at, rng.choice([0xDD, 0xDF, 0xC6, 0x91, 0xFF, 0]))
        return bytes(index)

    refused = 0
    tracemalloc.start()
    for _ in range(2000):
        try:
            reading(resealed(data, change))
        except CheckpointError:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 1500  # a changed name or number may still be a valid tree
    assert peak < 64 << 20


def edit(key, place, value):
    def change(index):
        parts = unpack(index)
        target = parts[key]
        for step in place[:-1]:
            target = target[step]
        if place:
            target[place[-1]] = value
        else:
            parts[key] = value
        return pack(parts)

    return change


@pytest.mark.parametrize(
    "change",
    [
        edit("blobs", (0, 1), 1 << 40),  # bytes that the file does not have
        edit("blobs", (0, 1), -1),
        edit("blobs", (1, 0), 64),  # two blobs over the same bytes
        edit("blobs", (0, 0), 65),
        edit("blobs", (0, 0), 0),
        edit("blobs", (0, 3), "other"),
        edit("storages", (0, 0), 1),
        edit("storages", (0, 0), 9),
        edit("storages", (0, 0), None),
        edit("storages", (0, 1), 1 << 50),
        edit("storages", (0, 2), 5),
        edit("tensors", (0, 0), 7),
        edit("tensors", (0, 0), -1),
        edit("tensors", (0, 1), "float1"),
        edit("tensors", (0, 1), "complex128"),
        edit("tensors", (0, 2, 0), 1000),  # set_() would grow the storage with what lies there
        edit("tensors", (0, 2, 0), 1 << 62),
        edit("tensors", (0, 2, 0), -1),
        edit("tensors", (0, 3, 0), 1 << 61),
        edit("tensors", (0, 3, 0), -3),
        edit("tensors", (0, 4), 1),
        edit("tensors", (0, 4), 1 << 63),
        edit("tensors", (0, 5), 4),  # conj of a real tensor
        edit("tensors", (0, 5), 64),
        edit("tensors", (0, 2), [1] * 70),
        edit("names", ("model/w",), 99),
        edit("chunks", (), b""),
        edit("chunks", (), bytes(16)),
        edit("v", (), 2),
        edit("seg", (), bytes(16)),
        edit("tree", (), {1.5: 1}),
    ],
)
def test_a_lying_index_is_damage(change):
    data, _ = written(tree())
    assert reading(resealed(data, lambda index: index))  # the control: resealing is not what fails
    with pytest.raises(DamagedError):
        reading(resealed(data, change))


def test_a_damaged_record_is_damage():
    data = RECORD.to_bytes()
    for cut in range(len(data)):
        with pytest.raises(DamagedError):
            Record.from_bytes(data[:cut])
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 0x10
        with pytest.raises(CheckpointError):
            Record.from_bytes(bytes(bad))


def test_a_record_does_not_lead_out_of_its_store():
    shard = RECORD.shards[0]
    for path in ("/etc/passwd", "data/../../x", "commits/x", "data//x", "data/a\\b"):
        evil = replace(RECORD, shards=(replace(shard, path=path),))
        with pytest.raises(DamagedError, match="outside the store"):
            Record.from_bytes(evil.to_bytes())


RECORD = Record(
    run_id="0123456789abcdef",
    gen=2,
    save=3,
    uid="0badcafe",
    step=7,
    state="step",
    parent=Parent(id="g000002-n000002-s000000000006-0badcafe", digest=bytes(16)),
    created=1.5,
    versions={"torch": "2.4"},
    shards=(
        Shard(path="data/x/r00000.000.sts", nbytes=99, index_off=9, index_len=8, index_digest=UUID),
    ),
    tags=("final",),
)
HEADER = (
    "895354530d0a1a0a0100000000000000000102030405060708090a0b0c0d0e0f40000000000000000000800000"
    "00000000000000000000003ff264ad0733ce0e"
)
INDEX = (
    "88a17601a3736567c410000102030405060708090a0b0c0d0e0fa66368756e6b73c4104533ce61c4655ba3c3e0"
    "77b25dd1d769a5626c6f627391944008c0c0a873746f726167657391930008a3637075a774656e736f72739197"
    "00a7666c6f61743332910291010000c0a56e616d657381a17700a47472656582a177d60100000000a16e93c700"
    "2001c70903000000000000000001"
)
TRAILER = (
    "00100000000000009500000000000000f510000000000000480000000000000079e6960430f5aaac784ecc4856"
    "62b209000102030405060708090a0b0c0d0e0f0100000000000000e3ff94d3e904a0b000000000000000005354"
    "53454e440d0a"
)
RECORD_BYTES = (
    "895354430d0a1a0a010000003d0100008fa672756e5f6964b030313233343536373839616263646566a26964d9"
    "26673030303030322d6e3030303030332d733030303030303030303030372d3062616463616665a367656e02a4"
    "7361766503a3756964a83062616463616665a47374657007a966736d5f7374617465a473746570a6706172656e"
    "7482a26964d926673030303030322d6e3030303030322d733030303030303030303030362d3062616463616665"
    "a6646967657374c41000000000000000000000000000000000a5776f726c6401a763726561746564cb3ff80000"
    "00000000a876657273696f6e7381a5746f726368a3322e34a67368617264739197b5646174612f782f72303030"
    "30302e3030302e737473630908c410000102030405060708090a0b0c0d0e0f00a372756ea865787465726e616c"
    "90a364637080a47461677391a566696e616ce7d4bc43240c659431584e9e7a11c928535443454e440d0a"
)


def live() -> dict[str, Any]:
    base = torch.zeros(40, 30)
    return {"a": base, "view": base[2:5], "b": [torch.zeros(7, dtype=torch.bfloat16)]}


def test_live_tensors_get_the_values_where_they_are() -> None:
    wanted, here, file = live(), live(), io.BytesIO()
    wanted["a"].normal_()
    wanted["b"][0].fill_(1.5)
    places = here["a"].data_ptr(), here["b"][0].data_ptr()
    container.write(wanted, file)
    container.read_into(file, here)
    assert unequal(here, wanted) == []
    assert (here["a"].data_ptr(), here["b"][0].data_ptr()) == places


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(40, 31), "view": torch.zeros(3, 30), "b": [torch.zeros(7)]},
        {**live(), "view": torch.zeros(3, 30)},  # it shares no memory
        {**live(), "c": torch.zeros(2)},
    ],
)
def test_live_tensors_that_are_others_stay_as_they_are(other: dict[str, Any]) -> None:
    file, wanted = io.BytesIO(), live()
    wanted["a"].normal_()
    container.write(wanted, file)
    with pytest.raises(CheckpointError, match="are not those of the tree"):
        container.read_into(file, other)
    assert not other["a"].any()


def test_nothing_live_changes_where_a_byte_is_damaged() -> None:
    file, wanted, here = io.BytesIO(), live(), live()
    wanted["b"][0].fill_(1.5)
    segment = container.write(wanted, file)
    data = bytearray(file.getvalue())
    data[segment.index_off - 70] ^= 1
    with pytest.raises(DamagedError):
        container.read_into(io.BytesIO(bytes(data)), here)
    assert unequal(here, live()) == []


def test_a_message_is_not_as_long_as_what_is_damaged() -> None:
    assert len(str(DamagedError("x" * 10_000))) == 501
    assert str(DamagedError("short")) == "short"
