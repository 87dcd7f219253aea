from __future__ import annotations

import json
from pathlib import Path

import pytest

from statetrain.cli.main import main
from statetrain.persist import container
from statetrain.persist.keep import metric_tags
from statetrain.persist.store import Store


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Six checkpoints, of steps 10 to 60; the losses are best at 20 and 30."""
    store = Store(tmp_path)
    for number, loss in enumerate((5.0, 1.0, 2.0, 3.0, 4.0, 6.0), 1):
        tags = metric_tags({"val_loss": loss})
        store.save(
            lambda file: container.write({"a": 1}, file), step=10 * number, state="s", tags=tags
        )
    return str(tmp_path)


def steps(url: str) -> list[int]:
    return [record.step for record in Store(url).records()]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ([], [60, 50]),
        (["--last", "3"], [60, 50, 40]),
        (["--last", "1"], [60, 50]),
        (["--steps", "20"], [60, 50, 40, 20]),
        (["--best", "2", "--metric", "val_loss"], [60, 50, 30, 20]),
        (["--best", "2", "--metric", "val_loss", "--mode", "max"], [60, 50, 10]),
    ],
)
def test_it_removes_what_is_not_kept(
    url: str, options: list[str], left: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", url, *options, "--dry-run"]) == 0
    assert f"{6 - len(left)} would be removed" in capsys.readouterr().out
    assert len(steps(url)) == 6
    assert main(["prune", url, *options]) == 0
    assert f"{6 - len(left)} removed" in capsys.readouterr().out
    assert steps(url) == left


def test_as_json_it_says_what_went(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    gone = {record.id: record.nbytes for record in Store(url).records()[2:]}
    assert main(["prune", url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"url": url, "dry_run": False, "removed": gone}


def test_a_pinned_one_stays_until_it_is_unpinned(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = Store(url).records()[-1].id
    assert main(["pin", f"{url}@step=10"]) == 0
    assert main(["pin", f"{url}@step=10", "the first"]) == 0
    assert Store(url).pins() == {key: "the first"}
    assert main(["ls", url]) == 0
    assert "pinned" in capsys.readouterr().out
    assert main(["prune", url]) == 0
    assert steps(url) == [60, 50, 10]
    assert main(["unpin", f"{url}@step=10"]) == 0
    assert main(["prune", url]) == 0
    assert steps(url) == [60, 50]
    capsys.readouterr()
    assert main(["unpin", f"{url}@step=50"]) == 0
    assert "was not pinned" in capsys.readouterr().out


def test_what_is_not_whole_does_not_count(url: str) -> None:
    newest = Store(url).records()[0]
    segment = Path(url, newest.shards[0].path)
    segment.write_bytes(segment.read_bytes()[:-1])
    assert main(["prune", url]) == 0
    assert steps(url) == [50, 40]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--last", "0"], "keep=0: give a whole number from 1"),
        (["--best", "2"], "give best and metric together"),
        (["--mode", "low"], 'give "min" or "max"'),
    ],
)
def test_what_means_nothing_removes_nothing(
    url: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", url, *arguments]) == 2
    assert said in capsys.readouterr().err
    assert len(steps(url)) == 6


def test_a_place_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("prune", "pin", "unpin"):
        assert main([command, str(tmp_path / "none")]) == 2
        assert "no folder" in capsys.readouterr().err
