"""Token positions at which a prefix of a reference may end."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal

from lit_madrl.augmenters.delimiters import Span, opaque_spans
from lit_madrl.text import last_boxed

Offsets = Sequence[tuple[int, int]]
"""Start and end character of each token; equal for a token without text, such as a termination token."""


class PrefixBoundaries(ABC):
    """Finds where a reference may be cut, as numbers of its own tokens: nothing is tokenized again."""

    def __call__(self, text: str, offsets: Offsets) -> list[int]:
        """Prefix lengths, strictly increasing, each in 1..T-1.

        Args:
            text: the reference.
            offsets: T tokens. Tokens that share a character (a character of several bytes) are never parted.
        """
        return token_boundaries(self.ends(text), text, offsets)

    @abstractmethod
    def ends(self, text: str) -> list[tuple[int, int]]:
        """Ranges ``(first, last)`` of characters, both included: a prefix may end at the first token boundary in each.

        A range runs over the space after a sentence, since tokens such as ``.\\n`` hold both.
        """


class SentenceBoundaries(PrefixBoundaries):
    r"""Ends of sentences and formulas, with every math delimiter, code block and box closed.

    Reads English, Chinese, Hindi, Spanish and French. When in doubt (a capital before a period, a list number, a
    lowercase letter after it) there is no boundary. Code counts as one unit: a line end inside a fence is none, the
    end of the fence is one. What follows a boundary holds the whole answer and a word or number before it, so a
    continuation is never the bare answer.

    Args:
        answer: ``boxed``: the last balanced ``\boxed{}``; ``none``: the task has no marked answer, any word must be
            left; else a regular expression whose last match is the answer, such as ``#### .*``. A reference without
            its answer has no boundaries.
        formulas: which formulas end a unit: ``all`` or only ``display`` (``$$``, ``\[``, environments).
        lines: every line end outside delimiters is a boundary, for references with a step on each line.
    """

    def __init__(
        self, answer: str = "boxed", formulas: Literal["all", "display"] = "all", lines: bool = False
    ) -> None:
        if formulas not in ("all", "display"):
            raise ValueError(f"formulas: expected 'all' or 'display', got {formulas!r}")
        self.answer = answer
        self.pattern = None if answer in ("boxed", "none") else _compiled("answer", answer)
        self.formulas = formulas
        self.lines = lines

    def ends(self, text: str) -> list[tuple[int, int]]:
        before_answer = reversed(range(self._answer_start(text)))
        latest = next((i for i in before_answer if _WORD.match(text, i)), -1)  # what is left has a word
        return [(first, last) for first, last in _with_space(text, self._units(text)) if first <= latest]

    def _answer_start(self, text: str) -> int:
        """Where the answer starts: 0 for a reference without one."""
        if self.answer == "none":
            return len(text)
        if self.pattern is None:
            return (last_boxed(text) or (0, 0))[0]
        return max((found.start() for found in self.pattern.finditer(text)), default=0)

    def _units(self, text: str) -> set[int]:
        spans = opaque_spans(text)
        masked = _mask(text, spans)
        ends = {m.end() for m in _STOP.finditer(masked) if _ends_sentence(masked, m)}
        ends |= {m.start() for m in (_LINE if self.lines else _BLOCK).finditer(masked)}
        for span in spans:
            found = _PUNCTUATION.match(masked, span.end)
            end = found.end() if found else span.end
            inside_word = span.kind in ("inline", "box") and _WORD_GOES_ON.match(masked, end)
            wanted = span.kind in ("display", "fence") or (span.kind != "code" and self.formulas == "all")
            if wanted and not inside_word:
                ends.add(end)
        return ends


class SeparatorBoundaries(PrefixBoundaries):
    """After each separator, for references written as a list of steps or as lines of a program.

    Args:
        separator: the text that ends a step.
        after: regular expression that must match right before the separator (space between is ignored).
        keep: that many of the last separators are left to the continuation.
    """

    def __init__(self, separator: str, after: str = "", keep: int = 1) -> None:
        if not separator:
            raise ValueError(f"separator: expected a non-empty string, got {separator!r}")
        if keep < 0:
            raise ValueError(f"keep: expected an integer >= 0, got {keep}")
        _compiled("after", after)
        self.pattern = re.compile(rf"(?:{after})\s*{re.escape(separator)}" if after else re.escape(separator))
        self.keep = keep

    def ends(self, text: str) -> list[tuple[int, int]]:
        ends = [found.end() for found in self.pattern.finditer(text)]
        return list(_with_space(text, ends[: max(len(ends) - self.keep, 0)]))


def token_boundaries(ends: Sequence[tuple[int, int]], text: str, offsets: Offsets) -> list[int]:
    """The first token boundary in each range of characters, as sorted distinct prefix lengths in 1..T-1."""
    for index, (start, end) in enumerate(offsets):
        if not 0 <= start <= end <= len(text):
            raise ValueError(
                f"offsets: expected 0 <= start <= end <= {len(text)}, got {(start, end)} at token {index}"
            )
    size = len(text)
    # Characters that tokens before t reach, and that tokens from t on begin at.
    before = list(accumulate((end if end > start else 0 for start, end in offsets), max, initial=0))
    backwards = (start if end > start else size for start, end in reversed(offsets))
    after = list(accumulate(backwards, min, initial=size))[::-1]
    cuts = [t for t in range(1, len(offsets)) if before[t] <= after[t]]
    chosen = set()
    for first, last in ends:
        index = bisect_left(cuts, first, key=before.__getitem__)
        if index < len(cuts) and before[cuts[index]] <= last:
            chosen.add(cuts[index])
    return sorted(chosen)


# Below: what ends a sentence. Formulas, code and boxes are masked by a character that is neither word nor space.
_MASK = "\ufffc"
_WORD = re.compile(r"\w")
_SPACE = re.compile(r"\s*")
_CLOSING = r"""["'”’»›)\]*_」』）》】]*(?:[ \u00a0\u202f]»)?"""
_STOP = re.compile(rf"(?P<stop>[.!?]+|(?:[。！？।॥]|．(?!\d))+){_CLOSING}")
_PUNCTUATION = re.compile(rf"(?:[.,;:!?।，。；：！？、)\]）]{_CLOSING})*")
_WORD_GOES_ON = re.compile(r"[A-Za-z0-9\-'’]")
_LINE = re.compile(r"(?<=\S)(?=[ \t]*\n)")
# A blank line, or a new list item or heading, unless the sentence visibly goes on.
_BLOCK = re.compile(
    rf"(?<=[^\s:,;：，；、])(?=[ \t]*\n(?:[ \t]*\n\s*[^\s{_MASK}]|[ \t]*(?:[-+*•]|\#+|\d+[.)])[ \t]))"
)
_LONGEST_LABEL = 32
_LABEL = re.compile(r"[\s#>*_(\[+-]*(?:(?:[^\W\d_]+\s*)?\d+(?:\.\d+)*|[^\W\d_]|[ivxIVX]+)")
_ABBREVIATIONS = (
    "dr|mr|mrs|ms|prof|sr|jr|st|vs|etc|figs?|eqs?|(?-i:Nos?)|vol|sec|ch|thm|lem|prop|def|cor|ex|approx|resp|cf|al|eds?|pp|est"
    "|dept|m|mm|mme|mlle|env|art|chap|th|sra|srta|dra|uds?|págs?|núm|ej|aprox|डॉ|प्रो|श्री"
)
_ABBREVIATION = re.compile(
    rf"""(?<![^\s("'“«\[])(?:(?:[^\W\d_]\.)+[^\W\d_]|(?-i:[A-ZÀ-Þ])|{_ABBREVIATIONS})$""", re.IGNORECASE
)


def _ends_sentence(text: str, found: re.Match[str]) -> bool:
    stop, position = found["stop"], found.start()
    if stop in (".", "．"):
        before = text[max(0, position - _LONGEST_LABEL) : position]
        label = before.rpartition("\n")[2]
        starts_line = len(label) < _LONGEST_LABEL
        if _ABBREVIATION.search(before) or (starts_line and _LABEL.fullmatch(label)):
            return False
    return stop[0] not in ".!?" or _starts_sentence(text, found.end())


def _starts_sentence(text: str, position: int) -> bool:
    """Whether a sentence may start after ``position`` (and the space there)."""
    start = _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches the empty string
    gap, following = text[position:start], text[start : start + 2]
    if not following or gap.count("\n") > 1:
        return True
    if not gap:
        return "\u3040" <= following[0] <= "\u9fff"
    if following[0] in "+*-–—" and "\n" not in gap:
        return not (following[1:].isspace() or following[1:].isdigit())
    return not (following[0].islower() or following[0] in "=<>^,;:)]}%&|~/×·")


def _mask(text: str, spans: Sequence[Span]) -> str:
    pieces, position = [], 0
    for span in spans:
        pieces += [text[position : span.start], _MASK * (span.end - span.start)]
        position = span.end
    return "".join([*pieces, text[position:]])


def _with_space(text: str, ends: set[int] | list[int]) -> Iterator[tuple[int, int]]:
    for end in sorted(ends):
        yield end, _SPACE.match(text, end).end()  # type: ignore[union-attr]  # it matches the empty string


def _compiled(name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name}: expected a regular expression, got {pattern!r} ({error})") from error
