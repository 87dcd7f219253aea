from __future__ import annotations

import errno
import io
import logging
import os
import subprocess
import sys
import textwrap
import uuid
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from faults import FaultFS, Torn, nothing
from fsspec.registry import known_implementations

from statetrain.errors import CheckpointError
from statetrain.persist import container, local
from statetrain.persist.codec import DamagedError
from statetrain.persist.local import LocalFiles
from statetrain.persist.store import Store


@pytest.fixture(params=["local", "file", "memory"])
def url(request, tmp_path):
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/runs/a"
    return f"{'file://' if request.param == 'file' else ''}{tmp_path}/runs/a"


@pytest.fixture
def faulty():
    yield f"fault://{uuid.uuid4().hex}"
    FaultFS.plan = staticmethod(nothing)


def opened(url):
    return Store(url, pause=lambda seconds: None)


def save(store, value, **options):
    tree = {"value": value, "t": torch.full((300,), value)}
    options = {"step": value, "state": "step", **options}
    return store.save(lambda file: container.write(tree, file), **options)


def newest(store):
    found = store.newest(container.read)
    return None if found is None else found[1]["value"]


def everything(url):
    fs, root = fsspec.url_to_fs(url)
    return sorted(path.removeprefix(root) for path in fs.find(root))


def change(url, name, edit):
    fs, root = fsspec.url_to_fs(url)
    fs.pipe_file(f"{root}/{name}", edit(fs.cat_file(f"{root}/{name}")))


def flipped(data):
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


# the ordinary life of a store


def test_looking_writes_nothing(url):
    store = opened(url)
    assert store.newest(container.read) is None
    assert store.records() == []
    assert everything(url) == []


def test_the_newest_checkpoint_is_found_again(url):
    store = opened(url)
    records = [save(store, n, tags=["t"]) for n in range(3)]
    assert records[0].step == 0
    again = opened(url)
    record, tree = again.newest(container.read)
    assert record == records[2] == store.acknowledged
    assert torch.equal(tree["t"], torch.full((300,), 2))
    assert again.records() == records[::-1]
    assert [r.parent and r.parent.id for r in records] == [None, records[0].id, records[1].id]
    with again.open(records[1]) as file:
        assert container.read(file)["value"] == 1


def test_several_saves_at_one_step_are_in_order(url):
    store = opened(url)
    for n in (5, 3, 4):
        save(store, n, step=7)
    assert newest(opened(url)) == 4
    assert [r.save for r in store.records()] == [3, 2, 1]


def test_a_later_writer_is_newer_whatever_its_step(url):
    save(opened(url), 100)
    later = opened(url)
    assert newest(later) == 100
    record = save(later, 5)  # rolled back on purpose
    assert (record.gen, record.parent.id[:7]) == (2, "g000001")
    assert newest(opened(url)) == 5


def test_a_run_keeps_its_identity(url):
    first = save(opened(url), 1)
    assert save(opened(url), 2).run_id == first.run_id
    assert len(first.run_id) == 16


def test_claims_grow(url):
    assert [opened(url).claim() for _ in range(3)] == [1, 2, 3]


def test_what_cannot_be_encoded_leaves_nothing_behind(url):
    store = opened(url)
    save(store, 1)
    before = everything(url)
    with pytest.raises(CheckpointError, match="cannot store x: type object is not known"):
        store.save(lambda f: container.write({"x": object()}, f), step=2, state="step")
    assert everything(url) == before


def test_an_error_of_the_reader_is_the_readers(url):
    save(opened(url), 1)

    def reader(file):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        opened(url).newest(reader)

    def unfit(file):
        raise CheckpointError("it does not fit this loop")

    save(opened(url), 2)
    with pytest.raises(CheckpointError, match="does not fit"):  # never an older one instead
        opened(url).newest(unfit)


# damage


