"""The share of each category."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_madrl.metrics.base import CategoryMetric, row_shares


class CategoryFrequencies(CategoryMetric):
    """Shares ``[K]`` of the valid completions: n_z / Σ_z n_z over the split.

    ``per_prompt``: the mean over prompts of each prompt's shares; a prompt without a valid completion is left
    out. The two differ when prompts have unequal numbers of valid completions. NaN before the first one.

    Args:
        num_categories: K.
        per_prompt: mean of shares rather than shares of all.
    """

    shares: Tensor
    mass: Tensor

    def __init__(self, num_categories: int, per_prompt: bool = False, **kwargs: Any) -> None:
        super().__init__(num_categories, **kwargs)
        self.per_prompt = per_prompt
        self.add_sum("shares" if per_prompt else "mass", num_categories)

    def update(self, policy: Tensor) -> None:
        """Add P prompts: ``policy`` samples ``[P, S]`` or mass ``[P, K]``.

        Raises:
            ValueError: a wrong shape, a category out of range, or negative mass.
        """
        mass = self.read_policy(policy)
        if self.per_prompt:
            self.shares = self.shares + row_shares(mass).sum(0)
        else:
            self.mass = self.mass + mass.sum(0)

    def compute(self) -> Tensor:
        """Shares ``[K]`` that sum to 1."""
        summed = self.shares if self.per_prompt else self.mass
        return summed / summed.sum()  # the sum of shares is the number of prompts
