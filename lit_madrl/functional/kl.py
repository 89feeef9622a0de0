"""Per-token estimates of the divergence from a frozen reference policy."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]


_LIMIT = 20.0
"""Log-ratio (nats) beyond which exponentials are continued by their tangent."""


def linearized_exp(x: Tensor) -> Tensor:
    """exp(x), continued beyond x = 20 by its tangent: value and gradient stay finite and nonzero."""
    bounded = x.clamp(max=_LIMIT)
    return bounded.exp() * (1 + (x - bounded))


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    r"""Estimate of KL(pi || ref) in nats from each sampled token, same shape as ``logprobs``.

    With d = ref_logprobs - logprobs: ``k1`` = -d, ``k2`` = d^2 / 2, ``k3`` = exp(d) - d - 1. Under on-policy
    sampling k1 and k3 have the expectation KL(pi || ref), k2 nearly. Used as a loss, what counts is the
    derivative through ``logprobs``, which in expectation at a given context is the gradient of

    - ``k1``: nothing, :math:`E_\pi[\nabla \log \pi] = 0`: not a penalty at all;
    - ``k2``: KL(pi || ref), :math:`E_\pi[\log(\pi / ref) \nabla \log \pi]`;
    - ``k3``: KL(ref || pi), :math:`E_\pi[(1 - ref / \pi) \nabla \log \pi]` (GRPO's choice).

    Beyond d = 20 the exponential of k3 is continued linearly (continuous derivative), so tokens that the
    reference likes far better than the policy cannot overflow.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    difference = ref_logprobs - logprobs
    if kind == "k1":
        return -difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        # expm1 keeps the small values of nearly equal policies; the last term is the linear continuation.
        bounded = difference.clamp(max=_LIMIT)
        return bounded.expm1() - difference + bounded.exp() * (difference - bounded)
    raise ValueError(f"kind: expected 'k1', 'k2' or 'k3', got {kind!r}")
