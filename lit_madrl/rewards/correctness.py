"""The task reward alone (RLVR)."""

from __future__ import annotations

from torch import Tensor

from lit_madrl.rewards.base import RewardShaper
from lit_madrl.types import Scores


class Correctness(RewardShaper):
    """r = 1 where the completion solves its problem, else 0; targets are ignored."""

    def forward(self, scores: Scores, targets: Tensor) -> Tensor:
        """Rewards ``[P, G]`` in the dtype of ``targets``."""
        return scores.correct.to(targets.dtype, copy=True)
