"""The store over real servers: every kind of place keeps the same promises."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import programs
import pytest
import servers
import torch
from servers import Server

import statetrain as st
from statetrain.cli.stored import Place
from statetrain.errors import CheckpointError
from statetrain.persist import container
from statetrain.persist.compare import unequal
from statetrain.persist.store import Store, SupersededError

pytestmark = [
    pytest.mark.stores,
    pytest.mark.filterwarnings("ignore"),  # the clients' own, which are not ours to mend
]


@pytest.fixture(scope="module", params=servers.SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with servers.SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    return f"{server.url}/{uuid.uuid4().hex[:8]}/run"


def opened(server: Server, url: str) -> Store:
    return Store(url, storage_options=server.options or None)


def save(store: Store, value: int, *, size: int = 300) -> Any:
    tree = {"value": value, "t": torch.full((size,), value)}
    return store.save(lambda file: container.write(tree, file), step=value, state="step")


def newest(store: Store) -> int | None:
    found: Any = store.newest(container.read)
    return None if found is None else found[1]["value"]


def rewrite(server: Server, url: str, name: str, edit: Any) -> None:
    fs, root = fsspec.url_to_fs(url, skip_instance_cache=True, **server.options)
    data = fs.cat_file(f"{root}/{name}")
    fs.rm_file(f"{root}/{name}")
    fs.pipe_file(f"{root}/{name}", edit(data))


def everything(server: Server, url: str) -> list[str]:
    fs, root = fsspec.url_to_fs(url, skip_instance_cache=True, **server.options)
    return sorted(path.rpartition("run/")[2] for path in fs.find(root))


def test_looking_writes_nothing(server: Server, url: str) -> None:
    store = opened(server, url)
    assert (store.newest(container.read), store.records()) == (None, [])
    assert everything(server, url) == []


def test_the_newest_is_found_by_another(server: Server, url: str) -> None:
    store, other = opened(server, url), opened(server, url)
    for value in range(3):
        record = save(store, value, size=3_000_000)
        assert newest(other) == value  # a view of its own, and no stale one
    assert other.records()[0] == record
    assert other.claim() == 2


def test_damage_is_passed_over_loudly(
    server: Server, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(server, url)
    first, second, third = (save(store, n) for n in (1, 2, 3))
    assert newest(opened(server, url)) == 3
    rewrite(server, url, f"commits/{third.id}.stc", lambda data: data[: len(data) // 2])
    assert newest(opened(server, url)) == 2
    name = second.shards[0].path
    rewrite(server, url, name, lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:])
    assert newest(opened(server, url)) == 1
    assert sum("is damaged" in message for message in caplog.messages) == 3
    rewrite(server, url, first.shards[0].path, lambda data: data[:-10])
    with pytest.raises(CheckpointError, match=f"no checkpoint in {url} is whole"):
        newest(opened(server, url))


def test_pruning_leaves_nothing_behind(server: Server, url: str) -> None:
    store = opened(server, url)
    records = [save(store, value) for value in range(5)]
    assert store.prune(2) == [record.id for record in records[2::-1]]
    left = [name for name in everything(server, url) if not name.startswith(("claims", "LATEST"))]
    ids = [records[3].id, records[4].id]
    assert left == sorted(
        [*(f"commits/{i}.stc" for i in ids), *(f"data/{i}/r00000.000.sts" for i in ids)]
    )
    assert newest(opened(server, url)) == 4
    store.clear()
    assert everything(server, url) == []


def test_a_superseded_writer_is_stopped(server: Server, url: str) -> None:
    old = opened(server, url)
    save(old, 1)
    new = opened(server, url)
    assert newest(new) == 1
    new.claim()
    with pytest.raises(SupersededError, match=f"another run has begun to write to {url}"):
        save(old, 2)
    save(new, 3)
    new.prune(2)
    assert newest(opened(server, url)) == 3


def test_a_save_that_fails_half_way_leaves_the_older_one(server: Server, url: str) -> None:
    store = opened(server, url)
    save(store, 1)

    def failing(file: Any) -> Any:
        file.write(b"x" * 6_000_000)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        store.save(failing, step=2, state="step")
    assert newest(opened(server, url)) == 1
    save(store, 3)
    store.prune(2)
    names = everything(server, url)
    assert len([name for name in names if name.startswith("data/")]) == 2
    assert newest(opened(server, url)) == 3


def test_two_starters_at_once_have_one_order(server: Server, url: str) -> None:
    one, two = opened(server, url), opened(server, url)
    plain = two._orders()
    one.claim()
    two._orders = lambda: plain  # type: ignore[method-assign]  # it looked before the other wrote
    assert two.claim() == 1
    del two._orders
    first, second = sorted((one, two), key=lambda store: store.uid)
    save(second, 2)
    with pytest.raises(SupersededError):
        save(first, 1)
    assert newest(opened(server, url)) == 2


# a run, killed and resumed


def process(server: Server, name: str, url: str, log: Path, *kill: str) -> int:
    source = [str(Path(st.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(Path(programs.__file__)), name, url, *kill],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, source)),
            "STORAGE_OPTIONS": json.dumps(server.options),
            "LOG": str(log),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def end_of(server: Server, url: str) -> Any:
    found = st.Checkpoints(url, storage_options=server.options or None).newest()
    assert found is not None
    counters = found[1].callbacks["counters"]  # the killing callback is no part of the program
    found[1].callbacks["counters"] = {k: v for k, v in counters.items() if "kill" not in k}
    return found[1]


def test_killed_and_resumed_it_ends_the_same(server: Server, url: str, tmp_path: Path) -> None:
    if server.kind == "memory":
        pytest.skip("memory:// dies with its process: test_exact_resume stops and goes on there")
    assert process(server, "rich", f"{url}/golden", tmp_path / "golden") == 0
    killed = f"{url}/killed"
    for state, visit, sent in [("forward", "5", "SIGKILL"), ("backward", "6", "SIGTERM"),
                               ("step", "4", "SIGKILL")]:  # fmt: skip
        expected = -signal.SIGKILL if sent == "SIGKILL" else 75
        found = process(server, "rich", killed, tmp_path / "killed", state, visit, sent)
        assert found == expected
    middle = end_of(server, killed)
    assert unequal(end_of(server, f"{url}/golden"), middle) != []  # the control
    assert process(server, "rich", killed, tmp_path / "killed") == 0
    assert unequal(end_of(server, f"{url}/golden"), end_of(server, killed)) == []
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "golden").read_bytes()


def test_stopped_and_resumed_in_one_process_it_ends_the_same(server: Server, url: str) -> None:
    ends = []
    for name, stops in (("golden", []), ("stopped", [7, 20])):
        for stop in (*stops, None):
            checkpoints = st.Checkpoints(
                f"{url}/{name}", every=None, at="forward", storage_options=server.options or None
            )
            trainer, arguments = programs.rich(checkpoints, [])
            if stop is not None:
                programs.interrupt(trainer, stop)
            trainer.fit(*arguments)
        ends.append(end_of(server, f"{url}/{name}"))
    assert unequal(*ends) == []


# what goes wrong


BAD = {
    "s3": {"key": None, "secret": None, "anon": False},
    "abfs": {"connection_string": "{}"},
    "sftp": {"key_filename": "{}"},
}


def test_refused_credentials_are_said_at_once(
    server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server.kind not in BAD:
        pytest.skip(f"{server.kind} asks for no credentials here")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    key = tmp_path / "other"
    if server.kind == "sftp":
        subprocess.run(
            [str(shutil.which("ssh-keygen")), "-q", "-t", "ed25519", "-N", "", "-f", str(key)],
            check=True,
        )
    text = str(server.options.get("connection_string", "")).replace("Eby8", "Eby9")
    bad = {
        name: value.format(text or key) if isinstance(value, str) else value
        for name, value in BAD[server.kind].items()
    }
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=f"{url}: .*check the permissions and credentials"):
        save(Store(url, storage_options={**server.options, **bad}), 1)
    assert time.monotonic() - begun < 3


def test_a_missing_bucket_is_said_at_once_and_not_made(server: Server) -> None:
    if servers.BUCKET not in server.url:
        pytest.skip(f"{server.kind} has no buckets")
    url = f"{server.url}-that-is-not-there/run"
    store = opened(server, url)
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=f"begin writing {url}: .*no such bucket"):
        save(store, 1)
    assert time.monotonic() - begun < 3
    fs = fsspec.url_to_fs(url, skip_instance_cache=True, **server.options)[0]
    assert not fs.exists(f"{servers.BUCKET}-that-is-not-there")


def test_an_unreachable_endpoint_is_said(server: Server, url: str) -> None:
    if server.kind not in {"s3", "sftp"}:
        pytest.skip("its client tries for a minute or more before it says so")
    port = servers.free_port()
    other = (
        {"port": port} if server.kind == "sftp" else {"endpoint_url": f"http://127.0.0.1:{port}"}
    )
    waits: list[float] = []
    with pytest.raises(CheckpointError, match=f"{url}: .*check that it can be reached"):
        Store(url, storage_options={**server.options, **other}, pause=waits.append).claim()
    assert waits == [0.5, 1.0, 2.0]


def test_a_place_that_may_only_be_read_is_said(server: Server, tmp_path: Path) -> None:
    if server.kind != "sftp" or os.getuid() != 0:
        pytest.skip("only sftp has a place that nobody may write to here")
    with pytest.raises(CheckpointError, match="/proc/runs/a"):
        save(opened(server, "sftp://127.0.0.1/proc/runs/a"), 1)


def test_a_connection_that_was_cut_is_made_anew(server: Server, url: str) -> None:
    if server.kind != "sftp":
        pytest.skip("its client has no lasting connection")
    waits: list[float] = []
    store = Store(url, storage_options=server.options, pause=waits.append)
    save(store, 1)
    store._files.fs.client.close()
    save(store, 2)
    assert waits != []  # the control: it was cut
    assert newest(opened(server, url)) == 2


@pytest.fixture
def requests(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests to s3 from now on."""
    if server.kind != "s3":
        pytest.skip("requests are counted on s3")
    import s3fs

    calls: list[str] = []
    plain = s3fs.S3FileSystem._call_s3

    async def counted(self: Any, method: str, *args: Any, **more: Any) -> Any:
        calls.append(method)
        return await plain(self, method, *args, **more)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
    return calls


