"""`statetrain export`: the weights of a checkpoint as a file that other tools read."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

import torch

from statetrain.cli.statedict import FORMATS, format_of, untied, write_file
from statetrain.cli.stored import Place, split
from statetrain.cli.text import printable, size
from statetrain.cli.weights import Weights, weights
from statetrain.errors import CheckpointError, StatetrainError
from statetrain.loop import nearest

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

__all__ = ["add"]

ABOUT = """\
Write what is in the state_dict of a checkpoint's modules to a file, bit for bit.
None of the program is imported. One module has the names of its state_dict; those of several
begin with the field, as in `g.0.weight`.
"""

EXAMPLES = """\
examples:
  statetrain export runs/digits digits.safetensors
  statetrain export runs/digits@step=120 digits.pt
  statetrain export runs/gan g.pt --module g           the generator alone
  python -c 'import torch; print(torch.load("digits.pt", weights_only=True).keys())'

exit codes: 0; 2 there is no such checkpoint, it is damaged, or the file cannot be written
"""


def add(commands: Commands) -> None:
    """Add the command `export` to the command line."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint's weights to a file that other tools read",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target",
        metavar="URL[@ID]",
        help="a path or URL, and the beginning of an id, or step=N; `statetrain ls URL` has them",
    )
    parser.add_argument(
        "file", metavar="FILE", help="what to write: .safetensors, or .pt, .pth or .bin"
    )
    parser.add_argument("--to", choices=FORMATS, help="the format, where the ending is another")
    parser.add_argument("--module", metavar="NAME", help="write this one alone, with plain names")
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    parser.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> None:
    kind = options.to or format_of(options.file, "--to")
    if os.path.lexists(options.file) and not options.force:
        raise StatetrainError(f"{options.file!r} is there already: --force replaces it")
    url, wanted = split(options.target)
    place = Place(url)
    found, passed = place.find(wanted)
    for stored in passed:
        print(f"statetrain: passed over {stored.id}: {stored.damage}", file=sys.stderr)
    try:
        _, held = place.store.load(found.record.id, weights)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {found.record.id}: {error}") from error
    tensors = _named(held, options.module)
    copies: dict[str, str] = {}
    if kind == "safetensors":
        tensors, copies = untied(tensors)
    write_file(tensors, options.file, kind)
    for name, owner in copies.items():
        _note(f"{name} shares memory with {owner}: it is written as a copy, which is not tied")
    for name in held.left_out:
        _note(f"{name} is no tensor of a module: it is not written")
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    print(f"wrote {options.file}: {len(tensors)} tensors, {size(nbytes)}, of {found.record.id}")


def _named(held: Weights, wanted: str | None) -> dict[str, torch.Tensor]:
    modules = held.modules
    if not modules:
        raise StatetrainError("there is no module in this checkpoint, so no weights to write")
    if wanted is not None and wanted not in modules:
        raise StatetrainError(f"--module {wanted!r}: no such module{nearest(wanted, modules)}")
    if wanted is not None or len(modules) == 1:
        return modules[next(iter(modules)) if wanted is None else wanted]
    return {f"{field}.{name}": t for field, named in modules.items() for name, t in named.items()}


def _note(line: str) -> None:
    print(f"statetrain: {printable(line)}", file=sys.stderr)
