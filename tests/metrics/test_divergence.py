from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lit_madrl.metrics import (
    DivergenceMetric,
    ForwardKLDivergence,
    JensenShannonDivergence,
    L2Divergence,
    ReverseKLDivergence,
)
from tests.helpers.metric_contract import MetricCase, MetricContract
from tests.metrics.category_batches import MASS, SAMPLES, with_targets

ALL = (L2Divergence, ForwardKLDivergence, ReverseKLDivergence, JensenShannonDivergence)
# Forward KL of a prompt's few samples is mostly infinite: per prompt it is tested on mass.
CASES = [
    *(MetricCase(f"{m.__name__}-samples", partial(m, 3), with_targets(SAMPLES)) for m in ALL),
    *(MetricCase(f"{m.__name__}-mass", partial(m, 3), with_targets(MASS)) for m in ALL),
    *(
        MetricCase(f"{m.__name__}-prompts", partial(m, 3, per_prompt=True), with_targets(SAMPLES))
        for m in (L2Divergence, ReverseKLDivergence, JensenShannonDivergence)
    ),
    *(
        MetricCase(f"{m.__name__}-mass-prompts", partial(m, 3, per_prompt=True), with_targets(MASS))
        for m in ALL
    ),
    MetricCase("reverse-smoothed", partial(ReverseKLDivergence, 3, epsilon=0.1), with_targets(SAMPLES)),
]


class TestContract(MetricContract):
    cases = CASES


def value(metric: DivergenceMetric, policy: object, targets: object) -> float:
    metric.update(torch.tensor(policy), torch.tensor(targets))
    return float(metric.compute())


# --- a slow reference ------------------------------------------------------------------------------------


def kl(p: np.ndarray, q: np.ndarray) -> float:
    total = 0.0
    for a, b in zip(p, q, strict=True):
        if a > 0:
            total += a * math.log(a / b) if b > 0 else math.inf
    return total


REFERENCE = {
    L2Divergence: lambda t, p: 0.5 * sum((a - b) ** 2 for a, b in zip(t, p, strict=True)),
    ForwardKLDivergence: kl,
    ReverseKLDivergence: lambda t, p: kl(p, t),
    JensenShannonDivergence: lambda t, p: (kl(t, (t + p) / 2) + kl(p, (t + p) / 2)) / 2,
}


def counts(row: np.ndarray, k: int) -> np.ndarray:
    return np.array([sum(1 for z in row if z == category) for category in range(k)], dtype=float)


@given(
    seed=st.integers(0, 2**32 - 1),
    k=st.integers(2, 5),
    prompts=st.integers(1, 6),
    samples=st.integers(1, 6),
    per_prompt=st.booleans(),
    kind=st.sampled_from(ALL),
)
def test_against_a_slow_reference(
    seed: int, k: int, prompts: int, samples: int, per_prompt: bool, kind: type[DivergenceMetric]
) -> None:
    rng = np.random.default_rng(seed)
    policy = rng.integers(-1, k, size=(prompts, samples))
    targets = rng.dirichlet(np.ones(k), size=prompts)
    targets[rng.random(prompts) < 0.3] = np.eye(k)[0]  # targets with zeros
    metric = kind(k, per_prompt=per_prompt)
    for rows in np.array_split(np.arange(prompts), min(2, prompts)):
        metric.update(torch.from_numpy(policy[rows]), torch.from_numpy(targets[rows]))
    by_prompt = [counts(row, k) for row in policy]
    if not (policy >= 0).any():
        expected = math.nan
    elif per_prompt:
        each = [
            REFERENCE[kind](t, c / c.sum()) for t, c in zip(targets, by_prompt, strict=True) if c.sum() > 0
        ]
        expected = sum(each) / len(each)
    else:
        pooled = sum(by_prompt)
        expected = REFERENCE[kind](targets.mean(0), pooled / pooled.sum())
    torch.testing.assert_close(
        float(metric.compute()), float(expected), rtol=1e-9, atol=1e-12, equal_nan=True
    )


# --- golden values ---------------------------------------------------------------------------------------


