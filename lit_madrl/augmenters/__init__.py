"""Augmenters: correct trajectories for groups that have none, made with the help of a reference."""

from lit_madrl.augmenters.base import Reference, RolloutAugmenter, RolloutCollector
from lit_madrl.augmenters.baselines import FixedLevel, ReferenceInsertion, Resample
from lit_madrl.augmenters.boundaries import PrefixBoundaries, SentenceBoundaries, SeparatorBoundaries
from lit_madrl.augmenters.bread import BREAD
from lit_madrl.augmenters.guidance import AdaptiveReferenceGuidance
from lit_madrl.augmenters.luffy import LUFFY
from lit_madrl.augmenters.selector import LevelTotals, PrefixSelector
from lit_madrl.augmenters.uft import UFT

__all__ = [
    "BREAD",
    "LUFFY",
    "UFT",
    "AdaptiveReferenceGuidance",
    "FixedLevel",
    "LevelTotals",
    "PrefixBoundaries",
    "PrefixSelector",
    "Reference",
    "ReferenceInsertion",
    "Resample",
    "RolloutAugmenter",
    "RolloutCollector",
    "SentenceBoundaries",
    "SeparatorBoundaries",
]
