"""A run that goes on from another place: exact, as a child, and nothing is written there."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import statetrain as st
from statetrain.persist.checkpoint import Snapshot
from statetrain.persist.compare import unequal
from statetrain.persist.store import Store

BATCHES = [torch.full((2, 3), float(n)) for n in range(6)]


class Line(st.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.line = torch.nn.Linear(width, 1)
        self.drop = torch.nn.Dropout(0.5)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return (self.line(self.drop(batch)) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def trainer(url: str, *, stop: int | None = None, epochs: int = 2, **settings: Any) -> st.Trainer:
    given: dict[str, Any] = {
        "max_epochs": epochs, "seed": 3, "loggers": [], "progress": False, **settings
    }  # fmt: skip
    job = st.Trainer(checkpoints=st.Checkpoints(url, every=None, keep=1), **given)
    if stop is not None:
        job.on("step", at=stop)(lambda run: run.stop())
    return job


def fit(url: str, **settings: Any) -> st.Run:
    torch.manual_seed(0)
    return trainer(url, **settings).fit(Line(), BATCHES)


def end(url: str) -> Snapshot:
    found = st.Checkpoints(url).newest()
    assert found is not None
    return found[1]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_it_ends_as_if_it_had_stayed_where_it_was(tmp_path: Path) -> None:
    one, two, golden = (str(tmp_path / name) for name in ("one", "two", "golden"))
    fit(golden)
    fit(one, stop=8)
    before = content(tmp_path / "one")
    fit(two, resume=one)
    assert unequal(end(two).run, end(golden).run) == []
    assert unequal(end(two).random, end(golden).random) == []
    assert content(tmp_path / "one") == before
    fit(str(tmp_path / "three"))
    fit(str(tmp_path / "fresh"), seed=4)
    assert unequal(end(str(tmp_path / "three")).run, end(golden).run) == []
    assert unequal(end(str(tmp_path / "fresh")).run, end(golden).run) != []  # the control


def test_its_own_checkpoints_come_first(tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    fit(one, stop=3)
    fit(two, resume=one, stop=7)
    steps: list[int] = []
    job = trainer(two, resume=one)
    job.on("step")(lambda run: steps.append(run.step))
    job.fit(Line(), BATCHES)
    assert steps == [8, 9, 10, 11, 12]
    shutil.rmtree(one)
    assert fit(two, resume=one, epochs=3).step == 18


def test_it_is_a_child_of_that_run(tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    fit(one, stop=3)
    fit(two, resume=one)
    (parent,), (child, *_) = Store(one).records(), Store(two).records()
    assert child.run_id != parent.run_id
    first = Store(two).records()[-1]
    assert first.parent is not None
    assert (first.parent.id, first.parent.digest) == (parent.id, parent.digest)


def test_killed_before_its_first_save_it_goes_on_from_there_again(tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    fit(one, stop=8)
    job = trainer(two, resume=one)

    @job.on("batch_end", at=1)
    def fail(run: st.Run) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        job.fit(Line(), BATCHES)
    assert Store(two).records() == []
    assert len(Store(one).records()) == 1
    fit(two, resume=one)
    fit(str(tmp_path / "golden"))
    assert unequal(end(two).run, end(str(tmp_path / "golden")).run) == []


def test_what_does_not_fit_or_is_not_there_is_refused(tmp_path: Path) -> None:
    one = str(tmp_path / "one")
    fit(one, stop=3)
    with pytest.raises(st.CheckpointError, match="holds no checkpoint: name the place of the run"):
        fit(str(tmp_path / "two"), resume=str(tmp_path / "none"))
    with pytest.raises(st.CheckpointError, match=f"at {one}"):
        trainer(str(tmp_path / "two"), resume=one).fit(Line(4), [torch.ones(2, 4)])
    assert not (tmp_path / "none").exists()


def test_a_damaged_newest_there_is_said_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    fit(one, stop=3)
    fit(one, stop=6)
    newest = Store(one).records()[0]
    Path(one, newest.shards[0].path).write_bytes(b"")
    fit(two, resume=one)
    assert any("is damaged" in text for text in caplog.messages)
    fit(str(tmp_path / "golden"))
    assert unequal(end(two).run, end(str(tmp_path / "golden")).run) == []


def test_a_place_that_may_only_be_read_is_enough(tmp_path: Path) -> None:
    one, two = tmp_path / "one", str(tmp_path / "two")
    fit(str(one), stop=8)
    for folder, _, _ in os.walk(one):
        os.chmod(folder, 0o500)
    try:
        assert fit(two, resume=str(one)).step == 12
    finally:
        for folder, _, _ in os.walk(one):
            os.chmod(folder, 0o700)


@pytest.mark.stores
@pytest.mark.filterwarnings("ignore")  # the client's own, which are not ours to mend
def test_a_web_server_is_enough(tmp_path: Path) -> None:
    if importlib.util.find_spec("aiohttp") is None:
        pytest.skip("not installed: aiohttp (pip install 'statetrain[stores]')")
    fit(str(tmp_path / "one"), stop=8)
    before = content(tmp_path / "one")
    handler = functools.partial(Ranges, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fit(str(tmp_path / "two"), resume=f"http://127.0.0.1:{server.server_port}/one")
        server.shutdown()
    fit(str(tmp_path / "golden"))
    assert unequal(end(str(tmp_path / "two")).run, end(str(tmp_path / "golden")).run) == []
    assert content(tmp_path / "one") == before


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves a folder as web servers do, ranges of files too, and logs nothing."""

    def do_GET(self) -> None:
        path, asked = Path(self.translate_path(self.path)), self.headers.get("Range")
        if asked is None or not path.is_file():
            super().do_GET()
            return
        data, (start, end) = path.read_bytes(), asked.removeprefix("bytes=").split("-")
        part = data[int(start) : int(end) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # as its base has it
        pass
