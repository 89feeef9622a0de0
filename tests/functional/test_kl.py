from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_madrl.functional import kl_estimate, linearized_exp

LOGITS = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64)
REF = torch.tensor([-0.5, 0.4, 0.1], dtype=torch.float64).log_softmax(-1)


def expected_pathwise_gradient(kind: str, ref: Tensor = REF) -> Tensor:
    """E_pi[d kl_estimate / d logits] over the three tokens, the samples held fixed."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    loss = (logprobs.detach().exp() * kl_estimate(logprobs, ref, kind)).sum()
    return torch.autograd.grad(loss, logits)[0]


def kl_gradient(direction: str, ref: Tensor = REF) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    difference = logprobs - ref if direction == "policy to ref" else ref - logprobs
    weights = logprobs.exp() if direction == "policy to ref" else ref.exp()
    return torch.autograd.grad((weights * difference).sum(), logits)[0]


def test_golden_values():
    logprobs, ref = torch.tensor([math.log(0.5)]).double(), torch.tensor([math.log(0.25)]).double()
    assert kl_estimate(logprobs, ref, "k1").item() == pytest.approx(math.log(2))
    assert kl_estimate(logprobs, ref, "k2").item() == pytest.approx(0.5 * math.log(2) ** 2)
    assert kl_estimate(logprobs, ref, "k3").item() == pytest.approx(0.5 + math.log(2) - 1)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_by_enumeration(kind):
    logprobs = LOGITS.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - REF)).sum()
    torch.testing.assert_close((logprobs.exp() * kl_estimate(logprobs, REF, kind)).sum(), exact)


def test_expected_gradient_of_k1_is_zero():
    torch.testing.assert_close(expected_pathwise_gradient("k1"), torch.zeros(3).double(), rtol=0, atol=1e-14)


def test_expected_gradient_of_k2_is_that_of_kl_from_policy_to_reference():
    torch.testing.assert_close(
        expected_pathwise_gradient("k2"), kl_gradient("policy to ref"), rtol=0, atol=1e-14
    )


def test_expected_gradient_of_k3_is_that_of_kl_from_reference_to_policy():
    torch.testing.assert_close(
        expected_pathwise_gradient("k3"), kl_gradient("ref to policy"), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_gradient_depends_on_the_reference(kind):
    other = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64).log_softmax(-1)
    assert (expected_pathwise_gradient(kind) - expected_pathwise_gradient(kind, other)).abs().max() > 0.1
    logprobs = LOGITS.log_softmax(-1)
    torch.testing.assert_close(expected_pathwise_gradient(kind, logprobs), torch.zeros(3).double())


def test_k3_does_not_overflow_when_the_reference_is_100_nats_above():
    logprobs = torch.tensor([-100.0], requires_grad=True)
    loss = kl_estimate(logprobs, torch.zeros(1), "k3")
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.isfinite().all()
    assert gradient.item() == pytest.approx(1 - math.exp(20), rel=1e-6)


def test_k3_continuation_is_continuous_in_value_and_slope():
    ref = torch.tensor([20 - 1e-9, 20.0, 20 + 1e-9], dtype=torch.float64)
    logprobs = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    value = kl_estimate(logprobs, ref, "k3")
    (slope,) = torch.autograd.grad(value.sum(), logprobs)
    torch.testing.assert_close(value, torch.full_like(value, math.exp(20) - 21), rtol=1e-8, atol=0)
    torch.testing.assert_close(slope, torch.full_like(slope, 1 - math.exp(20)), rtol=1e-8, atol=0)
    # One nat further on, the tangent rather than the exponential.
    further = kl_estimate(torch.zeros(1).double(), torch.tensor([21.0]).double(), "k3")
    assert further.item() == pytest.approx(2 * math.exp(20) - 22, rel=1e-12)


def test_k3_is_exact_for_nearly_equal_float32_policies():
    difference = torch.tensor([1e-4, -1e-4, 3e-4])
    value = kl_estimate(-difference, torch.zeros(3), "k3")
    expected = difference.double().exp() - difference.double() - 1
    torch.testing.assert_close(value.double(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_never_negative_and_zero_at_equality(kind):
    logprobs = torch.linspace(-30, 0, 61)
    assert (kl_estimate(logprobs, logprobs.flip(0), kind) >= 0).all()
    assert (kl_estimate(logprobs, logprobs, kind) == 0).all()


def test_linearized_exp_is_exp_below_the_limit():
    x = torch.linspace(-60, 20, 81, dtype=torch.float64)
    torch.testing.assert_close(linearized_exp(x), x.exp(), rtol=1e-15, atol=0)


def test_unknown_kind():
    with pytest.raises(ValueError, match="kind: expected 'k1', 'k2' or 'k3', got 'k4'"):
        kl_estimate(LOGITS, REF, "k4")
