"""How many problems are solved, from several completions of each."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from lit_madrl.functional.pass_at_k import average_at_k, pass_at_k
from lit_madrl.metrics.base import AdditiveMetric


class SolvedMetric(AdditiveMetric):
    """Mean over prompts of what ``estimate`` makes of a prompt's completions; NaN before any prompt."""

    higher_is_better = True
    total: Tensor
    prompts: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("total")
        self.add_sum("prompts", dtype=torch.long)

    @abstractmethod
    def estimate(self, num_samples: Tensor, num_correct: Tensor) -> Tensor:
        """The estimate ``[P]`` of each prompt, from counts ``[P]``."""

    def update(self, correct: Tensor) -> None:
        """Add P prompts of S >= 1 completions: ``correct [P, S]`` in {0, 1}, of any dtype.

        Raises:
            ValueError: another shape or value.
        """
        if correct.ndim != 2 or correct.shape[1] < 1:
            raise ValueError(f"correct: expected shape [P, S] with S >= 1, got {list(correct.shape)}")
        wrong = correct[(correct != 0) & (correct != 1)]
        if wrong.numel():
            raise ValueError(f"correct: expected values in {{0, 1}}, got {float(wrong[0])}")
        num_correct = (correct != 0).sum(-1)
        num_samples = torch.full_like(num_correct, correct.shape[1])
        self.total = self.total + self.estimate(num_samples, num_correct).double().sum()
        self.prompts = self.prompts + len(correct)

    def compute(self) -> Tensor:
        """The mean in [0, 1], scalar."""
        return self.total / self.prompts


class PassAtK(SolvedMetric):
    """Mean over prompts of 1 - C(S-c, k)/C(S, k), the unbiased estimate of solving a problem in k draws.

    Args:
        k: number of draws; every update needs S >= k.
    """

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if k < 1:
            raise ValueError(f"k: expected an integer >= 1, got {k!r}")
        self.k = k
        self.keep_apart(k)

    def estimate(self, num_samples: Tensor, num_correct: Tensor) -> Tensor:
        """1 - C(S-c, k)/C(S, k)."""
        return pass_at_k(num_samples, num_correct, self.k)


class AverageAtK(SolvedMetric):
    """Mean over prompts of c/S: the share of correct completions, every prompt weighing the same."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.keep_apart()

    def estimate(self, num_samples: Tensor, num_correct: Tensor) -> Tensor:
        """c/S."""
        return average_at_k(num_samples, num_correct)
