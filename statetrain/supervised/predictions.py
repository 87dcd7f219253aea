"""Predictions, kept in memory or written to a file as they come."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import numpy as np
import torch

from statetrain.errors import TrainingError

__all__ = ["Predictions"]

SINGLE = (str, bool, int, float, type(None))


class Predictions:
    """Collect what `predict_step` returned: a list with an item a batch, or JSON lines in a file.

    A file has one line a sample: a number, a text, a list, or an object of those. Checkpoints hold
    the list, or the file's length, to which a resumed prediction cuts it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else os.fspath(path)
        self.batches: list[Any] = []
        self._file: TextIO | None = None
        self._length = 0
        if self.path is not None and not self.path.endswith(".jsonl"):
            raise TrainingError(f"to={self.path!r}: give a path that ends with .jsonl")

    def open(self) -> None:
        """Open the file, if there is one to be: empty, or at the length that was saved.

        Raises:
            TrainingError: it cannot be written, or has lost what was written before.
        """
        if self.path is None or self._file is not None:
            return
        try:
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - see close
            there = os.fstat(self._file.fileno()).st_size
            if there >= self._length:
                self._file.truncate(self._length)
        except OSError as error:
            raise TrainingError(
                f"cannot write predictions to {self.path}: {error}; give another path"
            ) from error
        if there < self._length:
            raise TrainingError(
                f"{self.path} has {there} bytes, but {self._length} were written before this "
                "prediction was stopped: put the file back, or predict without checkpoints"
            )

    def add(self, prediction: Any) -> None:
        """Add the prediction of a batch.

        Raises:
            TrainingError: a file cannot hold it, or cannot be written.
        """
        if self.path is None:
            self.batches.append(_on_cpu(prediction))
            return
        lines = [_line(sample) for sample in _samples(prediction)]
        self.open()
        assert self._file is not None  # noqa: S101 - open has opened it
        try:
            self._file.writelines(lines)
        except OSError as error:
            raise TrainingError(f"cannot write predictions to {self.path}: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        """Return the list, or the length of the file once its bytes are on the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._length = os.fstat(self._file.fileno()).st_size
        return {"batches": self.batches, "length": self._length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.batches, self._length = list(state["batches"]), state["length"]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _on_cpu(prediction: Any) -> Any:
    if isinstance(prediction, torch.Tensor):
        return prediction.detach().cpu()
    if isinstance(prediction, Mapping):
        return {key: _on_cpu(value) for key, value in prediction.items()}
    if type(prediction) in (list, tuple):
        return type(prediction)(_on_cpu(value) for value in prediction)
    return prediction


def _samples(prediction: Any) -> Iterator[Any]:
    if prediction is None:
        raise TrainingError("predict_step returned None: return the predictions of the batch")
    if isinstance(prediction, Mapping):
        columns = {key: list(_samples(value)) for key, value in prediction.items()}
        lengths = {key: len(column) for key, column in columns.items()}
        if len({*lengths.values()}) > 1:
            raise TrainingError(f"predict_step returned samples of different numbers: {lengths}")
        for row in zip(*columns.values(), strict=True):
            yield dict(zip(columns, row, strict=True))
        return
    plain = _plain(prediction)
    yield from plain if isinstance(plain, list) else [plain]


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a value: a number, a text, a list, or an object of those."""
    if isinstance(value, SINGLE):
        return value
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise TrainingError(
        f"predict_step returned {value!r}, which a .jsonl file cannot hold: return tensors, "
        "arrays, numbers, texts, or lists and dicts of them"
    )


def _line(sample: Any) -> str:
    try:
        return json.dumps(sample) + "\n"
    except (TypeError, ValueError) as error:  # complex numbers, keys that are no text
        raise TrainingError(
            f"predict_step returned {sample!r}, which a .jsonl file cannot hold: {error}"
        ) from error
