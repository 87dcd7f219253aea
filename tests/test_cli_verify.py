from __future__ import annotations

import io
import json
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import gan, interrupt

import statetrain as st
from statetrain.cli.main import main
from statetrain.cli.text import size
from statetrain.cli.verify import BAR, Bar
from statetrain.errors import CheckpointError
from statetrain.persist import container
from statetrain.persist.codec import DamagedError
from statetrain.persist.layout import CHUNK
from statetrain.persist.store import Store

TREE = {"w": torch.arange(3000.0), "n": [1, "x"], "a": np.arange(2000)}


def saved(url: str | Path, tree: object = TREE, count: int = 1) -> list[str]:
    """Store `tree` so many times and return the ids, newest first."""
    store = Store(url)
    for step in range(count):
        store.save(lambda file: container.write(tree, file), step=step, state="work")
    return store.ids()


def segment(url: str | Path, key: str) -> Path:
    return Path(url, "data", key, "r00000.000.sts")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def checked(
    capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0
) -> dict[str, str | None]:
    """Run it, and return the damage of each checkpoint by its id."""
    assert main(["verify", *arguments, "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return {each["id"]: each["damage"] for each in json.loads(out)["checkpoints"]}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(["verify", *arguments]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("statetrain: ").strip()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_a_checkpoint_and_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = saved(tmp_path, count=3)
    nbytes = segment(tmp_path, keys[0]).stat().st_size
    for how, note in (
        ([], ""),
        (["--full"], ""),
        (["--quick"], " (the tensors' data was not read)"),
    ):
        assert main(["verify", str(tmp_path), *how]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert [line.split() for line in out.splitlines()[:-1]] == [
            [key, size(nbytes), "ok"] for key in keys
        ]
        assert out.splitlines()[-1] == f"3 checkpoints: all whole{note}"


def test_the_checkpoints_of_a_run_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    url = "memory://cli-verify"
    trainer, arguments = gan(st.Checkpoints(url, every="1 steps", keep=9), [])
    interrupt(trainer, 30)
    trainer.progress = False
    trainer.fit(*arguments)
    assert checked(capsys, url) == dict.fromkeys(Store(url).ids())
    assert len(Store(url).ids()) > 1


REGIONS = {
    "magic": (0, "it does not begin as a segment does"),
    "header": (16, "its header is damaged"),
    "checksum of the header": (60, "its header is damaged"),
    "data": (64, "bytes 64 to 8388672 are not what was written"),
    "gap": (64 + 12000 + 1, "bytes 64 to 8388672 are not what was written"),
    "last of the data": (64 + 12032 + 16000 - 1, "bytes 64 to 8388672 are not what was written"),
    "zeros": (64 + 12032 + 16000, "the bytes before its index are damaged"),
    "index": (-97, "its index is damaged"),
    "trailer": (-96, "its trailer is damaged"),
    "end": (-1, "it does not end as a segment does"),
}


@pytest.mark.parametrize("region", REGIONS)
def test_a_flipped_bit_is_found_in_each_region(
    region: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, words = REGIONS[region]
    keys = saved(tmp_path, count=3)
    flip(segment(tmp_path, keys[1]), place)
    damage = f"the segment is damaged: {words}"
    assert checked(capsys, str(tmp_path), code=1) == {keys[0]: None, keys[1]: damage, keys[2]: None}
    assert main(["verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith(f"damaged: {damage}")
    assert lines[3] == "3 checkpoints: 1 damaged"
    with pytest.raises(DamagedError), segment(tmp_path, keys[1]).open("rb") as file:
        container.read(file)  # the control: a resume would not take it either


@pytest.mark.parametrize("region", REGIONS)
def test_quick_finds_what_lies_outside_the_data_and_does_not_read_it(
    region: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (key,) = saved(tmp_path)
    flip(segment(tmp_path, key), REGIONS[region][0])
    unread = region in {"data", "gap", "last of the data"}
    found = checked(capsys, str(tmp_path), "--quick", code=0 if unread else 1)
    assert (found[key] is None) == unread


@pytest.mark.parametrize("how", [[], ["--quick"]])
def test_damaged_records_sizes_and_lost_data_are_found(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = saved(tmp_path, count=5)
    flip(tmp_path / "commits" / f"{keys[0]}.stc", 40)
    segment(tmp_path, keys[1]).write_bytes(segment(tmp_path, keys[1]).read_bytes()[:-1])
    segment(tmp_path, keys[2]).unlink()
    segment(tmp_path, keys[3]).write_bytes(segment(tmp_path, keys[4]).read_bytes())  # another one
    found = checked(capsys, str(tmp_path), *how, code=1)
    words = ["record is damaged", "does not end as", "is missing", "not the segment that was"]
    assert list(found) == keys
    for key, word in zip(keys, words, strict=False):
        assert word in (found[key] or "")
    assert found[keys[4]] is None


def test_one_that_is_named_is_checked_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = saved(tmp_path, count=3)
    flip(segment(tmp_path, keys[0]), 64)
    assert [*checked(capsys, f"{tmp_path}@{keys[0]}", code=1)] == [keys[0]]
    assert checked(capsys, f"{tmp_path}@{keys[1][:15]}") == {keys[1]: None}
    assert checked(capsys, f"{tmp_path}@step=0") == {keys[2]: None}
    assert "no checkpoint 'g9'" in refused(capsys, f"{tmp_path}@g9")
    assert "no checkpoint of step 7" in refused(capsys, f"{tmp_path}@step=7")


def test_a_wrong_place_is_code_2_and_an_empty_one_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert "no folder" in refused(capsys, f"{tmp_path}/gone")
    assert "is a file" in refused(capsys, f"{tmp_path}/file")
    assert "nowhere" in refused(capsys, "nowhere://there")
    nothing = f"no checkpoints at '{tmp_path}': nothing was saved there yet"
    assert refused(capsys, str(tmp_path), code=1) == nothing
    assert refused(capsys, f"{tmp_path}@g1", code=1) == nothing
    with pytest.raises(SystemExit, match="2"):
        main(["verify", str(tmp_path), "--quick", "--full"])


def test_what_cannot_be_read_is_code_2_and_not_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (key,) = saved(tmp_path)
    segment(tmp_path, key).unlink()
    segment(tmp_path, key).mkdir()
    assert "cannot read" in refused(capsys, str(tmp_path))


@dataclass
class Meter:
    total: float


def never(state: object) -> Any:
    raise AssertionError(f"{state} was built")


def test_nothing_is_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    st.register(Meter, "verified.Meter", to_state=vars, from_state=never)
    (key,) = saved(tmp_path, {"meter": Meter(1.5), "rng": torch.Generator()})
    assert checked(capsys, str(tmp_path)) == {key: None}
    with (
        pytest.raises(CheckpointError, match="was built"),
        segment(tmp_path, key).open("rb") as file,
    ):
        container.read(file)  # the control: reading it would


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several chunks of data, with a flipped bit in the third."""
    path = tmp_path_factory.mktemp("large")
    (key,) = saved(path, {"w": torch.zeros(10 << 20)})
    flip(segment(path, key), 64 + 2 * CHUNK + 5)
    return path


def test_a_damaged_chunk_is_found_with_and_without_progress(large: Path) -> None:
    (key,) = Store(large).ids()
    words = f"bytes {64 + 2 * CHUNK} to {64 + 3 * CHUNK} are not what was written"
    done: list[int] = []
    for progress in (None, done.append):
        with pytest.raises(DamagedError, match=words), segment(large, key).open("rb") as file:
            container.verify(file, progress)
    assert done == [CHUNK, 2 * CHUNK]


def test_verifying_takes_no_memory_of_the_size_of_the_data() -> None:
    file = io.BytesIO()
    container.write({"w": torch.zeros(16 << 20)}, file)
    tracemalloc.start()
    try:
        container.verify(file, lambda _: None)
        assert tracemalloc.get_traced_memory()[1] < 3 * CHUNK
        file.seek(0)
        kept = file.read()  # the control: this is seen
        assert tracemalloc.get_traced_memory()[1] > len(kept)
    finally:
        tracemalloc.stop()


def test_the_bar_comes_when_it_takes_long_and_goes_with_each_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, now = Terminal(), [0.0]
    bar = Bar(4 << 20, stream=stream, clock=lambda: now[0])
    bar.look(1 << 20)
    assert stream.getvalue() == ""
    now[0] = 2.0
    bar.look(2 << 20)
    bar.hide(2 << 20)
    assert "2.0MiB of 4.0MiB" in stream.getvalue()
    written = len(stream.getvalue())
    bar.hide(0)
    assert len(stream.getvalue()) == written
    assert bar.text(1 << 20)[: BAR + 1] in ("━" * 18 + "─" * 6 + " ", "#" * 18 + "-" * 6 + " ")
    assert bar.text(1 << 20).endswith("3.0MiB of 4.0MiB")


def test_there_is_no_bar_where_stderr_is_no_terminal() -> None:
    stream, now = io.StringIO(), [0.0]
    bar = Bar(1, stream=stream, clock=lambda: now[0])
    now[0] = 99.0
    bar.look(1)
    bar.hide(1)
    assert (bar.console, stream.getvalue()) == (None, "")


def test_on_a_terminal_the_same_is_found(
    large: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", Terminal())
    assert main(["verify", str(large)]) == 1
    assert f"bytes {64 + 2 * CHUNK} to" in capsys.readouterr().out


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["verify", "--help"])
    out = capsys.readouterr().out
    assert "statetrain verify runs/digits" in out
    assert "exit codes: 0" in out
