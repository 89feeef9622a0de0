r"""Divergences between a target and the policy's category frequencies, and the rewards that descend them.

With the categorizer :math:`z(y)` and :math:`P(z) = \Pr_{y \sim \pi}[z(y) = z]` (MaD-RL, arXiv:2609.31644)

.. math:: \nabla D(P^*, P) = E_{y \sim \pi}[\partial D / \partial P(z(y)) \, \nabla \log \pi(y|x)],

so :math:`R(z) = -\partial D / \partial P(z) + c` is the reward whose policy gradient descends :math:`D`; the
constant :math:`c` makes it 0 where policy and target agree. All functions take ``(target, policy)``,
probabilities ``[..., K]`` that broadcast against each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) over the last dimension with 0 log 0 = 0, and gradient 0 at the entries where p is 0."""
    mass = p > 0
    # Substitute before the logarithm, not after: 0 * inf in the backward pass would be NaN.
    p, q = p.where(mass, 1), q.where(mass, 1)
    return (p * (p.log() - q.log())).sum(-1)


def _ratio(target: Tensor, policy: Tensor) -> Tensor:
    """target / policy, at policy = 0 its limit from above: inf where the target has mass, else 0."""
    positive = policy > 0
    at_zero = torch.zeros_like(target).masked_fill(target > 0, math.inf)
    return torch.where(positive, target / policy.where(positive, 1), at_zero)


def l2(target: Tensor, policy: Tensor) -> Tensor:
    """Half the squared distance, sum_z (P(z) - P*(z))^2 / 2, ``[..., K]`` -> ``[...]``."""
    return 0.5 * (policy - target).square().sum(-1)


def forward_kl(target: Tensor, policy: Tensor) -> Tensor:
    """KL(P* || P) = sum_z P* log(P* / P) in nats, ``[..., K]`` -> ``[...]``; inf if P misses a category."""
    return _kl(target, policy)


def reverse_kl(target: Tensor, policy: Tensor) -> Tensor:
    """KL(P || P*) = sum_z P log(P / P*) in nats, ``[..., K]`` -> ``[...]``; inf if P* misses a category."""
    return _kl(policy, target)


def jensen_shannon(target: Tensor, policy: Tensor) -> Tensor:
    """(KL(P* || M) + KL(P || M)) / 2, M = (P* + P) / 2, in nats, ``[..., K]`` -> ``[...]``; at most log 2."""
    middle = 0.5 * (target + policy)
    return 0.5 * (_kl(target, middle) + _kl(policy, middle))


def l2_reward(target: Tensor, policy: Tensor) -> Tensor:
    """R(z) = P*(z) - P(z), ``[..., K]``, within [-1, 1]; descends :func:`l2`."""
    return target - policy


def forward_kl_reward(target: Tensor, policy: Tensor) -> Tensor:
    """R(z) = P*(z) / P(z) - 1, ``[..., K]``, at least -1; descends :func:`forward_kl`.

    At P = 0, the limit: inf where the target has mass, else -1.
    """
    return _ratio(target, policy) - 1


def reverse_kl_reward(target: Tensor, policy: Tensor) -> Tensor:
    """R(z) = log(P*(z) / P(z)) in nats, ``[..., K]``; descends :func:`reverse_kl`.

    -inf where the target has no mass, else inf at P = 0: smooth the target first (:func:`smooth_target`).
    """
    return _ratio(target, policy).log()


def jensen_shannon_reward(target: Tensor, policy: Tensor) -> Tensor:
    """R(z) = log(M(z) / P(z)) / 2, M = (P* + P) / 2, in nats, ``[..., K]``; descends :func:`jensen_shannon`.

    At least -log(2) / 2. At P = 0, the limit: inf where the target has mass, else -log(2) / 2.
    """
    return 0.5 * (0.5 * (1 + _ratio(target, policy))).log()


def smooth_target(target: Tensor, eps: float) -> Tensor:
    """(1 - eps) P* + eps / K, ``[..., K]``: every category gets mass.

    Raises:
        ValueError: ``eps`` is not in [0, 1].
    """
    if not 0 <= eps <= 1:
        raise ValueError(f"eps: expected a number in [0, 1], got {eps!r}")
    return (1 - eps) * target + eps / target.shape[-1]


def validate_target(target: Sequence[float] | Tensor, num_categories: int, name: str = "target") -> None:
    """Check that ``target``, ``[..., K]``, holds probabilities of ``num_categories`` categories.

    Raises:
        ValueError: its last dimension is not ``num_categories`` long, or it holds entries that are negative
            or not finite, or does not sum to 1 within 1e-4.
    """
    values = torch.as_tensor(target, dtype=torch.float64).detach()
    if values.ndim == 0 or values.shape[-1] != num_categories:
        got = "a scalar" if values.ndim == 0 else f"{values.shape[-1]}"
        raise ValueError(f"{name}: expected {num_categories} probabilities (one a category), got {got}")
    if not (values.isfinite() & (values >= 0)).all():
        raise ValueError(f"{name}: expected finite probabilities >= 0, got {values.tolist()}")
    sums = values.sum(-1)
    if ((sums - 1).abs() > 1e-4).any():
        raise ValueError(f"{name}: expected probabilities that sum to 1 within 1e-4, got sum {sums.tolist()}")