@pytest.mark.parametrize("part", ["data/{}/r00000.000.sts", "commits/{}.stc"])
@pytest.mark.parametrize("edit", [flipped, lambda d: d[:-1], lambda d: b"", lambda d: d[:50]])
def test_a_damaged_checkpoint_is_passed_over_loudly(url, part, edit, caplog):
    store = opened(url)
    save(store, 1)
    bad = save(store, 2)
    assert newest(opened(url)) == 2  # the control
    change(url, part.format(bad.id), edit)
    with caplog.at_level(logging.WARNING, "statetrain"):
        assert newest(opened(url)) == 1
    (message,) = [r.getMessage() for r in caplog.records]
    assert bad.id in message
    assert "damaged" in message


def test_a_swapped_segment_is_damage(url):
    store = opened(url)
    one, two = save(store, 1), save(store, 2)
    fs, root = fsspec.url_to_fs(url)
    fs.pipe_file(
        f"{root}/{two.shards[0].path}", fs.cat_file(f"{root}/{one.shards[0].path}")
    )  # whole in itself, but another one
    assert newest(opened(url)) == 1


def test_missing_data_is_damage(url):
    store = opened(url)
    save(store, 1)
    bad = save(store, 2)
    fs, root = fsspec.url_to_fs(url)
    fs.rm(f"{root}/data/{bad.id}", recursive=True)
    assert newest(opened(url)) == 1
    with pytest.raises(DamagedError, match="missing"):
        opened(url).open(bad)


def test_nothing_whole_is_never_a_fresh_start(url):
    bad = save(opened(url), 1)
    change(url, f"data/{bad.id}/r00000.000.sts", flipped)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        newest(opened(url))


def test_strange_names_are_left_alone(url):
    store = opened(url)
    save(store, 1)
    fs, root = fsspec.url_to_fs(url)
    for name in ("commits/README", "commits/x.stc", "data/other", "claims/me", "LATEST"):
        fs.pipe_file(f"{root}/{name}", b"\xff")
    assert newest(opened(url)) == 1
    store.prune(1)
    assert "/data/other" in everything(url)


# two writers


def test_an_older_writer_is_stopped(url):
    old, new = opened(url), opened(url)
    save(old, 1)
    new.claim()
    with pytest.raises(CheckpointError, match="superseded"):
        save(old, 2)
    assert newest(opened(url)) == 1
    save(new, 3)
    assert newest(opened(url)) == 3


def test_a_save_whose_data_was_swept_away_is_not_committed(url):
    store = opened(url)
    save(store, 1)

    def swept(file):
        segment = container.write({"value": 2}, file)
        return replace(segment)

    files = store._files
    plain = files.names

    def names(folder):  # between the data and the commit, another hand removes the data
        if folder == "claims":
            for key in plain("data"):
                if "n000002" in key:
                    files.remove(f"data/{key}")
        return plain(folder)

    files.names = names
    with pytest.raises(CheckpointError, match="superseded"):
        store.save(swept, step=2, state="step")
    assert newest(opened(url)) == 1


def test_a_second_live_writer_is_refused(tmp_path):
    url = str(tmp_path / "run")
    code = f"""
        import sys
        from statetrain.persist.store import Store
        store = Store({url!r}); store.lock()
        print("locked", flush=True); sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=f"being written by process {process.pid} on "):
            Store(url).lock()
        process.kill()
        process.wait()
    store = Store(url)  # the lock died with its process
    store.lock()
    with pytest.raises(CheckpointError, match="in use by another fit of this process"):
        store.lock()
    with pytest.raises(CheckpointError, match="being written by process"):
        Store(url).lock()
    store.unlock()
    again = Store(url)
    again.lock()
    again.unlock()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_does_not_hold_the_lock(tmp_path):
    code = f"""
        import os, sys
        from statetrain.persist.store import Store
        store = Store({str(tmp_path)!r}); store.lock()
        if os.fork() == 0:
            print("worker", os.getpid(), flush=True); sys.stdin.read(); os._exit(0)
        os._exit(0)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline().startswith("worker")
        assert process.wait() == 0
        store = Store(tmp_path)  # the parent is gone, its worker still lives
        store.lock()
        store.unlock()
        process.stdin.close()


