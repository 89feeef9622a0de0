"""Reference surprisal and the prefix it selects (ARG, arXiv:2610.11128)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def reference_surprisal(token_logprobs: Tensor, lengths: Tensor) -> Tensor:
    """S_t = -sum_{s > t} log pi(r_s | x, r_{<s}): what is left of a reference after a prefix of t tokens.

    Args:
        token_logprobs: ``[R, T]``, log-probability (nats) of each token of R right-padded references, their
            termination tokens included. Padding is not read.
        lengths: ``[R]`` long, tokens of each reference.

    Returns:
        ``[R, T + 1]`` float64 in nats, nonincreasing in t; 0 at and after the end of the reference, infinite
        before a token of probability 0.

    Raises:
        ValueError: shapes that do not fit, a length outside 0..T, or a log-probability that is not a number.
    """
    if token_logprobs.ndim != 2 or lengths.shape != token_logprobs.shape[:1]:
        raise ValueError(
            f"token_logprobs, lengths: expected shapes [R, T] and [R], "
            f"got {list(token_logprobs.shape)} and {list(lengths.shape)}"
        )
    size = token_logprobs.shape[1]
    if bool(((lengths < 0) | (lengths > size)).any()):
        raise ValueError(f"lengths: expected integers in 0..T = {size}, got {lengths.tolist()}")
    inside = torch.arange(size, device=lengths.device) < lengths.unsqueeze(-1)
    # Rounding can leave a log-probability of 1e-7; clamping keeps S nonincreasing. `+ 0.0` is for -0.0.
    nats = torch.where(inside, -token_logprobs.double().clamp(max=0.0), 0.0) + 0.0
    if bool(nats.isnan().any()):
        row, token = nats.isnan().nonzero()[0].tolist()
        raise ValueError(f"token_logprobs: expected numbers, got nan in reference {row}, token {token}")
    left = nats.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([left, left.new_zeros(len(left), 1)], dim=-1)


def prefix_length(surprisal: Tensor, level: float, boundaries: Sequence[int]) -> int:
    """Tokens of the reference to give at one guidance level (ARG, appendix E.2).

    Level 1 is the empty prefix. Below it, the latest t with S_t >= level * S_0, if that is 0 the empty
    prefix, else moved to the first boundary at or after t, else to the latest one before it, else to 0.

    Args:
        surprisal: ``[T + 1]`` nonincreasing nats, S_0 finite and positive: a row of :func:`reference_surprisal`.
        level: share of the surprisal that is left to the continuation, in (0, 1].
        boundaries: prefix lengths at which a prefix may end, positive and strictly increasing.
    """
    if not 0 < level <= 1:
        raise ValueError(f"level: expected a number in (0, 1], got {level}")
    if any(after <= before for before, after in pairwise([0, *boundaries])):
        raise ValueError(
            f"boundaries: expected positive, strictly increasing integers, got {list(boundaries)}"
        )
    if level == 1:
        return 0
    total = float(surprisal[0])
    if not 0 < total < float("inf"):
        raise ValueError(f"surprisal: expected a finite positive S_0, got {total}")
    latest = int((surprisal >= level * total).nonzero()[-1])
    if latest == 0 or not boundaries:
        return 0
    return boundaries[min(bisect_left(boundaries, latest), len(boundaries) - 1)]
