from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from examples.hellinger import Hellinger
from lit_madrl.functional import dead_groups, group_advantages
from lit_madrl.rewards import L2, DivergenceShaper, ForwardKL, JensenShannon, ReverseKL
from lit_madrl.types import Scores

SHAPERS = [L2, ForwardKL, ReverseKL, JensenShannon, Hellinger]
UNBOUNDED = [ForwardKL, ReverseKL, JensenShannon, Hellinger]
PEAKED = torch.tensor([[0.6, 0.3, 0.1, 0.0, 0.0]], dtype=torch.float64)
UNIFORM = torch.full((1, 5), 0.2, dtype=torch.float64)


def scores(*category: int, on_policy: list[bool] | None = None) -> Scores:
    built = Scores.build(torch.tensor([category]))
    return built if on_policy is None else replace(built, on_policy=torch.tensor([on_policy]))


def assert_rewards(actual: Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, torch.tensor([expected], dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_golden_rewards_of_a_group_of_four():
    # Valid frequencies (2/3, 0, 0, 1/3, 0), the last rollout off-support.
    group = scores(0, 0, 3, -1)
    assert_rewards(L2()(group, PEAKED), 0.6 - 2 / 3, 0.6 - 2 / 3, -1 / 3, -1)
    assert_rewards(ForwardKL()(group, PEAKED), -0.1, -0.1, -1, -1)
    low, high = math.log(0.596 * 1.5), math.log(0.002 * 3)
    assert_rewards(ReverseKL()(group, PEAKED), low, low, high, -1)
    common = 0.5 * math.log(0.95)
    assert_rewards(JensenShannon()(group, PEAKED), common, common, -0.5 * math.log(2), -1)
    common = 0.5 * (math.sqrt(0.9) - 1)
    assert_rewards(Hellinger()(group, PEAKED), common, common, -0.5, -1)


def test_frequencies_over_all_rollouts_count_the_off_support_ones():
    group = scores(0, 0, 3, -1)
    assert_rewards(L2(frequencies="all")(group, PEAKED), 0.1, 0.1, -0.25, -1)
    assert_rewards(L2(leave_one_out=True)(group, PEAKED), 0.1, 0.1, 0.0, -1)
    assert_rewards(L2("all", leave_one_out=True)(group, PEAKED), 0.6 - 1 / 3, 0.6 - 1 / 3, 0.0, -1)


def test_a_reward_uses_all_four_rollouts_of_its_group():
    # Two halves of the group alone would each see frequency 1 for one category, and no reward to learn from.
    rewards = L2()(scores(0, 0, 0, 1), UNIFORM)
    assert_rewards(rewards, -0.55, -0.55, -0.55, -0.05)


@pytest.mark.parametrize("build", SHAPERS)
def test_peaked_target_with_zeros_gives_finite_rewards_for_present_categories(build):
    for group in [(0, 0, 0, 0), (3, 3, 3, 3), (0, 1, 2, 3), (4, -1, -1, -1), (-1, -1, -1, -1)]:
        assert build()(scores(*group), PEAKED).isfinite().all()
        assert build()(scores(*group), PEAKED.float()).isfinite().all()


@pytest.mark.parametrize("build", SHAPERS)
def test_each_prompt_has_its_own_target(build):
    category = torch.tensor([[0, 0, 1, 2], [0, 0, 1, 2]])
    both = build()(Scores.build(category), torch.cat([UNIFORM, PEAKED]))
    torch.testing.assert_close(both[:1], build()(scores(0, 0, 1, 2), UNIFORM))
    torch.testing.assert_close(both[1:], build()(scores(0, 0, 1, 2), PEAKED))


def test_validity_penalty_replaces_the_reward_off_support():
    assert_rewards(L2(validity_penalty=-0.3)(scores(-1, 0, -1, -1), PEAKED), -0.3, -0.4, -0.3, -0.3)


def test_min_frequency_is_a_floor():
    group = scores(0, 1, 1, 1)
    shaper = ForwardKL(leave_one_out=True, min_frequency=0.125)
    assert_rewards(shaper(group, UNIFORM), 0.6, *[0.2 * 1.5 - 1] * 3)
    assert_rewards(ForwardKL(min_frequency=0.5)(group, UNIFORM), -0.6, *[0.2 / 0.75 - 1] * 3)


def test_inserted_rollouts_are_rewarded_but_not_counted():
    # Three on-policy rollouts: frequencies (2/3, 1/3). The inserted one is held at half a count, 1/6.
    group = scores(0, 0, 1, 2, on_policy=[True, True, True, False])
    assert_rewards(ForwardKL()(group, UNIFORM), -0.7, -0.7, -0.4, 0.2 * 6 - 1)
    # One in a category the group holds is rewarded like the others there.
    group = scores(0, 0, 1, 1, on_policy=[True, True, True, False])
    assert_rewards(ForwardKL()(group, UNIFORM), -0.7, -0.7, -0.4, -0.4)
    # Nobody on-policy is valid: half of one count.
    group = scores(-1, -1, -1, 1, on_policy=[True, True, True, False])
    assert_rewards(ForwardKL()(group, UNIFORM), -1, -1, -1, -0.6)

    # A floor above half a count holds for it too.
    group = scores(0, 0, 1, 2, on_policy=[True, True, True, False])
    assert_rewards(ForwardKL(min_frequency=0.25)(group, UNIFORM), -0.7, -0.7, -0.4, -0.2)


@pytest.mark.parametrize("build", SHAPERS)
@pytest.mark.parametrize("over", ["valid", "all"])
def test_inserted_rollout_alone_in_its_category_has_a_finite_reward(build, over):
    group = scores(0, 0, 1, 2, on_policy=[True, True, True, False])
    rewards = build(frequencies=over)(group, UNIFORM)
    assert rewards.isfinite().all()
    assert rewards[0, 3] > rewards[0, 2] > rewards[0, 0]


@pytest.mark.parametrize("build", UNBOUNDED)
def test_leave_one_out_needs_a_floor_where_the_reward_is_infinite(build):
    with pytest.raises(ValueError, match=r"min_frequency: expected a number > 0 \(say 0.5 / G\)"):
        build(leave_one_out=True)
    shaper = build(leave_one_out=True, min_frequency=0.125)
    assert shaper(scores(0, 1, 1, 1), UNIFORM).isfinite().all()


class NaiveJensenShannon(DivergenceShaper):
    """As a user would write it, without a thought for zeros."""

    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        middle = 0.5 * (target + policy)
        terms = target * (target / middle).log() + policy * (policy / middle).log()
        return 0.5 * terms.sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_default_reward_survives_a_naive_divergence_at_zeros(dtype):
    group = scores(0, 0, 3, -1)
    actual, expected = NaiveJensenShannon()(group, PEAKED.to(dtype)), JensenShannon()(group, PEAKED.to(dtype))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert NaiveJensenShannon().reward(PEAKED.to(dtype), PEAKED.to(dtype)).isfinite().all()


class SteepAtZero(DivergenceShaper):
    """Its derivative overflows where the target is 0."""

    def divergence(self, target: Tensor, policy: Tensor) -> Tensor:
        return (policy**3 / target**2).sum(-1)


def test_default_reward_ignores_an_infinite_derivative_where_the_target_has_no_mass():
    # The constant is sum_z P* 3 (P / P*)^2 at the match, 3.
    rewards = SteepAtZero()(scores(0, 0, 1, 2), PEAKED)
    assert_rewards(rewards, *[3 - 3 * (0.5 / 0.6) ** 2] * 2, 3 - 3 * (0.25 / 0.3) ** 2, 3 - 3 * 2.5**2)


def test_default_reward_at_zero_frequency_is_its_limit():
    target = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    reward = Hellinger().reward(target, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    assert reward[0].item() == pytest.approx(0.5 * (math.sqrt(0.5) - 1))
    assert reward[1] > 1e10
    assert reward[2].item() == pytest.approx(-0.5)


def test_default_reward_broadcasts():
    targets, policies = torch.rand(3, 1, 4).softmax(-1), torch.rand(2, 4).softmax(-1)
    expected = 0.5 * ((targets / policies).sqrt() - 1)
    torch.testing.assert_close(Hellinger().reward(targets, policies), expected)
    torch.testing.assert_close(Hellinger().reward(targets, policies[:1]), expected[:, :1])


def test_frequencies_carry_no_gradient():
    targets = UNIFORM.clone().requires_grad_()
    for build in SHAPERS:
        assert not build()(scores(0, 1, 2, 3), targets).requires_grad


def test_reverse_kl_smooths_its_target():
    rewards = ReverseKL(epsilon=0.1)(scores(3, 3, 3, 3), PEAKED)
    assert_rewards(rewards, *[math.log(0.02)] * 4)
    with pytest.raises(
        ValueError, match="epsilon: expected > 0 for a target with a category of probability 0"
    ):
        ReverseKL(epsilon=0.0)(scores(0, 0, 0, 0), PEAKED)
    assert_rewards(ReverseKL(epsilon=0.0)(scores(0, 0, 1, 1), UNIFORM), *[math.log(0.4)] * 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frequencies": "some"}, "frequencies: expected 'valid' or 'all', got 'some'"),
        ({"validity_penalty": math.inf}, "validity_penalty: expected a finite number, got inf"),
        ({"min_frequency": -0.1}, "min_frequency: expected a number in"),
        ({"epsilon": 1.0}, "epsilon: expected a number in"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ReverseKL(**arguments)


def test_scores_and_targets_that_disagree():
    with pytest.raises(ValueError, match=r"category: expected -1 or 0..4 for 5 categories, got 6"):
        L2()(scores(0, 6), UNIFORM)
    for targets in (UNIFORM.expand(2, -1), UNIFORM[0], UNIFORM[:, :0]):
        with pytest.raises(ValueError, match=r"targets: expected shape \[P, K\]"):
            L2()(scores(0, 1), targets)


class TestWarnings:
    def test_small_group(self):
        (warning,) = L2().warnings(PEAKED[0], 9)
        assert warning.startswith("group_size = 9 is too small")
        assert warning.endswith("use at least 10")
        assert not list(L2().warnings(PEAKED[0], 10))
        assert not list(L2().warnings(PEAKED[0].float(), 10))

    def test_validity_penalty_above_the_lowest_valid_reward(self):
        # All in category 3: log(0.002 / 1), the lowest reward a group can give.
        (warning,) = ReverseKL().warnings(PEAKED[0], 16)
        assert "validity_penalty = -1 lies above -6.215" in warning
        assert "category 3" in warning
        assert not list(ReverseKL(validity_penalty=-6.3).warnings(PEAKED[0], 16))

    def test_l2_ties_with_the_default_penalty_and_does_not_warn(self):
        assert not list(L2().warnings(PEAKED[0], 16))
        assert len(list(L2(validity_penalty=-0.9).warnings(PEAKED[0], 16))) == 1

    @pytest.mark.parametrize("build", [ForwardKL, JensenShannon, Hellinger])
    def test_bounded_rewards_stay_above_the_default_penalty(self, build):
        assert not list(build().warnings(PEAKED[0], 16))

    def test_target_that_is_no_distribution(self):
        with pytest.raises(ValueError, match="target: expected probabilities that sum to 1"):
            list(L2().warnings(PEAKED[0] / 2, 16))


class TestWithAdvantages:
    def test_std_scaling_hides_the_divergence_between_two_categories(self):
        group = scores(0, 0, 0, 0, 0, 1, 1, 1)
        scaled = [group_advantages(build()(group, UNIFORM)) for build in SHAPERS]
        unscaled = [group_advantages(build()(group, UNIFORM), "none") for build in SHAPERS]
        for advantages in scaled[1:]:
            torch.testing.assert_close(advantages, scaled[0], rtol=1e-4, atol=1e-4)
        assert (unscaled[0] - unscaled[2]).abs().max() > 0.05

    @pytest.mark.parametrize("build", SHAPERS)
    def test_std_scaling_blows_up_the_noise_near_a_match(self, build):
        group, target = scores(*[0] * 9, *[1] * 7), torch.tensor([[0.5, 0.5]], dtype=torch.float64)
        rewards = build()(group, target)
        assert (rewards[0, 0] - rewards[0, -1]).abs() < 0.3
        assert group_advantages(rewards).abs().min() > 0.8

    @pytest.mark.parametrize("build", SHAPERS)
    def test_dead_groups_are_those_in_one_category_or_at_the_target(self, build):
        category = torch.tensor([[2, 2, 2, 2], [0, 1, 0, 1], [0, 0, 0, 1], [-1, -1, -1, -1]])
        target = torch.tensor([[0.4, 0.4, 0.2]]).expand(4, -1)
        rewards = build()(Scores.build(category), target)
        assert dead_groups(rewards).tolist() == [True, True, False, True]
        advantages = group_advantages(rewards)
        assert (advantages[[0, 1, 3]] == 0).all()
        assert (advantages[2] != 0).all()

    def test_a_constant_penalty_on_a_whole_group_cancels(self):
        rewards = ForwardKL()(scores(0, 0, 1, 2), UNIFORM)
        torch.testing.assert_close(group_advantages(rewards - 0.7), group_advantages(rewards))
