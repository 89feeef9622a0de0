"""The frequency reward of GAPO, the baseline that aims at the uniform distribution."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_madrl.functional.frequencies import group_frequencies
from lit_madrl.rewards.base import RewardShaper
from lit_madrl.rewards.divergence import check_shapes
from lit_madrl.types import Scores


class GAPO(RewardShaper):
    """r = 1 - (f(z) - 1/K) with f the frequency among valid on-policy rollouts; -1 off-support.

    Of a target, only its number of categories K matters. Within valid rollouts this is L2 under the uniform
    target, raised by 1.
    """

    def forward(self, scores: Scores, targets: Tensor) -> Tensor:
        """Rewards ``[P, G]`` in the dtype of ``targets`` ``[P, K]``.

        Raises:
            ValueError: scores and targets disagree on P, or a category is outside {-1, 0..K-1}.
        """
        check_shapes(scores, targets)
        category, num_categories = scores.category, targets.shape[-1]
        frequencies = group_frequencies(category, num_categories, "valid", scores.on_policy, targets.dtype)
        own = frequencies.gather(-1, category.clamp(min=0))
        return (1 - (own - 1 / num_categories)).where(category >= 0, -1.0)

    def warnings(self, target: Tensor, group_size: int) -> Iterator[str]:
        """A target that is not uniform, which this reward ignores."""
        if not torch.allclose(target, target.mean(), atol=1e-4):
            yield f"GAPO aims at the uniform distribution and ignores the target {target.tolist()}"
