"""The contract of everything that turns scores into rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn

from lit_madrl.types import Scores


class RewardShaper(nn.Module, ABC):
    """Turns the scores of whole groups into rewards; a group is never split over ranks or micro-batches."""

    @abstractmethod
    def forward(self, scores: Scores, targets: Tensor) -> Tensor:
        """Rewards ``[P, G]`` from scores ``[P, G]`` and targets ``[P, K]`` (each row sums to 1)."""

    def warnings(self, target: Tensor, group_size: int) -> Iterator[str]:
        """Complaints about this reward with one target ``[K]`` and G, asked once before training."""
        return iter(())
