"""References cut into parts of about equal length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def episode_ends(boundaries: Sequence[int], tokens: int, episodes: int) -> list[int]:
    """Prefix lengths after each of the first ``episodes - 1`` parts of a reference, each moved to a boundary.

    Part i ends at the first boundary at or after i/episodes of the tokens, else at the last one. Lengths never
    decrease and may repeat; there are none without boundaries.

    Args:
        boundaries: prefix lengths at which the reference may be cut, strictly increasing.
        tokens: of the reference.
        episodes: parts wanted.
    """
    if not boundaries:
        return []
    ends = [bisect_left(boundaries, part * tokens / episodes) for part in range(1, episodes)]
    return [boundaries[min(end, len(boundaries) - 1)] for end in ends]
