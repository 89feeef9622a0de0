from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_madrl.metrics import OffSupportRate
from tests.helpers.metric_contract import MetricCase, MetricContract
from tests.metrics.category_batches import MASS, SAMPLES

CASES = [
    MetricCase("OffSupportRate-samples", partial(OffSupportRate, 3), SAMPLES),
    MetricCase("OffSupportRate-mass", partial(OffSupportRate, 3), MASS),
]


class TestContract(MetricContract):
    cases = CASES


def rate(policy: object, k: int = 2) -> float:
    metric = OffSupportRate(k)
    metric.update(torch.tensor(policy))
    return float(metric.compute())


def test_golden_values() -> None:
    assert rate([[0, -1, 1, -1], [0, 0, 0, -1]]) == 3 / 8
    assert rate([[-1, -1]]) == 1
    assert rate([[0, 1]]) == 0
    assert rate([[0.5, 0.25], [0.0, 0.0]]) == 0.625


def test_completions_weigh_the_same_in_batches_of_different_width() -> None:
    metric = OffSupportRate(2)
    metric.update(torch.tensor([[-1]]))
    metric.update(torch.tensor([[0, 0, 1]]))
    assert float(metric.compute()) == 0.25


@given(seed=st.integers(0, 2**32 - 1), prompts=st.integers(1, 5), samples=st.integers(1, 5))
def test_against_a_slow_reference(seed: int, prompts: int, samples: int) -> None:
    policy = np.random.default_rng(seed).integers(-1, 3, size=(prompts, samples))
    missing = sum(1 for row in policy for z in row if z == -1)
    assert rate(policy.tolist(), 3) == pytest.approx(missing / policy.size)


def test_rounding_is_no_negative_rate_and_excess_is_an_error() -> None:
    assert rate([[0.5, 0.50001]]) == 0
    with pytest.raises(ValueError, match="policy: expected probabilities that sum to <= 1, got 3"):
        rate([[1.0, 2.0]])
    with pytest.raises(ValueError, match=r"category: expected -1 or 0..1 .* got 2"):
        rate([[2]])
