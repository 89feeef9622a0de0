"""Rewards that descend a divergence between a prompt's target and the category frequencies of its group."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from lit_madrl.functional.divergences import validate_target
from lit_madrl.functional.frequencies import group_frequencies, group_total, leave_one_out_frequencies
from lit_madrl.rewards.base import RewardShaper
from lit_madrl.types import Scores


class DivergenceShaper(RewardShaper):
    """R(z) = -dD/dP(z) + c at the estimated frequencies P of each group (MaD-RL, arXiv:2609.31644).

    A subclass writes :meth:`divergence` and nothing else; :meth:`reward` follows by automatic differentiation
    and may be overridden with a closed form. A subclass with arguments of its own sets them before it calls
    ``super().__init__``, which may already evaluate the reward.

    Frequencies come from on-policy rollouts alone and carry no gradient. An inserted rollout (``on_policy``
    false) is rewarded at no less than half a count, 0.5 / n, so a category that only it holds is finite.

    Args:
        frequencies: denominator n of the frequencies: ``valid`` counts rollouts that have a category, ``all``
            every rollout.
        leave_one_out: estimate each rollout's frequencies from the others of its group, which makes the
            gradient of L2 exactly unbiased.
        validity_penalty: the reward of off-support rollouts.
        min_frequency: floor on the estimated frequencies, in [0, 1).

    Raises:
        ValueError: an argument is out of range, or ``leave_one_out`` is used without ``min_frequency`` and
            the reward has no finite limit at frequency 0, which a rollout alone in its category would see.
    """

    def __init__(
        self,
        frequencies: Literal["valid", "all"] = "valid",
        leave_one_out: bool = False,
        validity_penalty: float = -1.0,
        min_frequency: float = 0.0,
    ) -> None:
        super().__init__()
        if frequencies not in ("valid", "all"):
            raise ValueError(f"frequencies: expected 'valid' or 'all', got {frequencies!r}")
        if not math.isfinite(validity_penalty):
            raise ValueError(f"validity_penalty: expected a finite number, got {validity_penalty!r}")
        if not 0 <= min_frequency < 1:
            raise ValueError(f"min_frequency: expected a number in [0, 1), got {min_frequency!r}")
        self.frequencies: Literal["valid", "all"] = frequencies
        self.leave_one_out = leave_one_out
        self.validity_penalty = validity_penalty
        self.min_frequency = min_frequency
        if leave_one_out and min_frequency == 0 and not self._finite_at_zero():
            raise ValueError(
                f"min_frequency: expected a number > 0 (say 0.5 / G) for {type(self).__name__} with "
                "leave_one_out, whose reward is infinite for a rollout alone in its category, got 0"
            )

    @abstractmethod
    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        """D(P*, P) in nats, differentiable in ``policy``, ``[..., K]``, ``[..., K]`` -> ``[...]``."""

    def reward(self, target: Tensor, policy: Tensor) -> Tensor:
        """R(z) = -dD/dP(z) + c, ``[..., K]``; c = sum_z P* dD/dP(z) at P = P* makes an interior match 0.

        An infinite limit at P(z) = 0 becomes a large finite number.
        """
        target, policy = target.expand_as(target - policy), policy.expand_as(target - policy)
        at_match = torch.where(target > 0, target * self._partial(target, target), 0.0)
        return at_match.sum(-1, keepdim=True) - self._partial(target, policy)

    def forward(self, scores: Scores, targets: Tensor) -> Tensor:
        """Rewards ``[P, G]`` in the dtype of ``targets`` ``[P, K]``.

        Raises:
            ValueError: scores and targets disagree on P, or a category is outside {-1, 0..K-1}.
        """
        category = scores.category
        check_shapes(scores, targets)
        with torch.no_grad():
            # Evaluated for all K and gathered: infinities of categories that the group misses never enter.
            rewards = self.reward(targets.unsqueeze(-2), self._estimate(scores, targets))
            own = rewards.gather(-1, category.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return own.where(category >= 0, self.validity_penalty)

    def warnings(self, target: Tensor, group_size: int) -> Iterator[str]:
        """A group too small for the target; a validity penalty that a valid rollout can fall below."""
        validate_target(target, target.shape[-1])
        smallest = float(target[target > 0].min())
        needed = math.ceil(1 / smallest - 1e-5)
        if group_size < needed:
            yield (
                f"group_size = {group_size} is too small for a target whose smallest positive probability is "
                f"{smallest:.4g}: a group at the target holds less than one rollout of that category on "
                f"average; use at least {needed}"
            )
        collapsed = torch.eye(target.shape[-1], dtype=target.dtype, device=target.device)
        lowest, category = self.reward(target.expand_as(collapsed), collapsed).diagonal().min(-1)
        if self.validity_penalty > float(lowest) + 1e-6:
            yield (
                f"validity_penalty = {self.validity_penalty:.4g} lies above {float(lowest):.4g}, the reward "
                f"of a group all in category {int(category)}: off-support rollouts would be preferred to it"
            )

    def _estimate(self, scores: Scores, targets: Tensor) -> Tensor:
        """The frequencies each rollout is rewarded at, ``[P, G, K]`` (or ``[P, 1, K]`` broadcast to it)."""
        category, counted, num_categories = scores.category, scores.on_policy, targets.shape[-1]
        if self.leave_one_out:
            estimate = leave_one_out_frequencies(
                category, num_categories, self.frequencies, counted, targets.dtype
            )
        else:
            estimate = group_frequencies(
                category, num_categories, self.frequencies, counted, targets.dtype
            ).unsqueeze(-2)
        total = group_total(category, self.frequencies, counted).clamp(min=1).unsqueeze(-1)
        half_count = (0.5 / total.to(targets.dtype)).clamp(min=self.min_frequency)
        floor = half_count.expand_as(category).masked_fill(counted, self.min_frequency)
        return torch.maximum(estimate, floor.unsqueeze(-1))

    def _partial(self, target: Tensor, policy: Tensor) -> Tensor:
        """dD/dP(z), ``[..., K]``, with zeros moved off the edge, where sqrt has no derivative."""
        tiny = torch.finfo(policy.dtype).tiny
        # Lightning validates in inference mode, whose tensors know no gradient: leave it, and copy them.
        with torch.inference_mode(False), torch.enable_grad():
            # The target goes far below the policy: the limit is that of P -> 0 with the target fixed.
            target = target.detach().clone().clamp(min=tiny)
            policy = policy.detach().clone().clamp(min=math.sqrt(tiny)).requires_grad_()
            (partial,) = torch.autograd.grad(self.divergence(target, policy).sum(), policy)
        return partial

    def _finite_at_zero(self) -> bool:
        """Whether R(z) stays bounded as P(z) -> 0, judged by its growth over ten decades."""
        target = torch.full((2, 2), 0.5, dtype=torch.float64)
        vanishing = torch.tensor([1e-20, 1e-10], dtype=torch.float64)
        smaller, small = self.reward(target, torch.stack([vanishing, 1 - vanishing], -1))[:, 0].tolist()
        return math.isfinite(smaller) and abs(smaller - small) < 1e-3


def check_shapes(scores: Scores, targets: Tensor) -> None:
    """Raise ValueError unless scores are ``[P, G]`` and targets ``[P, K]`` of the same P."""
    shape = scores.category.shape
    if len(shape) != 2 or targets.ndim != 2 or targets.shape[0] != shape[0] or targets.shape[1] == 0:
        raise ValueError(
            f"targets: expected shape [P, K] with K >= 1 and the P of scores [P, G], "
            f"got {list(targets.shape)} for scores {list(shape)}"
        )