def test_golden_values_of_one_sided_samples() -> None:
    """Shares (3/4, 1/4) against (1/2, 1/2): M = (5/8, 3/8)."""
    policy, target = [[0, 0, 0, 1]], [[0.5, 0.5]]
    assert value(L2Divergence(2), policy, target) == pytest.approx(0.0625, abs=1e-15)
    assert value(ForwardKLDivergence(2), policy, target) == pytest.approx(0.5 * math.log(4 / 3), abs=1e-15)
    assert value(ReverseKLDivergence(2), policy, target) == pytest.approx(
        0.75 * math.log(1.5) - 0.25 * math.log(2), abs=1e-15
    )
    jsd = 0.25 * (math.log(4 / 5) + math.log(4 / 3)) + 0.5 * (0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3))
    assert value(JensenShannonDivergence(2), policy, target) == pytest.approx(jsd, abs=1e-15)


def test_pooling_hides_prompts_that_fail_in_opposite_ways() -> None:
    policy, targets = [[0, 0, 0], [1, 1, 1]], [[0.5, 0.5], [0.5, 0.5]]
    assert value(JensenShannonDivergence(2), policy, targets) == pytest.approx(0, abs=1e-15)
    # M = (3/4, 1/4): 1/2 [1/2 log(2/3) + 1/2 log 2] + 1/2 log(4/3) = 3/4 log(4/3)
    per_prompt = value(JensenShannonDivergence(2, per_prompt=True), policy, targets)
    assert per_prompt == pytest.approx(0.75 * math.log(4 / 3), abs=1e-15)
    assert value(ReverseKLDivergence(2, per_prompt=True), policy, targets) == pytest.approx(math.log(2))


def test_pooled_samples_weigh_completions_and_leave_out_off_support() -> None:
    """Counts (3, 1) over five completions of two prompts, mean target (3/4, 1/4)."""
    policy, targets = [[0, 0, 0], [1, -1, -1]], [[1.0, 0.0], [0.5, 0.5]]
    for metric in ALL:
        assert value(metric(2), policy, targets) == pytest.approx(0, abs=1e-15)


def test_mass_is_renormalized_over_the_categories() -> None:
    for metric in ALL:
        for per_prompt in (False, True):
            assert value(metric(2, per_prompt), [[0.3, 0.1]], [[0.75, 0.25]]) == pytest.approx(0, abs=1e-12)


def test_targets_are_freed_of_their_rounding() -> None:
    for per_prompt in (False, True):
        assert value(ForwardKLDivergence(2, per_prompt), [[0, 1]], [[0.50004, 0.50004]]) == 0


def test_counts_as_mass_equal_samples() -> None:
    samples, targets = with_targets(SAMPLES)[2].values()
    mass = torch.stack([(samples == z).sum(-1) for z in range(3)], -1).double()
    for metric in ALL:
        for per_prompt in (False, True):
            by_samples, by_mass = metric(3, per_prompt), metric(3, per_prompt)
            by_samples.update(samples, targets)
            by_mass.update(mass, targets)
            torch.testing.assert_close(by_mass.compute(), by_samples.compute())


def test_a_prompt_without_valid_completion_is_left_out_of_the_mean_of_prompts() -> None:
    metric = L2Divergence(2, per_prompt=True)
    assert value(metric, [[0, 0], [-1, -1]], [[0.5, 0.5], [0.5, 0.5]]) == 0.25
    only = JensenShannonDivergence(2, per_prompt=True)
    assert math.isnan(value(only, [[-1, -1]], [[0.5, 0.5]]))


def test_its_target_still_counts_in_the_pooled_target() -> None:
    """Mean target (1/2, 1/2), shares (1, 0)."""
    assert value(L2Divergence(2), [[0, 0], [-1, -1]], [[1.0, 0.0], [0.0, 1.0]]) == 0.25


def test_infinities_and_smoothing() -> None:
    assert value(ReverseKLDivergence(2), [[0, 1]], [[1.0, 0.0]]) == math.inf
    assert value(ForwardKLDivergence(2), [[0, 0]], [[0.5, 0.5]]) == math.inf
    assert value(ReverseKLDivergence(2), [[0, 0]], [[1.0, 0.0]]) == 0
    # smoothed target (0.9, 0.1)
    smoothed = value(ReverseKLDivergence(2, epsilon=0.2), [[0, 1]], [[1.0, 0.0]])
    assert smoothed == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), abs=1e-12)
    assert value(JensenShannonDivergence(2), [[0, 0]], [[0.0, 1.0]]) == pytest.approx(math.log(2))


