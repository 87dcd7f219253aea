"""The exceptions of statetrain, one tree.

StatetrainError
├── LoopError         a loop is declared wrongly, or no transition out of a state is open
├── CallbackError     a callback cannot be attached: unknown point, wrong signature, bad filter
├── TrainingError     a module, an optimizer or a loss that the loop cannot train with
├── DataError         a loader that cannot be read, or cannot be resumed exactly
└── CheckpointError   a checkpoint that cannot be written, read, or does not fit this run

Preempted is no error: it is the SystemExit that ends a process which a signal stopped after its
state was saved.
"""

from __future__ import annotations

__all__ = [
    "CallbackError",
    "CheckpointError",
    "DataError",
    "LoopError",
    "Preempted",
    "StatetrainError",
    "TrainingError",
]

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: run the same command again
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells report for Ctrl-C


class StatetrainError(Exception):
    """Any error that statetrain raises itself."""


class LoopError(StatetrainError):
    """A loop is declared wrongly, or its machine found no open transition."""


class CallbackError(StatetrainError):
    """A callback cannot be attached where it was asked for."""


class TrainingError(StatetrainError):
    """A module, an optimizer or a loss that the supervised loop cannot train with."""


class DataError(StatetrainError):
    """A loader that cannot be read, or cannot be resumed exactly."""


class CheckpointError(StatetrainError):
    """A checkpoint cannot be written, read or verified, or does not fit this run."""


class Preempted(SystemExit):
    """A signal stopped the run, and its state was saved: run the same command to go on.

    As a `SystemExit` it ends the process with exit code 75, or 130 after Ctrl-C, without a
    traceback. `url` is where the run was saved and `state` the state it stopped in.
    """

    def __init__(self, message: str, *, code: int, url: str, state: str) -> None:
        super().__init__(code)
        self.message = message
        self.url = url
        self.state = state

    def __str__(self) -> str:
        return self.message
