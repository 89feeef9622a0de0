"""Which mathematical problems suit verified training (ARG, arXiv:2610.11128, appendix E.1): pure functions of text."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lit_madrl.data.prompts import require_at_least, seeded

_OPTION = re.compile(r"(?:^|[\s({\[])\(?\\?(?:text(?:bf)?\{)?\(?([A-E])\s*[).:}]")
_LETTER = re.compile(r"^\\?(?:text(?:bf)?\{)?\s*\(?([A-E])\)?\s*\}?\.?$")
_SEVERAL = re.compile(r"\\(?:quad|qquad|text\{\s*(?:and|or)\b)|\b(?:and|or)\b|[;\n]|\\\\")
_OPENING, _CLOSING = "([{", ")]}"


@dataclass(frozen=True)
class Rules:
    """The numbers in the rules, by default those of ARG's paper.

    Args:
        min_difficulty: the least ``metadata["difficulty"]``; problems without one stay.
        most_answer_characters: of a short expression (the paper gives no number).
        most_prompt_tokens: of the prompt in the model's tokens, where there is a model.
        sample: problems that are drawn before any is attempted.
    """

    min_difficulty: float = 5.0
    most_answer_characters: int = 50
    most_prompt_tokens: int = 3072
    sample: int = 16000

    def __post_init__(self) -> None:
        require_at_least(
            1,
            most_answer_characters=self.most_answer_characters,
            most_prompt_tokens=self.most_prompt_tokens,
            sample=self.sample,
        )


def is_multiple_choice(question: str, answer: str) -> bool:
    """Whether the question offers lettered options, or the answer is a letter that the question offers.

    Options are at least A, B and C, each followed by a parenthesis, period or colon.
    """
    offered = set(_OPTION.findall(question))
    letter = _LETTER.match(answer.strip())
    return {"A", "B", "C"} <= offered or bool(letter and letter[1] in offered)


def is_short_expression(answer: str, most_characters: int = 50) -> bool:
    """Whether an answer is one expression of at most so many characters.

    Lists (a comma outside brackets that sets no thousands apart), several statements (and, or, semicolons, line
    breaks) and sentences (more than three words outside commands) are none.
    """
    text = answer.strip()
    if not 0 < len(text) <= most_characters or _SEVERAL.search(text):
        return False
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text)
    return len(words) <= 3 and not _has_outer_comma(text)


def sample_by_difficulty(difficulties: Sequence[float], count: int, seed: int = 0) -> list[int]:
    """Indices of ``count`` items drawn without replacement in proportion to their difficulty, sorted; all if fewer.

    Item i has the key u_i^(1 / difficulty_i) with u_i uniform, and the largest keys win (Efraimidis and Spirakis).
    """
    rng = seeded(seed, "difficulty")
    keys = [rng.random() ** (1 / difficulty) if difficulty > 0 else 0.0 for difficulty in difficulties]
    return sorted(heapq.nlargest(count, range(len(keys)), key=keys.__getitem__))


def _has_outer_comma(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        thousands = re.match(r",(?:\\!)?\d{3}(?!\d)", text[position:]) and text[:position][-1:].isdigit()
        if character == "," and depth <= 0 and not thousands:
            return True
    return False
