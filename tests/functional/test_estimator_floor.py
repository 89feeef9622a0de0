from __future__ import annotations

import pytest
import torch

from lit_madrl.functional import estimator_floor


@pytest.mark.parametrize(
    ("target", "published"),
    [((0.2, 0.2, 0.2, 0.2, 0.2), 0.00063), ((0.6, 0.3, 0.1, 0.0, 0.0), 0.00032)],
)
def test_published_floor_of_800_draws(target, published):
    assert estimator_floor(target, 800) == pytest.approx(published, rel=0.05)


def test_one_draw_by_hand():
    # A draw from (1/2, 1/2) is a one-hot frequency whichever way it falls: JSD = 3/4 log(4/3).
    assert estimator_floor((0.5, 0.5), 1, simulations=10) == pytest.approx(0.75 * 0.2876820724517809)


def test_deterministic_and_apart_from_the_global_random_state():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first = estimator_floor((0.5, 0.5), 10, simulations=50, seed=3)
    assert torch.rand(1) == expected
    assert first == estimator_floor((0.5, 0.5), 10, simulations=50, seed=3)
    assert first != estimator_floor((0.5, 0.5), 10, simulations=50, seed=4)


def test_certain_target_has_no_floor():
    assert estimator_floor((0.0, 1.0, 0.0), 7, simulations=5) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0.5, 0.5), 0), "draws: expected an integer >= 1, got 0"),
        (((0.5, 0.5), 1, 0), "simulations: expected"),
        (((0.5, 0.6), 1), "target: expected probabilities that sum to 1"),
        ((torch.full((2, 2), 0.5), 1), "target: expected one distribution"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        estimator_floor(*arguments)
