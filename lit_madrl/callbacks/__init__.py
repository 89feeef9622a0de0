"""Lightning callbacks and loggers: what a run writes."""

from lit_madrl.callbacks.atomic_checkpoint import AtomicCheckpointIO, checked_checkpoint, newest_checkpoint
from lit_madrl.callbacks.completion_table import CompletionTable
from lit_madrl.callbacks.run_log import RunLog
from lit_madrl.callbacks.save_on_signal import INTERRUPTED, SaveOnSignal
from lit_madrl.callbacks.step_checkpoint import StepCheckpoint

__all__ = [
    "INTERRUPTED",
    "AtomicCheckpointIO",
    "CompletionTable",
    "RunLog",
    "SaveOnSignal",
    "StepCheckpoint",
    "checked_checkpoint",
    "newest_checkpoint",
]