def test_a_store_without_locks_says_so_and_goes_on(caplog):
    with caplog.at_level(logging.INFO, "statetrain"):
        store = Store(f"memory://{uuid.uuid4().hex}")
        store.lock()
        store.unlock()
    assert "no locks" in caplog.text


# pruning


def test_pruning_keeps_the_newest(url):
    store = opened(url)
    records = [save(store, n) for n in range(5)]
    gone = store.prune(2, protect=[records[0].id])
    assert gone == [records[2].id, records[1].id]
    assert [r.step for r in opened(url).records()] == [4, 3, 0]
    assert not [p for p in everything(url) if records[1].id in p]
    assert store.prune(0) == [records[0].id]  # two are always kept
    assert newest(opened(url)) == 4


def test_pruning_keeps_the_parent_of_the_run(url):
    first = save(opened(url), 0)
    store = opened(url)
    store.newest(container.read)
    records = [save(store, n) for n in range(1, 5)]
    assert store.prune(2) == [records[1].id, records[0].id]
    assert [r.id for r in opened(url).records()] == [records[3].id, records[2].id, first.id]
    assert opened(url).prune(2) == [first.id]  # no one's parent


def test_what_was_found_damaged_counts_as_no_good_one(url):
    store = opened(url)
    one, two = save(store, 1), save(store, 2)
    change(url, two.shards[0].path, flipped)  # of the right size: only reading it shows
    store = opened(url)
    assert newest(store) == 1
    save(store, 3)
    assert store.prune(2) == [two.id]
    assert opened(url).records()[1] == one


def test_a_policy_chooses_among_the_whole_ones(url):
    store = opened(url)
    records = [save(store, n) for n in range(5)]
    change(url, f"commits/{records[1].id}.stc", flipped)
    seen = []

    def even(whole):
        seen.extend(whole)
        return {record.id for record in whole if record.step % 2 == 0}

    assert store.retain(even) == [records[1].id]
    assert seen == [records[n] for n in (4, 3, 2, 0)]
    store.remove([records[0].id])
    assert store.records() == [records[n] for n in (4, 3, 2)]


def test_pruning_counts_whole_checkpoints_only(url):
    store = opened(url)
    records = [save(store, n) for n in range(4)]
    change(url, f"commits/{records[3].id}.stc", lambda d: d[:20])
    change(url, f"data/{records[2].id}/r00000.000.sts", lambda d: d[:20])
    assert store.prune(1) == [records[3].id, records[2].id]
    assert newest(opened(url)) == 1


def test_pruning_without_a_whole_checkpoint_removes_none(url):
    store = opened(url)
    bad = save(store, 1)
    change(url, f"commits/{bad.id}.stc", flipped)
    assert store.prune(1) == []
    assert any(bad.id in path for path in everything(url))


def test_pinned_and_newer_checkpoints_are_kept(url):
    store = opened(url)
    records = [save(store, n) for n in range(4)]
    fs, root = fsspec.url_to_fs(url)
    fs.makedirs(f"{root}/keep", exist_ok=True)
    fs.pipe_file(f"{root}/keep/{records[0].id}", b"")
    newer = save(opened(url), 9)
    assert store.prune(1) == [records[1].id]
    assert store.records() == [newer, records[3], records[2], records[0]]


def test_leftovers_of_older_writers_are_removed_and_of_newer_ones_kept(url):
    old = opened(url)
    first = save(old, 1)
    store = opened(url)
    save(store, 2)
    fs, root = fsspec.url_to_fs(url)
    orphans = {}
    for gen in (1, 3):
        key = first.id.replace("g000001-n000001", f"g{gen:06d}-n000009")
        orphans[gen] = f"/data/{key}/r00000.000.sts"
        fs.makedirs(f"{root}/data/{key}", exist_ok=True)
        fs.pipe_file(root + orphans[gen], b"torn")
    store.prune(5)
    found = everything(url)
    assert orphans[1] not in found
    assert orphans[3] in found
    assert len([p for p in found if p.startswith("/claims/")]) == 1
    assert len(store.records()) == 2


