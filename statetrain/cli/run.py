"""`statetrain run`: a script as `python` runs it, its exit code explained, and again if asked.

The script gets an interpreter of its own, whose parent this process is. So nothing is imported
before it and nothing of ours is in its tracebacks, and a script that was killed can be told about.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from statetrain.cli.child import Child
from statetrain.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, StatetrainError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

__all__ = ["add", "explained"]

KNOWN = {
    1: "the script raised an error, shown above; what was saved before it is still there",
    2: "the script, or python, refused its arguments",
    EXIT_PREEMPTED: "preempted and saved: run the same command again and it goes on",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C: run the same command again and it goes on where it "
    "was last saved",
}
KILLED = {
    "SIGKILL": "killed, as when memory or the job's time runs out",
    "SIGTERM": "ended before it could save: it was not in fit, or had no checkpoints",
    "SIGSEGV": "crashed in native code; where, is shown above",
    "SIGABRT": "aborted in native code; where, is shown above",
}

ABOUT = """\
Run a script as `python SCRIPT args` does: the same interpreter, arguments, search path and
__main__, in the current folder. Added are a traceback where native code crashes (faulthandler),
output that is not held back where it goes to a file or pipe, and a line about the exit code.
Signals sent to this process are passed on to the script.
"""

EXAMPLES = """\
examples:
  statetrain run train.py --lr 0.1
  statetrain run -m mylab.train --lr 0.1
  statetrain run --retries 3 train.py     run it again if it was preempted; at most three times

exit codes are the script's own:
    0  it ended; a run that is complete does nothing when it is run again
    1  it raised an error
    2  it was not found, or refused its arguments
   75  it was stopped by a signal and is saved: run it again. With --retries that is done here,
       unless this process was sent the signal too: then the machine, or you, want it to end
  130  Ctrl-C; a run in fit is saved at its next state, a second Ctrl-C does not wait for that
  137  it was killed (SIGKILL): the next run goes on where it was last saved
  128 + n for any other signal n that ended it
"""


def add(commands: Commands) -> None:
    """Add the command `run` to the command line."""
    parser = commands.add_parser(
        "run",
        help="run a script, explain its exit code, and run it again if preempted",
        usage="statetrain run [-h] [--retries N] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--retries",
        metavar="N",
        type=_count,
        default=0,
        help="run it again after exit code 75, at most N times (default 0)",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="it is a module, as with `python -m`"
    )
    parser.add_argument("script", metavar="SCRIPT", help="a file, or a module after -m")
    parser.add_argument(
        "arguments",
        metavar="ARGUMENT",
        nargs=argparse.REMAINDER,
        help="given to the script as they are, also what looks like an option",
    )
    parser.set_defaults(command=_run)


def explained(code: int) -> str | None:
    """Return what exit code `code` means, as a shell has it; None for success."""
    if code == 0:
        return None
    if code in KNOWN:
        return f"exit code {code}: {KNOWN[code]}"
    name = _signal_name(code - 128)
    if name is not None:
        why = KILLED.get(name, f"ended by {name}")
        return f"exit code {code} ({name}): {why}; run it again and it goes on where it was saved"
    return f"exit code {code}, which the script chose itself"


def _run(options: argparse.Namespace) -> int:
    command = _command(options)
    tried = 0
    with Child() as child:
        while True:
            code = child.run(command)
            again = code == EXIT_PREEMPTED and tried < options.retries and child.told is None
            if not again:
                break
            tried += 1
            _say(f"exit code {code}: preempted and saved: run again ({tried} of {options.retries})")
        stopped = child.told is not None and code == EXIT_PREEMPTED and tried < options.retries
    why = explained(code)
    if why is not None:
        _say(f"{why} (not done here: {child.told} came to this process)" if stopped else why)
    return code


def _command(options: argparse.Namespace) -> Sequence[str]:
    if not options.is_module and not os.path.exists(options.script):
        raise StatetrainError(
            f"no file {options.script!r} in {os.getcwd()!r}: give a script, or -m and a module"
        )
    # by flags, not by the environment: that would reach what the script starts
    held_back = [] if sys.stdout.isatty() else ["-u"]
    script = ["-m", options.script] if options.is_module else [options.script]
    return [sys.executable, "-X", "faulthandler", *held_back, *script, *options.arguments]


def _say(what: str) -> None:
    print(f"statetrain run: {what}", file=sys.stderr, flush=True)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def _signal_name(number: int) -> str | None:
    try:
        return signal.Signals(number).name
    except ValueError:
        return None
