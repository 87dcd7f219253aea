from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import gan, interrupt, rich

import statetrain as st
from statetrain.cli.main import main
from statetrain.persist import container
from statetrain.persist.compare import unequal
from statetrain.persist.store import Store
from statetrain.persist.tensors import DTYPES

PROGRAMS = {"rich": rich, "gan": gan}


def saved(url: str | Path, tree: object) -> str:
    Store(url).save(lambda file: container.write(tree, file), step=0, state="work")
    return str(url)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def diff(capsys: pytest.CaptureFixture[str], tmp_path: Path, a: object, b: object) -> list[str]:
    """Return what is said of two trees, but for the two lines that name the checkpoints."""
    number = len([*tmp_path.iterdir()])
    urls = saved(tmp_path / f"{number}a", a), saved(tmp_path / f"{number}b", b)
    code = main(["diff", *urls, "--values"])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert [line[:2] for line in lines[:2]] == ["A:", "B:"]
    assert (code == 0) == lines[-1].startswith("the same, bit for bit: ")
    return lines[2:]


def parsed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> Any:
    assert main(["diff", *arguments, "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def nan(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


PAIRS: dict[str, tuple[Any, Any, list[str]]] = {
    "a counter": (3, 4, ["x: 3 in A, 4 in B"]),
    "a text": ("a\n", "b", ["x: 'a\\n' in A, 'b' in B"]),
    "a zero's sign": (0.0, -0.0, ["x: 0.0 in A, -0.0 in B"]),
    "a type": (1, 1.0, ["x: 1 in A, 1.0 in B"]),
    "a bool": (True, 1, ["x: True in A, 1 in B"]),
    "none": (None, {"y": 1}, ["x: None in A, dict of 1 in B"]),
    "a list": ([1, 2], [1], ["x/1: only in A: 2"]),
    "a key": ({"y": {}}, {"z": 1}, ["x/y: only in A: dict of 0", "x/z: only in B: 1"]),
    "a mapping": ({"y": 1}, OrderedDict(y=1), ["x: dict of 1 in A, OrderedDict of 1 in B"]),
    "a deque": (
        deque([1], 2), deque([1], 3), ["x: deque of at most 2 in A, deque of at most 3 in B"],
    ),
    "a set": ({1, 2.0}, {1, 2}, ["x: set [1, 2.0] in A, set [1, 2] in B"]),
    "a numpy scalar": (np.int8(1), np.int8(2), ["x: np.int8(1) in A, np.int8(2) in B"]),
    "a dtype": (
        torch.zeros(3), torch.zeros(3, dtype=torch.float64),
        ["x: float32 [3] in A, float64 [3] in B"],
    ),
    "a shape": (torch.zeros(3), torch.zeros(3, 1), ["x: float32 [3] in A, float32 [3, 1] in B"]),
    "strides": (
        torch.zeros(2, 2), torch.zeros(2, 2).t(),
        ["x: float32 [2, 2] with strides [2, 1] in A, float32 [2, 2] with strides [1, 2] in B, "
         "and the same bits"],
    ),
    "a gradient": (
        torch.zeros(2), torch.zeros(2, requires_grad=True),
        ["x: float32 [2] with strides [1] in A, float32 [2] with strides [1] that requires a "
         "gradient in B, and the same bits"],
    ),
    "an array and a tensor": (
        np.zeros(2000), torch.zeros(2000, dtype=torch.float64),
        ["x: array <f8 [2000] in A, tensor float64 [2000] in B"],
    ),
    "floats": (
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.5], [3.0, 3.0]]),
        ["x: float32 [2, 2]: 2 of 4 elements differ, by up to 1",
         "  [0, 1]: 2.0 in A, 2.5 in B", "  [1, 1]: 4.0 in A, 3.0 in B"],
    ),
    "transposed floats": (
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(), torch.tensor([[1.0, 2.0], [3.0, 4.5]]).t(),
        ["x: float32 [2, 2]: 1 of 4 elements differ, by up to 0.5", "  [1, 1]: 4.0 in A, 4.5 in B"],
    ),
    "expanded floats": (
        torch.zeros(1).expand(1 << 40), torch.ones(1).expand(1 << 40),
        ["x: float32 [1099511627776]: 1,099,511,627,776 of 1,099,511,627,776 elements differ, "
         "by up to 1", "  [0]: 0.0 in A, 1.0 in B"],
    ),
    "a scalar": (
        torch.tensor(1.0), torch.tensor(2.0),
        ["x: float32 []: 1.0 in A, 2.0 in B"],
    ),
    "zeros' signs": (
        torch.zeros(2), torch.tensor([0.0, -0.0]),
        ["x: float32 [2]: 1 of 2 elements differ, 1 of them in bits alone (-0.0, or NaNs)",
         "  [1]: 0.0 in A, -0.0 in B"],
    ),
    "NaNs": (
        torch.cat([nan(0x7FC00000), torch.tensor([float("nan"), 1.0])]),
        torch.cat([nan(0x7FC00001), torch.tensor([1.0, 1.25])]),
        ["x: float32 [3]: 3 of 3 elements differ, by up to 0.25, 1 of them NaN in one alone, "
         "1 of them in bits alone (-0.0, or NaNs)",
         "  [0]: nan (0x7fc00000) in A, nan (0x7fc00001) in B",
         "  [1]: nan in A, 1.0 in B", "  [2]: 1.0 in A, 1.25 in B"],
    ),
    "infinities": (
        torch.tensor([float("inf")]), torch.tensor([-float("inf")]),
        ["x: float32 [1]: 1 of 1 elements differ, by up to inf", "  [0]: inf in A, -inf in B"],
    ),
    "integers": (
        torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]),
        [f"x: int64 [1]: 1 of 1 elements differ, by up to {2**64 - 1}",
         f"  [0]: {-(2**63)} in A, {2**63 - 1} in B"],
    ),
    "bools": (
        torch.tensor([True, False]), torch.tensor([True, True]),
        ["x: bool [2]: 1 of 2 elements differ, by up to 1", "  [1]: False in A, True in B"],
    ),
    "a small array": (
        np.array([1, 2], ">i2"), np.array([1, 300], ">i2"),
        ["x: >i2 [2]: 1 of 2 elements differ, by up to 298", "  [1]: 2 in A, 300 in B"],
    ),
    "a large array": (
        np.zeros((2, 1500), order="F"), np.eye(2, 1500),
        ["x: float64 [2, 1500]: 2 of 3,000 elements differ, by up to 1",
         "  [0, 0]: 0.0 in A, 1.0 in B", "  [1, 1]: 0.0 in A, 1.0 in B"],
    ),
    "texts": (
        np.array(["ab", "c"]), np.array(["ab", "d"]),
        ["x: <U2 [2]: 1 of 2 elements differ", "  [1]: c in A, d in B"],
    ),
    "a generator": (
        torch.Generator().manual_seed(1), torch.Generator().manual_seed(2),
        ["x: another state of a random stream"],
    ),
    "python's generator": (
        random.Random(1), random.Random(2), ["x: another state of a random stream"],
    ),
    "numpy's generator": (
        np.random.default_rng(1), np.random.default_rng(2), ["x: another state of a random stream"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_difference_is_told_in_its_words(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, words = PAIRS[name]
    assert diff(capsys, tmp_path, {"x": a, "y": [1.0]}, {"x": b, "y": [1.0]})[:-1] == words
    for same in (a, b):  # the control
        assert len(diff(capsys, tmp_path, {"x": same}, {"x": same})) == 1


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if not dtype.startswith("q")])
def test_one_bit_is_found_in_each_dtype(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    width = DTYPES[dtype].itemsize
    data = bytearray(3 * width)
    sides = []
    for last in (0, 1):
        data[-1] = last
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sides.append(torch.empty(0, dtype=DTYPES[dtype]).set_(raw.untyped_storage(), 0, (3,), (1,)))
    lines = diff(capsys, tmp_path, {"x": sides[0]}, {"x": sides[1]})
    assert lines[0].startswith(f"x: {dtype} [3]: 1 of 3 elements differ")
    assert lines[1].startswith("  [2]: ")
    known = DTYPES[dtype].is_floating_point or DTYPES[dtype].is_complex or dtype == "bool"
    if known and "float4" not in dtype and "e8m0" not in dtype:
        assert "by up to" in lines[0]


def trained(name: str, url: str, states: int) -> None:
    trainer, arguments = PROGRAMS[name](st.Checkpoints(url, every="1 steps", keep=9), [])
    interrupt(trainer, states)
    trainer.progress = False
    trainer.fit(*arguments)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_differs_in_a_run_is_what_the_snapshots_say(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(tmp_path)
    trained(name, url, 60)
    store = Store(url)
    new = store.records()[0]
    old = next(record for record in store.records() if record.step < new.step)
    assert parsed(capsys, url, f"{url}@{new.id}", code=0)["differences"] == []
    found = parsed(capsys, f"{url}@{old.id}", f"{url}@{new.id}")
    paths = {each["path"]: each for each in found["differences"]}
    assert (paths["run/step"]["a"], paths["run/step"]["b"]) == (old.step, new.step)
    assert paths["random/python"]["kind"] == paths["random/torch"]["kind"] == "random"
    assert not any(path.startswith("random/torch/") for path in paths)
    trees = [store.load(record.id, container.read)[1] for record in (old, new)]
    model = "module" if name == "rich" else "g"
    states = [tree.run[model].state["parameters"] for tree in trees]
    differing = {f"run/{model}/state/parameters{key}" for key in unequal(*states)}
    assert differing
    assert differing == {
        f"{head}/parameters[{tail!r}]"
        for head, slash, tail in (path.partition("/parameters/") for path in paths)
        if slash and head == f"run/{model}/state"
    }
    for key, value in states[0].items():
        told = paths.get(f"run/{model}/state/parameters/{key}")
        if told is not None:
            far = (value.double() - states[1][key].double()).abs()
            assert told["elements"]["largest"] == far.max().item()
            assert told["elements"]["differing"] == int((far > 0).sum())


def test_a_run_of_another_program_differs_in_what_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [str(tmp_path / name) for name in PROGRAMS]
    for name, url in zip(PROGRAMS, urls, strict=True):
        trained(name, url, 40)
    kinds = {each["path"]: each["kind"] for each in parsed(capsys, *urls)["differences"]}
    assert kinds["run/module/state/parameters/shared.weight"] == "only_a"
    assert kinds["run/g/state/parameters/0.weight"] == "only_b"
    assert kinds["run/noise"] == "only_b"  # a random stream is one leaf


def test_the_summary_counts_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = {"n": 1, "o": 1, "t": torch.zeros(2), "r": torch.Generator(), "same": [1, 2]}
    b = {"n": 2, "p": 1, "t": torch.ones(2), "r": torch.Generator().manual_seed(3), "same": [1, 2]}
    assert diff(capsys, tmp_path, a, b)[-1] == (
        "5 of 7 leaves differ: 1 only in A, 1 only in B, 2 of another value, 1 random streams"
    )
    assert diff(capsys, tmp_path, a, a)[-1] == "the same, bit for bit: 6 leaves"


def test_without_values_each_leaf_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (saved(tmp_path / n, {"x": torch.full((9,), float(n))}) for n in ("1", "2"))
    assert main(["diff", a, b]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["diff", a, b, "--values"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 4 + 6
    (found,) = parsed(capsys, a, b, "--values")["differences"]
    assert found["elements"]["first"][0] == {"index": [0], "a": 1.0, "b": 2.0}


def test_what_is_shared_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shared(last: int) -> list[Any]:
        tree: list[Any] = [last]
        for _ in range(40):
            tree = [tree, tree]  # 2**40 leaves if repeated
        return tree

    lines = diff(capsys, tmp_path, {"x": shared(1)}, {"x": shared(2)})
    assert len(lines) == 2
    assert lines[0].endswith("/0: 1 in A, 2 in B")


def test_floats_in_the_tree_are_compared_by_their_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
    lines = diff(capsys, tmp_path, {"x": float("nan")}, {"x": other})
    assert lines[0] == "x: nan in A, nan in B, with other bits"


@pytest.mark.parametrize("side", [0, 1])
def test_damaged_data_is_an_error_that_names_the_checkpoint(
    side: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [saved(tmp_path / name, {"x": torch.ones(99)}) for name in "ab"]
    (key,) = Store(urls[side]).ids()
    assert main(["diff", *urls]) == 0  # the control
    flip(Path(urls[side], "data", key, "r00000.000.sts"), 70)
    capsys.readouterr()
    assert main(["diff", *urls]) == 2
    assert capsys.readouterr().err == (
        f"statetrain: checkpoint {key} is damaged: the segment is damaged: bytes 64 to 8388672 are "
        "not what was written\n"
    )


def test_a_damaged_newest_is_passed_over_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, {"x": 1})
    url = saved(tmp_path, {"x": 2})
    new, old = Store(url).ids()
    flip(Path(url, "data", new, "r00000.000.sts"), -100)
    assert main(["diff", url, f"{url}@{old}"]) == 0
    out, err = capsys.readouterr()
    assert f"statetrain: passed over {new}: " in err
    assert out.startswith(f"A: {old} at ")


def test_what_is_not_there_is_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = saved(tmp_path / "a", {"x": 1})
    for other in (f"{tmp_path}/b", f"{url}@g9", f"{url}@step=9", "nowhere://there"):
        for arguments in ((url, other), (other, url)):
            assert main(["diff", *arguments]) == 2
            assert capsys.readouterr().err.count("\n") == 1


def test_classes_that_are_not_known_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Gauge:
        def __init__(self, total: float) -> None:
            self.total = total

    def never(state: object) -> Gauge:
        raise AssertionError(f"{state} was built")

    st.register(Gauge, "compared.Gauge", to_state=vars, from_state=never)
    lines = diff(capsys, tmp_path, {"x": Gauge(1.0)}, {"x": Gauge(2.0)})
    assert lines[0] == "x/total: 1.0 in A, 2.0 in B"


def test_tensors_are_read_one_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = 4 << 20
    urls = []
    for name in "ab":
        tree = {str(i): torch.full((size // 4,), float(i)) for i in range(16)}
        tree["15"][-1] = float(ord(name))
        urls.append(saved(tmp_path / name, tree))
    del tree
    tracemalloc.start()
    try:
        assert main(["diff", *urls]) == 1
        assert tracemalloc.get_traced_memory()[1] < 12 * size  # of 32
    finally:
        tracemalloc.stop()
    assert "15: float32 [1048576]: 1 of 1,048,576 elements differ, by up to 1\n" in (
        capsys.readouterr().out
    )


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["diff", "--help"])
    out = capsys.readouterr().out
    assert "statetrain diff runs/a runs/b" in out
    assert "exit codes: 0" in out
