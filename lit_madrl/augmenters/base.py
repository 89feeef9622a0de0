"""The contract of everything that changes a group of rollouts before it is rewarded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

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
    """

    @abstractmethod
    def forward(
        self, problems: Sequence[Problem], rollouts: Rollouts, scores: Scores, collector: RolloutCollector
    ) -> tuple[Rollouts, Scores]:
        """New rollouts and scores of the same shape ``[P, G]``; inserted rows have ``scores.on_policy`` false."""

    def numbers(self) -> dict[str, float]:
        """What to log of the last call, over all ranks."""
        return {}
