"""Trajectories that may be inserted, and the groups that they may be inserted in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_madrl.augmenters.base import Reference, RolloutCollector
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


@dataclass(frozen=True)
class Verified:
    """A usable reference: it exists, fits the length limit and is correct.

    Attributes:
        text: with the characters of each token.
        trajectory: the reference as a trajectory, all of it given.
    """

    text: Reference
    trajectory: Candidate


def verified_references(
    prompts: Sequence[int], problems: Sequence[Problem], collector: RolloutCollector
) -> dict[int, Verified]:
    """The usable references among those of the problems ``prompts`` (indices of ``problems``), by index.

    A problem is left out that has no reference, one longer than ``sampling.max_new_tokens``, or one that the
    verifier rejects.
    """
    longest = collector.sampling.max_new_tokens
    encoded = {p: collector.encode_reference(problems[p]) for p in prompts}
    fitting = {p: r for p, r in encoded.items() if r is not None and len(r.ids) <= longest}
    if not fitting:
        return {}
    chosen = [problems[p] for p in fitting]
    groups = [[reference.ids] for reference in fitting.values()]
    rollouts = given(collector.encode_prompts(chosen), groups)
    trajectories = judged(rollouts, [[len(ids)] for (ids,) in groups], chosen, collector)
    return {
        p: Verified(text, trajectory)
        for (p, text), (trajectory,) in zip(fitting.items(), trajectories, strict=True)
        if trajectory.correct
    }


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
