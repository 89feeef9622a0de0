"""The ``shared_prefix`` attention: each completion of a packed group sees its prompt and itself.

Registered with transformers' ``AttentionInterface``, so no model is rewritten. Without an ``AttentionPlan`` in
the call (decoding, padded batches) it is transformers' own SDPA attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SHARED_PREFIX = "shared_prefix"

# What one attention call costs beside its arithmetic, in query-key pairs: below it, one dense call over whole
# groups (some pairs masked) beats two calls a group.
_CALL_OVERHEAD_PAIRS = 4096

# Queries a call on CPUs, where PyTorch's kernel computes what a mask hides as well.
_QUERY_BLOCK = 64

# Attention features that the plan does not know: a layer that asks for one must not be packed.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class DenseGroups:
    """All groups as one padded batch ``[P, L]`` with one mask; best for short completions.

    Attributes:
        index: ``[P, L]`` long, packed position of each token; padding points at the group's first token.
        mask: ``[P, 1, L, L]`` bool, true where a query may see a key.
        inverse: ``[N]`` long, place of each packed token in the flattened ``[P * L]``.
    """

    index: Tensor
    mask: Tensor
    inverse: Tensor

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **sdpa: Any) -> Tensor:
        q, k, v = (x[self.index].transpose(1, 2) for x in (query, key, value))
        out = _attend(q, k, v, attn_mask=self.mask, **sdpa)
        return out.transpose(1, 2).flatten(0, 1)[self.inverse]


@dataclass(frozen=True)
class GroupRows:
    """One group: its prompt attends causally, then its completions as rows ``[n, T]``; best for long ones.

    Attributes:
        start: packed position of the prompt's first token.
        prompt_length: tokens of the prompt.
        index: ``[n, T]`` long, packed positions of the completions' tokens; padding points at ``start``.
        mask: ``[T, prompt_length + T]`` bool. Padding comes after a row's real tokens, so causality hides it.
        inverse: ``[sum of the completions' lengths]`` long, place of each completion token in ``[n * T]``.
    """

    start: int
    prompt_length: int
    index: Tensor
    mask: Tensor
    inverse: Tensor

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **sdpa: Any) -> Tensor:
        prompt = slice(self.start, self.start + self.prompt_length)
        q, k, v = (x[prompt].transpose(0, 1)[None] for x in (query, key, value))
        out = _attend(q, k, v, is_causal=True, **sdpa)[0].transpose(0, 1)
        if self.index.numel() == 0:
            return out
        rows, columns = self.index.shape
        index = self.index.flatten()

        def completion_rows(x: Tensor) -> Tensor:
            return x[index].view(rows, columns, *x.shape[1:]).transpose(1, 2)

        own_q, own_k, own_v = map(completion_rows, (query, key, value))
        seen_k = torch.cat([k.expand(rows, -1, -1, -1), own_k], 2)
        seen_v = torch.cat([v.expand(rows, -1, -1, -1), own_v], 2)
        own = _attend_to_own(own_q, seen_k, seen_v, self.mask, **sdpa)
        return torch.cat([out, own.transpose(1, 2).flatten(0, 1)[self.inverse]])


def _attend_to_own(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **sdpa: Any) -> Tensor:
    """Attention of the last ``[.., T, D]`` tokens to all; on a CPU in blocks that leave out what comes after them."""
    tokens = query.shape[2]
    if not query.is_cpu or tokens <= _QUERY_BLOCK:
        return _attend(query, key, value, attn_mask=mask, **sdpa)
    outs = []
    for first in range(0, tokens, _QUERY_BLOCK):
        last = min(first + _QUERY_BLOCK, tokens)
        seen = key.shape[2] - tokens + last
        k, v, sees = key[:, :, :seen], value[:, :, :seen], mask[first:last, :seen]
        outs.append(_attend(query[:, :, first:last], k, v, attn_mask=sees, **sdpa))
    return torch.cat(outs, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, **sdpa: Any) -> Tensor:
    """Attention in the dtype it is asked for; on a CPU bfloat16 by the float32 kernel, which is faster."""
    autocast = query.is_cpu and torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else value.dtype
    if not (query.is_cpu and dtype is torch.bfloat16):
        return F.scaled_dot_product_attention(query, key, value, **sdpa)
    with torch.autocast("cpu", enabled=False):
        out = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), **sdpa)
    return out.to(dtype)


@dataclass(frozen=True)
class AttentionPlan:
    """How the attention of one packed batch is computed: its parts in packed order."""

    parts: tuple[DenseGroups | GroupRows, ...]

    @classmethod
    def build(cls, layout: Sequence[tuple[int, Sequence[int]]]) -> AttentionPlan:
        """Choose the cheaper form for groups given as (prompt length, lengths of the completions' inputs)."""
        sizes = [prompt + sum(fed) for prompt, fed in layout]
        dense = len(layout) * max(sizes) ** 2
        rows = sum(
            prompt**2 + len(fed) * max(fed, default=0) * (prompt + max(fed, default=0))
            for prompt, fed in layout
        )
        if dense <= rows + 2 * len(layout) * _CALL_OVERHEAD_PAIRS:
            return cls((dense_groups(layout),))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return cls(tuple(group_rows(start, *group) for start, group in zip(starts, layout, strict=True)))

    def to(self, device: torch.device | str) -> AttentionPlan:
        """A copy on ``device``."""
        return AttentionPlan(tuple(_moved(part, device) for part in self.parts))


def _moved(part: DenseGroups | GroupRows, device: torch.device | str) -> DenseGroups | GroupRows:
    tensors: dict[str, Any] = {k: v.to(device) for k, v in vars(part).items() if isinstance(v, Tensor)}
    return replace(part, **tensors)


def dense_groups(layout: Sequence[tuple[int, Sequence[int]]]) -> DenseGroups:
    """The dense form of groups given as (prompt length, lengths of the completions' inputs)."""
    sizes = torch.tensor([prompt + sum(fed) for prompt, fed in layout])
    width = int(sizes.max())
    starts = sizes.cumsum(0) - sizes
    column = torch.arange(width)
    valid = column < sizes[:, None]
    segment = torch.full((len(layout), width), -1)  # 0 the prompt, 1.. the completions, -1 padding
    for p, (prompt, fed) in enumerate(layout):
        lengths = torch.tensor([prompt, *fed])
        segment[p, : int(sizes[p])] = torch.arange(len(lengths)).repeat_interleave(lengths)
    same = segment[:, :, None] == segment[:, None, :]
    to_prompt = (segment == 0)[:, None, :]
    # Padded queries see the prompt's first token: a row without any key would be NaN.
    mask = (same | to_prompt) & (column[:, None] >= column)
    index = (starts[:, None] + column).where(valid, starts[:, None])
    inverse = torch.arange(len(layout) * width).view(len(layout), width)[valid]
    return DenseGroups(index, mask[:, None], inverse)


def group_rows(start: int, prompt_length: int, fed: Sequence[int]) -> GroupRows:
    """The row form of one group that begins at packed position ``start``."""
    lengths = torch.tensor([n for n in fed if n > 0], dtype=torch.long)
    first = start + prompt_length
    width = int(lengths.max()) if len(lengths) else 0
    valid = torch.arange(width) < lengths[:, None]
    index = torch.full(valid.shape, start)
    index[valid] = torch.arange(first, first + int(lengths.sum()))
    mask = torch.ones(width, prompt_length + width, dtype=torch.bool).tril(prompt_length)
    inverse = torch.arange(valid.numel()).view(valid.shape)[valid]
    return GroupRows(start, prompt_length, index, mask, inverse)


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    shared_prefix: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: ``query [1, H, N, D]``, ``key`` and ``value [1, KV, N, D]``.

    Returns ``[1, N, H, D]``.
    """
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    grouped = query.shape[1] != key.shape[1]
    if shared_prefix is None:
        if grouped and query.is_cpu and not asked and (query.shape[2] == 1 or attention_mask is not None):
            return _grouped_on_cpu(query, key, value, attention_mask, dropout, scaling).transpose(1, 2), None
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    if asked:
        raise ValueError(
            f"{type(module).__name__} uses {', '.join(asked)}, which packed batches do not support: "
            "set policy.packing to 'padded'"
        )
    tokens = [x[0].transpose(0, 1) for x in (query, key, value)]
    outs = [
        part(*tokens, dropout_p=dropout, scale=scaling, enable_gqa=grouped) for part in shared_prefix.parts
    ]
    return torch.cat(outs)[None], None


def _grouped_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float | None
) -> Tensor:
    """Attention of ``[R, H, T, D]`` to ``[R, KV, L, D]`` that sees all keys but those a mask hides, without copies.

    transformers repeats keys and values wherever there is a mask. And the one query of each head when decoding takes
    PyTorch's kernel as long as several: the heads that share keys become queries of one head.
    """
    if query.shape[2] > 1:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale, enable_gqa=True)
    rows, heads, _, width = query.shape
    shared = key.shape[1]
    if mask is not None and mask.shape[1] != 1:  # one for each head
        mask = mask.reshape(mask.shape[0], shared, heads // shared, -1)
    queries = query.reshape(rows, shared, heads // shared, width)
    out = F.scaled_dot_product_attention(queries, key, value, mask, dropout, scale=scale)
    return out.reshape(rows, heads, 1, -1)


AttentionInterface.register(SHARED_PREFIX, shared_prefix_attention)
# A packed call brings a 4-D placeholder mask, which transformers passes through; any other call gets SDPA's mask.
AttentionMaskInterface.register(SHARED_PREFIX, sdpa_mask)
