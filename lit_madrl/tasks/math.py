"""Whether a completion's answer is mathematically equal to its problem's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from lit_madrl.tasks.answers import (
    after_hashes,
    after_thinking,
    last_boxed_answer,
    normalize_answer,
    plain_characters,
)
from lit_madrl.tasks.base import Completions, Verifier, as_scores, check_groups
from lit_madrl.tasks.worker_pool import Failure, WorkerPool
from lit_madrl.types import Problem

Mark = Literal["boxed", "hashes"]
Pair = tuple[str, str]
"""A gold answer and another one."""

_MARKS: dict[str, tuple[str, Callable[[str], str | None]]] = {
    "boxed": (r"\boxed{{{}}}", last_boxed_answer),
    "hashes": ("#### {}", after_hashes),
}
_WARM_UP = (r"\frac{1}{2}", "0.5")
_REMEMBERED = 1 << 16
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]*")


class MathVerifier(Verifier):
    r"""Correct when the marked answer equals the problem's, in normalized spelling or by math-verify.

    Only what follows a ``</think>`` is read. A completion without marked answer is not well formed and is incorrect; so
    is one on which math-verify takes too long or crashes. Each answer of that kind can make a call wait for
    ``timeout / workers`` seconds when it is first seen. Needs the ``math`` extra.

    Args:
        answer: how a completion marks it: ``boxed``, the last balanced ``\boxed{...}``, or ``hashes``, the number after
            the last ``####``.
        timeout: seconds of computing for one comparison, as :class:`WorkerPool` counts them.
        workers: processes that compare.

    Raises:
        ValueError: a problem has no answer, or completions are not one group of equal size a problem.
    """

    def __init__(self, answer: Mark = "boxed", timeout: float = 5.0, workers: int = 2) -> None:
        if answer not in _MARKS:
            raise ValueError(f"answer: expected {' or '.join(get_args(Mark))}, got {answer!r}")
        if find_spec("math_verify") is None:
            raise ModuleNotFoundError("MathVerifier needs math-verify: pip install 'lit_madrl[math]'")
        self.answer = answer
        self.timeouts = 0
        """Comparisons so far that took too long."""
        self.crashes = 0
        """Comparisons so far that raised an error or ended their worker."""
        self._pool = WorkerPool(
            Path(__file__).with_name("equivalence.py"), "equivalent", workers, timeout, _WARM_UP
        )
        self._verdicts: dict[Pair, bool] = {}

    def __call__(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        golds = [_gold(problem) for problem in problems]
        groups = self._answers(problems, completions)
        pairs = [
            [None if answer is None else (gold, answer) for answer in group]
            for gold, group in zip(golds, groups, strict=True)
        ]
        by_spelling = {pair: _equal_by_spelling(*pair) for group in pairs for pair in group if pair}
        correct = by_spelling | self._equivalent(
            [pair for pair, equal in by_spelling.items() if equal is None]
        )
        return as_scores([[pair is not None and correct[pair] is True for pair in group] for group in pairs])

    def well_formed(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        groups = self._answers(problems, completions)
        return as_scores([[answer is not None for answer in group] for group in groups])

    def verifiable(self, answers: Sequence[str]) -> list[bool]:
        """Whether each gold answer, marked as a completion marks it, is read and found equal by math-verify itself."""
        template, extract = _MARKS[self.answer]
        golds = [plain_characters(answer) for answer in answers]
        marked = [extract(template.format(gold)) for gold in golds]
        equal = self._equivalent(
            [(gold, answer) for gold, answer in zip(golds, marked, strict=True) if answer]
        )
        return [bool(answer) and equal[gold, str(answer)] for gold, answer in zip(golds, marked, strict=True)]

    def numbers(self) -> dict[str, float]:
        """Comparisons so far that gave no result."""
        return {"verifier/timeouts": float(self.timeouts), "verifier/crashes": float(self.crashes)}

    def close(self) -> None:
        """End the worker processes; a later call starts new ones."""
        self._pool.close()

    def _answers(self, problems: Sequence[Problem], completions: Completions) -> list[list[str | None]]:
        """The marked answer of each completion, in plain characters."""
        check_groups(problems, completions)
        extract = _MARKS[self.answer][1]
        found = [[extract(after_thinking(text)) for text in group] for group in completions]
        return [[answer and plain_characters(answer) for answer in group] for group in found]

    def _equivalent(self, pairs: Sequence[Pair]) -> dict[Pair, bool]:
        """What math-verify says of each pair; the verdicts last used are remembered."""
        verdicts = {pair: self._verdicts.get(pair) for pair in pairs}
        unknown = [pair for pair, verdict in verdicts.items() if verdict is None]
        for pair, result in zip(unknown, self._pool.map(unknown), strict=True):
            verdicts[pair] = result is True
            if isinstance(result, Failure):
                self._count(result, *pair)
        known = {pair: bool(verdict) for pair, verdict in verdicts.items()}
        for pair, verdict in known.items():
            self._verdicts.pop(pair, None)  # what is used moves to the end
            self._verdicts[pair] = verdict
        for pair in list(self._verdicts)[:-_REMEMBERED]:
            del self._verdicts[pair]
        return known

    def _count(self, failure: Failure, gold: str, answer: str) -> None:
        """Count a comparison without result, and warn of the first."""
        if not self.timeouts + self.crashes:
            warnings.warn(
                f"MathVerifier: counts an answer as incorrect that cannot be compared ({failure.reason}): "
                f"{answer[:200]!r} with the gold answer {gold[:200]!r}; further ones are counted without a warning",
                stacklevel=4,
            )
        if failure.reason == "timeout":
            self.timeouts += 1
        else:
            self.crashes += 1


def _gold(problem: Problem) -> str:
    if problem.answer is None:
        raise ValueError(f"Problem.answer: expected a gold answer, got None in {problem.id!r}")
    return plain_characters(problem.answer)


def _equal_by_spelling(gold: str, answer: str) -> bool | None:
    """Whether two answers are equal where their spelling tells: equal texts are, different whole numbers are not."""
    first, second = normalize_answer(gold), normalize_answer(answer)
    if first and first == second:
        return True
    return False if _WHOLE_NUMBER.fullmatch(first) and _WHOLE_NUMBER.fullmatch(second) else None
