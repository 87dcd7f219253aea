"""The metrics of a run in one CSV file that reads as if it had never been interrupted."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Sequence
from typing import Any, TextIO

from statetrain.errors import StatetrainError
from statetrain.run import Row

__all__ = ["CSVLogger"]

log = logging.getLogger("statetrain")

HEADER = ("epoch", "step", "name", "value")


class CSVLogger:
    """Write each logged value as a row `epoch,step,name,value`.

    Checkpoints hold the file's length; a resumed run cuts off what was written after it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file: TextIO | None = None

    def start(self, state: dict[str, Any] | None) -> None:
        """Open the file: at the length in `state`, or anew.

        Raises:
            StatetrainError: the file cannot be written.
        """
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            self._file = open(self.path, "a", newline="", encoding="utf-8")  # noqa: SIM115 - closed in close()
            self._cut(0 if state is None else state["length"])
        except OSError as error:
            raise StatetrainError(
                f"cannot write the metrics to {self.path}: {error}. "
                "Give loggers=[st.CSVLogger(path)] another path, or loggers=[]"
            ) from error

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows; their tensors are read here."""
        if self._file is not None and rows:
            lines = ((row.epoch, row.step, row.name, _number(row.value)) for row in rows)
            try:
                csv.writer(self._file).writerows(lines)
                self._file.flush()
            except OSError as error:
                raise StatetrainError(
                    f"cannot write the metrics to {self.path}: {error}. Make room there, and run "
                    "the same command again: it goes on from the newest checkpoint"
                ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the file's length in bytes, once they are on the disk."""
        if self._file is None:
            return {"length": 0}
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"length": os.fstat(self._file.fileno()).st_size}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _cut(self, length: int) -> None:
        assert self._file is not None  # noqa: S101 - start has opened it
        there = os.fstat(self._file.fileno()).st_size
        if there < length:
            log.warning(
                "%s has %d bytes, the checkpoint knows of %d: what is missing was lost outside",
                self.path, there, length,
            )  # fmt: skip
        self._file.truncate(min(there, length))
        if min(there, length) == 0:
            csv.writer(self._file).writerow(HEADER)
            self._file.flush()


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
