"""Rewards that mix the task reward with a divergence (MaD-RL, arXiv:2609.31644)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from lit_madrl.rewards.base import RewardShaper
from lit_madrl.rewards.divergence import DivergenceShaper
from lit_madrl.types import Scores


class Additive(RewardShaper):
    """r = alpha r_corr + (1 - alpha) r_div.

    Args:
        divergence: gives r_div.
        alpha: weight of correctness, in [0, 1]; the paper uses 0.90, 0.80, 0.70 and 0.55.

    Raises:
        ValueError: ``alpha`` is not in [0, 1].
    """

    def __init__(self, divergence: DivergenceShaper, alpha: float) -> None:
        super().__init__()
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha: expected a number in [0, 1], got {alpha!r}")
        self.divergence = divergence
        self.alpha = alpha

    def forward(self, scores: Scores, targets: Tensor) -> Tensor:
        """Rewards ``[P, G]`` from scores ``[P, G]`` and targets ``[P, K]``."""
        shaped: Tensor = self.divergence(scores, targets)
        return self.alpha * scores.correct.to(shaped.dtype) + (1 - self.alpha) * shaped

    def warnings(self, target: Tensor, group_size: int) -> Iterator[str]:
        """Those of the divergence."""
        return self.divergence.warnings(target, group_size)


class Gated(RewardShaper):
    """r = r_corr (1 + lambda_g r_div): only correct completions are told apart by category.

    Args:
        divergence: gives r_div.
        lambda_g: strength of the divergence, finite and >= 0.

    Raises:
        ValueError: ``lambda_g`` is negative or not finite.
    """

    def __init__(self, divergence: DivergenceShaper, lambda_g: float = 1.0) -> None:
        super().__init__()
        if not 0 <= lambda_g < math.inf:
            raise ValueError(f"lambda_g: expected a finite number >= 0, got {lambda_g!r}")
        self.divergence = divergence
        self.lambda_g = lambda_g

    def forward(self, scores: Scores, targets: Tensor) -> Tensor:
        """Rewards ``[P, G]`` from scores ``[P, G]`` and targets ``[P, K]``."""
        shaped: Tensor = self.divergence(scores, targets)
        return scores.correct.to(shaped.dtype) * (1 + self.lambda_g * shaped)

    def warnings(self, target: Tensor, group_size: int) -> Iterator[str]:
        """Those of the divergence."""
        return self.divergence.warnings(target, group_size)


class WithFormat(RewardShaper):
    """r = inner reward + weight where an answer could be extracted.

    Args:
        shaper: gives the inner reward.
        weight: bonus of a well-formed completion, finite and >= 0; ARG (arXiv:2610.11128) uses 0.2.

    Raises:
        ValueError: ``weight`` is negative or not finite.
    """

    def __init__(self, shaper: RewardShaper, weight: float = 0.2) -> None:
        super().__init__()
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight: expected a finite number >= 0, got {weight!r}")
        self.shaper = shaper
        self.weight = weight

    def forward(self, scores: Scores, targets: Tensor) -> Tensor:
        """Rewards ``[P, G]`` from scores ``[P, G]`` and targets ``[P, K]``."""
        shaped: Tensor = self.shaper(scores, targets)
        return shaped + self.weight * scores.format.to(shaped.dtype)

    def warnings(self, target: Tensor, group_size: int) -> Iterator[str]:
        """Those of the inner shaper."""
        return self.shaper.warnings(target, group_size)
