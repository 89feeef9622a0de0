"""Metrics over a split, exact on any number of ranks."""

from lit_madrl.metrics.base import AdditiveMetric, CategoryMetric
from lit_madrl.metrics.coverage import CategoryCoverage
from lit_madrl.metrics.divergence import (
    DivergenceMetric,
    ForwardKLDivergence,
    JensenShannonDivergence,
    L2Divergence,
    ReverseKLDivergence,
)
from lit_madrl.metrics.frequencies import CategoryFrequencies
from lit_madrl.metrics.off_support import OffSupportRate
from lit_madrl.metrics.pass_at_k import AverageAtK, PassAtK

__all__ = [
    "AdditiveMetric",
    "AverageAtK",
    "CategoryCoverage",
    "CategoryFrequencies",
    "CategoryMetric",
    "DivergenceMetric",
    "ForwardKLDivergence",
    "JensenShannonDivergence",
    "L2Divergence",
    "OffSupportRate",
    "PassAtK",
    "ReverseKLDivergence",
]
