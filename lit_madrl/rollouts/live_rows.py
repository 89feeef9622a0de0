"""The distinct partial completions that a model is extending, and how the next ones follow from them.

Letters: R live rows, N samples that point at them, L prompt tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_madrl.rollouts.kv_cache import RowCache, build_cache


class LiveRows:
    """A model's state for R rows: cache, padding mask and the next position of each.

    Args:
        model: a causal language model of transformers.
        roots: the token lists to start from.
        max_rows: most rows there will ever be.
        max_new_tokens: most tokens that will ever be appended to a row.
        device: of the model's input.
    """

    def __init__(
        self,
        model: nn.Module,
        roots: Sequence[Sequence[int]],
        max_rows: int,
        max_new_tokens: int,
        device: torch.device,
    ) -> None:
        self.model = model
        lengths = [len(root) for root in roots]
        self.width = max(lengths)
        capacity = self.width + max_new_tokens
        padded = [[0] * (self.width - len(root)) + list(root) for root in roots]
        self.ids = torch.tensor(padded, device=device)
        self.position = torch.tensor(lengths, device=device)
        self.mask: Tensor | None = None  # attention is faster without one
        if min(lengths) < self.width:
            columns = torch.arange(capacity, device=device)
            self.mask = (columns >= self.width - self.position[:, None]).long()
        self.cache: Any = build_cache(model.config, max_rows, capacity)
        # transformers renamed the argument in 5.2x; both names are accepted until 5.40, but one warns.
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    def prefill(self, tokens: int) -> Tensor:
        """Next-token logits ``[R, V]`` of the roots; about ``tokens`` tokens go through the model at once."""
        columns = torch.arange(self.width, device=self.ids.device)
        position = (columns - self.width + self.position[:, None]).clamp_min(0)
        # Left-padded, so any number of columns of all rows is a batch. A model with a cache of its own may
        # not take a prompt in pieces.
        at_once = max(1, tokens // len(self.ids)) if isinstance(self.cache, RowCache) else self.width
        for start in range(0, self.width, at_once):
            end = min(start + at_once, self.width)
            logits = self._forward(self.ids[:, start:end], position[:, start:end], end)
        return logits

    def advance(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Row r becomes the former row ``parents[r]`` with ``tokens[r]`` appended; its logits ``[R, V]``.

        The one operation behind expansion from prompt to group, dropping finished rows and merging.
        """
        if parents.numel() != self.position.numel() or not is_identity(parents):
            self.cache.reorder_cache(parents)
            self.position = self.position[parents]
            self.mask = None if self.mask is None else self.mask[parents]
        self.width += 1
        logits = self._forward(tokens[:, None], self.position[:, None], self.width)
        self.position = self.position + 1
        return logits

    def _forward(self, ids: Tensor, position: Tensor, width: int) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=None if self.mask is None else self.mask[:, :width],
            position_ids=position,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
        )
        self.cache = getattr(output, self.cache_name)
        if self.cache is None:
            raise ValueError(
                f"policy: expected a model that returns its cache, got {type(self.model).__name__}"
            )
        logits: Tensor = output.logits[:, -1]
        return logits


def is_identity(parents: Tensor) -> bool:
    """Whether ``parents`` is 0, 1, 2, ..."""
    return torch.equal(parents, torch.arange(parents.numel(), device=parents.device))


class Branches(NamedTuple):
    """The next R rows, and where each of the N samples, once put in ``order``, finds itself in them."""

    parents: Tensor  # [R] the former row
    tokens: Tensor  # [R] the token appended to it
    order: Tensor  # [N] permutation of the samples
    row: Tensor  # [N] the row of a sample
    rank: Tensor  # [N] its number among the samples of its row


def branch(row: Tensor, tokens: Tensor, merge: bool = True) -> Branches:
    """Turn the distinct (row, token) pairs of N samples into rows; without ``merge`` each sample is a row.

    Args:
        row: ``[N]`` the row each sample points at.
        tokens: ``[N]`` the token each sample drew from it.
    """
    number = torch.arange(row.numel(), device=row.device)
    kind = tokens if merge else number
    key, order = (row * (kind.max() + 1) + kind).sort()
    is_first = torch.ones_like(key, dtype=torch.bool)
    is_first[1:] = key[1:] != key[:-1]
    first = is_first.nonzero().squeeze(1)
    child = is_first.cumsum(0) - 1
    place = placement(row[order[first]])
    representative = torch.empty_like(first)
    representative[place] = order[first]
    return Branches(row[representative], tokens[representative], order, place[child], number - first[child])


def placement(parents: Tensor) -> Tensor:
    """Distinct numbers in 0..R-1 for R children, so that the cache moves as little as possible.

    The first child of a row takes its number where that is below R; the others fill the gaps. Example:
    parents ``[0, 0, 2, 5]`` (sorted) are placed at ``[0, 1, 2, 3]``: rows 0 and 2 stay, two are copied.
    """
    stays = parents < parents.numel()
    stays[1:] &= parents[1:] != parents[:-1]
    free = torch.ones_like(stays)
    free[parents[stays]] = False
    place = parents.clone()
    place[~stays] = free.nonzero().squeeze(1)
    return place
