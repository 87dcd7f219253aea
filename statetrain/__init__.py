"""A PyTorch training loop that is a declared state machine, exact to the bit after any stop."""

from __future__ import annotations

from statetrain.callbacks import before, on
from statetrain.data.loader import Loader, resumable
from statetrain.diagram import mermaid
from statetrain.errors import (
    CallbackError,
    CheckpointError,
    DataError,
    LoopError,
    Preempted,
    StatetrainError,
    TrainingError,
)
from statetrain.exactness import Exactness
from statetrain.loggers.csv import CSVLogger
from statetrain.loop import Loop, State, Transition, path
from statetrain.machine import Machine
from statetrain.persist.checkpoint import Checkpoints
from statetrain.persist.keep import Keep
from statetrain.persist.registry import register
from statetrain.run import Limits, Run, static, transient
from statetrain.supervised.evaluation import EvaluationRun, evaluation
from statetrain.supervised.loop import SupervisedRun, supervised
from statetrain.supervised.module import Module
from statetrain.trainer import Trainer

__all__ = [
    "CSVLogger",
    "CallbackError",
    "CheckpointError",
    "Checkpoints",
    "DataError",
    "EvaluationRun",
    "Exactness",
    "Keep",
    "Limits",
    "Loader",
    "Loop",
    "LoopError",
    "Machine",
    "Module",
    "Preempted",
    "Run",
    "State",
    "StatetrainError",
    "SupervisedRun",
    "Trainer",
    "TrainingError",
    "Transition",
    "before",
    "evaluation",
    "mermaid",
    "on",
    "path",
    "register",
    "resumable",
    "static",
    "supervised",
    "transient",
]

__version__ = "0.1.0"
