from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lit_madrl.rewards import GAPO, L2
from lit_madrl.types import Scores

UNIFORM = torch.full((1, 4), 0.25, dtype=torch.float64)


def test_golden_values_as_published():
    # Valid frequencies (2/3, 1/3, 0, 0), L = 4.
    rewards = GAPO()(Scores.build(torch.tensor([[0, 0, 1, -1]])), UNIFORM)
    expected = torch.tensor([[1.25 - 2 / 3, 1.25 - 2 / 3, 1.25 - 1 / 3, -1]], dtype=torch.float64)
    torch.testing.assert_close(rewards, expected)


def test_is_l2_under_the_uniform_target_plus_one_on_valid_rollouts():
    scores = Scores.build(torch.tensor([[0, 3, 3, 1, 3, 0]]))
    torch.testing.assert_close(GAPO()(scores, UNIFORM), L2()(scores, UNIFORM) + 1)


def test_inserted_rollouts_are_not_counted():
    scores = Scores.build(torch.tensor([[0, 0, 1, 2]]))
    scores = replace(scores, on_policy=torch.tensor([[True, True, False, False]]))
    torch.testing.assert_close(GAPO()(scores, UNIFORM), torch.tensor([[0.25, 0.25, 1.25, 1.25]]).double())


def test_warns_of_a_target_it_ignores():
    assert not list(GAPO().warnings(UNIFORM[0], 4))
    (warning,) = GAPO().warnings(torch.tensor([0.7, 0.3]), 4)
    assert "ignores the target" in warning


def test_category_beyond_the_target():
    with pytest.raises(ValueError, match="category: expected"):
        GAPO()(Scores.build(torch.tensor([[4]])), UNIFORM)
