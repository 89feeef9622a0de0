from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_madrl.functional import dead_groups, group_advantages


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("none", (0.75, -0.25, -0.25, -0.25)),
        ("sample", (1.5, -0.5, -0.5, -0.5)),
        ("population", (math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3))),
    ],
)
def test_golden_values(scale, expected):
    rewards = torch.tensor([[1, 0, 0, 0]], dtype=torch.float64)
    actual = group_advantages(rewards, scale, eps=0.0)
    torch.testing.assert_close(actual, torch.tensor([expected], dtype=torch.float64), rtol=0, atol=1e-14)


def test_eps_is_added_to_the_standard_deviation():
    rewards = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert group_advantages(rewards, "population", eps=0.5)[0, 0].item() == pytest.approx(0.5)


@pytest.mark.parametrize("scale", ["none", "population", "sample"])
@pytest.mark.parametrize("value", [0.0, 0.1, 0.5, -1.0, 1e6])
@pytest.mark.parametrize("size", [1, 4, 7, 31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dead_group_gets_exactly_zero_whatever_its_value(scale, value, size, dtype):
    # The mean of seven 0.1 is not 0.1: scaling by std + 1e-6 would blow the difference up.
    rewards = torch.full((1, size), value, dtype=dtype)
    assert dead_groups(rewards).tolist() == [True]
    assert (group_advantages(rewards, scale) == 0).all()


def test_dead_group_gives_nothing_and_changes_nothing_in_a_live_one():
    live, dead = [1.0, 0.0, 0.5, 0.25], [0.5, 0.5, 0.5, 0.5]
    both = group_advantages(torch.tensor([live, dead]))
    assert dead_groups(torch.tensor([live, dead])).tolist() == [False, True]
    assert torch.equal(both[:1], group_advantages(torch.tensor([live])))
    assert (both[1] == 0).all()


def test_rewards_that_differ_by_rounding_alone_are_dead():
    third = torch.tensor(1 / 3)
    rewards = torch.stack([third, third.nextafter(torch.tensor(1.0)), third]).unsqueeze(0)
    assert dead_groups(rewards).all()
    assert not dead_groups(torch.tensor([[0.3333, 0.3334]])).any()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(-3, 3))
def test_a_constant_group_penalty_cancels(rewards, penalty):
    values = torch.tensor([rewards], dtype=torch.float64)
    if (values.amax() - values.amin()) < 1e-3:
        return
    torch.testing.assert_close(
        group_advantages(values - penalty), group_advantages(values), rtol=1e-8, atol=1e-8
    )


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-5, 5), min_size=3, max_size=8))
def test_advantages_are_centred_and_have_unit_sample_deviation(rewards):
    values = torch.tensor([rewards], dtype=torch.float64)
    if values.std() < 1e-2:
        return
    advantages = group_advantages(values)
    assert abs(advantages.mean().item()) < 1e-12
    assert advantages.std().item() == pytest.approx(1, rel=1e-3)


def test_a_missing_score_is_an_error_that_names_rewards():
    rewards = torch.tensor([[0.0, 1.0], [0.0, math.nan]])
    with pytest.raises(ValueError, match="rewards: expected finite numbers, got nan in group 1, row 1"):
        group_advantages(rewards)
    with pytest.raises(ValueError, match="rewards: expected finite numbers, got inf"):
        group_advantages(torch.tensor([[math.inf, 1.0]]))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"scale: expected .* got 'std'"):
        group_advantages(torch.zeros(1, 2), "std")
    with pytest.raises(ValueError, match=r"rewards: expected shape \[P, G\], got \[2\]"):
        group_advantages(torch.zeros(2))


def test_input_is_not_mutated():
    rewards = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    before = rewards.clone()
    group_advantages(rewards)
    assert torch.equal(rewards, before)


def test_mean_and_std_may_be_taken_over_some_rows_alone():
    """Rows 0 and 2 are the baseline: mean 1, sample std sqrt 2; the others are measured against them."""
    rewards = torch.tensor([[0.0, 5.0, 2.0, 1.0]], dtype=torch.float64)
    over = torch.tensor([[True, False, True, False]])
    actual = group_advantages(rewards, "sample", eps=0.0, baseline=over)
    expected = torch.tensor([[-1.0, 4.0, 1.0, 0.0]], dtype=torch.float64) / math.sqrt(2)
    torch.testing.assert_close(actual, expected)
    assert group_advantages(rewards, "none", baseline=over).tolist() == [[-1.0, 4.0, 1.0, 0.0]]


def test_a_baseline_without_spread_leaves_the_difference_unscaled():
    """Not divided by 0 + 1e-6, which would make it a million."""
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.2]])
    over = torch.tensor([[True, True, True, False]])
    assert group_advantages(rewards, "sample", baseline=over).tolist() == [
        [0.0, 0.0, 0.0, pytest.approx(1.2)]
    ]


def test_a_group_without_a_baseline_takes_all_its_rows():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    over = torch.tensor([[False, False], [True, True]])
    actual = group_advantages(rewards, baseline=over)
    assert torch.equal(actual[0], actual[1])
    with pytest.raises(ValueError, match=r"baseline: expected shape \[2, 2\]"):
        group_advantages(rewards, baseline=over[:1])
