"""`statetrain import`: a file of weights as a place that `Trainer(init_from=...)` starts from."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from statetrain.cli.statedict import FORMATS, format_of, read_file
from statetrain.cli.text import size
from statetrain.errors import CheckpointError
from statetrain.fitting import IMPORTED, as_snapshot
from statetrain.persist import container
from statetrain.persist.store import Store

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

__all__ = ["add"]

ABOUT = """\
Store the tensors of a file at a new place, which Trainer(init_from=URL) takes as first weights.
Nothing in the file is run: it is safetensors, or torch's with weights_only=True.

The names are those of the module's state_dict; of a run with several modules they begin with
the field, as in `g.0.weight`. The place holds weights and no run: no training goes on from it.
"""

EXAMPLES = """\
examples:
  statetrain import net.safetensors runs/net         then st.Trainer(init_from="runs/net")
  statetrain import old.ckpt s3://bucket/old --from torch

exit codes: 0; 2 the file is no state dict, or the place holds checkpoints already
"""


def add(commands: Commands) -> None:
    """Add the command `import` to the command line."""
    parser = commands.add_parser(
        "import",
        help="make a file of weights a place that a run can start from",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", metavar="FILE", help="a state dict: .safetensors, or .pt, .pth or .bin"
    )
    parser.add_argument("url", metavar="URL", help="a new place, for init_from=")
    parser.add_argument(
        "--from", dest="kind", choices=FORMATS, help="the format, where the ending is another"
    )
    parser.set_defaults(command=_import)


def _import(options: argparse.Namespace) -> None:
    kind = options.kind or format_of(options.file, "--from")
    tensors = read_file(options.file, kind)
    store = Store(options.url)
    store.lock()
    try:
        record_id = _stored(store, tensors, os.path.basename(options.file))
    finally:
        store.unlock()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    print(f"stored {len(tensors)} tensors, {size(nbytes)}, as {record_id} at {options.url}")


def _stored(store: Store, tensors: Mapping[str, torch.Tensor], source: str) -> str:
    there = store.ids()
    if there:
        raise CheckpointError(
            f"{store.url} holds checkpoints already ({there[0]}): name a new place"
        )
    write = partial(container.write, as_snapshot(tensors, source))
    return store.save(write, step=0, state=IMPORTED, versions={"torch": str(torch.__version__)}).id
