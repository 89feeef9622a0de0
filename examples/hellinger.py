"""A divergence of one's own: write D, and the reward that descends it follows by autograd."""

from __future__ import annotations

from torch import Tensor

from lit_madrl.rewards import DivergenceShaper


class Hellinger(DivergenceShaper):
    """Squared Hellinger distance, D = sum (sqrt P* - sqrt P)^2 / 2; its reward is (sqrt(P* / P) - 1) / 2."""

    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        return 0.5 * (target.sqrt() - policy.sqrt()).square().sum(-1)
