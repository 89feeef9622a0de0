"""Stretches of text inside which a prefix must not end: formulas, code, boxed answers."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from lit_madrl.text import matching_braces

Kind = Literal["inline", "display", "box", "fence", "code"]

_OPENER = re.compile(
    r"""
      (?P<fence>^[ \t]*(?P<marks>`{3,}|~{3,})[^`\n]*$)
    | (?P<code>`+)
    | (?P<environment>\\begin\{(?P<name>[^{}\n]*)\})
    | (?P<box>\\boxed\s*\{)
    | (?P<bracket>\\\[)
    | (?P<parenthesis>\\\()
    | \\.
    | (?P<dollars>\$\$)
    | (?P<dollar>\$)
    """,
    re.VERBOSE | re.MULTILINE,
)
_AMOUNT = re.compile(r"\$(?:\d|<<)")
_OPENS_MATH = re.compile(r"(?<=\s)\$[A-Za-z0-9\\({<]")
_NEVER = r"(?!)"
_BLANK_LINE = r"\n[ \t]*\n"


class Span(NamedTuple):
    """``text[start:end]``, delimiters included; ``end`` is the end of the text where nothing closes it."""

    start: int
    end: int
    kind: Kind


def opaque_spans(text: str) -> list[Span]:
    r"""Outermost formulas, code and boxes, in order and disjoint.

    Formulas are ``$``, ``$$``, ``\(``, ``\[``, ``\begin..\end`` (nested); code is fenced or inline. A dollar that
    reads as an amount of money, a backtick without partner and an unbalanced ``\boxed{`` are plain text; every
    other delimiter that is never closed stays open to the end of the text.
    """
    braces = matching_braces(text)
    spans: list[Span] = []
    position = 0
    while opener := _OPENER.search(text, position):
        closed = _close(text, opener, braces)
        if closed is None:
            position = opener.end()
        else:
            position, kind = closed
            spans.append(Span(opener.start(), position, kind))
    return spans


def _close(text: str, opener: re.Match[str], braces: dict[int, int]) -> tuple[int, Kind] | None:
    """Where what ``opener`` opens ends, and what it is; None for plain text."""
    start = opener.end()
    end: int | None
    match opener.lastgroup:
        case "fence":
            marks = opener["marks"]
            closing = re.compile(rf"^[ \t]*{marks[0]}{{{len(marks)},}}[ \t]*$", re.MULTILINE)
            found = closing.search(text, start)
            return (found.end() if found else len(text)), "fence"
        case "code":
            end = _balanced(text, start, _NEVER, rf"(?<!`){opener[0]}(?!`)", _BLANK_LINE)
            return (end, "code") if end else None
        case "environment":
            name = re.escape(opener["name"])
            end = _balanced(text, start, rf"\\begin\{{{name}\}}", rf"\\end\{{{name}\}}")
            return end or len(text), "display"
        case "box":
            end = braces.get(start)
            return (end, "box") if end else None
        case "bracket":
            return _balanced(text, start, _NEVER, r"\\\]") or len(text), "display"
        case "parenthesis":
            return _balanced(text, start, _NEVER, r"\\\)") or len(text), "inline"
        case "dollars":
            return _balanced(text, start, _NEVER, r"\$\$") or len(text), "display"
        case "dollar":
            end = _close_dollar(text, opener.start())
            return (end, "inline") if end else None
    return None


def _close_dollar(text: str, start: int) -> int | None:
    """End of the formula that the ``$`` at ``start`` opens; None if it is an amount or has no partner."""
    end = _balanced(text, start + 1, _NEVER, r"\$", _BLANK_LINE)
    if end is None or _OPENS_MATH.match(text, end - 1):
        return None
    amounts = _AMOUNT.match(text, start) and _AMOUNT.match(text, end - 1)
    return None if amounts else end


def _balanced(text: str, position: int, opening: str, closing: str, stop: str = _NEVER) -> int | None:
    """End of the ``closing`` that matches an opening before ``position``, None if ``stop`` or the end comes first.

    Escaped characters do not count.
    """
    depth = 1
    tokens = re.compile(rf"({opening})|({closing})|({stop})|\\.", re.DOTALL)
    for found in tokens.finditer(text, position):
        depth += (found[1] is not None) - (found[2] is not None)
        if depth == 0:
            return found.end()
        if found[3] is not None:
            return None
    return None
