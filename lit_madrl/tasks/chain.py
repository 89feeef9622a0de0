"""Whether a chain of modular arithmetic ends in the right number."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

from lit_madrl.tasks.base import Completions, Verifier, as_scores, check_groups
from lit_madrl.types import Problem

_ANSWER = re.compile(r"\[\s*([0-9]+)\s*\]")


class ChainVerifier(Verifier):
    """Correct when the number in the last ``[ n ]`` is the problem's answer, digit for digit.

    Nothing else is read: neither the steps before it nor any text after it.

    Raises:
        ValueError: a problem has no answer, or completions are not one group of equal size a problem.
    """

    def __call__(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        for problem in problems:
            if problem.answer is None:
                raise ValueError(f"Problem.answer: expected a number as text, got None in {problem.id!r}")
        found = _answers(problems, completions)
        rows = [
            [answer == problem.answer for answer in group]
            for problem, group in zip(problems, found, strict=True)
        ]
        return as_scores(rows)

    def well_formed(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        return as_scores(
            [[answer is not None for answer in group] for group in _answers(problems, completions)]
        )


def _answers(problems: Sequence[Problem], completions: Completions) -> list[list[str | None]]:
    """The number in the last ``[ n ]`` of each completion."""
    check_groups(problems, completions)
    return [[next(reversed(_ANSWER.findall(text)), None) for text in group] for group in completions]