# failing backends


def failing_at(operation, *failures):
    failures = list(failures)

    def plan(fs, op, path):
        if op == operation and failures:
            raise failures.pop(0)

    FaultFS.plan = staticmethod(plan)
    return failures


def test_a_passing_error_is_retried(faulty):
    save(opened(faulty), 1)
    for operation in ("ls", "get"):
        waits = []
        left = failing_at(operation, OSError("reset"), RuntimeError("no connection"))
        assert newest(Store(faulty, pause=waits.append)) == 1
        assert (left, waits) == ([], [0.5, 1.0])
    for operation in ("put", "open wb", "write", "close", "done", "info"):
        waits = []
        left = failing_at(operation, OSError(errno.EIO, "lost"), OSError(errno.ESTALE, "stale"))
        save(Store(faulty, pause=waits.append), 2)
        assert (left, waits) == ([], [0.5, 1.0])
        assert newest(opened(faulty)) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_lasting_error_is_not_tried_again(faulty, code):
    waits = []
    store = Store(faulty, pause=waits.append)
    save(store, 1)
    left = failing_at("write", OSError(code, os.strerror(code)), OSError("not reached"))
    with pytest.raises(CheckpointError, match=rf"cannot save to {faulty}: .*; .*(free|check)"):
        save(store, 2)
    assert (len(left), waits) == (1, [])


def test_a_backend_that_ignores_ranges_is_read_all_the_same(faulty, monkeypatch):
    save(opened(faulty), 1)
    asked = []

    def whole(fs, path, **options):
        asked.append(options)
        return fs.under.cat_file(path)

    monkeypatch.setattr(FaultFS, "cat_file", whole)
    store = opened(faulty)
    change(faulty, store.records()[0].shards[0].path, lambda data: data)
    tree = {"t": torch.arange(200_000)}
    record = store.save(lambda file: container.write(tree, file), step=2, state="step")
    assert record.nbytes > 1 << 20
    asked.clear()
    assert torch.equal(opened(faulty).newest(container.read)[1]["t"], tree["t"])
    assert any(options.get("end") for options in asked)  # the control: ranges were asked for


def test_one_that_is_pruned_while_it_is_looked_for_is_no_damage(faulty, caplog):
    store = opened(faulty)
    save(store, 1)

    def plan(fs, op, path):
        if op == "get" and "commits" in path:  # another hand saves and prunes after the listing
            FaultFS.plan = staticmethod(nothing)
            for n in (2, 3, 4):
                save(store, n)
            store.prune(2)

    FaultFS.plan = staticmethod(plan)
    assert newest(opened(faulty)) == 4
    assert "damaged" not in caplog.text


def test_a_lasting_error_is_raised_and_never_an_older_checkpoint(faulty, caplog):
    store = opened(faulty)
    save(store, 1)
    second = save(store, 2)
    for part in (f"data/{second.id}", f"commits/{second.id}"):

        def plan(fs, op, path, part=part):
            if op in {"get", "open rb"} and part in path:
                raise TimeoutError("no answer")

        FaultFS.plan = staticmethod(plan)
        with pytest.raises(CheckpointError, match=r"cannot read .*no answer.*run the same command"):
            newest(opened(faulty))
    assert "damaged" not in caplog.text


def test_every_failing_write_leaves_the_older_checkpoint(faulty):
    """Fail at the k-th write of a save, for every k; a later save and prune clean up."""
    store = opened(faulty)
    save(store, 0)
    at, failed, kept = 0, True, 0
    while failed:
        at, count = at + 1, 0

        def plan(fs, op, path, at=at):
            nonlocal count
            if op in {"write", "put", "open wb"} and "LATEST" not in path:
                count += 1
                if count == at:
                    raise OSError(errno.ENOSPC, "No space left on device")

        FaultFS.plan = staticmethod(plan)
        try:
            save(store, at)
            failed, kept = False, at
        except CheckpointError as error:
            assert "the disk is full" in str(error)  # noqa: PT017  # the last round has none
        FaultFS.plan = staticmethod(nothing)
        assert newest(opened(faulty)) == kept
    assert at > 3
    store.prune(9)
    assert len([p for p in everything(faulty) if "/data/" in p]) == 2


