from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from statetrain.cli.child import PASSED_ON
from statetrain.cli.main import main
from statetrain.cli.run import explained
from statetrain.persist.store import Store

ROOT = Path(__file__).resolve().parent.parent

# it sends itself a signal at its third step, in its first life only
TRAINED = """\
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import statetrain as st

@dataclass(kw_only=True)
class Work(st.Run):
    weight: torch.Tensor

def work(run):
    run.step += 1
    run.weight = run.weight + torch.rand(3)

loop = st.Loop(
    initial="work",
    states=[st.State("work", work), st.State("done", final=True)],
    transitions=[
        st.Transition("work", "done", when=lambda run: run.step >= 6), st.Transition("work", "work")
    ],
)
url, number = sys.argv[1:]
print("begun", url)
trainer = st.Trainer(loop, seed=1, checkpoints=st.Checkpoints(url, every=None), progress=False)

@trainer.on("work", at=3)
def stop(run):
    os.kill(os.getpid(), signal.Signals[number])

run = trainer.fit(Work(weight=torch.zeros(3)))
print("done", run.step, run.weight.tolist())
"""

LIVES = """\
import os, pathlib, sys
count = pathlib.Path("lives")
lives = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(lives))
sys.exit(int(sys.argv[lives]))
"""

TOLD = """\
import os, signal, sys
number = signal.Signals[sys.argv[1]]
signal.alarm(20)  # ends it if the signal does not come
signal.pthread_sigmask(signal.SIG_BLOCK, [number])
os.kill(os.getppid(), number)
signal.sigwait([number])
print("told", number.name)
sys.exit(75)
"""


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """Have signals do what they do in a new process: a fit that was stopped ignores its own."""
    before = {signal.Signals[name]: signal.getsignal(signal.Signals[name]) for name in PASSED_ON}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return tmp_path


