"""UFT: every rollout begins with a hint, a part of the reference that shrinks as training goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lit_madrl.augmenters.base import RolloutAugmenter, RolloutCollector
from lit_madrl.augmenters.boundaries import PrefixBoundaries, SentenceBoundaries
from lit_madrl.augmenters.candidates import verified_references
from lit_madrl.augmenters.episodes import episode_ends
from lit_madrl.types import Problem, Rollouts, Scores, Source


class UFT(RolloutAugmenter):
    """Rollouts of a problem begin with n chunks of its reference, n ~ Binomial(chunks, p) (arXiv:2505.16984).

    p(t) = lowest + (highest - lowest) (1 + cos(pi t / hint_steps)) / 2 at update t; from ``hint_steps`` on there are no
    hints. Hint tokens have the loss -sft_weight log pi, sampled tokens -A with ratio 1. A problem without a usable
    reference is sampled without a hint.

    Args:
        hint_steps: updates with hints.
        boundaries: where a reference may be cut; default at ends of sentences before the boxed answer.
        chunks: parts of a reference.
        lowest: p at the end of the hints.
        highest: p at the start.
        sft_weight: of the log-likelihood of hints.
    """

    learns_without_advantage = True
    updates: Tensor

    def __init__(
        self,
        hint_steps: int,
        boundaries: PrefixBoundaries | None = None,
        chunks: int = 5,
        lowest: float = 0.05,
        highest: float = 0.95,
        sft_weight: float = 0.001,
    ) -> None:
        super().__init__()
        for name, value, valid, expected in (
            ("hint_steps", hint_steps, hint_steps >= 1, "an integer >= 1"),
            ("chunks", chunks, chunks >= 1, "an integer >= 1"),
            ("lowest", lowest, 0 <= lowest <= highest, "a number in [0, highest]"),
            ("highest", highest, highest <= 1, "a number in [lowest, 1]"),
            ("sft_weight", sft_weight, sft_weight >= 0, "a number >= 0"),
        ):
            if not valid:
                raise ValueError(f"{name}: expected {expected}, got {value!r}")
        self.hint_steps = hint_steps
        self.boundaries = boundaries or SentenceBoundaries()
        self.chunks = chunks
        self.lowest = lowest
        self.highest = highest
        self.sft_weight = sft_weight
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self._numbers: dict[str, float] = {}

    def hint_probability(self) -> float:
        """p(t) of the next update; 0 once hints have ended."""
        t = int(self.updates)
        if t >= self.hint_steps:
            return 0.0
        return self.lowest + (self.highest - self.lowest) * (1 + math.cos(math.pi * t / self.hint_steps)) / 2

    def prefixes(
        self, problems: Sequence[Problem], collector: RolloutCollector
    ) -> Sequence[Sequence[int]] | None:
        """A hint for each problem; counts as one update."""
        probability = self.hint_probability()
        self._numbers = {"guidance/hint_probability": probability}
        self.updates += 1
        if probability == 0:
            return None
        chance = torch.full((len(problems),), probability)
        chunks = (
            torch.bernoulli(chance.expand(self.chunks, -1), generator=collector.generator()).sum(0).long()
        )
        hinted = chunks.nonzero().squeeze(1).tolist()
        hints: list[list[int]] = [[] for _ in problems]
        for p, reference in verified_references(hinted, problems, collector).items():
            text = reference.text
            boundaries = self.boundaries(text.text, text.offsets)
            ends = [0, *episode_ends(boundaries, len(text.ids), self.chunks), *boundaries[-1:]]
            hints[p] = text.ids[: ends[min(int(chunks[p]), len(ends) - 1)]]
        return hints

    def forward(
        self, problems: Sequence[Problem], rollouts: Rollouts, scores: Scores, collector: RolloutCollector
    ) -> tuple[Rollouts, Scores]:
        """Say of rollouts that began with a hint what they are; see :class:`RolloutAugmenter`."""
        hinted = rollouts.prefix_lengths > 0
        tokens, given, rows, with_hint = collector.global_sum(
            int(rollouts.lengths.sum()),
            int(rollouts.prefix_lengths.sum()),
            hinted.numel(),
            int(hinted.sum()),
        )
        self._numbers |= {
            "guidance/hinted": with_hint / max(rows, 1),
            "guidance/given_share": given / max(tokens, 1),
        }
        source = torch.zeros_like(rollouts.prefix_lengths) if rollouts.source is None else rollouts.source
        return (
            replace(rollouts, source=source.masked_fill(hinted, int(Source.GUIDED))),
            replace(scores, on_policy=scores.on_policy & ~hinted),
        )

    def inserted_loss(self, logprobs: Tensor, advantages: Tensor, given: Tensor) -> Tensor:
        """-sft_weight log pi of the hint, the policy gradient of what was sampled."""
        sampled = super().inserted_loss(logprobs, advantages, given)
        return torch.where(given, -self.sft_weight * logprobs, sampled)

    def numbers(self) -> dict[str, float]:
        """p(t), the share of rollouts with a hint and the share of given tokens in the last call."""
        return self._numbers
