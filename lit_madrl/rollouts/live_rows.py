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
from lit_madrl.rollouts.prefill import Stage


class LiveRows:
    """A model's state for R rows: cache, mask and the next position of each.

    Args:
        model: a causal language model of transformers.
        max_rows: most rows there will ever be.
        capacity: most columns there will ever be.
        device: of the model's input.
    """

    def __init__(self, model: nn.Module, max_rows: int, capacity: int, device: torch.device) -> None:
        self.model = model
        self.width = 0
        self.capacity = capacity
        self.position = torch.zeros(0, dtype=torch.long, device=device)
        self.mask: Tensor | None = None  # attention is faster without one
        self.cache: Any = build_cache(model.config, max_rows, capacity)
        # transformers renamed the argument in 5.2x; both names are accepted until 5.40, but one warns.
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    def prefill(self, stages: Sequence[Stage], tokens: int) -> Tensor:
        """Next-token logits ``[R, V]`` of the last stage's rows; about ``tokens`` tokens are computed at once."""
        for stage in stages:
            logits = self._extend(stage, tokens)
        return logits

    def _extend(self, stage: Stage, tokens: int) -> Tensor:
        parents, kept = (torch.tensor(x, device=self.position.device) for x in (stage.parents, stage.kept))
        if self.width:
            self._select(parents)
            if (kept < self.position).any():
                seen = self._explicit_mask()[:, : self.width]
                seen.masked_fill_(seen.cumsum(1) > kept[:, None], 0)
        self.position = kept
        new = stage.width
        padded = [[0] * (new - len(segment)) + list(segment) for segment in stage.segments]
        ids = torch.tensor(padded, device=kept.device)
        lengths = torch.tensor([len(segment) for segment in stage.segments], device=kept.device)
        number = torch.arange(new, device=kept.device) - new + lengths[:, None]  # negative where padded
        if (number < 0).any():
            self._explicit_mask()[:, self.width : self.width + new] = number >= 0
        position = (kept[:, None] + number).clamp_min(0)
        # Left-padded, so any number of columns of all rows is a batch. A model with a cache of its own may
        # not take a prompt in pieces.
        at_once = max(1, tokens // len(padded)) if isinstance(self.cache, RowCache) else new
        for start in range(0, new, at_once):
            end = min(start + at_once, new)
            logits = self._forward(ids[:, start:end], position[:, start:end], self.width + end)
        self.width += new
        self.position = kept + lengths
        return logits

    def advance(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Row r becomes the former row ``parents[r]`` with ``tokens[r]`` appended; its logits ``[R, V]``.

        The one operation behind expansion from prompt to group, dropping finished rows and merging.
        """
        self._select(parents)
        self.width += 1
        logits = self._forward(tokens[:, None], self.position[:, None], self.width)
        self.position = self.position + 1
        return logits

    def _select(self, parents: Tensor) -> None:
        if parents.numel() != self.position.numel() or not is_identity(parents):
            self.cache.reorder_cache(parents)
            self.position = self.position[parents]
            self.mask = None if self.mask is None else self.mask[parents]

    def _explicit_mask(self) -> Tensor:
        if self.mask is None:
            rows = self.position.numel()
            self.mask = torch.ones(rows, self.capacity, dtype=torch.long, device=self.position.device)
        return self.mask

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
