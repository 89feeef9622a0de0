"""Which of a problem's options a completion names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lit_madrl.tasks.base import Categorizer, Completions, check_groups
from lit_madrl.types import Problem

_ARTICLES = ("a", "an", "the")
_WORD = re.compile(r"[^\W_]+")


class ChoiceCategorizer(Categorizer):
    """Category k when the completion names option k of its problem and no other option, else -1.

    An option is named when its words stand side by side in the completion. Case, accents, punctuation,
    markup and the text around them do not matter, nor does an article at the start of the option.

    Raises:
        ValueError: a problem has no options, or its options cannot be told apart.
    """

    def __call__(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        size = check_groups(problems, completions)
        for problem in problems:
            if not problem.options:
                raise ValueError(f"Problem.options: expected at least one option, got none in {problem.id!r}")
        rows = [
            [_category(tuple(problem.options), text) for text in group]
            for problem, group in zip(problems, completions, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.long).reshape(len(problems), size)


@lru_cache(maxsize=1 << 15)
def _category(options: tuple[str, ...], text: str) -> int:
    words = _words(text)
    named = [k for k, option in enumerate(_patterns(options)) if option in words]
    return named[0] if len(named) == 1 else -1


@lru_cache(maxsize=1 << 12)
def _patterns(options: tuple[str, ...]) -> tuple[str, ...]:
    """The words of each option, checked to be unambiguous."""
    patterns = tuple(_without_article(_words(option)) for option in options)
    for i, inner in enumerate(patterns):
        if not inner.strip():
            raise ValueError(f"Problem.options: expected options with at least one word, got {options[i]!r}")
        for j, outer in enumerate(patterns):
            if i != j and inner in outer:
                raise ValueError(
                    "Problem.options: expected options of which none contains another, "
                    f"got {options[i]!r} and {options[j]!r}"
                )
    return patterns


def _words(text: str) -> str:
    """``text`` as lower-case words without accents, each with a space on either side.

    Spaces at both ends make the substring test a test for whole words.
    """
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(char for char in decomposed if not unicodedata.combining(char))
    return f" {' '.join(_WORD.findall(plain))} "


def _without_article(words: str) -> str:
    first, _, rest = words.strip().partition(" ")
    return f" {rest} " if first in _ARTICLES and rest else words
