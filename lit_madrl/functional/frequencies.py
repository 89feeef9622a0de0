"""Category frequencies of groups of rollouts.

``category`` is long in {-1, 0..K-1}, -1 meaning off-support. ``counted`` (bool, default all) says which
rollouts enter the estimate: inserted ones do not. ``over`` is the denominator: ``valid`` takes the counted
rollouts that have a category (frequencies sum to 1), ``all`` every counted rollout (they sum to the share
that is valid).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

Over = Literal["valid", "all"]


def _in_denominator(category: Tensor, over: Over, counted: Tensor | None) -> Tensor:
    """Bool ``[..., G]``: the rollouts that make up n."""
    if over not in ("valid", "all"):
        raise ValueError(f"over: expected 'valid' or 'all', got {over!r}")
    counted = torch.ones_like(category, dtype=torch.bool) if counted is None else counted
    return counted & (category >= 0) if over == "valid" else counted


def _membership(category: Tensor, num_categories: int, counted: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``[..., G, K]``: 1 where a counted rollout is in a category."""
    if category.numel():
        low, high = int(category.min()), int(category.max())
        if low < -1 or high >= num_categories:
            got = low if low < -1 else high
            raise ValueError(
                f"category: expected -1 or 0..{num_categories - 1} for {num_categories} categories, got {got}"
            )
    member = _in_denominator(category, "valid", counted)
    # One category too many, cut off again: it makes K = 0 legal.
    hot = one_hot(category.clamp(min=0), num_categories + 1)[..., :num_categories]
    return (hot * member.unsqueeze(-1)).to(dtype)


def category_counts(
    category: Tensor,
    num_categories: int,
    counted: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Counted rollouts in each category, ``[..., G]`` -> ``[..., K]``; off-support ones are in none.

    Raises:
        ValueError: a category is outside {-1, 0..K-1}.
    """
    return _membership(category, num_categories, counted, dtype).sum(-2)


def group_total(category: Tensor, over: Over, counted: Tensor | None = None) -> Tensor:
    """n, the denominator of the frequencies, ``[..., G]`` -> ``[...]`` long."""
    return _in_denominator(category, over, counted).sum(-1)


def group_frequencies(
    category: Tensor,
    num_categories: int,
    over: Over,
    counted: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """n_z / n, ``[..., G]`` -> ``[..., K]``; zeros for a group where n = 0.

    Raises:
        ValueError: a category is outside {-1, 0..K-1}, or ``over`` is unknown.
    """
    total = group_total(category, over, counted).unsqueeze(-1)
    return category_counts(category, num_categories, counted, dtype) / total.clamp(min=1)


def leave_one_out_frequencies(
    category: Tensor,
    num_categories: int,
    over: Over,
    counted: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(n_z - 1[z_i = z]) / (n - 1), the frequencies without rollout i, ``[..., G]`` -> ``[..., G, K]``.

    A rollout that is not in n has nothing to leave out and sees n_z / n. Zeros where nobody is left.

    Raises:
        ValueError: a category is outside {-1, 0..K-1}, or ``over`` is unknown.
    """
    own = _membership(category, num_categories, counted, dtype)
    included = _in_denominator(category, over, counted)
    others = own.sum(-2, keepdim=True) - own
    total = included.sum(-1, keepdim=True) - included.long()
    return others / total.clamp(min=1).unsqueeze(-1)
