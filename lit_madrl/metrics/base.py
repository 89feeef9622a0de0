"""What all metrics share: states that are sums, and the reading of category distributions.

Sums of fixed shape are the one kind of state that reduces correctly over ranks of which some saw nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lit_madrl.functional.divergences import validate_target
from lit_madrl.functional.frequencies import category_counts


class AdditiveMetric(Metric):
    """A metric whose states are sums over prompts, hence equal on one rank or many, in any order of batches.

    ``compute`` is a collective operation: call it on all ranks, those without data included.
    """

    is_differentiable = False
    full_state_update = False

    def add_sum(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> None:
        """Declare the state ``name``, zeros of ``shape`` that ranks add up."""
        self.add_state(name, torch.zeros(shape, dtype=dtype), dist_reduce_fx="sum")

    def keep_apart(self, *arguments: object) -> None:
        """Say that ``update`` depends on this class and on ``arguments``.

        A ``MetricCollection`` updates only one of several metrics whose states have equal names and were
        equal after the first batch; pass@1 and pass@4 are equal on a batch that is all correct. A state that
        stays zero but has a name of its own prevents it.
        """
        kind = type(self)
        self.add_sum(f"{kind.__module__}.{kind.__qualname__}{arguments}".replace(".", "_"))

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        """Follow a module to its device but not to its dtype: a bfloat16 sum stops counting at 256."""
        if self._dtype_convert:  # asked for by name: ``set_dtype``
            return super()._apply(fn, exclude_state)
        return super()._apply(lambda state: state.to(fn(state.new_empty(0)).device), exclude_state)


class CategoryMetric(AdditiveMetric):
    """A metric of the categories of each prompt's completions.

    Every subclass reads ``policy`` in one of two forms, told apart by dtype; use one of them throughout:

    - samples: categories ``[P, S]``, integer in {-1, 0..K-1}, -1 is off-support;
    - mass: ``[P, K]`` floating, nonnegative: exact probabilities (what is missing to 1 is off-support).

    Args:
        num_categories: K.
    """

    def __init__(self, num_categories: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_categories < 1:
            raise ValueError(f"num_categories: expected an integer >= 1, got {num_categories!r}")
        self.num_categories = num_categories

    def read_policy(self, policy: Tensor) -> Tensor:
        """The mass of each category ``[P, K]`` in float64: counts for samples, else the mass itself.

        Raises:
            ValueError: wrong rank, dtype or number of categories; a category out of range; negative mass.
        """
        k = self.num_categories
        if policy.ndim != 2:
            raise ValueError(
                f"policy: expected samples [P, S] or mass [P, {k}], got shape {list(policy.shape)}"
            )
        if policy.dtype == torch.bool or policy.is_complex():
            raise ValueError(f"policy: expected integer samples or floating mass, got {policy.dtype}")
        if not policy.is_floating_point():
            return category_counts(policy.long(), k, dtype=torch.float64)
        if policy.shape[1] != k:
            raise ValueError(f"policy: expected mass [P, {k}], got shape {list(policy.shape)}")
        wrong = policy[~(policy.isfinite() & (policy >= 0))]
        if wrong.numel():
            raise ValueError(f"policy: expected finite mass >= 0, got {float(wrong[0])}")
        return policy.double()

    def read_targets(self, targets: Tensor, policy: Tensor) -> Tensor:
        """The targets ``[P, K]`` in float64, each row summing to 1.

        Raises:
            ValueError: a shape other than [P, K]; a row that is no distribution.
        """
        expected = [policy.shape[0], self.num_categories]
        if list(targets.shape) != expected:
            raise ValueError(f"targets: expected shape {expected}, got {list(targets.shape)}")
        validate_target(targets, self.num_categories, "targets")
        mass = targets.double()
        return mass / mass.sum(-1, keepdim=True)


def row_shares(mass: Tensor) -> Tensor:
    """Shares ``[N, K]`` of those rows of ``mass [P, K]`` that have any; the others have no distribution."""
    total = mass.sum(-1, keepdim=True)
    return (mass / total)[total.squeeze(-1) > 0]


def not_a_number(like: Tensor) -> Tensor:
    """What a metric is before it has seen anything."""
    return torch.full((), torch.nan, dtype=like.dtype, device=like.device)
