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
        members: indices of its copies among all P x G rollouts, where they have a sampler's log-probabilities.
    """

    prompt: int
    ids: tuple[int, ...]
    advantage: float = 0.0
    copies: int = 1
    augmenter: int = -1
    given: int = 0
    context: int = 0
    members: tuple[int, ...] = ()

    @property
    def learned(self) -> int:
        """How many of its tokens are learned."""
        return len(self.ids) - self.context


def merge_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows that are the same but for their copies, as one: they have the same loss, so this is exact.

    Copies may have been drawn with log-probabilities that differ by rounding; ``members`` keeps them apart.
    """
    same: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = row.prompt, row.ids, row.advantage, row.augmenter, row.given, row.context
        same.setdefault(key, []).append(row)
    return [
        equal[0]._replace(
            copies=sum(row.copies for row in equal), members=tuple(m for row in equal for m in row.members)
        )
        for equal in same.values()
    ]


@dataclass(frozen=True)
class Drawn:
    """With what log-probabilities the policy's own rows of a micro-batch were drawn: E tokens of C completions.

    Every copy of a row has its own; given tokens have none.

    Attributes:
        logprobs: ``[E]`` nats, of the sampler.
        token: ``[E]`` long, which of the M tokens of the micro-batch it is.
        copy: ``[E]`` long in 0..C-1, which completion it belongs to.
        copies: C.
    """

    logprobs: Tensor
    token: Tensor
    copy: Tensor
    copies: int

    @classmethod
    def of(cls, rows: Sequence[Row], sampler_logprobs: Tensor, device: torch.device | str) -> Drawn:
        """The log-probabilities of ``rows`` out of those of all rollouts, ``[P x G, T]``."""
        own = [(row, member) for row, r in enumerate(rows) if r.augmenter < 0 for member in r.members]
        row, member = torch.tensor(own, dtype=torch.long).view(-1, 2).unbind(1)
        lengths = torch.tensor([len(r.ids) for r in rows])
        given = torch.tensor([r.given for r in rows])
        columns = torch.arange(sampler_logprobs.shape[-1])
        sampled = (columns >= given[row, None]) & (columns < lengths[row, None])
        copy, column = sampled.nonzero().unbind(1)
        token = (lengths.cumsum(0) - lengths)[row][copy] + column
        logprobs = sampler_logprobs[member[copy], column]
        return cls(logprobs.to(device), token.to(device), copy.to(device), len(own))


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed together.

    Attributes:
        packed: their tokens; R rows, M completion tokens.
        advantages: ``[M]``.
        weights: ``[M]``, the share of each token's loss in the loss of the whole (global) batch.
        augmenter: ``[M]`` long, which augmenter inserted each token's row; -1 for the policy's own.
        given: ``[M]`` bool, tokens that were given rather than sampled.
        drawn: how the sampler drew them; None where that is not known.
    """

    packed: PackedBatch
    advantages: Tensor
    weights: Tensor
    augmenter: Tensor
    given: Tensor
    drawn: Drawn | None = None


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
    sampler_logprobs: Tensor | None = None,
) -> list[MicroBatch]:
    """Pack rows into as few micro-batches as ``budget`` tokens each allow (a single longer row stands alone).

    ``sampler_logprobs`` are those of all rollouts, ``[P x G, T]``, on the CPU.
    """
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
        batches.append(
            MicroBatch(
                packed=packed.to(device),
                advantages=torch.tensor([row.advantage for row in part])[of_row].to(device),
                weights=(weights[of_row] * learned).to(device),
                augmenter=torch.tensor([row.augmenter for row in part])[of_row].to(device),
                given=(position < torch.tensor([row.given for row in part])[of_row]).to(device),
                drawn=None if sampler_logprobs is None else Drawn.of(part, sampler_logprobs, device),
            )
        )
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
