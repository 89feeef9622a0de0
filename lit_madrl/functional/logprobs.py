"""Log-probabilities of given tokens without ever holding the logits of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_madrl.functional.linear import matmul_transposed, transposed_matmul

LOGITS_BUDGET = 2**24
"""Most logits computed at once: 64 MiB in float32."""

CPU_TILE = 2**22
"""The same on a CPU: what its caches hold, and its allocator gives again without new pages."""

KEPT_LOGITS = 2**27
"""Most probabilities that wait for backward: 512 MiB in float32, 256 in bfloat16. The others are made again then, by a
fourth product beside three."""

LEAST_SHARE = -60.0
"""Logarithm of the least share of the whole that a tile is taken to have: its inverse must be a number."""

FEWEST_COLUMNS = 512
MOST_COLUMNS = 4096  # float32 loses accuracy in softmax's sum over more


def chunk_tokens_for(vocabulary: int) -> int:
    """Tokens a chunk where the logits of a chunk are made for the whole vocabulary."""
    return max(1, LOGITS_BUDGET // vocabulary)


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    fast: bool = True,
) -> Tensor:
    """log softmax((h W^T + b) / temperature) at the given ids, in float32.

    Logits are made tile by tile, some columns (tokens of the vocabulary) for as many rows as fit. A tile's softmax and
    normalizer are all that both passes need: with ``l_c`` the normalizer of tile c, ``l = log sum_c exp l_c`` and
    ``s_c = exp(l_c - l)`` its share, the gradient in its logits is ``-s_c (softmax_c - onehot / s_c)``. The bracket is
    kept, for up to ``KEPT_LOGITS`` of them in the dtype of the products; a row's factors join behind those products.

    Args:
        hidden: ``[N, E]`` final hidden states.
        weight: ``[V, E]`` output embedding.
        ids: ``[N]`` long, the token whose log-probability is asked at each position.
        bias: ``[V]`` or None.
        temperature: divides the logits; > 0.
        chunk_tokens: most rows of a tile; default is what leaves it ``FEWEST_COLUMNS``.
        fast: let oneDNN multiply where it is faster, see :mod:`lit_madrl.functional.linear`.

    Returns:
        ``[N]`` float32 (float64 for float64 input), nats.
    """
    if temperature <= 0:
        raise ValueError(f"temperature: expected a number > 0, got {temperature}")
    if torch.is_autocast_enabled(hidden.device.type):
        # Autocast does not reach into a custom function's backward: choose the compute type here, once.
        compute = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(compute), weight.to(compute)
    weight = weight.to(hidden.dtype)
    size = min(CPU_TILE, LOGITS_BUDGET) if hidden.is_cpu else LOGITS_BUDGET
    shape = tile_shape(len(ids), weight.shape[0], size, chunk_tokens)
    apply: Callable[..., Tensor] = _SelectedLogprobs.apply
    return apply(hidden, weight, bias, ids, temperature, shape, fast)


class Tile(NamedTuple):
    """Some rows and columns of the logits, and where the asked tokens are in them."""

    rows: slice
    columns: slice
    token: Tensor  # [rows, 1] the asked token, counted within the tile, or the nearest column
    inside: Tensor  # [rows] whether it is one of the columns


def tile_shape(count: int, vocabulary: int, size: int, most_rows: int | None = None) -> tuple[int, int]:
    """Rows and columns of a tile of about ``size`` logits; as many rows as there are, if that leaves enough columns."""
    rows = max(1, min(count, most_rows or count, size // min(vocabulary, FEWEST_COLUMNS)))
    return rows, max(1, min(vocabulary, MOST_COLUMNS, size // rows))


def tiles(ids: Tensor, vocabulary: int, shape: tuple[int, int]) -> Iterator[Tile]:
    """All logits in tiles, columns after columns; all rows of those come one after the other."""
    count, (height, width) = len(ids), shape
    for first in range(0, vocabulary, width):
        last = min(first + width, vocabulary) - 1
        for start in range(0, max(count, 1), height):
            rows = slice(start, min(start + height, count))
            near = ids[rows].clamp(first, last)
            yield Tile(rows, slice(first, last + 1), near[:, None] - first, near == ids[rows])


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, fast: bool) -> Tensor:
    logits = matmul_transposed(hidden, weight, fast)
    if logits.dtype != torch.float64:
        logits = logits.float()
    if bias is not None:
        logits += bias
    return logits if temperature == 1.0 else logits.div_(temperature)


def _share(normalizer: Tensor, total: Tensor) -> Tensor:
    return (normalizer - total).clamp_min_(LEAST_SHARE).exp_()


def _subtract_onehot(softmax: Tensor, tile: Tile, logprobs: Tensor, share: Tensor) -> None:
    """``softmax - onehot / share`` in place; ``(exp logprob - 1) / share`` at the asked token, to full precision."""
    own = (logprobs[tile.rows].expm1() / share)[:, None].to(softmax.dtype)
    softmax.scatter_(-1, tile.token, torch.where(tile.inside[:, None], own, softmax.gather(-1, tile.token)))


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float,
        shape: tuple[int, int],
        fast: bool,
    ) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        chosen = hidden.new_empty(ids.shape, dtype=dtype)
        total = hidden.new_full(ids.shape, -torch.inf, dtype=dtype)
        normalizers: list[Tensor] = []
        kept: list[Tensor] = []
        room = KEPT_LOGITS if any(ctx.needs_input_grad) else 0
        for tile in tiles(ids, weight.shape[0], shape):
            rows, columns = tile.rows, tile.columns
            part = None if bias is None else bias[columns]
            logits = _logits(hidden[rows], weight[columns], part, temperature, fast)
            softmax = logits.softmax(-1)
            # The largest logit's probability is 1 / sum exp(logit - largest): this saves a pass with exponentials.
            normalizer = logits.amax(-1) - softmax.amax(-1).log()
            total[rows] = torch.logaddexp(total[rows], normalizer)
            chosen[rows] = torch.where(tile.inside, logits.gather(-1, tile.token).squeeze(-1), chosen[rows])
            normalizers.append(normalizer)
            room -= softmax.numel()
            if room >= 0:
                kept.append(softmax.to(weight.dtype))
        logprobs = chosen - total
        for tile, softmax, normalizer in zip(
            tiles(ids, weight.shape[0], shape), kept, normalizers, strict=False
        ):
            _subtract_onehot(softmax, tile, logprobs, _share(normalizer, total[tile.rows]))
        ctx.save_for_backward(hidden, weight, bias, ids, total, logprobs, *normalizers, *kept)
        ctx.temperature, ctx.shape, ctx.fast, ctx.tiles = temperature, shape, fast, len(normalizers)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, total, logprobs, *rest = ctx.saved_tensors
        normalizers, kept = rest[: ctx.tiles], rest[ctx.tiles :]
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        scale = (grads[0] / ctx.temperature).to(total.dtype)
        grad_hidden = torch.zeros_like(hidden, dtype=total.dtype) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        for index, tile in enumerate(tiles(ids, weight.shape[0], ctx.shape)):
            rows, columns = tile.rows, tile.columns
            share = _share(normalizers[index], total[rows])
            if index < len(kept):
                error = kept[index]
            else:
                part = None if bias is None else bias[columns]
                logits = _logits(hidden[rows], weight[columns], part, ctx.temperature, ctx.fast)
                error = logits.softmax(-1).to(weight.dtype)
                _subtract_onehot(error, tile, logprobs, share)
            factor = (-scale[rows] * share)[:, None]
            if grad_bias is not None:
                grad_bias[columns] += (error * factor).sum(0)
            if grad_hidden is not None:
                grad_hidden[rows] += matmul_transposed(error, weight[columns].T, ctx.fast) * factor
            if grad_weight is not None:
                product = transposed_matmul(error, (hidden[rows] * factor).to(hidden.dtype), ctx.fast)
                if rows.start == 0:
                    grad_weight[columns] = product
                else:
                    grad_weight[columns] += product
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None
