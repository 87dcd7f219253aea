"""Named tensors as a file that other tools read: safetensors, or torch's own without any code."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import torch

from statetrain.errors import StatetrainError

__all__ = ["FORMATS", "format_of", "read_file", "untied", "write_file"]

Named = dict[str, torch.Tensor]

FORMATS = {
    "safetensors": (".safetensors",),
    "torch": (".pt", ".pth", ".bin"),
}


def format_of(path: str, option: str) -> str:
    """Return the format that a file's ending names; `option` is what names one otherwise."""
    ending = os.path.splitext(path)[1].lower()
    for name, endings in FORMATS.items():
        if ending in endings:
            return name
    known = ", ".join(each for endings in FORMATS.values() for each in endings)
    raise StatetrainError(
        f"{path!r} does not end in {known}: say which format it is with {option} safetensors or "
        f"{option} torch"
    )


def untied(tensors: Mapping[str, torch.Tensor]) -> tuple[Named, dict[str, str]]:
    """Return the tensors with memory of their own, and the copies: each name, and whose it was."""
    first: dict[int, str] = {}
    copies: dict[str, str] = {}
    made: Named = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        owner = first.setdefault(place, name) if place else name
        if owner != name:
            copies[name] = owner
        made[name] = tensor.contiguous() if owner == name else tensor.clone().contiguous()
    return made, copies


def write_file(tensors: Named, path: str, kind: str) -> None:
    """Write the tensors to `path` in the format `kind`: all of it is there, or nothing.

    Raises:
        StatetrainError: the format cannot hold a tensor, or the file cannot be written.
    """
    write = _safetensors_written if kind == "safetensors" else _torch_written
    _check_dtypes(tensors, kind)
    folder, name = os.path.split(os.path.abspath(path))
    spare = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(spare, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
        write(tensors, spare)
        os.chmod(spare, mode)  # safetensors lets nobody else read it
        with open(spare, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(spare, path)
    except OSError as error:
        raise StatetrainError(f"cannot write {path!r}: {error}; nothing was written") from error
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(spare)


def read_file(path: str, kind: str) -> Named:
    """Return the tensors in the file at `path`; nothing in it is run.

    Raises:
        StatetrainError: it cannot be read, or holds something else than named tensors.
    """
    read: Callable[[str], Any] = _safetensors_read if kind == "safetensors" else _torch_read
    try:
        found = read(path)
    except StatetrainError:
        raise
    except OSError as error:
        raise StatetrainError(f"cannot read {path!r}: {error}") from error
    except Exception as error:  # torch and safetensors raise what they like
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise StatetrainError(f"{path!r} is no {kind} file of tensors: {why[0]}") from error
    if not isinstance(found, Mapping) or not found:
        raise StatetrainError(
            f"{path!r} holds no named tensors but a {type(found).__name__}: save "
            "module.state_dict(), and nothing around it"
        )
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise StatetrainError(
                f"{path!r} has a {type(value).__name__} as {name!r}, where a state dict has a "
                "tensor: save module.state_dict(), and nothing around it"
            )
    return {name: value.detach() for name, value in found.items()}


def _check_dtypes(tensors: Named, kind: str) -> None:
    """Ask the format itself, with an empty tensor of each dtype."""
    refused: dict[torch.dtype, bool] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in refused:
            refused[tensor.dtype] = not _holds(kind, tensor)
        if refused[tensor.dtype]:
            other = "; --to torch may hold it" if kind == "safetensors" else ""
            raise StatetrainError(
                f"{name!r} is {tensor.dtype}, which a {kind} file cannot hold{other}"
            )


def _holds(kind: str, tensor: torch.Tensor) -> bool:
    empty = torch.empty(0, dtype=tensor.dtype)
    safetensors = _safetensors() if kind == "safetensors" else None
    try:
        if safetensors is not None:
            safetensors.save({"x": empty})
            return True
        file = io.BytesIO()
        torch.save({"x": empty}, file)
        file.seek(0)
        return bool(torch.load(file, weights_only=True)["x"].dtype == tensor.dtype)
    except (KeyError, ValueError, RuntimeError):
        return False


def _safetensors_written(tensors: Named, path: str) -> None:
    _safetensors().save_file(tensors, path, metadata={"format": "pt"})


def _torch_written(tensors: Named, path: str) -> None:
    with open(path, "wb") as file:
        torch.save(tensors, file)


def _safetensors_read(path: str) -> Any:
    return _safetensors().load_file(path)


def _torch_read(path: str) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _safetensors() -> Any:
    try:
        import safetensors.torch  # type: ignore[import-not-found,unused-ignore]  # optional
    except ImportError as error:
        raise StatetrainError(
            "safetensors is not installed: pip install safetensors, or use --to torch"
        ) from error
    return safetensors.torch
