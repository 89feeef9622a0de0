"""Whether two answers are mathematically equal: runs in worker processes, so it imports nothing of the package."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

_BOXED = [LatexExtractionConfig(boxed_match_priority=0)]


def equivalent(gold: str, answer: str) -> bool:
    """Whether math-verify finds ``answer`` equal to ``gold``, both LaTeX; false where it cannot read one of them.

    Its own time limits are off: they need the main thread, and cannot end a computation that never leaves C.
    """
    return bool(verify(_read(gold), _read(answer), timeout_seconds=None))


@lru_cache(maxsize=1024)
def _read(latex: str) -> list[Any]:
    return list(
        parse(
            rf"\boxed{{{latex}}}",
            _BOXED,
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
    )
