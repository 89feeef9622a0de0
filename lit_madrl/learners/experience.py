"""A batch of rollouts with all that was made of it: what it says, and the rows it trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from lit_madrl.augmenters.base import RolloutAugmenter
from lit_madrl.functional import dead_groups, jensen_shannon
from lit_madrl.learners.rows import Row, merge_rows
from lit_madrl.types import Problem, Rollouts, Scores

GlobalSum = Callable[..., list[float]]


@dataclass(frozen=True)
class Origin:
    """Which rows augmenters inserted, and how those are learned. All ``[P, G]``.

    Attributes:
        augmenter: long, index of the augmenter; -1 for the policy's own rows.
        context: long, tokens at the start of a row that are not learned.
        in_baseline: bool, rows whose rewards enter mean and std of their group.
        learns_without_advantage: bool, rows that have a loss where their advantage is 0.
    """

    augmenter: Tensor
    context: Tensor
    in_baseline: Tensor
    learns_without_advantage: Tensor

    @classmethod
    def sampled(cls, rollouts: Rollouts) -> Origin:
        """Nothing is inserted yet."""
        zeros = torch.zeros_like(rollouts.prefix_lengths)
        return cls(zeros - 1, zeros, zeros == 0, zeros > 0)

    def after(self, index: int, augmenter: RolloutAugmenter, inserted: Tensor, rollouts: Rollouts) -> Origin:
        """What holds once ``augmenter`` has inserted the rows ``inserted`` (bool ``[P, G]``) into ``rollouts``."""
        context = torch.zeros_like(self.context) if augmenter.learns_prefix else rollouts.prefix_lengths
        return Origin(
            self.augmenter.masked_fill(inserted, index),
            context.where(inserted, self.context),
            self.in_baseline.masked_fill(inserted, augmenter.in_baseline),
            self.learns_without_advantage.masked_fill(inserted, augmenter.learns_without_advantage),
        )


def newly_inserted(before: tuple[Rollouts, Scores], after: tuple[Rollouts, Scores]) -> Tensor:
    """Bool ``[P, G]``: off-policy rows that were on-policy or had other tokens before."""
    width = max(x.completion_ids.shape[-1] for x, _ in (before, after))
    old, new = (
        pad(
            x.completion_ids.masked_fill(~x.completion_mask, -1),
            (0, width - x.completion_ids.shape[-1]),
            value=-1,
        )
        for x, _ in (before, after)
    )
    return ~after[1].on_policy & (before[1].on_policy | (old != new).any(-1))


@dataclass(frozen=True)
class Experience:
    """One batch of rollouts; callbacks read it as ``learner.experience``.

    Attributes:
        problems: P problems.
        rollouts: their completions, ``[P, G]``, after augmentation.
        texts: P lists of G texts.
        scores: ``[P, G]``.
        sampled: ``[P, G]``, the scores of what the policy sampled, before augmentation.
        origin: what the augmenters did.
        targets: ``[P, K]``.
        rewards: ``[P, G]``.
        advantages: ``[P, G]``.
        generated_tokens: tokens that were sampled for it, those of augmenters included.
        staleness: how many optimizer steps ago the policy was what sampled it.
    """

    problems: list[Problem]
    rollouts: Rollouts
    texts: list[list[str]]
    scores: Scores
    sampled: Scores
    origin: Origin
    targets: Tensor
    rewards: Tensor
    advantages: Tensor
    generated_tokens: int = 0
    staleness: int = 0

    @property
    def dead(self) -> Tensor:
        """Bool ``[P]``: groups without any gradient but that of a KL term."""
        return dead_groups(self.rewards) & ~self.origin.learns_without_advantage.any(-1)

    def counted(self, dead: Literal["count", "exclude"]) -> Tensor:
        """Bool ``[P]``: groups that the loss's denominators count."""
        return ~self.dead if dead == "exclude" else torch.ones_like(self.dead)

    def rows(self, groups: Tensor) -> list[Row]:
        """The distinct completions of the chosen groups (bool ``[P]``) as training rows."""
        columns = (
            self.rollouts.completions(),
            self.advantages.tolist(),
            self.origin.augmenter.tolist(),
            self.rollouts.prefix_lengths.tolist(),
            self.origin.context.tolist(),
        )
        size = self.advantages.shape[-1]
        return merge_rows(
            [
                Row(prompt, tuple(ids), advantage, 1, augmenter, given, context, (prompt * size + g,))
                for prompt, group in enumerate(zip(*columns, strict=True))
                if groups[prompt]
                for g, (ids, advantage, augmenter, given, context) in enumerate(zip(*group, strict=True))
            ]
        )

    def describe(self, categories: Sequence[str], verified: bool, global_sum: GlobalSum) -> dict[str, float]:
        """Rewards, lengths and dead groups after augmentation; correctness and distribution of what was sampled.

        Args:
            categories: names of the K categories.
            verified: whether correctness was judged.
            global_sum: sums over ranks; tokens are counted over all of them, and shares are pooled before their
                divergence is taken, since the mean of the ranks' divergences would be larger.
        """
        category = self.sampled.category
        numbers = {
            "generated_tokens": global_sum(self.generated_tokens)[0],
            "reward": float(self.rewards.mean()),
            "length": float(self.rollouts.lengths.float().mean()),
            "truncated_rate": 1 - float(self.rollouts.finished.float().mean()),
            "dead_groups": float(dead_groups(self.rewards).float().mean()),
        }
        if verified:
            correct = self.sampled.correct
            numbers["correct"] = float(correct.mean())
            numbers[f"pass_at_{correct.shape[-1]}"] = float(correct.amax(-1).mean())
        if self.targets.shape[-1]:
            counts = [float((category == k).sum()) for k in range(self.targets.shape[-1])]
            pooled = torch.tensor(global_sum(*counts, *self.targets.sum(0).tolist())).view(2, -1)
            shares, target = pooled / pooled.sum(-1, keepdim=True).clamp(min=1)
            numbers["jsd"] = float(jensen_shannon(target, shares)) if shares.any() else float("nan")
            numbers["off_support_rate"] = float((category < 0).float().mean())
            numbers |= {f"share/{name}": float(s) for name, s in zip(categories, shares, strict=False)}
        return numbers
