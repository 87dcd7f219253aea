"""`statetrain draw`: a loop as Mermaid text, or as an SVG, PNG, Mermaid or DOT file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from statetrain.cli.target import load_loop
from statetrain.diagram import draw, mermaid

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

__all__ = ["add"]

EXAMPLES = """\
examples:
  statetrain draw statetrain:supervised -o loop.svg    the supervised loop
  statetrain draw train.py:loop                        a loop in a script, as Mermaid text
  statetrain draw mylib.gan:gan -o gan.png             a loop in a module
"""


def add(commands: Commands) -> None:
    """Add the command `draw` to the command line."""
    parser = commands.add_parser(
        "draw",
        help="draw a loop",
        description="Draw a loop. Without -o its Mermaid text is printed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target",
        metavar="MODULE:NAME",
        help="where the loop is: pkg.mod:name or path/to/file.py:name; "
        "a function of no arguments that returns a loop is called",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="a file to write; .svg, .png, .mmd or .dot (.svg and .png need statetrain[diagram])",
    )
    parser.set_defaults(command=_draw)


def _draw(options: argparse.Namespace) -> None:
    loop = load_loop(options.target)
    if options.output is None:
        print(mermaid(loop), end="")
    else:
        draw(loop, options.output)
        print(f"wrote {options.output}")
