from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_madrl.functional import clip_fraction, clipped_surrogate, token_weights, weighted_token_sum

REDUCTIONS = ["grpo", "dr_grpo", "dapo"]


def log_ratios(*ratios: float) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.3, 0.0),  # good and already likelier than 1 + 0.3: clipped
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),  # bad and already rarer than 1 - 0.2: clipped
        (1.5, -1.0, 1.5, 1.5),  # bad but likelier: never clipped
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_golden_values_and_gradients(ratio, advantage, loss, gradient):
    logprobs = log_ratios(ratio).requires_grad_()
    actual = clipped_surrogate(logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.3)
    (slope,) = torch.autograd.grad(actual.sum(), logprobs)
    assert actual.item() == pytest.approx(loss)
    assert slope.item() == pytest.approx(gradient)


def test_detached_logprobs_give_the_plain_policy_gradient():
    logprobs = torch.tensor([-3.0, -0.1], requires_grad=True)
    advantages = torch.tensor([2.0, -5.0])
    loss = clipped_surrogate(logprobs, logprobs.detach(), advantages, 0.0, 0.0)
    assert torch.equal(torch.autograd.grad(loss.sum(), logprobs)[0], -advantages)


def test_huge_ratio_of_a_dead_group_is_not_nan():
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    loss = clipped_surrogate(logprobs, torch.tensor([-200.0, -200.0]), torch.tensor([0.0, -1.0]))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss[0] == 0
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


def test_clip_fraction_counts_active_clips_alone():
    ratios = log_ratios(1.5, 1.5, 0.5, 0.5, 1.0, 1.5)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    assert clip_fraction(ratios, torch.zeros(6), advantages).item() == pytest.approx(2 / 6)
    assert clip_fraction(torch.zeros(0), torch.zeros(0), torch.zeros(0)).item() == 0


@pytest.mark.parametrize("function", [clipped_surrogate, clip_fraction])
def test_bad_clip_bounds(function):
    with pytest.raises(ValueError, match=r"clip_low: expected a number in \[0, 1\], got 1.3"):
        function(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip_low=1.3)
    with pytest.raises(ValueError, match=r"clip_high: expected a number >= 0, got -0\.2"):
        function(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip_high=-0.2)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("grpo", (1 / (2 * 4), 1 / (5 * 4), 2 / (1 * 4), 0.0)),
        ("dr_grpo", (1 / (10 * 4), 1 / (10 * 4), 2 / (10 * 4), 0.0)),
        ("dapo", (1 / 9, 1 / 9, 2 / 9, 0.0)),
    ],
)
def test_golden_token_weights(reduction, expected):
    # Lengths 2, 5, 1 (that completion came twice) and an empty row: 9 tokens in 4 sequences.
    weights = token_weights(
        torch.tensor([2, 5, 1, 0]),
        torch.tensor([1.0, 1.0, 2.0, 1.0]),
        reduction,
        num_sequences=4,
        num_tokens=9,
        max_length=10,
    )
    torch.testing.assert_close(weights, torch.tensor(expected))


