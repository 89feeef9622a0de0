"""A batch of rollouts with all that was made of it: what it says, and the rows it trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_madrl.functional import dead_groups, jensen_shannon
from lit_madrl.learners.rows import Row, merge_rows
from lit_madrl.types import Problem, Rollouts, Scores

GlobalSum = Callable[..., list[float]]


@dataclass(frozen=True)
class Experience:
    """One batch of rollouts; callbacks read it as ``learner.experience``.

    Attributes:
        problems: P problems.
        rollouts: their completions, ``[P, G]``, after augmentation.
        texts: P lists of G texts.
        scores: ``[P, G]``.
        targets: ``[P, K]``.
        rewards: ``[P, G]``.
        advantages: ``[P, G]``.
        generated_tokens: tokens that were sampled for it, those of augmenters included.
    """

    problems: list[Problem]
    rollouts: Rollouts
    texts: list[list[str]]
    scores: Scores
    targets: Tensor
    rewards: Tensor
    advantages: Tensor
    generated_tokens: int = 0

    def counted(self, dead: Literal["count", "exclude"]) -> Tensor:
        """Bool ``[P]``: groups that the loss's denominators count."""
        groups = dead_groups(self.rewards)
        return ~groups if dead == "exclude" else torch.ones_like(groups)

    def rows(self, groups: Tensor) -> list[Row]:
        """The distinct completions of the chosen groups (bool ``[P]``) as training rows."""
        columns = (
            self.rollouts.completions(),
            self.advantages.tolist(),
            self.scores.on_policy.tolist(),
            groups.tolist(),
        )
        return merge_rows(
            [
                Row(prompt, tuple(ids), advantage, on_policy=on_policy)
                for prompt, (group, advantages, flags, chosen) in enumerate(zip(*columns, strict=True))
                if chosen
                for ids, advantage, on_policy in zip(group, advantages, flags, strict=True)
            ]
        )

    def describe(self, categories: Sequence[str], verified: bool, global_sum: GlobalSum) -> dict[str, float]:
        """Rewards, lengths, dead groups and distribution.

        Args:
            categories: names of the K categories.
            verified: whether correctness was judged.
            global_sum: sums over ranks; tokens are counted over all of them, and shares are pooled before their
                divergence is taken, since the mean of the ranks' divergences would be larger.
        """
        category, sampled = self.scores.category, self.scores.on_policy
        numbers = {
            "generated_tokens": global_sum(self.generated_tokens)[0],
            "reward": float(self.rewards.mean()),
            "length": float(self.rollouts.lengths.float().mean()),
            "truncated_rate": 1 - float(self.rollouts.finished.float().mean()),
            "dead_groups": float(dead_groups(self.rewards).float().mean()),
        }
        if verified:
            # Inserted rows stand where rollouts failed: without them this is what the policy itself achieved.
            numbers["correct"] = float((self.scores.correct * sampled).mean())
        if self.targets.shape[-1]:
            counts = [float(((category == k) & sampled).sum()) for k in range(self.targets.shape[-1])]
            pooled = torch.tensor(global_sum(*counts, *self.targets.sum(0).tolist())).view(2, -1)
            shares, target = pooled / pooled.sum(-1, keepdim=True).clamp(min=1)
            numbers["jsd"] = float(jensen_shannon(target, shares)) if shares.any() else float("nan")
            numbers["off_support_rate"] = float((category < 0).float().mean())
            numbers |= {f"share/{name}": float(s) for name, s in zip(categories, shares, strict=False)}
        return numbers
