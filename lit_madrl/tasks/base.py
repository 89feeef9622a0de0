"""The contracts of everything that judges a completion's text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

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
