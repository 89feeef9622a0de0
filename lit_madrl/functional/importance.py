"""Importance weights of completions that another distribution than the policy's was sampled for.

The sampler rounds differently, is quantized, or has older weights. With rho = policy / sampler, E_sampler[rho f] is
E_policy[f]; weights are bounded since few large ones would decide everything. They are constants, without gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sequence_log_ratios(log_ratios: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """log of the ratio of whole completions: the sum of their tokens' log-ratios, ``[S]``.

    Args:
        log_ratios: ``[E]`` nats, policy minus sampler, of sampled tokens alone.
        sequences: ``[E]`` long in 0..S-1, the completion of each token.
        num_sequences: S.
    """
    return log_ratios.new_zeros(num_sequences).index_add(0, sequences, log_ratios)


def truncated_weights(log_ratios: Tensor, cap: float, floor: float = 0.0) -> Tensor:
    """min(max(rho, floor), cap), rho = exp(log_ratios): truncated importance sampling. Cannot overflow.

    Raises:
        ValueError: not 0 <= floor <= 1 <= cap < inf.
    """
    lowest, highest = _log_bounds(cap, floor)
    return log_ratios.detach().clamp(lowest, highest).exp()


def masked_weights(log_ratios: Tensor, cap: float, floor: float = 0.0) -> Tensor:
    """rho where floor <= rho <= cap, else 0, rho = exp(log_ratios): masked importance sampling. Cannot overflow.

    Raises:
        ValueError: not 0 <= floor <= 1 <= cap < inf.
    """
    return truncated_weights(log_ratios, cap, floor).masked_fill(out_of_bounds(log_ratios, cap, floor), 0.0)


def out_of_bounds(log_ratios: Tensor, cap: float, floor: float = 0.0) -> Tensor:
    """Bool, where rho is above ``cap`` or below ``floor``: what truncation changes and masking drops.

    Raises:
        ValueError: not 0 <= floor <= 1 <= cap < inf.
    """
    lowest, highest = _log_bounds(cap, floor)
    return (log_ratios < lowest) | (log_ratios > highest)


def mean_of_copies(weights: Tensor, tokens: Tensor, num_tokens: int) -> Tensor:
    """Mean weight of the copies of each token, ``[M]``; exactly 1 for a token without any.

    The loss is linear in the weights, so identical completions are one row with the mean of their weights.

    Args:
        weights: ``[E]``.
        tokens: ``[E]`` long in 0..M-1, the token that each weight belongs to.
        num_tokens: M.
    """
    total = weights.new_zeros(num_tokens).index_add(0, tokens, weights)
    copies = weights.new_zeros(num_tokens).index_add(0, tokens, torch.ones_like(weights))
    return torch.where(copies > 0, total / copies, 1.0)


def _log_bounds(cap: float, floor: float) -> tuple[float, float]:
    if not 1 <= cap < math.inf:
        raise ValueError(f"cap: expected a finite number >= 1, got {cap!r}")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor: expected a number in [0, 1], got {floor!r}")
    return math.log(floor) if floor else -math.inf, math.log(cap)
