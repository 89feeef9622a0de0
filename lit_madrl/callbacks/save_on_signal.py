"""Ending a run on request without losing a step."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lit_madrl.callbacks.step_checkpoint import validation_follows

INTERRUPTED = 75
"""Exit status of a run that was asked to stop and saved a checkpoint (``EX_TEMPFAIL``: try again)."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))


class SaveOnSignal(L.Callback):
    """On SIGTERM, SIGUSR1 or Ctrl-C, save ``interrupted.ckpt`` at the end of the step and exit with status 75.

    A step ends with its optimizer steps and the validation that follows it, if any. A signal to one rank stops all.
    Another signal, more than a second later, ends the process at once. These handlers stand in for Lightning's, which
    saves in the middle of a step (SLURM), enters a collective that the other ranks do not (SIGTERM) or saves nothing
    (Ctrl-C).

    Args:
        folder: of the checkpoint; default ``checkpoints`` in the run folder. It is removed when the run has ended.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._asked_at: float | None = None
        self._launcher: Any = None
        self._former: dict[int, Any] = {}

    def path(self, trainer: L.Trainer) -> str:
        """The checkpoint."""
        return str(Path(self.folder or Path(trainer.default_root_dir) / "checkpoints") / "interrupted.ckpt")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen; after Lightning's own handlers were set, and only where Python allows it."""
        self._asked_at = None
        self._launcher = trainer.strategy.launcher
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop listening."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Remove the checkpoint of an earlier interruption: the run has ended."""
        if stage == TrainerFn.FITTING:
            trainer.strategy.remove_checkpoint(self.path(trainer))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop here if asked to, unless a validation follows."""
        if not validation_follows(trainer):
            self._stop_if_asked(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop here if asked to."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._stop_if_asked(trainer)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > 1:  # launchers repeat at once what the ranks got themselves
            if self._launcher is not None:
                self._launcher.kill(signal.SIGKILL)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _stop_if_asked(self, trainer: L.Trainer) -> None:
        asked = self._asked_at is not None or trainer.received_sigterm
        if not trainer.strategy.reduce_boolean_decision(asked, all=False):
            return
        path = self.path(trainer)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            print(
                f"interrupted after optimizer step {trainer.global_step} and saved as {path}: "
                "repeat the command with --ckpt_path last to go on",
                file=sys.stderr,
            )
        # Lightning kills the first process of a node when another one that it started fails.
        raise SystemExit(INTERRUPTED if trainer.local_rank == 0 else 0)
