"""The hyperparameters of the GRPO objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_madrl.functional import Reduction, Scale
from lit_madrl.functional.kl import KLKind


@dataclass(frozen=True)
class Objective:
    """The GRPO objective (MaD-RL section 2.5).

    Args:
        advantage_scale: divide centred rewards by the group's ``sample`` or ``population`` std, or not (``none``).
            Scaling hides the divergence's shape and blows up noise near a match; not scaling leaves more to beta.
        reduction: ``dapo`` mean over all tokens, ``grpo`` mean over sequences of token means, ``dr_grpo`` sum over
            tokens divided by ``max_length`` and the number of sequences.
        max_length: the divisor of ``dr_grpo``; default ``sampling.max_new_tokens``.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.
        beta: coefficient of the KL term to the frozen start; 0 drops the reference model altogether.
        kl: its estimator, see :func:`lit_madrl.functional.kl_estimate`.
        inner_epochs: optimizer steps on each batch of rollouts.
        dead_groups: all-equal groups ``count`` in the denominators as any other, or are left out (``exclude``).
            They have no advantage, so without a KL term they are never computed.
    """

    advantage_scale: Scale = "sample"
    reduction: Reduction = "dapo"
    max_length: int | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.04
    kl: KLKind = "k3"
    inner_epochs: int = 1
    dead_groups: Literal["count", "exclude"] = "count"

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("clip_low", 0 <= self.clip_low <= 1, "a number in [0, 1]"),
            ("clip_high", self.clip_high >= 0, "a number >= 0"),
            ("beta", self.beta >= 0, "a number >= 0"),
            ("inner_epochs", self.inner_epochs >= 1, "an integer >= 1"),
            ("dead_groups", self.dead_groups in ("count", "exclude"), "'count' or 'exclude'"),
            ("max_length", self.max_length is None or self.max_length >= 1, "an integer >= 1"),
        ):
            if not valid:
                raise ValueError(f"objective.{name}: expected {expected}, got {getattr(self, name)!r}")
