from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lit_madrl.functional import (
    masked_weights,
    mean_of_copies,
    out_of_bounds,
    sequence_log_ratios,
    truncated_weights,
)

RATIOS = torch.tensor([0.1, 0.25, 0.5, 1.0, 1.75, 3.0], dtype=torch.float64)


def test_golden_values() -> None:
    logs = RATIOS.log()
    for weights, expected in (
        (truncated_weights(logs, 2.0), [0.1, 0.25, 0.5, 1.0, 1.75, 2.0]),
        (truncated_weights(logs, 1.5, 0.3), [0.3, 0.3, 0.5, 1.0, 1.5, 1.5]),
        (truncated_weights(logs, 1.0, 1.0), [1.0] * 6),
        (masked_weights(logs, 2.0), [0.1, 0.25, 0.5, 1.0, 1.75, 0.0]),
        (masked_weights(logs, 1.5, 0.3), [0.0, 0.0, 0.5, 1.0, 0.0, 0.0]),
    ):
        assert weights.tolist() == pytest.approx(expected)
    assert out_of_bounds(logs, 1.5, 0.3).tolist() == [True, True, False, False, True, True]
    assert out_of_bounds(logs, 2.0).tolist() == [False] * 5 + [True]


def test_equal_distributions_have_the_weight_one_exactly() -> None:
    zeros = torch.zeros(3)
    assert truncated_weights(zeros, 2.0).tolist() == masked_weights(zeros, 2.0, 0.5).tolist() == [1.0] * 3


def test_the_ratio_of_a_sequence_is_the_product_of_its_tokens() -> None:
    ratios = torch.tensor([2.0, 0.5, 3.0, 4.0, 0.25], dtype=torch.float64)
    sequences = torch.tensor([0, 2, 0, 2, 2])
    assert sequence_log_ratios(ratios.log(), sequences, 4).exp().tolist() == pytest.approx(
        [6.0, 1.0, 0.5, 1.0]
    )


def test_the_mean_of_copies_by_hand() -> None:
    weights, tokens = torch.tensor([0.5, 2.0, 1.5, 0.0]), torch.tensor([3, 0, 3, 1])
    assert mean_of_copies(weights, tokens, 5).tolist() == [2.0, 0.0, 1.0, 1.0, 1.0]
    assert mean_of_copies(weights[:0], tokens[:0], 2).tolist() == [1.0, 1.0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(1, 100), st.floats(0, 1))
def test_weights_are_bounded_and_finite(values: list[float], cap: float, floor: float) -> None:
    logs = torch.tensor(values, dtype=torch.float64)
    truncated, masked = truncated_weights(logs, cap, floor), masked_weights(logs, cap, floor)
    outside = out_of_bounds(logs, cap, floor)
    assert bool((truncated >= floor * (1 - 1e-9)).all())
    assert bool((truncated <= cap * (1 + 1e-9)).all())
    assert torch.equal(masked, truncated.masked_fill(outside, 0))


def test_infinities_are_bounded_and_nan_stays() -> None:
    logs = torch.tensor([100.0, math.inf, -math.inf, math.nan])
    assert truncated_weights(logs, 2.0)[:3].tolist() == pytest.approx([2.0, 2.0, 0.0])
    assert masked_weights(logs, 2.0)[:3].tolist() == [0.0, 0.0, 0.0]
    assert bool(truncated_weights(logs, 2.0)[3].isnan())
    assert bool(masked_weights(logs, 2.0)[3].isnan())


def test_weights_have_no_gradient() -> None:
    logs = torch.zeros(2, requires_grad=True)
    assert not truncated_weights(logs, 2.0).requires_grad
    assert not masked_weights(logs, 2.0).requires_grad


@pytest.mark.parametrize(
    ("cap", "floor", "message"),
    [
        (0.9, 0.0, "cap"),
        (math.inf, 0.0, "cap"),
        (math.nan, 0.0, "cap"),
        (2.0, -0.1, "floor"),
        (2.0, 1.1, "floor"),
    ],
)
def test_bounds_are_checked(cap: float, floor: float, message: str) -> None:
    for function in (truncated_weights, masked_weights, out_of_bounds):
        with pytest.raises(ValueError, match=f"{message}: expected"):
            function(torch.zeros(1), cap, floor)


# All completions of two tokens out of three, the second given the first

POLICY = torch.tensor([0.3, -1.2, 0.8, 0.1, 0.9, -0.4, 1.1, 0.2, -0.7, 0.5, -0.3, 0.6], dtype=torch.float64)
SAMPLER = POLICY + torch.tensor([0.4, -0.2, 0.1] * 2 + [-0.3, 0.5, 0.2] * 2, dtype=torch.float64)
COMPLETIONS = list(product(range(3), range(3)))
REWARDS = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, 0.0, 0.0, 3.0, -2.0], dtype=torch.float64)


def tokens_logprobs(logits: Tensor) -> Tensor:
    first, second = logits[:3].log_softmax(0), logits[3:].view(3, 3).log_softmax(-1)
    return torch.stack([torch.stack([first[x], second[x, y]]) for x, y in COMPLETIONS])


def expected_gradient(level: str | None) -> Tensor:
    """E_sampler[sum over tokens of w R grad log pi], exactly."""
    logits = POLICY.clone().requires_grad_()
    logprobs, sampler = tokens_logprobs(logits), tokens_logprobs(SAMPLER)
    weights = torch.ones_like(sampler)
    if level == "sequence":
        rows = torch.arange(9).repeat_interleave(2)
        ratios = sequence_log_ratios((logprobs - sampler).flatten(), rows, 9)
        weights = truncated_weights(ratios, 1e3)[:, None].expand(9, 2)
    elif level == "token":
        weights = truncated_weights(logprobs - sampler, 1e3)
    loss = (sampler.sum(1).exp() * REWARDS * (weights * logprobs).sum(1)).sum()
    return torch.autograd.grad(loss, logits)[0]


def test_sequence_weights_give_the_on_policy_gradient_in_expectation() -> None:
    logits = POLICY.clone().requires_grad_()
    value = (tokens_logprobs(logits).sum(1).exp() * REWARDS).sum()
    on_policy = torch.autograd.grad(value, logits)[0]
    torch.testing.assert_close(expected_gradient("sequence"), on_policy, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(expected_gradient(None), on_policy, atol=1e-2)
    # Token weights leave the first token's distribution to the sampler, as context and in the return.
    assert not torch.allclose(expected_gradient("token"), on_policy, atol=1e-2)
