"""A second place behind the first: what is there, what happens when either fails or is lost."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import FaultFS, nothing

import statetrain as st
from statetrain.persist import container
from statetrain.persist.checkpoint import Snapshot
from statetrain.persist.compare import unequal
from statetrain.persist.mirror import Mirrored
from statetrain.persist.record import Record
from statetrain.persist.store import Store, SupersededError

BATCHES = [torch.full((2, 3), float(n)) for n in range(6)]


class Line(st.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return (self.line(batch) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Place:
    """A local place and a mirror on a file system that fails as a test says."""

    def __init__(self, folder: Path) -> None:
        self.first = str(folder / "first")
        self.second = f"fault://{folder}/second"
        self.options = {"over": "file"}

    def mirrored(self, *, write: bool = False) -> Mirrored:
        first = Store(self.first)
        made = Mirrored(first, self.mirror(uid=first.uid, pause=lambda _: None))
        if write:
            made.claim()
        return made

    def mirror(self, **more: Any) -> Store:
        return Store(self.second, storage_options=self.options, **more)

    def trainer(self, *, stop: int | None = None, **settings: Any) -> st.Trainer:
        checkpoints = st.Checkpoints(
            self.first, **{"every": None, "mirror": self.second, **settings},
            storage_options=self.options,
        )  # fmt: skip
        job = st.Trainer(max_epochs=1, checkpoints=checkpoints, loggers=[], progress=False)
        if stop is not None:
            job.on("step", at=stop)(lambda run: run.stop())
        return job


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(FaultFS, "plan", staticmethod(nothing))
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between tries
    yield Place(tmp_path)
    FaultFS.plan = staticmethod(nothing)


def broken(*operations: str) -> Any:
    def plan(fs: FaultFS, operation: str, path: str) -> None:
        if operation in operations:
            raise PermissionError(13, "no", path)

    return staticmethod(plan)


def save(store: Store | Mirrored, value: int, **more: Any) -> Record:
    tree = {"value": value, "t": torch.full((300,), value)}
    return store.save(lambda file: container.write(tree, file), step=value, state="s", **more)


def newest(store: Store | Mirrored) -> int | None:
    found: Any = store.newest(container.read)
    return None if found is None else found[1]["value"]


def steps(store: Store) -> list[int]:
    return [record.step for record in store.records()]


def end(place: Place) -> Snapshot:
    found = st.Checkpoints(place.first).newest()
    assert found is not None
    return found[1]


def test_a_save_is_in_both_under_one_name(place: Place) -> None:
    both = place.mirrored(write=True)
    record = save(both, 1)
    both.close()
    for store in (Store(place.first), place.mirror()):
        assert store.records() == [record]
        assert newest(store) == 1


def test_the_newer_of_both_is_found(place: Place) -> None:
    both = place.mirrored(write=True)
    save(both, 1)
    both.close()
    save(Store(place.first), 2)
    assert newest(place.mirrored()) == 2
    shutil.rmtree(place.first)
    assert newest(place.mirrored()) == 1
    save(place.mirror(), 3)


def test_where_the_first_is_damaged_the_mirror_has_it(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    both = place.mirrored(write=True)
    save(both, 1)
    both.close()
    record = save(both, 2)
    both.close()
    segment = Path(place.first, record.shards[0].path)
    data = segment.read_bytes()
    segment.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    assert newest(place.mirrored()) == 2
    assert any("is damaged" in text for text in caplog.messages)


def test_both_are_pruned_alike(place: Place) -> None:
    both = place.mirrored(write=True)
    for value in range(5):
        save(both, value)
        both.close()
        both.prune(2)
    save(both, 5)
    both.close()
    assert steps(Store(place.first)) == [5, 4, 3]  # as it was before the next prune
    assert steps(place.mirror()) == [5, 4]


def test_a_pin_holds_in_both(place: Place) -> None:
    both = place.mirrored(write=True)
    for value in range(4):
        save(both, value, pin="mine" if value == 1 else None)
        both.close()
        both.prune(2)
    save(both, 4)
    both.close()
    assert steps(Store(place.first))[-1] == 1
    assert steps(place.mirror())[-1] == 1


def test_a_mirror_that_fails_is_said_and_tried_again(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    both = place.mirrored(write=True)
    save(both, 1)
    both.close()
    FaultFS.plan = broken("open wb")
    save(both, 2)
    both._join()
    assert any("is not in the mirror" in text for text in caplog.messages)
    assert newest(Store(place.first)) == 2
    FaultFS.plan = staticmethod(nothing)
    assert newest(place.mirror()) == 1
    both.close()  # tries again
    assert newest(place.mirror()) == 2


def test_a_copy_that_was_cut_off_does_not_count(place: Place) -> None:
    both = place.mirrored(write=True)
    save(both, 1)
    both.close()
    FaultFS.plan = broken("put")
    save(both, 2)
    both.close()
    FaultFS.plan = staticmethod(nothing)
    assert newest(place.mirror()) == 1
    save(both, 3)
    both.close()
    assert steps(place.mirror()) == [3, 1]


def test_a_slow_mirror_holds_up_no_save_and_gets_the_newest(place: Place) -> None:
    gate, both = threading.Event(), place.mirrored(write=True)
    save(both, 0)
    both.close()

    def slow(fs: FaultFS, operation: str, path: str) -> None:
        if operation == "open wb":
            assert gate.wait(60)

    FaultFS.plan = staticmethod(slow)
    for value in range(1, 6):
        save(both, value)
        both.prune(2)
    assert steps(Store(place.first))[0] == 5
    assert 1 in steps(Store(place.first))  # what is being copied stays
    gate.set()
    both.close()
    assert steps(place.mirror()) == [5, 1]


def test_to_end_at_once_stops_the_copy(place: Place) -> None:
    gate, both = threading.Event(), place.mirrored(write=True)
    save(both, 0)
    both.close()

    def slow(fs: FaultFS, operation: str, path: str) -> None:
        if operation == "open wb":
            assert gate.wait(60)

    FaultFS.plan = staticmethod(slow)
    save(both, 1)
    threading.Timer(0.2, gate.set).start()
    both.close(at_once=True)
    FaultFS.plan = staticmethod(nothing)
    assert steps(place.mirror()) == [0]
    both.close()


def test_a_writer_elsewhere_that_took_the_mirror_over_stops_this_one(place: Place) -> None:
    both = place.mirrored(write=True)
    save(both, 1)
    both.close()
    place.mirror().claim()
    save(both, 2)
    both._join()
    with pytest.raises(SupersededError):
        save(both, 3)
    assert newest(place.mirror()) == 1


def test_the_mirror_cannot_be_the_place_itself(tmp_path: Path) -> None:
    with pytest.raises(st.CheckpointError, match="is the place itself: name another"):
        st.Checkpoints(tmp_path, mirror=f"{tmp_path}/")


@pytest.mark.parametrize("lost", ["first", "mirror", "neither"])
def test_a_run_goes_on_from_either_bit_for_bit(place: Place, tmp_path: Path, lost: str) -> None:
    golden = Place(tmp_path / "golden")
    golden.trainer().fit(Line(), BATCHES)
    place.trainer(stop=3).fit(Line(), BATCHES)
    if lost != "neither":
        shutil.rmtree(tmp_path / ("first" if lost == "first" else "second"))
    run = place.trainer().fit(Line(), BATCHES)
    assert run.step == 6
    assert unequal(end(place).run, end(golden).run) == []
    assert newest_id(place.mirror()) == newest_id(Store(place.first))


def test_a_run_whose_both_are_lost_starts_afresh(place: Place, tmp_path: Path) -> None:
    place.trainer(stop=3).fit(Line(), BATCHES)
    for name in ("first", "second"):
        shutil.rmtree(tmp_path / name)
    seen: list[int] = []
    job = place.trainer()
    job.on("step")(lambda run: seen.append(run.step))
    job.fit(Line(), BATCHES)
    assert seen == [1, 2, 3, 4, 5, 6]  # the control


def test_training_ends_although_the_mirror_is_gone(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    job = place.trainer(every="1 steps")

    @job.on("step", at=2)
    def gone(run: st.Run) -> None:
        FaultFS.plan = broken("open wb", "put")

    with caplog.at_level(logging.WARNING, "statetrain"):
        assert job.fit(Line(), BATCHES).state == "done"
    assert any("is not in the mirror" in text for text in caplog.messages)
    assert Store(place.first).records()[0].state == "done"


def newest_id(store: Store) -> str:
    return store.records()[0].id
