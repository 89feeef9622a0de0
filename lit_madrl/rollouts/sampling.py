"""From logits to tokens and the log-probabilities they were drawn with. Pure functions.

Letters: R rows of logits, V tokens in the vocabulary, M draws from each row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_madrl.types import Sampling

RESOLUTION = 2.0**50
"""Probabilities become whole multiples of 1 / RESOLUTION before they are summed. Float64 adds such numbers
without rounding, so the cumulative sum is exact and monotone on every device, in whatever order it adds."""

SPAN = 128
"""Columns whose sum is looked at first: the sums of all columns are 8 bytes each and seldom needed."""

BLOCK = 1 << 23
"""Most elements of [R, V] that are turned into probabilities at once: bounds the float64 temporaries."""


def truncate(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """``logits`` with -inf at the tokens that top-k, then top-p on what is left, exclude.

    Top-k keeps exactly k tokens; top-p keeps the shortest list of the most likely tokens whose probability
    reaches ``top_p``, at least one. ``top_k = 0`` and ``top_p = 1`` keep all.

    Args:
        logits: ``[R, V]``.
    """
    if 0 < top_k < logits.shape[-1]:
        kept = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1, dtype=torch.float64)
        excluded = probabilities.cumsum(-1) - probabilities >= top_p
        logits = logits.masked_fill(torch.zeros_like(excluded).scatter(-1, order, excluded), -torch.inf)
    return logits


def inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which the cumulative distribution first exceeds u; never a token of probability zero.

    Probabilities below ``1 / (2 * RESOLUTION)``, about 4e-16, count as zero.

    Args:
        probabilities: ``[R, V]``, each row summing to about 1.
        uniforms: ``[R, M]`` float64 in [0, 1].

    Returns:
        ``[R, M]`` long.
    """
    weights = (probabilities * RESOLUTION).round_()
    columns, draws = probabilities.shape[1], uniforms.shape[1]
    if 8 * SPAN * draws > columns:
        cdf = weights.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(cdf, _targets(uniforms, cdf), right=True)
    spans = F.pad(weights, (0, -columns % SPAN)).view(len(weights), -1, SPAN)
    ends = spans.sum(-1, dtype=torch.float64).cumsum(-1)
    targets = _targets(uniforms, ends)
    span = torch.searchsorted(ends, targets, right=True)
    targets = targets - F.pad(ends, (1, 0)).gather(1, span)  # exact: what is taken off is a whole number
    cdf = spans.gather(1, span[:, :, None].expand(-1, -1, SPAN)).cumsum(-1, dtype=torch.float64)
    return span * SPAN + torch.searchsorted(cdf, targets[:, :, None], right=True).squeeze(-1)


def _targets(uniforms: Tensor, cdf: Tensor) -> Tensor:
    """The sums are whole numbers: everything from total - 1 on belongs to the last possible token."""
    total = cdf[:, -1:]
    return torch.minimum(uniforms * total, total - 1)


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw M tokens from each row by inverting its cumulative distribution at the given uniforms.

    Args:
        logits: ``[R, V]``; -inf excludes a token.
        uniforms: ``[R, M]`` float64 in [0, 1); what is drawn depends on nothing else.
        sampling: temperature, top-k and top-p.

    Returns:
        Tokens ``[R, M]`` long and their log-probabilities ``[R, M]`` float in nats, under the distribution
        drawn from. Temperature 0 takes the likeliest token, a point mass of log-probability 0.

    Raises:
        RuntimeError: a row of logits holds NaN or +inf, or -inf alone.
    """
    rows = max(1, BLOCK // logits.shape[-1])
    if logits.shape[0] <= rows:
        return _draw(logits, uniforms, sampling)
    blocks = zip(torch.split(logits, rows), torch.split(uniforms, rows), strict=True)
    tokens, logprobs = zip(*(_draw(*block, sampling) for block in blocks), strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    if sampling.temperature == 0:
        likeliest = logits.max(dim=-1, keepdim=True)
        _check(likeliest.values)
        return likeliest.indices.expand_as(uniforms), torch.zeros_like(uniforms, dtype=torch.float)
    if sampling.temperature != 1:  # shifted first, so that a small temperature cannot overflow
        logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    probabilities = truncate(logits, sampling.top_k, sampling.top_p).softmax(-1)
    _check(probabilities[:, 0])  # one bad logit makes its whole row NaN
    tokens = inverse_cdf(probabilities, uniforms)
    return tokens, probabilities.gather(-1, tokens).log()


def _check(row_values: Tensor) -> None:
    finite = row_values.isfinite()
    if not finite.all():
        bad = int((~finite).sum())
        raise RuntimeError(
            f"logits: expected finite values (or -inf for excluded tokens), got NaN, +inf or no possible "
            f"token in {bad} of {finite.numel()} rows; has the policy diverged?"
        )
