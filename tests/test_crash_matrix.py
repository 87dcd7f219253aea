"""Killed anywhere, or taken over at any moment, a store keeps what it acknowledged.

Each defence of the protocol is also taken away once, and that must be noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import servers
import torch
from faults import FaultFS, Said, Torn, nothing

import statetrain
from statetrain.errors import CheckpointError
from statetrain.persist import container, record, store
from statetrain.persist.codec import DamagedError
from statetrain.persist.record import Record
from statetrain.persist.store import Store, SupersededError

TREE = {"t": torch.ones(3)}


@pytest.fixture(autouse=True)
def no_plan() -> Iterator[None]:
    yield
    FaultFS.plan = staticmethod(nothing)


def opened(url: str, writer: str = "") -> Store:
    options = {"writer": writer} if url.startswith("fault") else None
    return Store(url, storage_options=options, pause=lambda seconds: None)


def save(at: Store, value: int) -> Record:
    tree = {**TREE, "value": value}
    return at.save(lambda file: container.write(tree, file), step=value, state="step")


def newest(url: str) -> tuple[tuple[int, int, str], int] | None:
    found: Any = opened(url).newest(container.read)
    return None if found is None else (found[0].order, found[1]["value"])


# Real SIGKILL. The parent forks before any connection is made, and looks in a fork too.

KILLER = """
    import asyncio, json, os, signal, sys
    import torch
    from statetrain.persist import container
    from statetrain.persist.store import Store

    place, url, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    if place == "fault":
        from faults import FaultFS, Torn
    elif place == "s3":
        import moto, s3fs
    calls = at = 0

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def count():
        global calls
        calls += 1
        return calls == at

    def dying(call):
        def once(*args, **options):
            if count():
                die()
            return call(*args, **options)
        return once

    def on_disk():
        for name in ("open", "mkdir", "fsync", "link", "unlink", "replace", "rmdir"):
            setattr(os, name, dying(getattr(os, name)))

    class Dying(BaseException):
        def __init__(self):
            die()

    def on_faults():
        class Later:  # raised when half of the bytes are there
            def __new__(cls): ...

        def plan(fs, operation, path):
            if operation in ("ls", "info", "get", "open rb"):
                return
            if count():
                die()
            if operation in ("put", "write") and count():
                torn = Torn()
                fs.__class__.plan = staticmethod(lambda *a: die())
                raise torn
        FaultFS.plan = staticmethod(plan)

    CHANGING = {
        "put_object", "delete_object", "delete_objects", "create_multipart_upload", "upload_part",
        "complete_multipart_upload", "abort_multipart_upload", "copy_object",
    }

    def on_s3():
        plain = s3fs.S3FileSystem._call_s3
        async def dying_call(self, method, *args, **options):
            if method not in CHANGING:
                return await plain(self, method, *args, **options)
            if count():
                die()  # not sent
            sent = count()
            if sent:  # on its way
                asyncio.get_running_loop().call_later(0.001, die)
            answer = await plain(self, method, *args, **options)
            if sent or count():
                die()  # done, and nobody knows
            return answer
        s3fs.S3FileSystem._call_s3 = dying_call

    def save(value, say):
        store = Store(url, storage_options=options)
        store.newest(container.read)
        {"local": on_disk, "fault": on_faults, "s3": on_s3}[place]()

        def write(file):
            class Half:
                def write(self, data):
                    half = file.write(data[: max(1, len(data) // 2)])
                    if place == "local" and count():
                        die()
                    return half
            return container.write({"value": value, "t": torch.ones(3)}, Half())

        store.save(write, step=value, state="step")
        os.write(say, b"acknowledged")
        store.save(write, step=value, state="step")
        store.prune(2)

    def look(_value, say):
        found = Store(url, storage_options=options).newest(container.read)
        os.write(say, str(found[1]["value"] if found else 0).encode())

    def forked(function, value):
        hear, say = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                function(value, say)
            finally:
                os._exit(0 if sys.exc_info()[0] is None else 1)
        os.close(say)
        heard = os.read(hear, 100)
        os.close(hear)
        return heard, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    acknowledged, number, status = 0, 0, -9
    if place == "fault":  # a torn record that is the only one is an error, and no fresh start
        forked(save, 1)
        acknowledged = 1
    while status and number < 1000:
        number = at = number + 1
        heard, status = forked(save, acknowledged + 1)
        at = 0
        value = int(forked(look, 0)[0])
        print(number, status, value - acknowledged - bool(heard), flush=True)
        acknowledged = value
"""


def killed_everywhere(place: str, url: str, options: str = "{}") -> list[tuple[int, int, int]]:
    """Kill the k-th call of claim, save, save and prune for every k; one place is reused.

    The last number is how much newer the found checkpoint is than the acknowledged one: 1 if it
    was committed and the process died before it could say so.
    """
    paths = [str(Path(statetrain.__file__).parents[1]), str(Path(__file__).parent)]
    code = textwrap.dedent(KILLER)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, place, url, options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]  # type: ignore[misc]


def check_lines(lines: list[tuple[int, int, int]], *, least: int) -> None:
    assert len(lines) > least
    assert [status for _, status, _ in lines] == [-signal.SIGKILL] * (len(lines) - 1) + [0]
    assert {ahead for _, _, ahead in lines} <= {0, 1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_in_any_system_call_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    check_lines(killed_everywhere("local", str(tmp_path)), least=50)
    assert len(opened(str(tmp_path)).records()) <= 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_in_any_request_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    lines = killed_everywhere("fault", f"fault://{tmp_path}/run", '{"over": "file"}')
    check_lines(lines, least=25)


@pytest.mark.stores
def test_killed_in_any_request_to_s3_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    """There are three moments a request that changes something: not sent, on its way, answered."""
    with servers.s3(tmp_path) as server:
        lines = killed_everywhere("s3", f"{server.url}/run", json.dumps(server.options))
    check_lines(lines, least=30)


# Two writers, interleaved operation by operation.


class Killed(BaseException):
    """A writer's process is gone: nothing that it would do after this happens."""


class Baton:
    """Lets one of several threads do one operation at a time, in an order drawn from a seed."""

    def __init__(self, seed: int, *, stale: bool = True, deaths: bool = True) -> None:
        self.draw = random.Random(seed)
        self.stale = stale
        self.lean = self.draw.choice([0.03, 0.3, 0.5, 0.7, 0.97])  # how often the old one goes on
        self.turn = threading.Condition()
        self.waiting: set[str] = set()
        self.alive: set[str] = set()
        self.next: str | None = None
        self.dead: set[str] = set()
        self.dies = self.draw.randrange(10, 90) if deaths and self.draw.random() < 0.6 else -1
        self.seen: dict[tuple[str, str], Any] = {}

    def plan(self, fs: FaultFS, operation: str, path: str) -> None:
        writer = fs.writer
        if writer not in self.alive:
            return
        if writer in self.dead:
            raise Killed
        self._wait(writer)
        if writer == "old":
            self.dies -= 1
            if self.dies == 0:
                self.dead.add(writer)
                raise Torn(Killed()) if operation in {"put", "write"} else Killed
        if operation == "ls":
            self._look(fs, writer, path)

    def _look(self, fs: FaultFS, writer: str, path: str) -> None:
        """Show the dying writer a listing from before, at times: NFS may do so for a minute."""
        key = (writer, path)
        if self.stale and writer == "old" and key in self.seen and self.draw.random() < 0.4:
            raise Said(self.seen[key])
        with contextlib.suppress(FileNotFoundError):
            self.seen[key] = fs.under.ls(path, detail=False)

    def _wait(self, writer: str) -> None:
        with self.turn:
            self.waiting.add(writer)
            self._choose()
            while self.next != writer:
                if not self.turn.wait(20):
                    raise RuntimeError("no turn")
            self.next = None
            self.waiting.discard(writer)

    def _choose(self) -> None:
        if self.next is None and self.waiting >= self.alive and self.waiting:
            first = "old" if self.draw.random() < self.lean else "new"
            self.next = first if first in self.waiting else min(self.waiting)
            self.turn.notify_all()

    def over(self, writer: str) -> None:
        with self.turn:
            self.alive.discard(writer)
            self._choose()


class Race:
    """A job and the one that takes over from it, on one store, and what went wrong."""

    def __init__(self, seed: int, **how: Any) -> None:
        self.url = f"fault://{uuid.uuid4().hex}"
        self.acknowledged: list[tuple[tuple[int, int, str], int]] = []
        self.violations: list[str] = []
        self.superseded = 0
        self.baton = Baton(seed, **how)
        FaultFS.plan = staticmethod(nothing)
        first = opened(self.url, "old")
        self._save(first, 1)
        self._save(first, 2)
        self.baton.alive = {"old", "new"}
        FaultFS.plan = staticmethod(self.baton.plan)
        threads = [
            threading.Thread(target=self._lived, args=("old", self._old, first)),
            threading.Thread(target=self._lived, args=("new", self._new, None)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        FaultFS.plan = staticmethod(nothing)
        self._check()
        self._save(last := opened(self.url), 99, after=True)  # and whoever comes next
        last.prune(2)
        self._check()
        FaultFS().under.rm(f"/{self.url.removeprefix('fault://')}", recursive=True)

    def _old(self, at: Store) -> None:
        for value in (3, 4):
            self._save(at, value)
            at.prune(2)

    def _new(self, _: None) -> None:
        at = opened(self.url, "new")
        found: Any = at.newest(container.read)
        before = max(self.acknowledged[:2])
        if found is None or found[0].order < before[0]:
            self.violations.append(f"the new job found {found and found[0].order}")
        at.claim()
        for value in (13, 14):
            self._save(at, value)
            at.prune(2)

    def _save(self, at: Store, value: int, *, after: bool = False) -> None:
        if after:
            at.newest(container.read)
        self.acknowledged.append((save(at, value).order, value))

    def _lived(self, writer: str, life: Any, given: Any) -> None:
        try:
            life(given)
        except Killed:
            pass
        except CheckpointError as error:  # its data was swept away before it saw the newer one
            self.superseded += 1
            if writer == "new":
                self.violations.append(f"the new job: {error}")
        except Exception as error:  # noqa: BLE001  # it is shown
            self.violations.append(f"{writer}: {error!r}")
        finally:
            self.baton.over(writer)

    def _check(self) -> None:
        best = max(self.acknowledged)
        try:
            found = newest(self.url)
        except CheckpointError as error:
            self.violations.append(f"nothing is left: {error}")
            return
        if found is None or found[0] < best[0] or dict(self.acknowledged).get(*found) != found[1]:
            self.violations.append(f"found {found}, acknowledged {best}")
        for each in opened(self.url).records():
            self._check_whole(each)

    def _check_whole(self, each: Record) -> None:
        """Every commit of the newest generation can be read: nobody has taken its data away."""
        if each.gen < max(order[0] for order, _ in self.acknowledged):
            return
        try:
            opened(self.url).load(each.id, container.read)
        except DamagedError as error:
            self.violations.append(f"{each.id} is not whole: {error}")


def races(seeds: range, **how: Any) -> list[str]:
    return [f"{seed}: {line}" for seed in seeds for line in Race(seed, **how).violations]


def test_two_writers_in_two_hundred_interleavings() -> None:
    assert races(range(200)) == []


@pytest.mark.slow
def test_two_writers_in_a_thousand_interleavings() -> None:
    assert races(range(1000, 2000)) == []


def test_the_interleavings_are_of_every_kind() -> None:
    found = [Race(seed) for seed in range(40)]
    assert any(race.superseded for race in found)
    assert any(race.baton.dead for race in found)
    assert any(not race.superseded and not race.baton.dead for race in found)


# Each defence alone: what it prevents happens once it is taken away.


@pytest.fixture
def url() -> str:
    return f"fault://{uuid.uuid4().hex}"


def killing(operation: str, part: str, *, torn: bool = False) -> None:
    """Let the first such operation be the last thing that the writer "old" does."""
    dead = False

    def plan(fs: FaultFS, op: str, path: str) -> None:
        nonlocal dead
        if fs.writer != "old":
            return
        if dead:
            raise Killed
        if op == operation and part in path:
            dead = True
            raise Torn(Killed()) if torn else Killed

    FaultFS.plan = staticmethod(plan)


def died(at: Store, value: int) -> bool:
    with contextlib.suppress(Killed):
        save(at, value)
        return False
    FaultFS.plan = staticmethod(nothing)
    return True


def found(url: str) -> int | None:
    try:
        order = newest(url)
    except CheckpointError:
        return None
    return order and order[1]


def not_whole(url: str) -> list[str]:
    at = opened(url)
    return [each.id for each in at.records() if not all(map(at._has, each.shards))]


def without_the_record_checksum(patch: pytest.MonkeyPatch) -> None:
    def payload(data: bytes) -> bytes:
        if data[:8] != record.MAGIC or len(data) < record.HEAD.size:
            raise DamagedError("no record")
        _, _, size = record.HEAD.unpack_from(data)
        return data[record.HEAD.size : record.HEAD.size + size]

    patch.setattr(record, "_verified", payload)


def record_checksum(url: str) -> bool:
    """A record with a flipped bit is no record."""
    made = save(opened(url), 1)
    data = made.to_bytes()
    for at in range(len(data)):
        with contextlib.suppress(CheckpointError):
            Record.from_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            return False
    return True


def without_unique_names(patch: pytest.MonkeyPatch) -> None:
    def claim(at: Store, above: int = 0) -> int:
        at._gen, at._saves, at._run_id = 1, 0, "x"
        return 1

    patch.setattr(Store, "claim", claim)
    patch.setattr(store.secrets, "token_hex", lambda size: "0" * 2 * size)


def unique_names(url: str) -> bool:
    """Who writes after another overwrites nothing of it."""
    save(opened(url), 1)
    killing("write", "data", torn=True)
    assert died(opened(url, "old"), 1)
    return found(url) == 1


def without_the_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "_orders", lambda at: [])


def fence(url: str) -> bool:
    """Who was taken over from is stopped at its next save."""
    old = opened(url)
    save(old, 1)
    new = opened(url)
    save(new, 2)
    with contextlib.suppress(SupersededError):
        save(old, 3)
        return False
    return True


def without_looking_for_its_data(patch: pytest.MonkeyPatch) -> None:
    plain = Store._fence
    patch.setattr(Store, "_fence", lambda at, made: plain(at, replace(made, shards=())))


def own_data_is_there(url: str) -> bool:
    """What was swept away while it was saved is not acknowledged, even if no claim shows yet."""
    old = opened(url, "old")
    hint = save(old, 1).id.encode()
    root = f"/{url.removeprefix('fault://')}"
    stale = {name: FaultFS().ls(f"{root}/{name}", detail=False) for name in ("claims", "commits")}
    looked: list[str] = []

    def plan(fs: FaultFS, op: str, path: str) -> None:
        name = path.rpartition("/")[2]
        if fs.writer == "old" and op == "ls" and name in stale:
            if not looked:
                looked.append(name)
                new = opened(url)
                save(new, 2)
                new.prune(2)
            raise Said(stale[name])
        if fs.writer == "old" and op == "get" and name == "LATEST":
            raise Said(hint)

    FaultFS.plan = staticmethod(plan)
    with contextlib.suppress(SupersededError):
        return opened(url)._has(save(old, 3).shards[0])
    return True


def without_committing_last(patch: pytest.MonkeyPatch) -> None:
    plain = Store._written

    def written(at: Store, made: Record, write: Any) -> Record:
        import io

        segment = write(io.BytesIO())
        path = f"data/{made.id}/r00000.000.sts"
        at._commit(replace(made, shards=(record.Shard(path=path, **vars(segment)),)))
        return plain(at, made, write)

    patch.setattr(Store, "_written", written)


def committed_last(url: str) -> bool:
    """Whoever has a record has its data."""
    save(opened(url), 1)
    killing("write", "data", torn=True)
    assert died(opened(url, "old"), 2)
    return not_whole(url) == []


def without_reading_back(patch: pytest.MonkeyPatch) -> None:
    def commit(at: Store, made: Record) -> None:
        at._files.put(f"commits/{made.id}.stc", made.to_bytes())

    patch.setattr(Store, "_commit", commit)


def read_back(url: str) -> bool:
    """A record that the store took and did not keep is not acknowledged."""
    at = opened(url)
    save(at, 1)

    def plan(fs: FaultFS, op: str, path: str) -> None:
        if op == "put" and "commits" in path:
            raise Said(None)

    FaultFS.plan = staticmethod(plan)
    with contextlib.suppress(CheckpointError):
        save(at, 2)
        FaultFS.plan = staticmethod(nothing)
        return found(url) == 2
    return True


def without_removing_records_first(patch: pytest.MonkeyPatch) -> None:
    def remove(at: Store, keys: list[str]) -> None:
        for folder in ("data/{}", "commits/{}.stc"):
            for key in keys:
                at._files.remove(folder.format(key))

    patch.setattr(Store, "_remove", remove)


def records_removed_first(url: str) -> bool:
    """A prune that dies leaves no record without its data."""
    at = opened(url, "old")
    for value in range(4):
        save(at, value)
    removed = 0

    def plan(fs: FaultFS, op: str, path: str) -> None:
        nonlocal removed
        removed += op == "rm"
        if removed == 2:
            raise Killed

    FaultFS.plan = staticmethod(plan)
    with contextlib.suppress(Killed):
        at.prune(2)
    FaultFS.plan = staticmethod(nothing)
    return removed == 2 and not_whole(url) == []


def with_pruning_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    plain = Store._fence

    def first(at: Store, made: Record) -> None:
        plain(at, made)
        at._remove([key for key in at._ids() if key != made.id])

    patch.setattr(Store, "_fence", first)


def pruned_after_the_commit(url: str) -> bool:
    """A save that dies has removed nothing."""
    at = opened(url, "old")
    save(at, 1)
    killing("put", "commits")
    assert died(at, 2)
    return found(url) == 1


def without_looking_at_generations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "_is_over", lambda at, order, gen: True)


def newer_ones_are_left_alone(url: str) -> bool:
    """A dying predecessor that prunes takes nothing from the one that took over."""
    old = opened(url)
    save(old, 1)
    save(old, 2)
    new = opened(url, "new")
    new.claim()

    def plan(fs: FaultFS, op: str, path: str) -> None:
        if fs.writer == "new" and op == "ls" and path.endswith("/claims"):
            FaultFS.plan = staticmethod(nothing)
            old.prune(2)

    FaultFS.plan = staticmethod(plan)
    with contextlib.suppress(SupersededError):
        return found(url) == 2 and save(new, 3).step == 3
    return False


DEFENCES = {
    record_checksum: without_the_record_checksum,
    unique_names: without_unique_names,
    fence: without_the_fence,
    own_data_is_there: without_looking_for_its_data,
    committed_last: without_committing_last,
    read_back: without_reading_back,
    records_removed_first: without_removing_records_first,
    pruned_after_the_commit: with_pruning_before_the_commit,
    newer_ones_are_left_alone: without_looking_at_generations,
}


@pytest.mark.parametrize("defence", DEFENCES, ids=lambda each: each.__name__)
def test_a_defence_holds_alone_and_matters(
    url: str, defence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert defence(url)
    FaultFS.plan = staticmethod(nothing)
    DEFENCES[defence](monkeypatch)
    assert not defence(f"{url}-without")


@pytest.mark.parametrize("mutant", [without_unique_names, without_looking_at_generations])
def test_the_interleavings_see_a_protocol_that_loses(
    mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert races(range(60)) != []
