"""Lightning callbacks."""

from lit_madrl.callbacks.completion_table import CompletionTable

__all__ = ["CompletionTable"]
