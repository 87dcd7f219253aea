"""What can be run on this repository: `nox -l` lists it, `nox -s NAME` runs it.

Each session makes its own environment and installs all it needs.
"""

from __future__ import annotations

import os
import shutil

import nox

nox.needs_version = ">=2024.3.2"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

PYTHON_FILES = ("statetrain", "tests", "examples", "bench", "noxfile.py")


def install(session: nox.Session, extra: str) -> None:
    """Install this package for editing, with one of its extras, at CI's versions."""
    session.install("-c", "constraints.txt", "-e", f".[{extra}]")


@nox.session
def demo(session: nox.Session) -> None:
    """Train digits with and without interruptions, and compare them bit for bit."""
    install(session, "demo")
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", *PYTHON_FILES)
    session.run("ruff", "format", "--check", *PYTHON_FILES)


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy."""
    install(session, "types")
    session.run("mypy", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests that need nothing but this machine, in a few minutes."""
    install(session, "test")
    quick = "not slow and not stores and not slurm and not gpu"
    session.run("pytest", "-m", quick, "-n", "2", "--dist", "worksteal", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Run the tests that take long."""
    install(session, "test")
    nothing_to_run = 5  # pytest's exit code when no test is marked slow
    session.run("pytest", "-m", "slow", *session.posargs, success_codes=[0, nothing_to_run])


@nox.session
def stores(session: nox.Session) -> None:
    """Run the tests that need real servers: s3, Azure, Google Cloud and sftp, all on this machine.

    Azure's is azurite, fetched with npm; sftp's is the system's sshd. What is missing is skipped
    and named.
    """
    install(session, "stores")
    folder = session.create_tmp()
    if shutil.which("npm"):
        command = ["npm", "install", "--silent", "--prefix", folder, "azurite@3"]
        session.run(*command, external=True, success_codes=range(256))
    azurite = {"STATETRAIN_AZURITE": f"{folder}/node_modules/.bin/azurite-blob"}
    found = azurite if os.path.exists(*azurite.values()) else {}
    workers = ["-n", "2", "--dist", "worksteal"]
    session.run("pytest", "-m", "stores", *workers, *session.posargs, env=found)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure speed and memory beside plain loops and other trainers; `-- --quick` for a trial.

    A whole run takes half an hour of a quiet machine; then `docs/performance.md` has its figures.
    """
    install(session, "bench")
    folder = session.create_tmp()
    for name in ("overhead", "fetch", "resume", "memory", "realistic", "checkpoint"):
        figures = f"{folder}/{name}.json"
        session.run("python", f"bench/{name}.py", "--json", figures, *session.posargs)
    if not session.posargs:
        session.run("python", "bench/report.py", folder)
