"""E[R grad log pi] = -grad D, by enumeration in float64 on a policy whose completions are its categories."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples.hellinger import Hellinger
from lit_madrl.rewards import L2, DivergenceShaper, ForwardKL, JensenShannon, ReverseKL
from lit_madrl.types import Scores

CLOSED_FORMS = [L2, ForwardKL, ReverseKL, JensenShannon]
SHAPERS = [*CLOSED_FORMS, Hellinger]
LOGITS = st.lists(st.floats(-4, 4), min_size=4, max_size=4)
INTERIOR = st.lists(st.floats(0.05, 1), min_size=4, max_size=4)
WITH_ZEROS = st.lists(st.just(0.0) | st.floats(0.05, 1), min_size=4, max_size=4).filter(any)


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normalized(weights: list[float]) -> Tensor:
    return tensor(weights) / sum(weights)


@pytest.mark.parametrize("build", SHAPERS)
@settings(deadline=None, max_examples=50)
@given(logits=LOGITS, weights=INTERIOR | WITH_ZEROS)
def test_policy_gradient_with_this_reward_descends_the_divergence(build, logits, weights):
    shaper, target = build(), normalized(weights)
    parameters = tensor(logits).requires_grad_()
    logprobs = parameters.log_softmax(-1)
    policy = logprobs.exp()
    (exact,) = torch.autograd.grad(shaper.divergence(target, policy), parameters, retain_graph=True)
    rewards = shaper.reward(target, policy.detach())
    surrogate = (policy.detach() * rewards * logprobs).sum()
    (policy_gradient,) = torch.autograd.grad(surrogate, parameters)
    torch.testing.assert_close(policy_gradient, -exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("build", CLOSED_FORMS)
@settings(deadline=None, max_examples=50)
@given(logits=LOGITS, weights=INTERIOR)
def test_closed_form_equals_the_derivative(build, logits, weights):
    shaper, policy, target = build(), tensor(logits).softmax(-1), normalized(weights)
    if build is ReverseKL:
        # Its reward is 0 at the smoothed target, where the default's constant looks at the target itself.
        default = DivergenceShaper.reward(shaper, target, policy)
        offset = shaper.reward(target, policy) - default
        torch.testing.assert_close(offset, offset[:1].expand(4), rtol=1e-10, atol=1e-10)
        shaper = ReverseKL(epsilon=0.0)
    derived = DivergenceShaper.reward(shaper, target, policy)
    torch.testing.assert_close(shaper.reward(target, policy), derived, rtol=1e-10, atol=1e-10)


@settings(deadline=None, max_examples=30)
@given(logits=LOGITS, weights=INTERIOR | WITH_ZEROS)
def test_hellinger_reward_by_autograd_equals_its_closed_form(logits, weights):
    policy, target = tensor(logits).softmax(-1), normalized(weights)
    expected = 0.5 * ((target / policy).sqrt() - 1)
    torch.testing.assert_close(Hellinger().reward(target, policy), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("build", SHAPERS)
@given(weights=INTERIOR)
@settings(deadline=None, max_examples=20)
def test_reward_is_zero_at_the_target(build, weights):
    target = normalized(weights)
    policy = 0.99 * target + 0.01 / 4 if build is ReverseKL else target
    assert build().reward(target, policy).abs().max() < 1e-14


def expected_group_gradient(
    shaper: DivergenceShaper, target: Tensor, parameters: Tensor, size: int
) -> Tensor:
    """E over all K^G groups of the mean over rollouts of R_i grad log pi(z_i)."""
    logprobs = parameters.log_softmax(-1)
    groups = torch.tensor(list(product(range(len(target)), repeat=size)))
    rewards = shaper(Scores.build(groups), target.expand(len(groups), -1))
    log_likelihood = logprobs[groups]
    probability = log_likelihood.sum(-1).exp().detach()
    surrogate = (probability * (rewards * log_likelihood).mean(-1)).sum()
    return torch.autograd.grad(surrogate, parameters)[0]


@settings(deadline=None, max_examples=20)
@given(
    logits=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    weights=st.lists(st.floats(0.1, 1), min_size=3, max_size=3),
)
def test_l2_with_leave_one_out_is_exactly_unbiased_over_all_groups_of_three(logits, weights):
    target, parameters = normalized(weights), tensor(logits).requires_grad_()
    divergence = L2().divergence(target, parameters.softmax(-1))
    (exact,) = torch.autograd.grad(divergence, parameters)
    actual = expected_group_gradient(L2(leave_one_out=True), target, parameters, 3)
    torch.testing.assert_close(actual, -exact, rtol=0, atol=1e-14)


def test_l2_without_leave_one_out_is_biased():
    target, parameters = tensor([0.2, 0.3, 0.5]), tensor([1.0, 0.0, -1.0]).requires_grad_()
    (exact,) = torch.autograd.grad(L2().divergence(target, parameters.softmax(-1)), parameters)
    actual = expected_group_gradient(L2(), target, parameters, 3)
    assert (actual + exact).abs().max() > 1e-2