def ran(
    capfd: pytest.CaptureFixture[str], code: str, *arguments: str, options: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    Path("script.py").write_text(code)
    left = main(["run", *options, "script.py", *arguments])
    out, err = capfd.readouterr()
    return left, out, err


def test_a_script_is_run_as_python_runs_it(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys, os; print(__name__, __file__, sys.argv, sys.path[0], sys.executable)\n"
    Path("sub").mkdir()
    Path("sub", "script.py").write_text(code)
    given = ["sub/script.py", "--retries", "3", "-m", "--", "-h", "", "a b"]
    done = subprocess.run([sys.executable, *given], capture_output=True, text=True, check=True)
    assert main(["run", *given]) == 0
    assert capfd.readouterr() == (done.stdout, "")
    assert "['sub/script.py', '--retries', '3', '-m', '--', '-h', '', 'a b']" in done.stdout


def test_a_module_is_run_as_python_runs_it(capfd: pytest.CaptureFixture[str]) -> None:
    Path("pack").mkdir()
    Path("pack", "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])\n")
    assert main(["run", "-m", "pack.train", "--lr", "0.1", "-m"]) == 0
    assert capfd.readouterr() == ("__main__ pack ['--lr', '0.1', '-m']\n", "")


def test_nothing_of_ours_is_imported_before_the_script(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print(sorted({'statetrain', 'torch', 'runpy'} & {*sys.modules}))\n"
    assert ran(capfd, code) == (0, "[]\n", "")


def test_a_traceback_is_the_script_s_own(capfd: pytest.CaptureFixture[str]) -> None:
    code = "def f():\n    raise ValueError('mine')\n\nf()\n"
    left, out, err = ran(capfd, code)
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, check=False
    )
    assert (left, out) == (done.returncode, done.stdout) == (1, "")
    assert err == done.stderr + (
        "statetrain run: exit code 1: the script raised an error, shown above; what was saved "
        "before it is still there\n"
    )


def test_faulthandler_is_on_and_output_is_not_held_back(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import faulthandler, os, sys\n"
        "print(faulthandler.is_enabled(), end=' ')\n"
        "os.write(1, b'after')\n"
        "os._exit(0)  # what is held back is lost\n"
    )
    assert ran(capfd, code) == (0, "True after", "")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=True)
    assert done.stdout == "after"  # the control


def test_a_crash_in_native_code_shows_where(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os, signal\ndef crash():\n    os.kill(os.getpid(), signal.SIGSEGV)\ncrash()\n"
    left, _, err = ran(capfd, code)
    assert left == 128 + signal.SIGSEGV
    assert "line 3 in crash" in err
    assert err.splitlines()[-1].startswith("statetrain run: exit code 139 (SIGSEGV): crashed")


def test_what_the_script_reads_is_what_is_given(tmp_path: Path) -> None:
    Path("script.py").write_text("print(input())\n")
    code = "import sys; from statetrain.cli.main import main; sys.exit(main(['run', 'script.py']))"
    done = subprocess.run(
        [sys.executable, "-c", code], input="line\n", capture_output=True, text=True, check=True
    )
    assert done.stdout == "line\n"


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_that_ends_the_script_is_128_more(
    number: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        f"os.kill(os.getpid(), signal.{number})\n"
    )
    left, _, err = ran(capfd, code)
    assert left == 128 + signal.Signals[number]
    assert err.count("\n") == 1
    assert err.startswith(f"statetrain run: exit code {left}")


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75, 130, 255])
def test_an_exit_code_is_passed_through_with_one_line(
    code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    left, out, err = ran(capfd, f"import sys; sys.exit({code})\n")
    assert (left, out) == (code, "")
    assert err == (f"statetrain run: {explained(code)}\n" if code else "")


@pytest.mark.parametrize(
    ("retries", "codes", "lives", "left"),
    [
        (0, (75, 0), 1, 75),
        (1, (75, 0), 2, 0),
        (3, (75, 75, 0), 3, 0),
        (2, (75, 75, 75, 0), 3, 75),
        (3, (75, 1, 0), 2, 1),
        (3, (130, 0), 1, 130),
        (3, (0, 1), 1, 0),
    ],
)
def test_a_script_is_run_again_only_after_exit_code_75(
    retries: int,
    codes: tuple[int, ...],
    lives: int,
    left: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    found, _, err = ran(capfd, LIVES, *map(str, codes), options=("--retries", str(retries)))
    assert (found, Path("lives").read_text()) == (left, str(lives))
    assert err.count(f"run again ({lives - 1} of {retries})") == (lives > 1)


def test_a_preempted_training_is_finished_by_a_retry(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    left, out, err = ran(capfd, TRAINED, "killed", "SIGTERM", options=("--retries", "2"))
    assert left == 0
    assert out.count("begun killed") == 2
    assert "saved in state 'work'" in err
    assert "statetrain run: exit code 75: preempted and saved: run again (1 of 2)\n" in err
    whole, unbroken, _ = ran(capfd, TRAINED, "whole", "SIGCONT")  # the control: it stops nothing
    assert (whole, unbroken.count("begun whole")) == (0, 1)
    assert out.splitlines()[-1] == unbroken.splitlines()[-1]  # the same bits
    records = {name: Store(folder / name).records() for name in ("killed", "whole")}
    assert [record.step for record in records["killed"]] == [6, 3]
    assert [record.step for record in records["whole"]] == [6]


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"])
def test_a_signal_is_passed_on_and_ends_the_retries(
    number: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statetrain.cli.child._in_foreground", lambda: False)
    before = signal.getsignal(signal.Signals[number])
    left, out, err = ran(capfd, TOLD, number, options=("--retries", "3"))
    assert (left, out) == (75, f"told {number}\n")
    assert err == (
        "statetrain run: exit code 75: preempted and saved: run the same command again and it goes "
        f"on (not done here: {number} came to this process)\n"
    )
    assert signal.getsignal(signal.Signals[number]) is before


def test_a_signal_that_is_ignored_here_stays_ignored_in_the_script(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = (
        "import os, signal\n"
        "os.kill(os.getppid(), signal.SIGHUP)\n"
        "print(signal.getsignal(signal.SIGHUP).name)\n"
    )
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    assert ran(capfd, code) == (0, "SIG_IGN\n", "")


def test_ctrl_c_in_a_terminal_reaches_the_script_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statetrain.cli.child._in_foreground", lambda: True)
    code = (
        "import os, signal, sys\n"
        "signal.alarm(20)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGUSR1])\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        "signal.sigwait([signal.SIGUSR1])\n"
        "print(signal.sigpending())\n"
    )
    assert ran(capfd, code) == (0, "set()\n", "")
    monkeypatch.setattr("statetrain.cli.child._in_foreground", lambda: False)
    assert "SIGINT" in ran(capfd, code)[1]  # the control


def test_a_typed_ctrl_c_interrupts_the_script_once() -> None:
    Path("script.py").write_text(
        "import os, signal, time\n"
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "os.kill(os.getppid(), signal.SIGSTOP)  # or two signals could come as one\n"
        "print('ready', flush=True)\n"
        "while not seen: time.sleep(0.01)\n"
        "os.kill(os.getppid(), signal.SIGCONT)\n"
        "time.sleep(0.5)  # a second one would come before\n"
        "print('seen', len(seen), flush=True)\n"
    )
    code = (
        "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "from statetrain.cli.main import main; sys.exit(main(['run', 'script.py']))"
    )
    ours, terminal = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=terminal,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.write(ours, b"\x03")
        assert process.stdout.readline() == "seen 1\n"
        assert process.wait() == 0
    os.close(terminal)
    os.close(ours)


def test_a_script_that_is_not_there_is_refused_before_anything_is_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "train.py"]) == 2
    assert capfd.readouterr() == (
        "",
        f"statetrain: no file 'train.py' in '{folder}': give a script, or -m and a module\n",
    )


@pytest.mark.parametrize(
    "arguments", [[], ["--retries", "-1", "x.py"], ["--retries", "many", "x.py"], ["--retry", "1"]]
)
def test_wrong_usage_has_exit_code_2(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", *arguments])
    assert left.value.code == 2
    assert "usage: statetrain" in capfd.readouterr().err


def test_help_documents_the_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", "--help"])
    out = capfd.readouterr().out
    assert left.value.code == 0
    for words in (
        " 75  it was stopped by a signal",
        "130  Ctrl-C",
        "137  it was killed",
        "128 + n",
    ):
        assert words in out
    assert "statetrain run train.py --lr 0.1" in out


def test_every_explanation_is_one_line() -> None:
    told = [explained(code) for code in range(256)]
    assert told[0] is None
    assert all(
        text and "\n" not in text and str(code) in text for code, text in enumerate(told[1:], 1)
    )
    assert told[137] == (
        "exit code 137 (SIGKILL): killed, as when memory or the job's time runs out; run it again "
        "and it goes on where it was saved"
    )
