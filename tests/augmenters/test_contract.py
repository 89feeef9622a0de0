"""Every shipped augmenter keeps the contract."""

from __future__ import annotations

from lit_madrl.augmenters import (
    BREAD,
    LUFFY,
    UFT,
    AdaptiveReferenceGuidance,
    FixedLevel,
    ReferenceInsertion,
    Resample,
    RolloutAugmenter,
    SeparatorBoundaries,
)
from tests.helpers.augmenter_contract import CUT, AugmenterContract

BOUNDARIES = SeparatorBoundaries(chr(CUT))


class TestAdaptiveReferenceGuidance(AugmenterContract):
    def build(self) -> RolloutAugmenter:
        return AdaptiveReferenceGuidance(BOUNDARIES)


class TestFixedLevel(AugmenterContract):
    def build(self) -> RolloutAugmenter:
        return FixedLevel(0.5, BOUNDARIES)


class TestResample(AugmenterContract):
    def build(self) -> RolloutAugmenter:
        return Resample()


class TestReferenceInsertion(AugmenterContract):
    def build(self) -> RolloutAugmenter:
        return ReferenceInsertion()


class TestLUFFY(AugmenterContract):
    def build(self) -> RolloutAugmenter:
        return LUFFY()


class TestLUFFYOverRolloutsAlone(AugmenterContract):
    def build(self) -> RolloutAugmenter:
        return LUFFY(normalize="on_policy")


class TestBREAD(AugmenterContract):
    def build(self) -> RolloutAugmenter:
        return BREAD(BOUNDARIES)


class TestUFT(AugmenterContract):
    def build(self) -> RolloutAugmenter:
        return UFT(100, BOUNDARIES)
