"""The clipped policy-gradient surrogate, and the weights that turn token losses into one number.

Everything works on the flat list of active tokens, row after row, so padding has no slot to leak from.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_madrl.functional.kl import linearized_exp

Reduction = Literal["grpo", "dr_grpo", "dapo"]


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low: expected a number in [0, 1], got {clip_low!r}")
    if not clip_high >= 0:
        raise ValueError(f"clip_high: expected a number >= 0, got {clip_high!r}")


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each token, r = exp(logprobs - old_logprobs).

    All tensors broadcast to ``logprobs``; logprobs are nats. With ``old_logprobs = logprobs.detach()`` the
    ratio is 1 and nothing is clipped: the plain policy gradient, as for inserted rows. Beyond a log-ratio of
    20 the exponential is continued linearly, so the loss cannot overflow.

    Raises:
        ValueError: ``clip_low`` is not in [0, 1] or ``clip_high`` is negative.
    """
    _check_clip(clip_low, clip_high)
    ratio = linearized_exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clip_fraction(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Share of tokens whose clipped branch is the active one (no gradient), a scalar; 0 without tokens.

    Raises:
        ValueError: ``clip_low`` is not in [0, 1] or ``clip_high`` is negative.
    """
    _check_clip(clip_low, clip_high)
    ratio = linearized_exp((logprobs - old_logprobs).detach())
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    clipped = (too_low | too_high).to(ratio.dtype)
    return clipped.sum() / max(clipped.numel(), 1)


def token_weights(
    mask_lengths: Tensor,
    row_weights: Tensor,
    reduction: Reduction,
    *,
    num_sequences: float,
    num_tokens: float,
    max_length: int,
) -> Tensor:
    """Weight of each *token* of a row, ``[R]``: the loss is the sum over tokens of weight * token loss.

    ``grpo``: w / (length * num_sequences), the mean over sequences of token means; ``dr_grpo``:
    w / (max_length * num_sequences), free of the length; ``dapo``: w / num_tokens, the mean over tokens.

    Args:
        mask_lengths: ``[R]`` long, active tokens of each row; a row without any has weight 0.
        row_weights: ``[R]`` float, how many identical completions a row stands for, 1 for ordinary rows.
        reduction: which of the three.
        num_sequences: sequences in the GLOBAL batch, over all micro-batches and ranks, so that the sum of
            all their gradients is the large-batch gradient. Whoever lets rows be left out decides here
            whether they still count.
        num_tokens: active tokens in the global batch (multiplicity included), likewise.
        max_length: the length limit of a completion.

    Raises:
        ValueError: shapes differ, ``reduction`` is unknown, or the divisor it needs is not positive.
    """
    if mask_lengths.ndim != 1 or mask_lengths.shape != row_weights.shape:
        raise ValueError(
            f"row_weights: expected the shape [R] of mask_lengths, got {list(row_weights.shape)} "
            f"and {list(mask_lengths.shape)}"
        )
    divisors = {
        "grpo": ("num_sequences",),
        "dr_grpo": ("num_sequences", "max_length"),
        "dapo": ("num_tokens",),
    }
    if reduction not in divisors:
        raise ValueError(f"reduction: expected one of {', '.join(divisors)}, got {reduction!r}")
    given = {"num_sequences": num_sequences, "num_tokens": num_tokens, "max_length": max_length}
    for name in divisors[reduction]:
        if not given[name] > 0:
            raise ValueError(
                f"{name}: expected a number > 0 for reduction {reduction!r}, got {given[name]!r}"
            )
    active = row_weights.where(mask_lengths > 0, 0)
    if reduction == "grpo":
        return active / (mask_lengths.clamp(min=1) * num_sequences)
    if reduction == "dr_grpo":
        return active / (max_length * num_sequences)
    return active / num_tokens


def weighted_token_sum(token_values: Tensor, mask_lengths: Tensor, weights: Tensor) -> Tensor:
    """Sum over active tokens of their row's weight times their value, a scalar.

    Args:
        token_values: ``[N]``, active tokens alone, row after row (``padded[mask]``), never padding.
        mask_lengths: ``[R]`` long, tokens of each row; they sum to N.
        weights: ``[R]`` from :func:`token_weights`.

    Raises:
        ValueError: the lengths do not sum to N.
    """
    total = int(mask_lengths.sum())
    if token_values.shape != (total,):
        raise ValueError(
            f"token_values: expected shape [{total}], the sum of mask_lengths, got {list(token_values.shape)}"
        )
    return (token_values * weights.repeat_interleave(mask_lengths, output_size=total)).sum()