def gradient_in_parts(lengths: list[int], parts: list[list[int]], reduction: str) -> Tensor:
    """Sum of the gradients of the parts (micro-batches or ranks), each loss with the global counts."""
    generator = torch.Generator().manual_seed(1)
    logprobs = torch.randn(len(lengths), max(lengths), generator=generator).double()
    advantages = torch.randn(len(lengths), generator=generator).double()
    parameter = torch.ones((), dtype=torch.float64, requires_grad=True)
    for rows in parts:
        length = torch.tensor([lengths[r] for r in rows])
        mask = torch.arange(max(lengths)) < length.unsqueeze(-1)
        flat = (parameter * logprobs[rows])[mask]
        advantage = advantages[rows].repeat_interleave(length)
        loss = clipped_surrogate(flat, flat.detach(), advantage) * logprobs[rows][mask]
        weights = token_weights(
            length,
            torch.ones(len(rows), dtype=torch.float64),
            reduction,
            num_sequences=len(lengths),
            num_tokens=sum(lengths),
            max_length=128,
        )
        weighted_token_sum(loss, length, weights).backward()
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_token_denominator_accumulation_1_and_4_give_equal_gradients(reduction):
    lengths = [3, 1, 7, 2, 9, 4, 4, 1]
    whole = gradient_in_parts(lengths, [list(range(8))], reduction)
    torch.testing.assert_close(gradient_in_parts(lengths, [[0, 1], [2, 3], [4, 5], [6, 7]], reduction), whole)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_token_denominator_ranks_with_1_and_100_tokens_equal_one_rank(reduction):
    whole = gradient_in_parts([1, 100], [[0, 1]], reduction)
    torch.testing.assert_close(gradient_in_parts([1, 100], [[0], [1]], reduction), whole)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_multiplicity_equals_repeating_the_row(reduction):
    kwargs = {"num_sequences": 3, "num_tokens": 8, "max_length": 5}
    once = token_weights(torch.tensor([3, 2]), torch.tensor([2.0, 1.0]), reduction, **kwargs)
    thrice = token_weights(torch.tensor([3, 3, 2]), torch.ones(3), reduction, **kwargs)
    values = torch.tensor([1.0, -2.0, 4.0, 3.0, 5.0])
    repeated = torch.cat([values[:3], values])
    torch.testing.assert_close(
        weighted_token_sum(values, torch.tensor([3, 2]), once),
        weighted_token_sum(repeated, torch.tensor([3, 3, 2]), thrice),
    )


def test_normalizer_with_one_truncated_row_of_two_left_out():
    # The row of 4 tokens was truncated and is left out. Counted out of the global counts it dilutes nothing;
    # kept in them it does: the caller chooses, nothing is implied by the row's weight alone.
    lengths, keep = torch.tensor([2, 4]), torch.tensor([1.0, 0.0])
    out = token_weights(lengths, keep, "dapo", num_sequences=1, num_tokens=2, max_length=4)
    kept = token_weights(lengths, keep, "dapo", num_sequences=2, num_tokens=6, max_length=4)
    assert out.tolist() == [0.5, 0.0]
    torch.testing.assert_close(kept, torch.tensor([1 / 6, 0.0]))
    out = token_weights(lengths, keep, "grpo", num_sequences=1, num_tokens=2, max_length=4)
    assert out.tolist() == [0.5, 0.0]


def test_nan_at_a_padded_slot_never_enters():
    padded = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.nan, math.nan]], requires_grad=True)
    lengths = torch.tensor([2, 1])
    mask = torch.arange(3) < lengths.unsqueeze(-1)
    weights = token_weights(lengths, torch.ones(2), "grpo", num_sequences=2, num_tokens=3, max_length=3)
    loss = weighted_token_sum(padded[mask], lengths, weights)
    assert loss.item() == pytest.approx((1.5 + 4) / 2)
    (gradient,) = torch.autograd.grad(loss, padded)
    assert gradient.tolist() == [[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]


def test_padding_among_the_token_values_is_an_error():
    with pytest.raises(ValueError, match=r"token_values: expected shape \[3\].* got \[6\]"):
        weighted_token_sum(torch.zeros(6), torch.tensor([2, 1]), torch.ones(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "mean"}, "reduction: expected one of grpo, dr_grpo, dapo, got 'mean'"),
        ({"num_sequences": 0}, "num_sequences: expected a number > 0 for reduction 'grpo', got 0"),
        ({"reduction": "dapo", "num_tokens": 0}, "num_tokens: expected a number > 0"),
        ({"reduction": "dr_grpo", "max_length": 0}, "max_length: expected a number > 0"),
        ({"row_weights": torch.ones(3)}, "row_weights: expected the shape"),
    ],
)
def test_bad_token_weight_arguments(change, message):
    arguments = {
        "mask_lengths": torch.tensor([1, 2]),
        "row_weights": torch.ones(2),
        "reduction": "grpo",
        "num_sequences": 2,
        "num_tokens": 3,
        "max_length": 4,
    }
    with pytest.raises(ValueError, match=message):
        token_weights(**(arguments | change))
