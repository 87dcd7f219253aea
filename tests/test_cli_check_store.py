from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults import FaultFS, Said, nothing

from statetrain.cli.main import main


def findings(capsys: pytest.CaptureFixture[str], url: str, *, code: int = 0) -> dict[str, str]:
    assert main(["check-store", url, "--mib", "8", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["fit"] == (code == 0)
    return {each["trial"]: each["found"] for each in told["findings"]}


def test_a_folder_is_fit_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("stays")
    found = findings(capsys, str(tmp_path))
    assert found["a second write of a name"].startswith("refused")
    assert found["writing 8.0MiB"].endswith("/s")
    assert os.listdir(tmp_path) == ["mine"]
    findings(capsys, str(tmp_path / "new"))
    assert os.listdir(tmp_path) == ["mine"]


def test_it_prints_a_table_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-store", "memory://checked", "--mib", "8"]) == 0
    *table, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "memory://checked is fit for checkpoints"
    assert {line.split("  ")[0] for line in table} >= {"a small object is there at once"}


def test_a_place_whose_listings_lag_is_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(fs: FaultFS, operation: str, path: str) -> None:
        if operation == "ls" and path.endswith("/a"):
            raise Said([])

    url = f"fault://{tmp_path}/run"
    monkeypatch.setenv("FSSPEC_FAULT", json.dumps({"over": "file"}))
    monkeypatch.setattr(FaultFS, "plan", staticmethod(nothing))
    findings(capsys, url)  # the control
    monkeypatch.setattr(FaultFS, "plan", staticmethod(stale))
    found = findings(capsys, url, code=1)
    assert found["it is listed at once"].startswith("no: []")
    assert found["a small object is there at once"] == "yes"


def test_what_cannot_be_reached_or_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for url, said in (
        (str(tmp_path / "file"), "file"),
        ("nosuch://x", "nosuch"),
        ("/proc/runs", "/proc/runs"),
    ):
        assert main(["check-store", url]) == 2
        assert said in capsys.readouterr().err
    assert main(["check-store", str(tmp_path), "--mib", "0"]) == 2
    assert "--mib 0" in capsys.readouterr().err


def test_it_is_a_command_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "statetrain.cli.main", "check-store", str(tmp_path)]
    done = subprocess.run([*command, "--mib", "8"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
