"""Putting trajectories in the place of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lit_madrl.augmenters.candidates import Candidate
from lit_madrl.types import Rollouts, Scores, Source


class Insertion(NamedTuple):
    """A whole trajectory that replaces rollout ``[prompt, row]``.

    Attributes:
        prompt: index of the prompt.
        row: index of the rollout in its group.
        ids: tokens of the trajectory, prefix and stop token included.
        prefix_length: how many of them were given.
        source: where it comes from.
        correct: 0 or 1.
        format: 0 or 1.
        category: its category.
    """

    prompt: int
    row: int
    ids: Sequence[int]
    prefix_length: int
    source: Source
    correct: float
    format: float
    category: int

    @classmethod
    def of(cls, prompt: int, row: int, candidate: Candidate, source: Source) -> Insertion:
        """A candidate in the place of rollout ``[prompt, row]``."""
        return cls(
            prompt,
            row,
            candidate.ids,
            candidate.prefix_length,
            source,
            float(candidate.correct),
            candidate.format,
            candidate.category,
        )


def insert(rollouts: Rollouts, scores: Scores, insertions: Sequence[Insertion]) -> tuple[Rollouts, Scores]:
    """Rollouts and scores with the insertions in place; the arguments stay as they are."""
    if not insertions:
        return rollouts, scores
    width = max(rollouts.completion_ids.shape[-1], *(len(i.ids) for i in insertions))
    ids, mask, logprobs = (
        _widened(x, width)
        for x in (rollouts.completion_ids, rollouts.completion_mask, rollouts.sampler_logprobs)
    )
    finished, prefix_lengths = rollouts.finished.clone(), rollouts.prefix_lengths.clone()
    source = torch.zeros_like(prefix_lengths) if rollouts.source is None else rollouts.source.clone()
    fields = {name: value.clone() for name, value in vars(scores).items()}
    for new in insertions:
        at = (new.prompt, new.row)
        length = len(new.ids)
        ids[at] = 0
        ids[at][:length] = torch.as_tensor(new.ids, device=ids.device)
        mask[at] = torch.arange(width, device=mask.device) < length
        logprobs[at] = 0.0
        finished[at] = True
        prefix_lengths[at] = new.prefix_length
        source[at] = int(new.source)
        fields["category"][at] = new.category
        fields["correct"][at] = new.correct
        fields["format"][at] = new.format
        fields["on_policy"][at] = False
    inserted = replace(
        rollouts,
        completion_ids=ids,
        completion_mask=mask,
        sampler_logprobs=logprobs,
        finished=finished,
        prefix_lengths=prefix_lengths,
        source=source,
    )
    return inserted, Scores(**fields)


def _widened(x: Tensor, width: int) -> Tensor:
    out = x.new_zeros(*x.shape[:-1], width)
    out[..., : x.shape[-1]] = x
    return out
