"""The baselines of ARG that are special cases of it (section 3.1 and its ablations)."""

from __future__ import annotations

from lit_madrl.augmenters.boundaries import PrefixBoundaries
from lit_madrl.augmenters.guidance import AdaptiveReferenceGuidance


class FixedLevel(AdaptiveReferenceGuidance):
    """ARG with one level: every candidate continues from the same share of the reference.

    Args:
        level: share of the reference's surprisal that the prefix leaves.
        kwargs: see :class:`AdaptiveReferenceGuidance`.
    """

    def __init__(
        self,
        level: float,
        boundaries: PrefixBoundaries | None = None,
        continuations: int = 8,
        fallback: bool = True,
    ) -> None:
        super().__init__(boundaries, continuations, levels=(level,), fallback=fallback)


class Resample(AdaptiveReferenceGuidance):
    """K further rollouts of the prompt where all failed; correct ones are inserted. No reference is used.

    Args:
        continuations: K.
        max_unguided: most candidates that are inserted.
    """

    def __init__(self, continuations: int = 8, max_unguided: int = 4) -> None:
        super().__init__(None, continuations, levels=(1.0,), max_unguided=max_unguided, fallback=False)


class ReferenceInsertion(AdaptiveReferenceGuidance):
    """The reference replaces one rollout where all failed; nothing is generated."""

    def __init__(self) -> None:
        super().__init__(None, continuations=0, levels=(1.0,))
