from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_madrl.functional import prefix_length, reference_surprisal


def by_tokens(logprobs: list[float]) -> list[float]:
    """S_t token by token, from its definition."""
    return [math.fsum(-value for value in logprobs[t:]) for t in range(len(logprobs) + 1)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.floats(-30, 0), max_size=7), min_size=1, max_size=4), st.integers(0, 2))
def test_equals_a_token_by_token_loop_whatever_the_padding(references, extra):
    size = max(map(len, references)) + extra
    lengths = torch.tensor([len(reference) for reference in references])
    rows = [reference + [math.nan] * (size - len(reference)) for reference in references]
    logprobs = torch.tensor(rows, dtype=torch.float64).reshape(len(references), size)
    actual = reference_surprisal(logprobs, lengths)
    assert actual.dtype == torch.float64
    expected = [by_tokens(reference) + [0.0] * (size - len(reference)) for reference in references]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert (actual.diff(dim=-1) <= 0).all()


def test_sums_in_float64():
    logprobs = torch.full((1, 100_000), -0.1)
    expected = 100_000 * float(torch.tensor(0.1))
    assert reference_surprisal(logprobs, torch.tensor([100_000]))[0, 0].item() == pytest.approx(
        expected, rel=1e-10
    )


def test_an_impossible_token_makes_everything_before_it_infinite():
    logprobs = torch.tensor([[-1.0, -math.inf, -2.0]])
    assert reference_surprisal(logprobs, torch.tensor([3])).tolist() == [[math.inf, math.inf, 2.0, 0.0]]


def test_a_logprob_rounded_above_zero_does_not_raise_the_surprisal():
    logprobs = torch.tensor([[-1.0, 1e-7, -0.0]])
    assert reference_surprisal(logprobs, torch.tensor([3])).tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_inputs_are_not_mutated():
    logprobs, lengths = torch.tensor([[-1.0, -2.0]]), torch.tensor([1])
    reference_surprisal(logprobs, lengths)
    assert logprobs.tolist() == [[-1.0, -2.0]]
    assert lengths.tolist() == [1]


@pytest.mark.parametrize(
    ("logprobs", "lengths", "message"),
    [
        (torch.zeros(3), torch.tensor([3]), r"expected shapes \[R, T\] and \[R\], got \[3\] and \[1\]"),
        (torch.zeros(2, 3), torch.tensor([3]), r"got \[2, 3\] and \[1\]"),
        (torch.zeros(1, 3), torch.tensor([4]), r"lengths: expected integers in 0..T = 3, got \[4\]"),
        (torch.zeros(1, 3), torch.tensor([-1]), r"lengths: .* got \[-1\]"),
        (torch.tensor([[0.0, math.nan]]), torch.tensor([2]), "got nan in reference 0, token 1"),
    ],
)
def test_bad_input(logprobs, lengths, message):
    with pytest.raises(ValueError, match=message):
        reference_surprisal(logprobs, lengths)


# S = 8 6 6 4 2 1 0: half is reached at t = 3 exactly, a quarter at t = 4, three quarters at the tie t = 1, 2.
SURPRISAL = torch.tensor([8.0, 6.0, 6.0, 4.0, 2.0, 1.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("level", "boundaries", "expected"),
    [
        (1.0, [1, 2, 3], 0),
        (0.5, [1, 3, 5], 3),  # the target itself
        (0.5, [1, 2, 4, 5], 4),  # the first one after it
        (0.5, [1, 2], 2),  # none after it: the latest before
        (0.5, [], 0),
        (0.75, [1, 2, 3], 2),  # a tie: the latest t
        (0.75, [1, 3], 3),
        (0.25, [2, 4], 4),
        (0.25, [5], 5),
        (0.26, [1, 2, 3], 3),
        (0.8, [1, 2], 0),  # even the first token is too much: no boundary is looked for
        (1e-9, [3, 5], 5),
        (0.999, [1], 0),
    ],
)
def test_prefix_length_golden_values(level, boundaries, expected):
    assert prefix_length(SURPRISAL, level, boundaries) == expected


def test_prefix_length_where_the_first_tokens_cost_nothing():
    surprisal = torch.tensor([2.0, 2.0, 2.0, 0.5, 0.0], dtype=torch.float64)
    assert prefix_length(surprisal, 0.5, [1, 3]) == 3
    assert prefix_length(surprisal, 0.5, [1, 2]) == 2
    assert prefix_length(surprisal, 1.0, [1, 2]) == 0


def slowly(surprisal: list[float], level: float, boundaries: list[int]) -> int:
    if level == 1:
        return 0
    latest = max(t for t in range(len(surprisal)) if surprisal[t] >= level * surprisal[0])
    if latest == 0:
        return 0
    later = [b for b in boundaries if b >= latest]
    earlier = [b for b in boundaries if b < latest]
    return later[0] if later else max(earlier, default=0)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=9).filter(any),
    st.sampled_from([1.0, 0.5, 0.25, 0.9]),
    st.sets(st.integers(1, 8)),
)
def test_prefix_length_against_the_rule_read_out(steps, level, boundaries):
    surprisal = by_tokens([-step for step in steps])
    inside = sorted(b for b in boundaries if b < len(steps))
    actual = prefix_length(torch.tensor(surprisal, dtype=torch.float64), level, inside)
    assert actual == slowly(surprisal, level, inside)
    assert actual in {0, *inside}


@pytest.mark.parametrize(
    ("surprisal", "level", "boundaries", "message"),
    [
        (SURPRISAL, 0.0, [1], r"level: expected a number in \(0, 1\], got 0.0"),
        (SURPRISAL, 1.1, [1], "level: .* got 1.1"),
        (SURPRISAL, 0.5, [2, 2], r"boundaries: .* got \[2, 2\]"),
        (SURPRISAL, 0.5, [0, 2], r"boundaries: .* got \[0, 2\]"),
        (torch.zeros(3), 0.5, [1], "surprisal: expected a finite positive S_0, got 0.0"),
        (torch.tensor([math.inf, 1.0, 0.0]), 0.5, [1], "surprisal: .* got inf"),
    ],
)
def test_prefix_length_bad_input(surprisal, level, boundaries, message):
    with pytest.raises(ValueError, match=message):
        prefix_length(surprisal, level, boundaries)
