"""The hyperparameters of the GRPO objective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lit_madrl.functional import Reduction, Scale
from lit_madrl.functional.kl import KLKind


@dataclass(frozen=True)
class Importance:
    """Weights for completions that were not drawn from the policy as the trainer computes it.

    rho is the policy before the update over the sampler, of each sampled token or of its whole completion (their
    product). Token weights have little variance but leave the distribution of contexts as it was; sequence weights
    are unbiased up to the bounds. Tokens that were given and rows that an augmenter inserted have the weight 1. The
    whole loss of a token is weighted, its KL term included. Group rewards still see the frequencies of the sampler.

    Args:
        kind: ``truncate`` puts rho into [floor, cap], ``mask`` drops what is outside.
        level: ``token`` or ``sequence``.
        cap: largest rho.
        floor: smallest rho.
    """

    kind: Literal["truncate", "mask"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    cap: float = 2.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("kind", self.kind in ("truncate", "mask"), "'truncate' or 'mask'"),
            ("level", self.level in ("token", "sequence"), "'token' or 'sequence'"),
            ("cap", 1 <= self.cap < math.inf, "a finite number >= 1"),
            ("floor", 0 <= self.floor <= 1, "a number in [0, 1]"),
        ):
            if not valid:
                raise ValueError(
                    f"objective.importance.{name}: expected {expected}, got {getattr(self, name)!r}"
                )


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
        importance: weights for a sampler that is not exactly the policy (another precision, older weights); default
            none, as the embedded engine is exact. ``train/mismatch/...`` says how far apart they are in any case.
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
    importance: Importance | None = None

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
