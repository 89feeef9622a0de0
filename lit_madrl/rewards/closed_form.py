"""The four divergences of MaD-RL (arXiv:2609.31644) with their rewards in closed form."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from lit_madrl.functional import divergences
from lit_madrl.rewards.divergence import DivergenceShaper


class L2(DivergenceShaper):
    """D = sum (P - P*)^2 / 2, R(z) = P*(z) - P(z), within [-1, 1]."""

    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        """The squared distance, halved."""
        return divergences.l2(target, policy)

    def reward(self, target: Tensor, policy: Tensor) -> Tensor:
        """P* - P."""
        return divergences.l2_reward(target, policy)


class ForwardKL(DivergenceShaper):
    """D = KL(P* || P), R(z) = P*(z) / P(z) - 1, within [-1, G P*(z) - 1] in a group of G."""

    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        """KL(P* || P) in nats."""
        return divergences.forward_kl(target, policy)

    def reward(self, target: Tensor, policy: Tensor) -> Tensor:
        """P* / P - 1."""
        return divergences.forward_kl_reward(target, policy)


class JensenShannon(DivergenceShaper):
    """D = JSD(P*, P), R(z) = log(M(z) / P(z)) / 2 with M = (P* + P) / 2, at least -log(2) / 2 nats."""

    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        """JSD(P*, P) in nats."""
        return divergences.jensen_shannon(target, policy)

    def reward(self, target: Tensor, policy: Tensor) -> Tensor:
        """log(M / P) / 2."""
        return divergences.jensen_shannon_reward(target, policy)


class ReverseKL(DivergenceShaper):
    """D = KL(P || Q), R(z) = log(Q(z) / P(z)) nats; Q = (1 - epsilon) P* + epsilon / K smooths the target.

    Args:
        epsilon: mass taken from the target and spread over all categories; 0 needs targets without zeros.

    The other arguments are those of :class:`DivergenceShaper`.

    Raises:
        ValueError: ``epsilon`` is not in [0, 1); in use, it is 0 and a target has a category without mass.
    """

    def __init__(
        self,
        frequencies: Literal["valid", "all"] = "valid",
        leave_one_out: bool = False,
        validity_penalty: float = -1.0,
        min_frequency: float = 0.0,
        epsilon: float = 0.01,
    ) -> None:
        if not 0 <= epsilon < 1:
            raise ValueError(f"epsilon: expected a number in [0, 1), got {epsilon!r}")
        self.epsilon = epsilon
        super().__init__(frequencies, leave_one_out, validity_penalty, min_frequency)

    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        """KL(P || Q) in nats."""
        return divergences.reverse_kl(self._smooth(target), policy)

    def reward(self, target: Tensor, policy: Tensor) -> Tensor:
        """log(Q / P)."""
        return divergences.reverse_kl_reward(self._smooth(target), policy)

    def _smooth(self, target: Tensor) -> Tensor:
        if self.epsilon == 0 and (target == 0).any():
            raise ValueError("epsilon: expected > 0 for a target with a category of probability 0, got 0")
        return divergences.smooth_target(target, self.epsilon)
