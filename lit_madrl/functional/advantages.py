"""Group-relative advantages (GRPO)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scale = Literal["none", "population", "sample"]


def dead_groups(rewards: Tensor) -> Tensor:
    """Bool ``[P]``: groups of rewards ``[P, G]`` that are equal up to a few units of rounding.

    Such a group holds no preference, so its advantages are 0 and it gives no policy gradient.
    """
    rounding = 4 * min(torch.finfo(rewards.dtype).eps, torch.finfo(torch.float32).eps)
    return rewards.amax(-1) - rewards.amin(-1) <= rounding * rewards.abs().amax(-1)


def group_advantages(
    rewards: Tensor, scale: Scale = "sample", eps: float = 1e-6, baseline: Tensor | None = None
) -> Tensor:
    """A_i = (r_i - mean) / (std + eps) within each group, ``[P, G]`` -> ``[P, G]``.

    ``scale`` picks the standard deviation: ``sample`` divides by G - 1, ``population`` by G, ``none`` leaves
    r_i - mean unscaled. Exactly 0 in :func:`dead_groups`. Scaling removes the size of the rewards: with only
    two categories in a group every decreasing reward gives the same advantages, so the divergence no longer
    matters, and near a match (9 against 7 of 16) sampling noise is blown up to about +-1.

    Args:
        rewards: ``[P, G]``.
        scale: which standard deviation.
        eps: added to it.
        baseline: bool ``[P, G]``, the rows that mean and std are taken over, by default all; a group without
            any takes all. Where their rewards are equal there is no std, and r_i - mean stays unscaled.

    Raises:
        ValueError: a reward is not finite, ``scale`` is unknown, or ``baseline`` has another shape.
    """
    if scale not in ("none", "population", "sample"):
        raise ValueError(f"scale: expected 'none', 'population' or 'sample', got {scale!r}")
    if rewards.ndim != 2:
        raise ValueError(f"rewards: expected shape [P, G], got {list(rewards.shape)}")
    if not rewards.isfinite().all():
        group, row = (~rewards.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"rewards: expected finite numbers, got {rewards[group, row].item()} in group {group}, row {row}"
        )
    if baseline is None:
        baseline = torch.ones_like(rewards, dtype=torch.bool)
    elif baseline.shape != rewards.shape:
        raise ValueError(f"baseline: expected shape {list(rewards.shape)}, got {list(baseline.shape)}")
    over = baseline | ~baseline.any(-1, keepdim=True)
    count = over.sum(-1, keepdim=True)
    advantages = rewards - (rewards * over).sum(-1, keepdim=True) / count
    if scale != "none":
        degrees = (count - int(scale == "sample")).clamp(min=1)
        std = ((advantages * over).square().sum(-1, keepdim=True) / degrees).sqrt()
        flat = dead_groups(rewards.where(over, rewards.masked_fill(~over, -torch.inf).amax(-1, keepdim=True)))
        advantages = advantages / (std + eps).masked_fill(flat.unsqueeze(-1), 1.0)
    return advantages.masked_fill(dead_groups(rewards).unsqueeze(-1), 0.0)
