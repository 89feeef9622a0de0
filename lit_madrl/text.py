"""What several parts read in a text: boxed answers."""

from __future__ import annotations

import re

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"[{}]|\\.", re.DOTALL)


def last_boxed(text: str) -> tuple[int, int] | None:
    r"""Start and end of the last balanced, outermost ``\boxed{...}``; None if there is none."""
    braces = matching_braces(text)
    last, position = None, 0
    while opener := _BOXED.search(text, position):
        end = braces.get(opener.end())
        position = end or opener.end()
        last = (opener.start(), end) if end else last
    return last


def matching_braces(text: str) -> dict[int, int]:
    """The position after each opening brace to that after its closing one; escaped braces do not count."""
    matching, opened = {}, []
    for found in _BRACE.finditer(text):
        if found[0] == "{":
            opened.append(found.end())
        elif found[0] == "}" and opened:
            matching[opened.pop()] = found.end()
    return matching
