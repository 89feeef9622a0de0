"""Lightning callbacks and loggers: what a run writes."""

from lit_madrl.callbacks.completion_table import CompletionTable
from lit_madrl.callbacks.run_log import RunLog

__all__ = ["CompletionTable", "RunLog"]
