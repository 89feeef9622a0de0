from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_madrl.metrics import CategoryFrequencies
from tests.helpers.metric_contract import MetricCase, MetricContract
from tests.metrics.category_batches import MASS, SAMPLES

CASES = [
    MetricCase(
        f"CategoryFrequencies-{name}-{per_prompt}", partial(CategoryFrequencies, 3, per_prompt), batches
    )
    for name, batches in (("samples", SAMPLES), ("mass", MASS))
    for per_prompt in (False, True)
]


class TestContract(MetricContract):
    cases = CASES


def shares(policy: object, k: int, per_prompt: bool = False) -> list[float]:
    metric = CategoryFrequencies(k, per_prompt)
    metric.update(torch.tensor(policy))
    return metric.compute().tolist()


def test_golden_values() -> None:
    """Three valid completions of the first prompt, one of the second, none of the third."""
    policy = [[0, 0, 1], [2, -1, -1], [-1, -1, -1]]
    assert shares(policy, 3) == [0.5, 0.25, 0.25]
    assert shares(policy, 3, per_prompt=True) == pytest.approx([1 / 3, 1 / 6, 1 / 2])
    assert shares([[0.5, 0.0], [0.25, 0.25]], 2) == [0.75, 0.25]
    assert shares([[0.5, 0.0], [0.25, 0.25]], 2, per_prompt=True) == [0.75, 0.25]
    assert shares([[0.1, 0.0], [0.3, 0.3]], 2, per_prompt=True) == pytest.approx([0.75, 0.25])


@given(seed=st.integers(0, 2**32 - 1), prompts=st.integers(1, 5), samples=st.integers(1, 5))
def test_against_a_slow_reference(seed: int, prompts: int, samples: int) -> None:
    policy = np.random.default_rng(seed).integers(-1, 3, size=(prompts, samples))
    valid = [[z for z in row if z >= 0] for row in policy.tolist()]
    pooled = [z for row in valid for z in row]
    if not pooled:
        assert np.isnan(shares(policy.tolist(), 3)).all()
        assert np.isnan(shares(policy.tolist(), 3, per_prompt=True)).all()
        return
    assert shares(policy.tolist(), 3) == pytest.approx([pooled.count(z) / len(pooled) for z in range(3)])
    rows = [[row.count(z) / len(row) for z in range(3)] for row in valid if row]
    assert shares(policy.tolist(), 3, per_prompt=True) == pytest.approx(np.mean(rows, axis=0).tolist())


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"policy: expected mass \[P, 3\], got shape \[1, 2\]"):
        shares([[0.5, 0.5]], 3)
