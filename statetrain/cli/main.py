"""The command `statetrain`: a file a subcommand, errors as one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import statetrain
from statetrain.cli import (
    check_store,
    cp,
    diff,
    draw,
    export,
    import_,
    ls,
    pin,
    prune,
    run,
    show,
    verify,
)
from statetrain.errors import StatetrainError

__all__ = ["main"]

# each has add(commands); its parser's default `command` is what runs, and may return an exit code
COMMANDS = (run, draw, ls, show, prune, pin, check_store, verify, diff, cp, export, import_)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default the process's own, and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int | None = options.command(options)
    except StatetrainError as error:
        print(f"statetrain: {_one_line(error)}", file=sys.stderr)
        return 2
    return code or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="statetrain",
        description="See and check training loops that are declared as state machines.",
        epilog="`statetrain COMMAND --help` tells more about a command.",
    )
    parser.add_argument(
        "--version", action="version", version=f"statetrain {statetrain.__version__}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


def _one_line(error: StatetrainError) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