def test_a_small_checkpoint_takes_few_requests(
    server: Server, url: str, requests: list[str]
) -> None:
    save(opened(server, url), 1)
    requests.clear()
    store = opened(server, url)
    with store.open(store.records()[0]) as file:
        container.read_index(file)
    assert len(requests) <= 5, requests


def test_a_large_checkpoint_is_shown_in_five_requests(
    server: Server, url: str, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(server, url)
    for value in range(3):
        save(store, value, size=1_000_000)
    monkeypatch.setitem(fsspec.config.conf, "s3", server.options)
    requests.clear()
    found, _ = Place(url).find(None)
    assert found.index.tree["value"] == 2
    assert len(requests) <= 5, requests


def test_many_tensors_are_read_in_few_requests(
    server: Server, url: str, requests: list[str]
) -> None:
    tree = {str(n): torch.full((10_000,), float(n)) for n in range(1000)}  # 40 MB
    store = opened(server, url)
    store.save(lambda file: container.write(tree, file), step=1, state="s")
    requests.clear()
    found = store.newest(container.read)
    assert found is not None
    assert unequal(found[1], tree) == []
    assert len(requests) <= 12, requests  # 5 of 8 MiB, and both ends


def test_the_command_line_finds_it_fit(server: Server, url: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "statetrain.cli.main", "check-store"]
    root = str(Path(st.__file__).parents[1])
    environment = {**os.environ, **server.environment, "PYTHONPATH": root}
    done = subprocess.run(
        [*command, url, "--mib", "8"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{url} is fit for checkpoints"
    logging.getLogger("statetrain").info("%s", done.stdout)
