"""Log-probabilities of given tokens without ever holding the logits of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOGITS_BUDGET = 2**24
"""Largest number of logits in memory at once: 64 MiB in float32."""


def chunk_tokens_for(vocabulary: int) -> int:
    """Tokens a chunk so that a chunk's logits stay within ``LOGITS_BUDGET``."""
    return max(1, LOGITS_BUDGET // vocabulary)


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> Tensor:
    """log softmax((h W^T + b) / temperature) at the given ids, in float32.

    The vocabulary logits are made chunk by chunk and made again in backward, so memory is
    ``chunk_tokens * V`` rather than ``N * V``; when one chunk holds all tokens it is kept instead.

    Args:
        hidden: ``[N, E]`` final hidden states.
        weight: ``[V, E]`` output embedding.
        ids: ``[N]`` long, the token whose log-probability is asked at each position.
        bias: ``[V]`` or None.
        temperature: divides the logits; > 0.
        chunk_tokens: tokens a chunk; default fits ``LOGITS_BUDGET``.

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
    chunk = chunk_tokens or chunk_tokens_for(weight.shape[0])
    apply: Callable[..., Tensor] = _SelectedLogprobs.apply
    return apply(hidden, weight, bias, ids, temperature, chunk)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = hidden @ weight.T
    if logits.dtype != torch.float64:
        logits = logits.float()
    if bias is not None:
        logits = logits + bias
    return logits if temperature == 1.0 else logits / temperature


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        starts = range(0, max(hidden.shape[0], 1), chunk)
        logprobs, normalizers, logits = [], [], None
        for start in starts:
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias, temperature)
            normalizer = logits.logsumexp(-1)
            logprobs.append(logits.gather(-1, ids[part, None]).squeeze(-1) - normalizer)
            normalizers.append(normalizer)
        kept = logits if len(starts) == 1 and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, bias, ids, torch.cat(normalizers), kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        hidden, weight, bias, ids, normalizers, kept = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = kept if kept is not None else _logits(hidden[part], weight, bias, ctx.temperature)
            # d logprob / d logits = onehot(id) - softmax
            scale = (grad[part] / ctx.temperature).to(logits.dtype)[:, None]
            delta = (logits - normalizers[part, None]).exp_().mul_(-scale)
            delta.scatter_add_(-1, ids[part, None], scale)
            if grad_bias is not None:
                grad_bias += delta.sum(0)
            delta = delta.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(delta, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(delta.T, hidden[part])
        return grad_hidden, grad_weight, grad_bias, None, None, None
