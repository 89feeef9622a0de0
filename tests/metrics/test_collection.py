"""Metrics side by side: what a MetricCollection shares between them, and two processes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lit_madrl.metrics import (
    AverageAtK,
    CategoryCoverage,
    CategoryFrequencies,
    ForwardKLDivergence,
    JensenShannonDivergence,
    L2Divergence,
    OffSupportRate,
    PassAtK,
    ReverseKLDivergence,
)
from tests.helpers.metric_contract import gather_on_two_ranks, same
from tests.metrics import test_coverage, test_divergence, test_frequencies, test_off_support, test_pass_at_k

CASES = [
    *test_divergence.CASES,
    *test_off_support.CASES,
    *test_frequencies.CASES,
    *test_coverage.CASES,
    *test_pass_at_k.CASES,
]


def build() -> dict[str, Metric]:
    return {
        "l2": L2Divergence(2),
        "fkl": ForwardKLDivergence(2),
        "rkl": ReverseKLDivergence(2),
        "rkl_smooth": ReverseKLDivergence(2, epsilon=0.1),
        "jsd": JensenShannonDivergence(2),
        "l2_prompts": L2Divergence(2, per_prompt=True),
        "rkl_prompts": ReverseKLDivergence(2, per_prompt=True),
        "rkl_smooth_prompts": ReverseKLDivergence(2, per_prompt=True, epsilon=0.1),
        "jsd_prompts": JensenShannonDivergence(2, per_prompt=True),
        "off_support": OffSupportRate(2),
        "frequencies": CategoryFrequencies(2),
        "frequencies_prompts": CategoryFrequencies(2, per_prompt=True),
        "coverage": CategoryCoverage(2),
        "coverage_strict": CategoryCoverage(2, threshold=0.5),
        "coverage_prompts": CategoryCoverage(2, per_prompt=True),
        "coverage_strict_prompts": CategoryCoverage(2, threshold=0.5, per_prompt=True),
        "pass_1": PassAtK(1),
        "pass_4": PassAtK(4),
        "average": AverageAtK(),
    }


def batch(category: list[int], correct: list[int]) -> dict[str, Tensor]:
    return {
        "policy": torch.tensor([category]),
        "targets": torch.tensor([[0.5, 0.5]]),
        "correct": torch.tensor([correct]),
    }


# After the first batch every divergence is 0 and every success 1: a collection would take states for equal.
BATCHES = [
    batch([0, 0, 1, 1], [1, 1, 1, 1]),
    batch([0, 1, 1, 1], [0, 1, 0, 0]),
    batch([1, 1, 1, -1], [0, 0, 0, 0]),
]


def test_a_collection_equals_its_metrics_alone() -> None:
    collection, alone = MetricCollection(build()), build()
    for _ in range(2):
        for inputs in BATCHES:
            collection.update(**inputs)
            for metric in alone.values():
                metric.update(**metric._filter_kwargs(**inputs))
            together = collection.compute()
            for name, metric in alone.items():
                same(together[name], metric.compute())
        same(collection["jsd"].floor(), alone["jsd"].floor())
        collection.reset()
        for metric in alone.values():
            metric.reset()


def test_pooled_divergences_share_one_state() -> None:
    collection = MetricCollection(build())
    collection.update(**BATCHES[0])
    groups = {frozenset(group) for group in collection.compute_groups.values() if len(group) > 1}
    assert frozenset({"l2", "fkl", "rkl", "rkl_smooth", "jsd"}) in groups
    assert all(not name.endswith("_prompts") and "_at" not in name for group in groups for name in group)


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    for values in gather_on_two_ranks(CASES, tmp_path):
        for case in CASES:
            expected = case.after(case.batches)
            for value in values[case.name]:
                same(value["compute"], expected.compute())
                if "floor" in value:
                    same(value["floor"], expected.floor())
    assert sum("floor" in values[name][0] for name in names) == 2
