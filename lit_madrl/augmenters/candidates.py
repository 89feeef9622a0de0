"""Trajectories that may be inserted, and the groups that they may be inserted in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_madrl.augmenters.base import RolloutCollector
from lit_madrl.functional.surprisal import prefix_length
from lit_madrl.types import Problem, Rollouts


@dataclass(frozen=True)
class Candidate:
    """A trajectory that may be inserted.

    Attributes:
        ids: its tokens, prefix and stop token included.
        prefix_length: how many of them were given.
        correct: whether the verifier accepts it.
        format: 0 or 1.
        category: its category.
    """

    ids: list[int]
    prefix_length: int
    correct: bool
    format: float
    category: int


@dataclass(frozen=True)
class Task:
    """A group that is guided.

    Attributes:
        prompt: its index in the batch.
        reference: the reference as a trajectory; None where no reference is needed.
        surprisal: ``[T + 1]`` nats, S_t of the reference.
        boundaries: prefix lengths at which the reference may be cut.
    """

    prompt: int
    reference: Candidate | None
    surprisal: Tensor
    boundaries: list[int]

    def prefix(self, level: float) -> list[int]:
        """The tokens of the reference to give at a level."""
        if self.reference is None:
            return []
        return self.reference.ids[: prefix_length(self.surprisal, level, self.boundaries)]

    def is_copy(self, candidate: Candidate) -> bool:
        """Whether a candidate is the reference itself."""
        return self.reference is not None and candidate.ids == self.reference.ids


def given(prompts: list[list[int]], groups: list[list[list[int]]]) -> Rollouts:
    """Completions that were given rather than sampled, groups of one size, as rollouts."""
    lengths = torch.tensor([[len(ids) for ids in group] for group in groups])
    width = int(lengths.max())
    ids = torch.tensor([[row + [0] * (width - len(row)) for row in group] for group in groups])
    return Rollouts(
        prompt_ids=prompts,
        completion_ids=ids,
        completion_mask=torch.arange(width) < lengths[..., None],
        sampler_logprobs=torch.zeros(ids.shape),
        finished=torch.ones_like(lengths, dtype=torch.bool),
        prefix_lengths=lengths,
    )


def judged(
    rollouts: Rollouts,
    prefix_lengths: list[list[int]],
    problems: Sequence[Problem],
    collector: RolloutCollector,
) -> list[list[Candidate]]:
    """Score trajectories of which the first ``prefix_lengths`` tokens were given: ``[P, G]`` candidates."""
    scores = collector.judge(problems, rollouts)
    columns = (
        rollouts.completions(),
        prefix_lengths,
        (scores.correct > 0).tolist(),
        scores.format.tolist(),
        scores.category.tolist(),
    )
    return [
        [Candidate(*fields) for fields in zip(*group, strict=True)] for group in zip(*columns, strict=True)
    ]
