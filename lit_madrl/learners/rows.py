"""Completions as training rows: identical ones merged, all of them split into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_madrl.functional import Reduction, token_weights
from lit_madrl.policy.packing import PackedBatch, pack


class Row(NamedTuple):
    """A distinct completion of one prompt.

    Attributes:
        prompt: index of its prompt in the batch.
        ids: its tokens, the stop token included.
        advantage: of each of its copies.
        copies: how many identical completions it stands for.
        augmenter: index of the augmenter that inserted it, -1 for the policy's own.
        given: how many tokens at its start were given rather than sampled.
        context: how many tokens at its start are not learned.
    """

    prompt: int
    ids: tuple[int, ...]
    advantage: float = 0.0
    copies: int = 1
    augmenter: int = -1
    given: int = 0
    context: int = 0

    @property
    def learned(self) -> int:
        """How many of its tokens are learned."""
        return len(self.ids) - self.context


def merge_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows that are the same but for their copies, as one: they have the same loss, so this is exact."""
    merged: dict[Row, int] = {}
    for row in rows:
        key = row if row.copies == 1 else row._replace(copies=1)
        merged[key] = merged.get(key, 0) + row.copies
    return [row._replace(copies=copies) for row, copies in merged.items()]


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed together.

    Attributes:
        packed: their tokens; R rows, M completion tokens.
        advantages: ``[M]``.
        weights: ``[M]``, the share of each token's loss in the loss of the whole (global) batch.
        augmenter: ``[M]`` long, which augmenter inserted each token's row; -1 for the policy's own.
        given: ``[M]`` bool, tokens that were given rather than sampled.
    """

    packed: PackedBatch
    advantages: Tensor
    weights: Tensor
    augmenter: Tensor
    given: Tensor


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole batch, all micro-batches and ranks together."""

    sequences: float
    tokens: float
    max_length: int


def micro_batches(
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Row],
    reduction: Reduction,
    denominators: Denominators,
    budget: int | None,
    device: torch.device | str,
) -> list[MicroBatch]:
    """Pack rows into as few micro-batches as ``budget`` tokens each allow (a single longer row stands alone)."""
    batches = []
    for part in _split(prompts, sorted(rows, key=lambda row: row.prompt), budget):
        used = sorted({row.prompt for row in part})
        groups = [[row.ids for row in part if row.prompt == prompt] for prompt in used]
        packed = pack([prompts[prompt] for prompt in used], groups)
        weights = token_weights(
            torch.tensor([row.learned for row in part]),
            torch.tensor([float(row.copies) for row in part]),
            reduction,
            num_sequences=denominators.sequences,
            num_tokens=denominators.tokens,
            max_length=denominators.max_length,
        )
        of_row = packed.rows
        position = torch.cat([torch.arange(len(row.ids)) for row in part])
        learned = position >= torch.tensor([row.context for row in part])[of_row]
        columns = (
            torch.tensor([row.advantage for row in part])[of_row],
            weights[of_row] * learned,
            torch.tensor([row.augmenter for row in part])[of_row],
            position < torch.tensor([row.given for row in part])[of_row],
        )
        batches.append(MicroBatch(packed.to(device), *(column.to(device) for column in columns)))
    return batches


def _split(prompts: Sequence[Sequence[int]], rows: Sequence[Row], budget: int | None) -> Iterator[list[Row]]:
    part: list[Row] = []
    size = 0
    for row in rows:
        cost = len(row.ids) + (0 if part and part[-1].prompt == row.prompt else len(prompts[row.prompt]))
        if part and budget is not None and size + cost > budget:
            yield part
            part, size, cost = [], 0, len(row.ids) + len(prompts[row.prompt])
        part.append(row)
        size += cost
    if part:
        yield part
