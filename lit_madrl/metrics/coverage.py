"""How many of the target's categories the policy still reaches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_madrl.metrics.base import CategoryMetric


class CategoryCoverage(CategoryMetric):
    """Number of categories with target mass whose share of the valid completions is at least ``threshold``.

    A category with target mass that falls below 2 % is never recovered (MaD-RL, arXiv:2609.31644), so this
    chooses the warm start. Pooled: shares and mean target of the split. ``per_prompt``: mean over all prompts
    of the number of their own target categories covered. Without a valid completion nothing is covered; NaN
    before any prompt.

    Args:
        num_categories: K.
        threshold: least share that counts as covered, in (0, 1].
        per_prompt: mean of numbers rather than the number over the split.
    """

    higher_is_better = True
    mass: Tensor
    targets: Tensor
    covered: Tensor
    prompts: Tensor

    def __init__(
        self, num_categories: int, threshold: float = 0.02, per_prompt: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(num_categories, **kwargs)
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold: expected a number in (0, 1], got {threshold!r}")
        self.threshold = threshold
        self.per_prompt = per_prompt
        if per_prompt:
            self.add_sum("covered", dtype=torch.long)
            self.add_sum("prompts", dtype=torch.long)
            self.keep_apart(threshold)
        else:
            self.add_sum("mass", num_categories)
            self.add_sum("targets", num_categories)

    def update(self, policy: Tensor, targets: Tensor) -> None:
        """Add P prompts: ``policy`` samples ``[P, S]`` or mass ``[P, K]``, ``targets [P, K]``.

        Raises:
            ValueError: shapes that disagree, a category out of range, or what is no distribution.
        """
        mass = self.read_policy(policy)
        target = self.read_targets(targets, policy)
        if self.per_prompt:
            self.covered = self.covered + self._covered(mass, target).sum()
            self.prompts = self.prompts + len(mass)
        else:
            self.mass = self.mass + mass.sum(0)
            self.targets = self.targets + target.sum(0)

    def compute(self) -> Tensor:
        """Categories covered, scalar in [0, K]."""
        if self.per_prompt:
            return self.covered.double() / self.prompts
        # NaN without a prompt: each prompt adds 1 to the sum of targets
        return self._covered(self.mass, self.targets) + 0 / self.targets.sum()

    def _covered(self, mass: Tensor, target: Tensor) -> Tensor:
        shares = mass / mass.sum(-1, keepdim=True)  # NaN, which covers nothing, without valid mass
        return ((target > 0) & (shares >= self.threshold)).sum(-1)