def test_a_divergence_of_ones_own_writes_only_the_formula() -> None:
    class TotalVariation(DivergenceMetric):
        def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
            return (target - policy).abs().sum(-1) / 2

    assert value(TotalVariation(2), [[0, 0, 0, 1]], [[0.5, 0.5]]) == 0.25
    assert value(TotalVariation(2, per_prompt=True), [[0, 0], [0, 1]], [[0.5, 0.5], [0.5, 0.5]]) == 0.25


# --- the estimator floor ---------------------------------------------------------------------------------


def draws(number: int, target: list[float]) -> JensenShannonDivergence:
    metric = JensenShannonDivergence(len(target))
    metric.update(torch.zeros(number // 4, 4, dtype=torch.long), torch.tensor(target).expand(number // 4, -1))
    return metric


@pytest.mark.parametrize(
    ("target", "published"), [([0.2] * 5, 0.00063), ([0.6, 0.3, 0.1, 0.0, 0.0], 0.00032)]
)
def test_floor_of_800_draws_is_the_published_one(target: list[float], published: float) -> None:
    assert float(draws(800, target).floor()) == pytest.approx(published, rel=0.05)


def test_floor_counts_valid_draws_over_batches() -> None:
    metric = JensenShannonDivergence(2)
    half = torch.tensor([[0.5, 0.5]])
    metric.update(torch.tensor([[0, -1, -1, -1]]), half)
    metric.update(torch.tensor([[1, 1, 1, -1]]), half)
    assert float(metric.floor()) == float(draws(4, [0.5, 0.5]).floor())
    assert float(metric.floor()) > float(draws(8, [0.5, 0.5]).floor()) > 0


def test_floor_without_noise_without_data_and_per_prompt() -> None:
    metric = JensenShannonDivergence(2)
    assert metric.floor().isnan()
    metric.update(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.5, 0.5]]))
    assert metric.floor() == 0
    with pytest.raises(ValueError, match="per_prompt: expected False"):
        JensenShannonDivergence(2, per_prompt=True).floor()


# --- bad input -------------------------------------------------------------------------------------------

GOOD = torch.tensor([[0, 1], [1, -1]])
TARGETS = torch.full((2, 2), 0.5)


@pytest.mark.parametrize(
    ("policy", "targets", "message"),
    [
        (GOOD[0], TARGETS, r"policy: expected samples \[P, S\] or mass \[P, 2\], got shape \[2\]"),
        (GOOD + 1, TARGETS, r"category: expected -1 or 0..1 for 2 categories, got 2"),
        (GOOD - 1, TARGETS, r"category: expected -1 or 0..1 for 2 categories, got -2"),
        (GOOD > 0, TARGETS, r"policy: expected integer samples or floating mass, got torch.bool"),
        (torch.ones(2, 3), TARGETS, r"policy: expected mass \[P, 2\], got shape \[2, 3\]"),
        (torch.tensor([[1.0, -0.5], [1, 0]]), TARGETS, r"policy: expected finite mass >= 0, got -0.5"),
        (torch.tensor([[1.0, math.nan], [1, 0]]), TARGETS, r"policy: expected finite mass >= 0, got nan"),
        (GOOD, TARGETS[:1], r"targets: expected shape \[2, 2\], got \[1, 2\]"),
        (GOOD, torch.full((2, 3), 1 / 3), r"targets: expected shape \[2, 2\], got \[2, 3\]"),
        (GOOD, TARGETS * 2, r"targets: expected probabilities that sum to 1 .* got sum \[2.0, 2.0\]"),
        (GOOD, TARGETS * 0, r"targets: expected probabilities that sum to 1 .* got sum \[0.0, 0.0\]"),
        (GOOD, torch.tensor([[1.5, -0.5], [1, 0]]), r"targets: expected finite probabilities >= 0"),
    ],
)
@pytest.mark.parametrize("per_prompt", [False, True])
def test_bad_input_is_named_and_not_counted(
    policy: Tensor, targets: Tensor, message: str, per_prompt: bool
) -> None:
    metric = L2Divergence(2, per_prompt)
    with pytest.raises(ValueError, match=message):
        metric.update(policy, targets)
    assert all(not getattr(metric, name).any() for name in metric._defaults)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="num_categories: expected an integer >= 1, got 0"):
        L2Divergence(0)
    with pytest.raises(ValueError, match=r"epsilon: expected a number in \[0, 1\], got 2"):
        ReverseKLDivergence(2, epsilon=2)
    with pytest.raises(TypeError, match="abstract"):
        DivergenceMetric(2)
