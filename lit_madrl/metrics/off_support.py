"""The rate of completions that belong to no category."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_madrl.metrics.base import CategoryMetric


class OffSupportRate(CategoryMetric):
    """Share of completions whose category is -1; of mass, the mean over prompts of 1 - Σ_z P_π(z).

    NaN before the first completion.
    """

    higher_is_better = False
    off_support: Tensor
    completions: Tensor

    def __init__(self, num_categories: int, **kwargs: Any) -> None:
        super().__init__(num_categories, **kwargs)
        self.add_sum("off_support")
        self.add_sum("completions")

    def update(self, policy: Tensor) -> None:
        """Add P prompts: ``policy`` samples ``[P, S]`` or probabilities ``[P, K]``.

        Raises:
            ValueError: a wrong shape, a category out of range, or mass that sums to more than 1.
        """
        mass = self.read_policy(policy).sum(-1)
        samples = 1 if policy.is_floating_point() else policy.shape[1]
        excess = mass[mass > samples + 1e-3]
        if excess.numel():
            raise ValueError(f"policy: expected probabilities that sum to <= 1, got {float(excess[0]):.6g}")
        self.off_support = self.off_support + (samples - mass).clamp(min=0).sum()
        self.completions = self.completions + samples * len(mass)

    def compute(self) -> Tensor:
        """The rate in [0, 1], scalar."""
        return self.off_support / self.completions