def test_a_store_that_keeps_less_than_it_was_given_is_found_out(faulty):
    store = opened(faulty)
    save(store, 1)

    def plan(fs, op, path):
        if op == "write":
            raise Torn

    FaultFS.plan = staticmethod(plan)
    with pytest.raises(CheckpointError, match=r"kept \d+ of"):
        save(store, 2)


def test_an_unknown_kind_of_url_says_so():
    with pytest.raises(CheckpointError, match="nosuch://x"):
        Store("nosuch://x")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(
        known_implementations,
        "ghost",
        {"class": "ghost_fs_package.Ghost", "err": "Install ghost_fs_package"},
    )
    with pytest.raises(CheckpointError, match="Install ghost_fs_package"):
        Store("ghost://x")


def test_a_file_in_the_way_is_explained(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="a file is where a folder should be"):
        save(opened(tmp_path / "file" / "run"), 1)
    with pytest.raises(CheckpointError, match="a file is where a folder should be"):
        newest(opened(tmp_path / "file" / "run"))


@pytest.mark.skipif(not Path("/proc/sys").exists(), reason="needs Linux")
def test_a_place_that_cannot_be_written_is_explained():
    with pytest.raises(CheckpointError, match=r"cannot begin writing /proc/sys/runs"):
        opened("/proc/sys/runs").claim()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_disk_is_explained_and_costs_nothing(tmp_path):
    store = opened(tmp_path)
    save(store, 1)
    before = everything(str(tmp_path))

    def full(file):
        container.write({"value": 2}, file)
        with open("/dev/full", "wb", buffering=0) as device:
            container.write({"value": 2}, device)

    with pytest.raises(CheckpointError, match="No space left on device; the disk is full"):
        store.save(full, step=2, state="step")
    assert everything(str(tmp_path)) == before
    assert newest(opened(tmp_path)) == 1


def test_a_local_file_is_new_or_an_error(tmp_path):
    files = LocalFiles(str(tmp_path))
    files.write_new("data/a", lambda f: f.write(b"1"))
    with pytest.raises(FileExistsError):
        files.write_new("data/a", lambda f: f.write(b"2"))
    files.put("commits/a", b"1")
    with pytest.raises(FileExistsError):
        files.put("commits/a", b"2")
    assert (files.get("data/a"), files.get("commits/a")) == (b"1", b"1")
    assert files.names("commits") == ["a"]  # no spare name is left


def test_a_copy_of_the_data_is_read_as_a_plain_file(tmp_path):
    record = save(opened(tmp_path), 1)
    data = (tmp_path / record.shards[0].path).read_bytes()
    assert container.read(io.BytesIO(data))["value"] == 1


def test_a_lock_whose_folder_is_removed_meanwhile_is_taken_on_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "run" / "lock"
    path.parent.mkdir()
    flock, tries = local.fcntl.flock, []

    def late(file, how):
        if not tries:
            path.unlink()
            path.parent.rmdir()
        tries.append(how)
        flock(file, how)

    monkeypatch.setattr(local.fcntl, "flock", late)
    first = local.Lock(str(path))
    first.acquire()
    assert len(tries) == 2
    with pytest.raises(CheckpointError, match="is being written by process"):
        local.Lock(str(path)).acquire()
    first.release()


def test_clearing_a_store_removes_its_folder(tmp_path):
    for url in (str(tmp_path / "run"), "memory://cleared"):
        store = Store(url)
        store.lock()
        save(store, 1)
        store.clear()
        store.unlock()
        assert Store(url).records() == []
    assert list(tmp_path.iterdir()) == []
