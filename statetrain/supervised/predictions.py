"""Predictions, kept in memory or written to a file as they come."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import torch

from statetrain.errors import TrainingError

__all__ = ["Predictions"]


class Predictions:
    """Collect what `predict_step` returned: a list with an item a batch, or JSON lines in a file.

    A file has one line a sample: a number, a list, or an object of those. Checkpoints hold the
    list, or the file's length, to which a resumed prediction cuts it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else os.fspath(path)
        self.batches: list[Any] = []
        self._file: TextIO | None = None
        self._length = 0
        if self.path is not None and not self.path.endswith(".jsonl"):
            raise TrainingError(f"to={self.path!r}: give a path that ends with .jsonl")

    def add(self, prediction: Any) -> None:
        """Add the prediction of a batch."""
        if self.path is None:
            self.batches.append(_on_cpu(prediction))
            return
        file = self._opened()
        file.writelines(json.dumps(sample) + "\n" for sample in _samples(prediction))

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

    def _opened(self) -> TextIO:
        if self._file is None:
            assert self.path is not None  # noqa: S101 - add asks for it
            try:
                self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - see close
                self._file.truncate(self._length)
            except OSError as error:
                raise TrainingError(
                    f"cannot write predictions to {self.path}: {error}; give another path"
                ) from error
        return self._file


def _on_cpu(prediction: Any) -> Any:
    if isinstance(prediction, torch.Tensor):
        return prediction.detach().cpu()
    if isinstance(prediction, Mapping):
        return {key: _on_cpu(value) for key, value in prediction.items()}
    if type(prediction) in (list, tuple):
        return type(prediction)(_on_cpu(value) for value in prediction)
    return prediction


def _samples(prediction: Any) -> Iterator[Any]:
    if isinstance(prediction, torch.Tensor):
        yield from prediction.tolist() if prediction.dim() else [prediction.item()]
    elif isinstance(prediction, Mapping):
        columns = {key: list(_samples(value)) for key, value in prediction.items()}
        for row in zip(*columns.values(), strict=True):
            yield dict(zip(columns, row, strict=True))
    else:
        yield from prediction
