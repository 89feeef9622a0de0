"""LUFFY: one whole reference in every group, learned with a shaped off-policy ratio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from lit_madrl.augmenters.base import RolloutAugmenter, RolloutCollector
from lit_madrl.augmenters.candidates import verified_references
from lit_madrl.augmenters.insertion import Insertion, insert
from lit_madrl.types import Problem, Rollouts, Scores, Source


class LUFFY(RolloutAugmenter):
    """The reference in the place of one rollout of every group, failed or not (arXiv:2504.14945).

    Its tokens have the loss -f(pi) A with f(p) = p / (p + gamma), which is not clipped: compared with the likelihood
    it weighs tokens by gamma p / (p + gamma)^2, most where p is about gamma. A group without a usable reference
    (none, longer than ``sampling.max_new_tokens``, or rejected by the verifier) keeps all its rollouts and is counted.

    Args:
        gamma: of the shaping.
        normalize: rows whose mean and std make the advantages: ``union`` as in the paper, or ``on_policy``, the
            rollouts alone, as in its published code.
    """

    def __init__(self, gamma: float = 0.1, normalize: Literal["union", "on_policy"] = "union") -> None:
        super().__init__()
        if not gamma > 0:
            raise ValueError(f"gamma: expected a number > 0, got {gamma!r}")
        if normalize not in ("union", "on_policy"):
            raise ValueError(f"normalize: expected 'union' or 'on_policy', got {normalize!r}")
        self.gamma = gamma
        self.in_baseline = normalize == "union"
        self._numbers: dict[str, float] = {}

    def forward(
        self, problems: Sequence[Problem], rollouts: Rollouts, scores: Scores, collector: RolloutCollector
    ) -> tuple[Rollouts, Scores]:
        """See :class:`RolloutAugmenter`."""
        last = rollouts.finished.shape[1] - 1  # rollouts are exchangeable
        references = verified_references(range(len(problems)), problems, collector)
        insertions = [
            Insertion.of(p, last, reference.trajectory, Source.REFERENCE)
            for p, reference in references.items()
        ]
        groups, used = collector.global_sum(len(problems), len(references))
        self._numbers = {"guidance/without_reference": 1 - used / max(groups, 1)}
        return insert(rollouts, scores, insertions)

    def inserted_loss(self, logprobs: Tensor, advantages: Tensor, given: Tensor) -> Tensor:
        """-p / (p + gamma) A, p the probability of each token."""
        probabilities = logprobs.exp()
        return -probabilities / (probabilities + self.gamma) * advantages

    def numbers(self) -> dict[str, float]:
        """The share of groups without a usable reference in the last call."""
        return self._numbers
