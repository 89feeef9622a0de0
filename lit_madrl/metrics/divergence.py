"""Divergences of the policy's category shares from the target, in nats."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lit_madrl.functional import divergences
from lit_madrl.functional.estimator_floor import estimator_floor
from lit_madrl.metrics.base import CategoryMetric, not_a_number, row_shares


class DivergenceMetric(CategoryMetric):
    """D(P*, P_π) in nats over the K categories; a new divergence writes only ``divergence``.

    Shares are renormalized over the K categories; what is off-support is ``OffSupportRate``'s matter.

    - pooled (default): P_π are the shares of all valid completions (or of all mass) of the split, P* the mean
      of the prompts' targets, as MaD-RL (arXiv:2609.31644) evaluates. It hides prompts that miss in opposite
      directions.
    - ``per_prompt``: the mean over prompts of D. A prompt without a valid completion has no distribution and
      is left out of the mean. With few samples a prompt this is biased upwards even for a perfect policy.

    NaN before the first valid completion.

    Args:
        num_categories: K.
        per_prompt: mean of divergences rather than the divergence of means.
    """

    higher_is_better = False
    mass: Tensor
    targets: Tensor
    draws: Tensor
    total: Tensor
    prompts: Tensor

    def __init__(self, num_categories: int, per_prompt: bool = False, **kwargs: Any) -> None:
        super().__init__(num_categories, **kwargs)
        self.per_prompt = per_prompt
        if per_prompt:
            self.add_sum("total")
            self.add_sum("prompts", dtype=torch.long)
            self.keep_apart()
        else:  # all divergences of a collection share these states
            self.add_sum("mass", num_categories)
            self.add_sum("targets", num_categories)
            self.add_sum("draws", dtype=torch.long)

    @abstractmethod
    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        """D ``[...]`` in nats of two probability vectors ``[..., K]``, float64."""

    def update(self, policy: Tensor, targets: Tensor) -> None:
        """Add P prompts: ``policy`` samples ``[P, S]`` or mass ``[P, K]``, ``targets [P, K]``.

        Raises:
            ValueError: shapes that disagree, a category out of range, or what is no distribution.
        """
        mass = self.read_policy(policy)
        target = self.read_targets(targets, policy)
        if self.per_prompt:
            shares = row_shares(mass)
            self.total = self.total + self.divergence(target[mass.sum(-1) > 0], shares).sum()
            self.prompts = self.prompts + len(shares)
            return
        self.mass = self.mass + mass.sum(0)
        self.targets = self.targets + target.sum(0)
        if not policy.is_floating_point():
            self.draws = self.draws + mass.sum().long()

    def compute(self) -> Tensor:
        """The divergence in nats, scalar."""
        if self.per_prompt:
            return self.total / self.prompts  # 0 / 0 is NaN
        if self.mass.sum() == 0:
            return not_a_number(self.mass)
        return self.divergence(self.targets / self.targets.sum(), self.mass / self.mass.sum())


class L2Divergence(DivergenceMetric):
    """Half the squared distance of the shares, in [0, 1]."""

    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        """½ Σ (P_π - P*)²."""
        return divergences.l2(target, policy)


class ForwardKLDivergence(DivergenceMetric):
    """KL(P*‖P_π): infinite where the policy misses a target category."""

    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        """Σ P* log(P*/P_π)."""
        return divergences.forward_kl(target, policy)


class ReverseKLDivergence(DivergenceMetric):
    """KL(P_π‖P*): infinite where the policy has mass and the target none.

    Args:
        num_categories: K.
        per_prompt: mean of divergences rather than the divergence of means.
        epsilon: compare with the smoothed target (1-ε)P* + ε/K, which keeps the divergence finite.
    """

    def __init__(
        self, num_categories: int, per_prompt: bool = False, epsilon: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(num_categories, per_prompt, **kwargs)
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon: expected a number in [0, 1], got {epsilon!r}")
        self.epsilon = epsilon
        if per_prompt:
            self.keep_apart(epsilon)

    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        """Σ P_π log(P_π/P*), P* smoothed."""
        return divergences.reverse_kl(divergences.smooth_target(target, self.epsilon), policy)


class JensenShannonDivergence(DivergenceMetric):
    """In [0, log 2] and never infinite: MaD-RL's measure of a run, to be read beside its ``floor``."""

    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        """½ KL(P*‖M) + ½ KL(P_π‖M), M = ½(P*+P_π)."""
        return divergences.jensen_shannon(target, policy)

    def floor(self) -> Tensor:
        """The mean JSD in nats of as many draws from the target itself: what a perfect policy would score.

        By simulation, for the valid completions seen so far. 0 for mass, which has no sampling noise; NaN
        before the first valid completion. A collective operation, as ``compute``.

        Raises:
            ValueError: for a per-prompt metric.
        """
        if self.per_prompt:
            raise ValueError("per_prompt: expected False for the estimator floor, got True")
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self.sync_on_compute):
            target, draws, mass = self.targets / self.targets.sum(), int(self.draws), self.mass
        if mass.sum() == 0:
            return not_a_number(mass)
        # Rounded, so that the order in which targets were added up asks for no new simulation.
        rounded = tuple(round(share, 9) for share in target.tolist())
        return mass.new_tensor(_estimator_floor(rounded, draws) if draws else 0.0)


@lru_cache(maxsize=64)  # a run asks for the same few targets at every validation
def _estimator_floor(target: tuple[float, ...], draws: int) -> float:
    return estimator_floor(target, draws)
