from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_madrl.metrics import CategoryCoverage
from tests.helpers.metric_contract import MetricCase, MetricContract
from tests.metrics.category_batches import MASS, SAMPLES, with_targets

CASES = [
    MetricCase(
        f"CategoryCoverage-{name}-{per_prompt}",
        partial(CategoryCoverage, 3, threshold=0.3, per_prompt=per_prompt),
        with_targets(batches),
    )
    for name, batches in (("samples", SAMPLES), ("mass", MASS))
    for per_prompt in (False, True)
]


class TestContract(MetricContract):
    cases = CASES


def coverage(policy: object, targets: object, **arguments: object) -> float:
    metric = CategoryCoverage(len(targets[0]), **arguments)
    metric.update(torch.tensor(policy), torch.tensor(targets))
    return float(metric.compute())


def test_two_percent_is_covered_and_less_is_not() -> None:
    uniform = [[1 / 3, 1 / 3, 1 / 3]]
    assert coverage([[0] * 97 + [1] * 2 + [2]], uniform) == 2
    assert coverage([[0] * 97 + [1] * 2 + [2]], uniform, threshold=0.01) == 3
    assert coverage([[0.9, 0.019, 0.001]], uniform) == 2  # 0.019 / 0.92 is above 2 %
    assert coverage([[0] * 97 + [1] * 2 + [-1] * 50], uniform) == 2  # of the valid completions


def test_categories_without_target_mass_do_not_count() -> None:
    assert coverage([[0, 1, 2, 3]], [[0.5, 0.5, 0.0, 0.0]]) == 2


def test_pooling_hides_what_each_prompt_misses() -> None:
    policy, targets = [[0, 0], [1, 1], [-1, -1]], [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    assert coverage(policy, targets) == 2
    assert coverage(policy, targets, per_prompt=True) == pytest.approx(2 / 3)  # the third covers nothing
    assert coverage([[0], [1]], [[0.0, 1.0], [1.0, 0.0]]) == 2
    assert coverage([[0], [1]], [[0.0, 1.0], [1.0, 0.0]], per_prompt=True) == 0


def test_nothing_valid_covers_nothing() -> None:
    assert coverage([[-1, -1]], [[0.5, 0.5]]) == 0
    assert coverage([[-1, -1]], [[0.5, 0.5]], per_prompt=True) == 0


@given(
    seed=st.integers(0, 2**32 - 1),
    prompts=st.integers(1, 5),
    samples=st.integers(1, 6),
    threshold=st.sampled_from([0.02, 0.2, 0.25, 0.5, 1.0]),
)
def test_against_a_slow_reference(seed: int, prompts: int, samples: int, threshold: float) -> None:
    rng = np.random.default_rng(seed)
    policy = rng.integers(-1, 3, size=(prompts, samples)).tolist()
    targets = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]])[rng.integers(0, 3, size=prompts)]

    def covered(completions: list[int], target: np.ndarray) -> int:
        valid = [z for z in completions if z >= 0]
        return sum(
            1 for z in range(3) if valid and target[z] > 0 and valid.count(z) / len(valid) >= threshold
        )

    pooled = covered([z for row in policy for z in row], targets.sum(0))
    assert coverage(policy, targets.tolist(), threshold=threshold) == pooled
    each = [covered(row, target) for row, target in zip(policy, targets, strict=True)]
    mean = coverage(policy, targets.tolist(), threshold=threshold, per_prompt=True)
    assert mean == pytest.approx(sum(each) / prompts)


@pytest.mark.parametrize("threshold", [0.0, 1.5, math.nan])
def test_bad_threshold(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"threshold: expected a number in \(0, 1\], got"):
        CategoryCoverage(2, threshold)
