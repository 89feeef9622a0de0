from __future__ import annotations

import math

import pytest
import torch

from lit_madrl.rewards import L2, Additive, Correctness, ForwardKL, Gated, ReverseKL, WithFormat
from lit_madrl.types import Scores

TARGETS = torch.full((1, 2), 0.5, dtype=torch.float64)
# Valid frequencies (2/3, 1/3): L2 rewards -1/6, -1/6, 1/6, -1.
SCORES = Scores.build(
    torch.tensor([[0, 0, 1, -1]]),
    correct=torch.tensor([[1.0, 0.0, 1.0, 1.0]]),
    format=torch.tensor([[1.0, 1.0, 0.0, 0.0]]),
)


def expect(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_correctness_keeps_zeros_and_ignores_targets():
    assert torch.equal(Correctness()(SCORES, TARGETS), expect(1, 0, 1, 1))
    assert torch.equal(Correctness()(SCORES, torch.zeros(1, 0)), torch.tensor([[1.0, 0.0, 1.0, 1.0]]))


def test_additive():
    expected = expect(0.7 - 0.05, -0.05, 0.7 + 0.05, 0.7 - 0.3)
    torch.testing.assert_close(Additive(L2(), alpha=0.7)(SCORES, TARGETS), expected)


def test_additive_at_its_ends_is_one_of_the_two():
    torch.testing.assert_close(Additive(L2(), 1.0)(SCORES, TARGETS), Correctness()(SCORES, TARGETS))
    torch.testing.assert_close(Additive(L2(), 0.0)(SCORES, TARGETS), L2()(SCORES, TARGETS))


def test_gated_gives_wrong_completions_nothing():
    torch.testing.assert_close(Gated(L2())(SCORES, TARGETS), expect(5 / 6, 0, 7 / 6, 0))
    torch.testing.assert_close(Gated(L2(), 0.5)(SCORES, TARGETS), expect(11 / 12, 0, 13 / 12, 0.5))


def test_format_bonus():
    torch.testing.assert_close(WithFormat(Correctness())(SCORES, TARGETS), expect(1.2, 0.2, 1, 1))
    torch.testing.assert_close(WithFormat(Gated(L2()), 0.5)(SCORES, TARGETS), expect(4 / 3, 0.5, 7 / 6, 0))


def test_all_wrong_groups_still_differ_in_reward():
    # So whoever looks for failed groups must look at correctness, not at the shaped reward.
    wrong = Scores.build(torch.tensor([[0, 0, 1, 1]]), correct=torch.zeros(1, 4))
    rewards = Additive(L2(), alpha=0.55)(wrong, torch.tensor([[0.9, 0.1]]))
    assert rewards[0, 0] != rewards[0, 2]
    assert (Gated(L2())(wrong, TARGETS) == 0).all()


@pytest.mark.parametrize("wrap", [lambda d: Additive(d, 0.9), Gated, lambda d: WithFormat(Gated(d))])
def test_warnings_are_those_of_the_divergence(wrap):
    target = torch.tensor([0.99, 0.01])
    inner = list(ReverseKL().warnings(target, 4))
    assert len(inner) == 2
    assert list(wrap(ReverseKL()).warnings(target, 4)) == inner
    assert not list(WithFormat(Correctness()).warnings(target, 4))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Additive(ForwardKL(), 1.1), r"alpha: expected a number in \[0, 1\], got 1.1"),
        (lambda: Additive(ForwardKL(), math.nan), "alpha: expected"),
        (lambda: Gated(ForwardKL(), -1.0), "lambda_g: expected a finite number >= 0, got -1.0"),
        (lambda: Gated(ForwardKL(), math.inf), "lambda_g: expected"),
        (lambda: WithFormat(Correctness(), -0.2), "weight: expected a finite number >= 0, got -0.2"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()
