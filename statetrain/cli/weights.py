"""The weights of the modules in a checkpoint, read without the program that made it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from statetrain.cli.facts import PART, SNAPSHOT
from statetrain.errors import CheckpointError
from statetrain.persist.chunks import read_spans, verify
from statetrain.persist.codec import Decoder, Opaque
from statetrain.persist.layout import Tables, open_tables
from statetrain.persist.tensors import memory, rebuild

__all__ = ["Weights", "weights"]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The tensors of each module by the module's field, and the names of what is left out."""

    modules: dict[str, dict[str, torch.Tensor]]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Row:
    """Where a tensor stands in the index; nothing of it has been read."""

    number: int


def weights(file: BinaryIO) -> Weights:
    """Return what is in the `state_dict` of all modules; tied tensors share memory here too.

    All of the file is verified, and only the bytes of these tensors are kept.

    Raises:
        DamagedError: the bytes are not what was written.
        CheckpointError: it holds no run, or a parameter or buffer that is no plain tensor.
    """
    tables = open_tables(file)
    tree = Decoder(_Row, lambda *_: None, build=False).decode(tables.tree)
    rows: dict[str, dict[str, _Row]] = {}
    left_out: list[str] = []
    for name, kind, state in _parts(_run(tree), ""):
        if kind == "module":
            rows[name] = _rows(state, name)
            extra = [key for key in state["extra"] if _extra(key) not in rows[name]]
            left_out += [f"{name}.{_extra(key)}" for key in extra]
        elif kind == "parameter":
            left_out.append(name)
    verify(file, tables)
    made = _tensors(file, tables, {row.number for named in rows.values() for row in named.values()})
    modules = {
        name: {key: made[row.number] for key, row in named.items()} for name, named in rows.items()
    }
    return Weights(modules=modules, left_out=tuple(left_out))


def _run(tree: object) -> dict[str, Any]:
    if isinstance(tree, Opaque) and tree.kind == SNAPSHOT and isinstance(tree.parts[1], dict):
        run = tree.parts[1].get("run")
        if isinstance(run, dict):
            return run
    raise CheckpointError("it holds no snapshot of a run, so there are no modules in it")


def _parts(value: Any, name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield name, kind and state of each live object; dataclasses are gone into."""
    if isinstance(value, Opaque) and value.kind == PART:
        part: Any = value.parts[1]
        if part["kind"] != "dataclass":
            yield name, part["kind"], part["state"]
            return
        for key, item in part["state"].items():
            yield from _parts(item, f"{name}.{key}")
    elif type(value) is dict:
        for key, item in value.items():
            yield from _parts(item, f"{name}[{key!r}]" if name else key)
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            yield from _parts(item, f"{name}[{number}]")


def _rows(state: dict[str, Any], module: str) -> dict[str, _Row]:
    """Return a module's tensors by their names in `state_dict`."""
    extra = {_extra(key): v for key, v in state["extra"].items() if isinstance(v, _Row)}
    held = {**state["parameters"], **state["buffers"]}
    again = {name: held[owner] for name, owner in state["aliases"].items()}
    named = {**held, **again, **extra}
    for name in state["unsaved"]:
        named.pop(name, None)
    for name, value in named.items():
        if not isinstance(value, _Row | None):
            what = value.kind if isinstance(value, Opaque) else type(value).__name__
            raise CheckpointError(
                f"{module}.{name} is a {what}, which no file of weights holds: make it dense "
                "and save again"
            )
    return {name: row for name, row in named.items() if row is not None}


def _extra(submodule: str) -> str:
    return f"{submodule}._extra_state" if submodule else "_extra_state"


def _tensors(file: BinaryIO, tables: Tables, numbers: set[int]) -> dict[int, torch.Tensor]:
    storages: dict[int, torch.UntypedStorage] = {}
    spans: list[tuple[int, memoryview]] = []
    for place in sorted({tables.tensors[number][0] for number in numbers}):
        blob, nbytes, device = tables.storages[place]
        if blob is None and nbytes:
            raise CheckpointError(f"a weight is on the device {device!r} and has no values")
        storages[place] = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        if blob is not None:
            spans.append((tables.blobs[blob][0], memory(storages[place])))
    read_spans(file, spans)
    rows = {number: tables.tensors[number] for number in numbers}
    made = {number: rebuild(row, storages[row[0]]).detach() for number, row in rows.items()}
    return {number: tensor.resolve_conj().resolve_neg() for number, tensor in made.items()}
