"""Checkpoints at the end of a step, which is after the validation that belongs to it."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether the training step that just ended is to be followed by a validation."""
    loop: Any = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


class StepCheckpoint(ModelCheckpoint):
    """A ``ModelCheckpoint`` whose ``every_n_train_steps`` waits for the validation of its step, if there is one.

    Lightning's own saves first, and a run resumed from there does not make up for the validation: when the process
    died before that was over, its numbers are missing from the log for ever.
    """

    _waits = False

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save unless a validation follows."""
        self._waits = validation_follows(trainer)
        if not self._waits:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save what waited, then what belongs to validations."""
        if self._waits:
            self._waits = False
            super().on_train_batch_end(trainer, pl_module, None, None, 0)
        super().on_validation_end(trainer, pl_module)
