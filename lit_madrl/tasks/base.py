"""The contracts of everything that judges a completion's text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_madrl.types import Problem

Completions = Sequence[Sequence[str]]
"""P lists of G texts, without prompt and stop token."""


class Categorizer(ABC):
    """Names the category of each completion."""

    @abstractmethod
    def __call__(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        """Categories ``[P, G]``, long in {-1, 0..K-1}; -1 is off-support."""


class Verifier(ABC):
    """Decides whether each completion solves its problem."""

    @abstractmethod
    def __call__(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        """Correctness ``[P, G]``, float in {0, 1}."""

    @abstractmethod
    def well_formed(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        """Whether an answer could be extracted at all, ``[P, G]``, float in {0, 1}."""

    def numbers(self) -> dict[str, float]:
        """What to log beside the scores."""
        return {}


def check_groups(problems: Sequence[Problem], completions: Completions) -> int:
    """G, the size of every group; 0 without problems.

    Raises:
        ValueError: completions are not one group of equal size a problem.
    """
    if len(problems) != len(completions):
        raise ValueError(
            f"completions: expected a group for each of {len(problems)} problems, got {len(completions)}"
        )
    sizes = sorted({len(group) for group in completions})
    if len(sizes) > 1:
        raise ValueError(f"completions: expected groups of one size, got sizes {sizes}")
    return sizes[0] if sizes else 0


def as_scores(rows: Sequence[Sequence[bool]]) -> Tensor:
    """``[P, G]`` float in {0, 1}."""
    return torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(rows[0]) if rows else 0)
