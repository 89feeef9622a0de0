"""Learning-rate schedules as a factor of the optimizer's own learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then constant, linear or cosine decay.

    Args:
        kind: what follows the warm-up; decay ends with the run's last optimizer step.
        warmup_steps: optimizer steps until the full rate; the first step uses 1/warmup_steps of it.
        final: factor at the end of a decay.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 10
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule.kind: expected 'constant', 'linear' or 'cosine', got {self.kind!r}")
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps: expected an integer >= 0, got {self.warmup_steps}")
        if not 0 <= self.final <= 1:
            raise ValueError(f"schedule.final: expected a number in [0, 1], got {self.final}")

    def factor(self, step: int, total: int) -> float:
        """Factor of optimizer step ``step`` (from 0) in a run of ``total`` steps."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        progress = min(1.0, step / max(1, total))
        if self.kind == "linear":
            decay = 1 - progress
        elif self.kind == "cosine":
            decay = 0.5 * (1 + math.cos(math.pi * progress))
        else:
            return warmup
        return warmup * (self.final + (1 - self.final) * decay)
