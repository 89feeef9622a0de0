"""Groups of completions that share a prompt, as one row of tokens without padding or repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lit_madrl.policy.attention import AttentionPlan

Group = Sequence[Sequence[int]]
"""The completions of one prompt."""


@dataclass(frozen=True)
class PackedBatch:
    """``[prompt 1 | completion 1.1 | completion 1.2 | ... | prompt 2 | completion 2.1 | ...]``.

    A completion's positions restart after its prompt. Its last token is predicted but predicts nothing, so
    it is no input. Example: prompt ``[5, 6]`` with completions ``[7, 8, 9]`` and ``[4]`` has the inputs
    ``[5, 6, 7, 8]``, positions ``[0, 1, 2, 3]``, sources ``[1, 2, 3, 1]`` and targets ``[7, 8, 9, 4]``.

    Attributes:
        input_ids: ``[1, N]`` long.
        position_ids: ``[1, N]`` long.
        plan: which tokens each token attends to.
        sources: ``[M]`` long, input position whose hidden state predicts each completion token.
        targets: ``[M]`` long, the completion tokens, row after row.
        rows: ``[M]`` long, row in ``0..R-1`` of each completion token.
        lengths: ``[R]`` long, tokens of each completion.
        prompts: ``[R]`` long, prompt in ``0..P-1`` of each row.
        prompt_lengths: ``[P]`` long.
    """

    input_ids: Tensor
    position_ids: Tensor
    plan: AttentionPlan
    sources: Tensor
    targets: Tensor
    rows: Tensor
    lengths: Tensor
    prompts: Tensor
    prompt_lengths: Tensor

    @property
    def num_rows(self) -> int:
        """R, completions over all prompts."""
        return self.lengths.shape[0]

    def unpack(self, values: Tensor) -> Tensor:
        """``[M]`` values of completion tokens as ``[R, T]``, zero after each completion's end."""
        columns = torch.arange(values.shape[0], device=values.device) - self._starts[self.rows]
        out = values.new_zeros(self.num_rows, int(self.lengths.max()))
        return out.index_put((self.rows, columns), values)

    def row_sums(self, values: Tensor) -> Tensor:
        """``[M]`` values of completion tokens summed over each row: ``[R]``."""
        return values.new_zeros(self.num_rows).index_add(0, self.rows, values)

    @property
    def _starts(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths

    def to(self, device: torch.device | str) -> PackedBatch:
        """A copy on ``device``."""
        moved: dict[str, Any] = {f.name: getattr(self, f.name).to(device) for f in fields(self)}
        return replace(self, **moved)


def pack(prompts: Sequence[Sequence[int]], groups: Sequence[Group]) -> PackedBatch:
    """Pack the completions ``groups[p]`` of each prompt ``prompts[p]``.

    Raises:
        ValueError: a prompt or completion is empty, or there is no completion at all.
    """
    if len(prompts) != len(groups):
        raise ValueError(f"groups: expected one group for each of {len(prompts)} prompts, got {len(groups)}")
    inputs: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    lengths: list[int] = []
    layout: list[tuple[int, list[int]]] = []
    for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        if not prompt or not all(group):
            raise ValueError(
                f"prompt {index}: expected non-empty token lists, got an empty prompt or completion"
            )
        last = len(inputs) + len(prompt) - 1
        inputs.extend(prompt)
        positions.extend(range(len(prompt)))
        for completion in group:
            fed = len(completion) - 1
            sources.append(last)
            sources.extend(range(len(inputs), len(inputs) + fed))
            inputs.extend(completion[:-1])
            positions.extend(range(len(prompt), len(prompt) + fed))
            targets.extend(completion)
            lengths.append(len(completion))
        layout.append((len(prompt), [len(completion) - 1 for completion in group]))
    if not lengths:
        raise ValueError("groups: expected at least one completion, got none")
    row_lengths = torch.tensor(lengths)
    group_sizes = torch.tensor([len(group) for group in groups])
    return PackedBatch(
        input_ids=torch.tensor([inputs]),
        position_ids=torch.tensor([positions]),
        plan=AttentionPlan.build(layout),
        sources=torch.tensor(sources),
        targets=torch.tensor(targets),
        rows=torch.arange(len(lengths)).repeat_interleave(row_lengths),
        lengths=row_lengths,
        prompts=torch.arange(len(prompts)).repeat_interleave(group_sizes),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
    )


def padded_inputs(batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """The same batch as right-padded rows that repeat their prompt, for models that cannot be packed.

    Returns:
        ``input_ids [R, L]`` long, ``attention_mask [R, L]`` bool, and ``sources [M]`` long: the position in the
        flattened ``[R * L]`` rows that predicts each completion token.
    """
    device = batch.input_ids.device
    prompt_lengths = batch.prompt_lengths[batch.prompts]
    totals = prompt_lengths + batch.lengths - 1
    width = int(totals.max())
    column = torch.arange(width, device=device)
    mask = column < totals[:, None]
    # Where each row's prompt and completion begin in the packed row of tokens.
    fed_by_prompt = torch.zeros_like(batch.prompt_lengths).index_add(0, batch.prompts, batch.lengths - 1)
    sizes = batch.prompt_lengths + fed_by_prompt
    prompt_starts = (sizes.cumsum(0) - sizes)[batch.prompts]
    fed_before = (batch.lengths - 1).cumsum(0) - (batch.lengths - 1)
    completion_starts = batch.prompt_lengths.cumsum(0)[batch.prompts] + fed_before
    index = torch.where(
        column < prompt_lengths[:, None],
        prompt_starts[:, None] + column,
        completion_starts[:, None] + column - prompt_lengths[:, None],
    )
    input_ids = batch.input_ids[0][index.where(mask, torch.zeros_like(index))].where(mask, 0)
    token = torch.arange(batch.targets.shape[0], device=device) - batch._starts[batch.rows]
    sources = batch.rows * width + prompt_lengths[batch.rows] - 1 + token
    return input_ids, mask, sources
