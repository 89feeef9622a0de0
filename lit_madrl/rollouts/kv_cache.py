"""A key/value cache whose rows can be selected and whose length grows in place."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

SPARE = 128
"""Tokens of room reserved beyond the present length, so that a copy is made once in 128 steps."""


class RowBuffer:
    """States ``[rows, heads, length, dim]`` in a larger buffer; rows that stay in place are not copied."""

    def __init__(self, max_rows: int, max_length: int) -> None:
        self.max_rows = max_rows
        self.max_length = max_length
        self.data: Tensor | None = None

    def append(self, states: Tensor, past: int) -> Tensor:
        """Write ``[rows, heads, new, dim]`` behind ``past`` tokens; a view of all ``past + new`` tokens."""
        rows, _, new, _ = states.shape
        data = self._reserve(states, rows, past + new, past)
        data[:rows, :, past : past + new] = states
        return data[:rows, :, : past + new]

    def select(self, live: Tensor, sources: Tensor, targets: Tensor, rows: int) -> Tensor:
        """Copy the rows ``sources`` of the view ``live`` to the rows ``targets``; a view of ``rows`` rows."""
        length = live.shape[2]
        data = self._reserve(live, rows, length, length)
        data[:, :, :length].index_copy_(0, targets, live.index_select(0, sources))
        return data[:rows, :, :length]

    def _reserve(self, like: Tensor, rows: int, length: int, past: int) -> Tensor:
        """The buffer, moved to a larger one first where it cannot hold ``[rows, heads, length, dim]``."""
        old = self.data
        if old is not None and rows <= old.shape[0] and length <= old.shape[2]:
            return old
        held_rows, held_length = (0, 0) if old is None else (old.shape[0], old.shape[2])
        if rows > held_rows:
            held_rows = max(rows, min(2 * rows, self.max_rows)) if held_rows else rows
        if length > held_length:
            held_length = max(length, min(length + SPARE, self.max_length))
        self.data = like.new_empty(held_rows, like.shape[1], held_length, like.shape[3])
        if old is not None:
            self.data[: old.shape[0], :, :past] = old[:, :, :past]
        return self.data


class RowLayer(DynamicLayer):  # type: ignore[misc, unused-ignore]
    """One layer of full attention: ``keys`` and ``values`` are views of buffers that outlive them."""

    def __init__(self, max_rows: int, max_length: int) -> None:
        super().__init__()
        self._key_buffer = RowBuffer(max_rows, max_length)
        self._value_buffer = RowBuffer(max_rows, max_length)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[rows, heads, new, dim]`` states; all states so far.

        Under autocast the float32 weights of a norm make keys float32. They are kept in the values' dtype, to which
        attention would cast them anyway.
        """
        past = self.get_seq_length()
        self.device = key_states.device
        self.keys = self._key_buffer.append(key_states.to(value_states.dtype), past)
        self.values = self._value_buffer.append(value_states, past)
        self.is_initialized = True
        return self.keys, self.values

    def select(self, sources: Tensor, targets: Tensor, rows: int) -> None:
        """Rows ``targets`` become copies of rows ``sources``; ``rows`` rows are left."""
        if self.get_seq_length():
            self.keys = self._key_buffer.select(self.keys, sources, targets, rows)
            self.values = self._value_buffer.select(self.values, sources, targets, rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row r becomes a copy of the former row ``beam_idx[r]``."""
        self.select(beam_idx, torch.arange(beam_idx.numel(), device=beam_idx.device), beam_idx.numel())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        rows = self.keys.shape[0] if self.get_seq_length() else 0
        self.reorder_cache(torch.arange(rows, device=self.device).repeat_interleave(repeats))


class RowCache(Cache):  # type: ignore[misc, unused-ignore]
    """The cache of a decoder with full attention in all layers, for at most ``max_rows`` x ``max_length``."""

    def __init__(self, layers: int, max_rows: int, max_length: int) -> None:
        super().__init__(layers=[RowLayer(max_rows, max_length) for _ in range(layers)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row r becomes a copy of the former row ``beam_idx[r]``; where those are equal, nothing moves."""
        rows = beam_idx.numel()
        moved = (beam_idx != torch.arange(rows, device=beam_idx.device)).nonzero().squeeze(1)
        sources = beam_idx[moved]
        for layer in self.layers:
            layer.select(sources, moved, rows)


def build_cache(config: Any, max_rows: int, max_length: int) -> Cache:
    """A ``RowCache`` where every layer of the model has full attention, else the model's own cache."""
    own = DynamicCache(config=config)
    return RowCache(len(own.layers), max_rows, max_length) if has_full_attention(own) else own


def has_full_attention(cache: Cache) -> bool:
    """Whether every layer of the model that ``cache`` was made for sees all tokens, by their keys and values."""
    return bool(cache.layers) and all(type(layer) is DynamicLayer for layer in cache.layers)


def allows_holes(model: nn.Module) -> bool:
    """Whether the model can be made to skip columns of its cache, by mask and explicit positions alone.

    True of full attention in all layers when the forward takes ``position_ids``; windows, convolutions and
    recurrent states go by columns, and so do models that count positions themselves.
    """
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    return takes_positions and has_full_attention(DynamicCache(config=model.config))
