"""Reward shapers: from the scores of whole groups to rewards."""

from lit_madrl.rewards.base import RewardShaper
from lit_madrl.rewards.closed_form import L2, ForwardKL, JensenShannon, ReverseKL
from lit_madrl.rewards.correctness import Correctness
from lit_madrl.rewards.divergence import DivergenceShaper
from lit_madrl.rewards.gapo import GAPO
from lit_madrl.rewards.mixing import Additive, Gated, WithFormat

__all__ = [
    "GAPO",
    "L2",
    "Additive",
    "Correctness",
    "DivergenceShaper",
    "ForwardKL",
    "Gated",
    "JensenShannon",
    "ReverseKL",
    "RewardShaper",
    "WithFormat",
]
