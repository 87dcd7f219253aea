from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from faults import FaultFS, nothing
from programs import gan, interrupt

import statetrain as st
from statetrain.cli.main import main
from statetrain.persist import container
from statetrain.persist.compare import unequal
from statetrain.persist.store import Store


class Killed(BaseException):
    """The end of the process."""


def trained(url: Any, states: int = 20) -> list[str]:
    """Train the GAN a little, and return the ids of its checkpoints, newest first."""
    trainer, arguments = gan(st.Checkpoints(url, every="1 steps", keep=9), [])
    interrupt(trainer, states)
    trainer.progress = False
    trainer.fit(*arguments)
    return Store(url).ids()


@pytest.fixture
def source(tmp_path: Path) -> str:
    ids = trained(tmp_path / "run")
    assert len(ids) > 2
    return str(tmp_path / "run")


@pytest.fixture
def faulty() -> Iterator[str]:
    yield f"fault://{uuid.uuid4().hex}"
    FaultFS.plan = staticmethod(nothing)


def done(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[str, str]:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    return err.removeprefix("statetrain: ").strip()


def value(url: Any, key: str) -> Any:
    return Store(url).load(key, container.read)


def files(url: Any) -> list[str]:
    fs, root = fsspec.url_to_fs(str(url))
    return sorted(path.removeprefix(root) for path in fs.find(root))


def test_the_newest_goes_to_memory_and_back_and_a_run_goes_on_from_it(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, back = f"memory://{uuid.uuid4().hex}", tmp_path / "back"
    newest, *_ = Store(source).ids()
    out, err = done(capsys, "cp", source, there)
    assert (out.split(",")[0], err) == (f"copied: {newest}", "")
    done(capsys, "cp", there, back)
    assert Store(back).ids() == [newest]
    record, tree = value(source, newest)
    assert (record, unequal(tree, value(back, newest)[1])) == (value(back, newest)[0], [])
    older = value(source, Store(source).ids()[1])[1]
    assert unequal(tree, older)  # the control
    assert [name for name in files(there) if "/claims" in name] == []  # no writer was stopped
    trainer, arguments = gan(st.Checkpoints(back, every=None), [])
    trainer.progress = False
    trainer.fit(*arguments)
    assert trainer.run.state == "done"
    assert Store(back).records()[0].parent.id == newest


def test_one_is_chosen_and_all_are_copied_in_their_order(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = Store(source).ids()
    done(capsys, "cp", f"{source}@{ids[1]}", tmp_path / "one")
    assert Store(tmp_path / "one").ids() == [ids[1]]
    out, _ = done(capsys, "cp", source, tmp_path / "one", "--all")
    assert [line.split(",")[0] for line in out.splitlines()] == [
        f"{'already there' if key == ids[1] else 'copied'}: {key}" for key in reversed(ids)
    ]
    assert Store(tmp_path / "one").records() == Store(source).records()
    words = refused(capsys, "cp", f"{source}@{ids[1]}", tmp_path / "one", "--all")
    assert words == f"@{ids[1]} names one checkpoint and --all means each: give one"


@pytest.mark.parametrize("moment", ["write", "close", "put"])
def test_a_copy_that_is_killed_shows_nothing_and_is_made_again(
    moment: str, source: str, faulty: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(_fs: FaultFS, operation: str, _path: str) -> None:
        if operation == moment:
            raise Killed

    FaultFS.plan = staticmethod(plan)
    with pytest.raises(Killed):
        main(["cp", source, faulty])
    FaultFS.plan = staticmethod(nothing)
    assert Store(faulty).ids() == []
    assert Store(faulty).newest(container.read) is None
    out, _ = done(capsys, "cp", source, faulty)
    assert out.startswith("copied: ")
    assert (
        unequal(value(faulty, Store(faulty).ids()[0])[1], value(source, Store(source).ids()[0])[1])
        == []
    )


def test_what_a_killed_process_left_on_a_disk_is_written_anew(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = Store(source).ids()[0]
    half = tmp_path / "dest" / "data" / key / "r00000.000.sts"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half of it")
    assert Store(tmp_path / "dest").newest(container.read) is None
    done(capsys, "cp", source, tmp_path / "dest")
    assert unequal(value(source, key)[1], value(tmp_path / "dest", key)[1]) == []


def test_an_interrupted_copy_of_all_keeps_what_is_whole_and_goes_on(
    source: str, faulty: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left = 2

    def plan(_fs: FaultFS, operation: str, path: str) -> None:
        nonlocal left
        left -= operation == "open wb" and "/data/" in path
        if left < 0:
            raise Killed

    FaultFS.plan = staticmethod(plan)
    with pytest.raises(Killed):
        main(["cp", source, faulty, "--all"])
    FaultFS.plan = staticmethod(nothing)
    ids = Store(source).ids()
    assert Store(faulty).ids() == ids[-2:]
    done(capsys, "cp", source, faulty, "--all")
    assert Store(faulty).ids() == ids


def damage(url: Any, key: str, place: int) -> None:
    path = Path(url, "data", key, "r00000.000.sts")
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_copy_with_other_data_is_noticed_and_removed_unless_quick(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = Store(source).ids()[0]
    damage(source, key, 64)  # the index is whole: this is found where all data is read
    words = refused(capsys, "cp", source, tmp_path / "dest")
    assert words.startswith(f"the copy of {key} is not whole and was removed: the segment is dam")
    assert Store(tmp_path / "dest").ids() == []
    assert not (tmp_path / "dest" / "data" / key).exists()
    done(capsys, "cp", source, tmp_path / "dest", "--quick")  # the control
    assert Store(tmp_path / "dest").ids() == [key]
    words = refused(capsys, "cp", source, tmp_path / "dest")
    assert f"has {key} already, and it is damaged: " in words


def test_a_damaged_one_is_passed_over_and_said(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, *older = Store(source).ids()
    damage(source, newest, -200)
    for options, copied in (([], older[:1]), (["--all"], older)):
        _, err = done(capsys, "cp", source, tmp_path / str(len(options)), *options)
        assert err.startswith(f"statetrain: passed over {newest}: the segment is damaged")
        assert Store(tmp_path / str(len(options))).ids() == copied


def test_a_place_of_another_run_is_refused_without_force(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "other")
    there = Store(tmp_path / "other").ids()
    runs = [Store(url).records()[0].run_id[:8] for url in (tmp_path / "other", source)]
    assert refused(capsys, "cp", source, tmp_path / "other") == (
        f"{tmp_path}/other holds checkpoints of another run ({runs[0]}, and this is {runs[1]}): "
        "name another place, or --force"
    )
    assert Store(tmp_path / "other").ids() == there
    done(capsys, "cp", source, tmp_path / "other", "--force")
    assert {*Store(tmp_path / "other").ids()} == {*there, Store(source).ids()[0]}


def test_a_live_writer_is_not_disturbed(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Store(tmp_path / "dest")
    writer.lock()
    assert "is being written by" in refused(capsys, "cp", source, tmp_path / "dest")
    writer.unlock()
    done(capsys, "cp", source, tmp_path / "dest")


def test_a_full_disk_is_one_line(
    source: str, faulty: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(_fs: FaultFS, operation: str, _path: str) -> None:
        if operation == "write":
            raise OSError(28, "No space left on device")

    FaultFS.plan = staticmethod(plan)
    assert "the disk is full" in refused(capsys, "cp", source, faulty)
    FaultFS.plan = staticmethod(nothing)
    assert Store(faulty).ids() == []


def test_a_source_that_holds_nothing_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkdir(tmp_path / "empty")
    for options in ([], ["--all"]):
        words = refused(capsys, "cp", tmp_path / "empty", tmp_path / "dest", *options)
        assert words.startswith("no checkpoints at ")
    assert not (tmp_path / "dest").exists()
