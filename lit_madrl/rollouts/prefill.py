"""In which pieces prompts and their prefixes go through the model, so that what they share is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Root = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and a prefix that its completion is given."""


class Stage(NamedTuple):
    """The next R rows: row r is the first ``kept[r]`` tokens of row ``parents[r]``, then ``segments[r]``."""

    parents: Sequence[int]
    kept: Sequence[int]
    segments: Sequence[Sequence[int]]

    @property
    def width(self) -> int:
        """Columns it takes: the longest segment; the others are padded on the left."""
        return max(len(segment) for segment in self.segments)


def whole(roots: Sequence[Root]) -> list[Stage]:
    """Each root by itself."""
    return [beginning([(*prompt, *prefix) for prompt, prefix in roots])]


def plan(roots: Sequence[Root]) -> list[Stage]:
    """The stages with the fewest tokens, padding counted, after which row r is root r.

    A *trunk* is a longest beginning of a prompt's roots, where a beginning is all but a root's last token.
    Prefixes that are nested have one trunk; those that diverge have several, with the prompt in common. So
    the choice is among ``[roots]``, ``[trunks, last tokens]`` and ``[prompts, rest of trunks, last tokens]``.

    Args:
        roots: R distinct ones.
    """
    begun = [(prompt, (*prompt, *prefix)[:-1]) for prompt, prefix in roots]
    trunks: list[Root] = []
    trunk_of = [0] * len(roots)
    # In order, what begins with some tokens follows them at once. So, from the last one on, each either begins
    # the trunk found last or is a trunk itself.
    for r in sorted(range(len(roots)), key=begun.__getitem__, reverse=True):
        prompt, tokens = begun[r]
        if not trunks or trunks[-1][0] != prompt or trunks[-1][1][: len(tokens)] != tokens:
            trunks.append(begun[r])
        trunk_of[r] = len(trunks) - 1
    last = Stage(
        trunk_of, [len(tokens) for _, tokens in begun], [(*prompt, *prefix)[-1:] for prompt, prefix in roots]
    )
    # Of a prompt with no prefix but the empty one, the last token is not in the trunk.
    heads = {prompt: tokens[: len(prompt)] for prompt, tokens in trunks}
    number = {prompt: h for h, prompt in enumerate(heads)}
    rest = Stage(
        [number[prompt] for prompt, _ in trunks],
        [len(heads[prompt]) for prompt, _ in trunks],
        [tokens[len(prompt) :] for prompt, tokens in trunks],
    )
    nested = [beginning([tokens for _, tokens in trunks]), last]
    diverging = [beginning(list(heads.values())), rest, last]
    return min(whole(roots), nested, diverging, key=padded_tokens)


def beginning(segments: Sequence[Sequence[int]]) -> Stage:
    """The first stage: rows that keep nothing."""
    return Stage(range(len(segments)), [0] * len(segments), segments)


def padded_tokens(stages: Sequence[Stage]) -> int:
    """Tokens that go through the model, padding included."""
    return sum(len(stage.segments) * stage.width for stage in stages)
