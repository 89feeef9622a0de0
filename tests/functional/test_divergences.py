from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_madrl.functional import divergences as div

DIVERGENCES = [div.l2, div.forward_kl, div.reverse_kl, div.jensen_shannon]
REWARDS = {
    div.l2: div.l2_reward,
    div.forward_kl: div.forward_kl_reward,
    div.reverse_kl: div.reverse_kl_reward,
    div.jensen_shannon: div.jensen_shannon_reward,
}
LOG2 = math.log(2)
INF = math.inf


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def distributions(size: int = 4, low: float = 0.0) -> st.SearchStrategy[Tensor]:
    # Exact zeros often, but nothing so small that its reciprocal overflows.
    weight = st.floats(low, 1.0) if low else st.just(0.0) | st.floats(1e-300, 1.0)
    weights = st.lists(weight, min_size=size, max_size=size).filter(lambda w: sum(w) > 0.1)
    return weights.map(lambda w: tensor(*w) / sum(w))


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (div.l2, 0.5 * (0.25**2 + 0.25**2)),
        (div.forward_kl, 0.5 * math.log(4 / 3)),
        (div.reverse_kl, 0.25 * math.log(0.5) + 0.75 * math.log(1.5)),
        (
            div.jensen_shannon,
            0.5 * (0.5 * math.log(16 / 15) + 0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)),
        ),
    ],
)
def test_golden_values_by_hand(divergence, expected):
    # target (1/2, 1/2), policy (1/4, 3/4): middle (3/8, 5/8)
    assert divergence(tensor(0.5, 0.5), tensor(0.25, 0.75)).item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (div.l2_reward, (0.25, -0.25)),
        (div.forward_kl_reward, (1.0, -1 / 3)),
        (div.reverse_kl_reward, (LOG2, math.log(2 / 3))),
        (div.jensen_shannon_reward, (0.5 * math.log(1.5), 0.5 * math.log(5 / 6))),
    ],
)
def test_golden_rewards_by_hand(reward, expected):
    actual = reward(tensor(0.5, 0.5), tensor(0.25, 0.75))
    torch.testing.assert_close(actual, tensor(*expected), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("divergence", "target", "policy", "expected"),
    [
        (div.forward_kl, (1, 0), (0.5, 0.5), LOG2),
        (div.forward_kl, (0.5, 0.5), (1, 0), INF),
        (div.forward_kl, (1, 0, 0), (1, 0, 0), 0.0),
        (div.reverse_kl, (0.5, 0.5), (1, 0), LOG2),
        (div.reverse_kl, (1, 0), (0.5, 0.5), INF),
        (div.jensen_shannon, (1, 0), (0, 1), LOG2),
        (div.jensen_shannon, (1, 0, 0), (0.5, 0.5, 0), 0.75 * math.log(4 / 3)),
        (div.l2, (1, 0), (0, 1), 1.0),
    ],
)
def test_zero_mass_by_limits(divergence, target, policy, expected):
    assert divergence(tensor(*target), tensor(*policy)).item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("reward", "target", "policy", "expected"),
    [
        (div.forward_kl_reward, 0.2, 0.0, INF),
        (div.forward_kl_reward, 0.0, 0.0, -1.0),
        (div.forward_kl_reward, 0.0, 0.3, -1.0),
        (div.reverse_kl_reward, 0.2, 0.0, INF),
        (div.reverse_kl_reward, 0.0, 0.3, -INF),
        (div.reverse_kl_reward, 0.0, 0.0, -INF),
        (div.jensen_shannon_reward, 0.2, 0.0, INF),
        (div.jensen_shannon_reward, 0.0, 0.3, -0.5 * LOG2),
        (div.jensen_shannon_reward, 0.0, 0.0, -0.5 * LOG2),
        (div.l2_reward, 0.2, 0.0, 0.2),
    ],
)
def test_rewards_of_zero_mass_by_limits(reward, target, policy, expected):
    assert reward(tensor(target), tensor(policy)).item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@settings(deadline=None, max_examples=60)
@given(target=distributions(), policy=distributions())
def test_never_nan_never_negative_and_gradients_finite_where_the_value_is(divergence, target, policy):
    target, policy = target.requires_grad_(), policy.requires_grad_()
    value = divergence(target, policy)
    assert value.item() >= -1e-15
    if value.isfinite():
        for gradient in torch.autograd.grad(value, (target, policy)):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@settings(deadline=None, max_examples=40)
@given(target=distributions(low=0.01), policy=distributions(low=0.01))
def test_reward_is_minus_the_partial_derivative_up_to_a_constant(divergence, target, policy):
    policy = policy.requires_grad_()
    (partial,) = torch.autograd.grad(divergence(target, policy), policy)
    constant = REWARDS[divergence](target, policy.detach()) + partial
    torch.testing.assert_close(constant, constant[:1].expand_as(constant), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@given(target=distributions(low=0.01))
@settings(deadline=None, max_examples=20)
def test_divergence_and_reward_vanish_at_equality(divergence, target):
    assert divergence(target, target).item() == 0
    assert REWARDS[divergence](target, target).abs().max() < 1e-15


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_broadcasting_equals_one_by_one(divergence):
    torch.manual_seed(0)
    targets = torch.rand(3, 1, 4, dtype=torch.float64).softmax(-1)
    policies = torch.rand(5, 4, dtype=torch.float64).softmax(-1)
    together = divergence(targets, policies)
    rewards = REWARDS[divergence](targets, policies)
    assert together.shape == (3, 5)
    assert rewards.shape == (3, 5, 4)
    for i in range(3):
        for j in range(5):
            torch.testing.assert_close(together[i, j], divergence(targets[i, 0], policies[j]))
            torch.testing.assert_close(rewards[i, j], REWARDS[divergence](targets[i, 0], policies[j]))


def test_jensen_shannon_is_symmetric():
    a, b = tensor(0.7, 0.3, 0.0), tensor(0.1, 0.4, 0.5)
    torch.testing.assert_close(div.jensen_shannon(a, b), div.jensen_shannon(b, a), rtol=0, atol=1e-15)


def test_smooth_target_gives_every_category_mass():
    torch.testing.assert_close(div.smooth_target(tensor(1, 0), 0.1), tensor(0.95, 0.05))
    with pytest.raises(ValueError, match="eps: expected a number in"):
        div.smooth_target(tensor(1, 0), 1.5)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ((0.5, 0.5), "shares: expected 3 probabilities .* got 2"),
        ((0.5, 0.6, -0.1), "shares: expected finite probabilities >= 0"),
        ((0.5, 0.5, math.nan), "shares: expected finite probabilities >= 0"),
        ((0.5, 0.4, 0.0999 - 0.001), "shares: .* sum to 1 within 1e-4"),
    ],
)
def test_validate_target_names_what_is_wrong(target, message):
    with pytest.raises(ValueError, match=message):
        div.validate_target(target, 3, "shares")


def test_validate_target_accepts_rounding_and_batches():
    div.validate_target((0.33333, 0.33333, 0.33333), 3, "target")
    div.validate_target(torch.full((2, 3), 1 / 3), 3, "target")
