"""The contract of everything that changes a group of rollouts before it is rewarded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lit_madrl.functional import clipped_surrogate
from lit_madrl.types import Problem, Rollouts, Sampling, Scores


class Reference(NamedTuple):
    """A problem's reference solution as tokens.

    Attributes:
        text: the solution.
        ids: its tokens, the stop token last.
        offsets: characters ``(start, end)`` of each token but the stop token.
    """

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]


class RolloutCollector(Protocol):
    """What an augmenter may ask of the learner; everything uses the current weights."""

    sampling: Sampling

    def encode_prompts(self, problems: Sequence[Problem]) -> list[list[int]]:
        """Prompt tokens."""

    def encode_reference(self, problem: Problem) -> Reference | None:
        """The problem's reference, or None when it has none."""

    def generate(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        prefixes: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> Rollouts:
        """Sample completions that begin with given tokens; the length limit includes them."""

    def judge(self, problems: Sequence[Problem], rollouts: Rollouts) -> Scores:
        """Score completions."""

    def logprobs(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Sequence[int]]]
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities (nats) of given completions: ``[R, T]`` a token, ``[R]`` in total."""

    def generator(self) -> torch.Generator:
        """Random numbers of this rank and this step: a resumed run draws the same ones."""

    def global_sum(self, *values: float) -> list[float]:
        """Each value summed over ranks. Collective: all ranks call it equally often."""


class RolloutAugmenter(nn.Module, ABC):
    """Adds to what the policy sampled. State lives in buffers, so that it is in the checkpoint.

    Several augmenters run in the order in which they are listed, each on what the former left.

    Attributes:
        in_baseline: whether rewards of inserted rows enter the mean and std of their group's advantages.
        learns_prefix: whether the given tokens of inserted rows are learned; else they are context, as the prompt is.
        learns_without_advantage: whether inserted rows have a loss where all rewards of their group are equal.
    """

    in_baseline: bool = True
    learns_prefix: bool = True
    learns_without_advantage: bool = False

    @abstractmethod
    def forward(
        self, problems: Sequence[Problem], rollouts: Rollouts, scores: Scores, collector: RolloutCollector
    ) -> tuple[Rollouts, Scores]:
        """New rollouts and scores of the same shape ``[P, G]``; inserted rows have ``scores.on_policy`` false."""

    def prefixes(
        self, problems: Sequence[Problem], collector: RolloutCollector
    ) -> Sequence[Sequence[int]] | None:
        """Asked before sampling: the tokens with which all rollouts of each problem are to begin; None for none."""
        return None

    def inserted_loss(self, logprobs: Tensor, advantages: Tensor, given: Tensor) -> Tensor:
        """Loss of each token of the rows that this augmenter inserted; by default -exp(l - sg l) A, ratio 1.

        Args:
            logprobs: ``[M]`` nats under the policy.
            advantages: ``[M]``, of each token's row.
            given: ``[M]`` bool, tokens that were given rather than sampled.
        """
        return clipped_surrogate(logprobs, logprobs.detach(), advantages)

    def numbers(self) -> dict[str, float]:
        """What to log of the last call, over all ranks."""
        return {}
