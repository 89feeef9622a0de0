from __future__ import annotations

from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics import Metric

from lit_madrl.metrics import AverageAtK, PassAtK
from tests.helpers.metric_contract import MetricCase, MetricContract

BATCHES = (
    {"correct": torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])},
    {"correct": torch.tensor([[1.0, 1.0, 1.0, 1.0]])},
    {"correct": torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])},
)
CASES = [
    *(MetricCase(f"PassAtK-{k}", partial(PassAtK, k), BATCHES) for k in (1, 2, 4)),
    MetricCase("AverageAtK", AverageAtK, BATCHES),
]


class TestContract(MetricContract):
    cases = CASES


def value(metric: Metric, correct: object) -> float:
    metric.update(torch.tensor(correct))
    return float(metric.compute())


def test_golden_values() -> None:
    """Of four samples 1 and 3 are correct: pass@2 is 1 - C(3,2)/C(4,2) = 1/2 and 1."""
    correct = [[1, 0, 0, 0], [0, 1, 1, 1]]
    assert value(AverageAtK(), correct) == 0.5
    assert value(PassAtK(1), correct) == pytest.approx(0.5)
    assert value(PassAtK(2), correct) == pytest.approx(0.75)
    assert value(PassAtK(4), correct) == 1


def test_prompts_weigh_the_same_whatever_their_number_of_samples() -> None:
    for metric in (AverageAtK(), PassAtK(1)):
        metric.update(torch.tensor([[True]]))
        metric.update(torch.tensor([[False, False, False]]))
        assert float(metric.compute()) == 0.5


@given(seed=st.integers(0, 2**32 - 1), prompts=st.integers(1, 4), samples=st.integers(1, 6), data=st.data())
def test_against_all_subsets(seed: int, prompts: int, samples: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, samples))
    correct = np.random.default_rng(seed).integers(0, 2, size=(prompts, samples)).tolist()
    each = [np.mean([any(subset) for subset in combinations(row, k)]) for row in correct]
    assert value(PassAtK(k), correct) == pytest.approx(float(np.mean(each)))
    assert value(AverageAtK(), correct) == pytest.approx(float(np.mean(correct)))


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="k: expected an integer >= 1, got 0"):
        PassAtK(0)
    with pytest.raises(ValueError, match=r"correct: expected shape \[P, S\] with S >= 1, got \[2\]"):
        value(PassAtK(1), [1, 0])
    with pytest.raises(ValueError, match=r"correct: expected values in \{0, 1\}, got 0.5"):
        value(AverageAtK(), [[0.5]])
    with pytest.raises(ValueError, match="k"):
        value(PassAtK(3), [[1, 0]])
