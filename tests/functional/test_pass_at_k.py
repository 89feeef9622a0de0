from __future__ import annotations

from itertools import combinations

import pytest
import torch

from lit_madrl.functional import average_at_k, pass_at_k


def reference(n: int, c: int, k: int) -> float:
    """Share of all k-subsets of n samples, of which the first c are correct, that hold a correct one."""
    subsets = list(combinations(range(n), k))
    return sum(min(subset) < c for subset in subsets) / len(subsets)


@pytest.mark.parametrize("n", [1, 4, 6])
def test_against_enumeration_of_subsets(n):
    for k in range(1, n + 1):
        correct = torch.arange(n + 1)
        expected = torch.tensor([reference(n, c, k) for c in range(n + 1)], dtype=torch.float64)
        torch.testing.assert_close(pass_at_k(n, correct, k), expected, rtol=1e-13, atol=1e-15)


def test_golden_values():
    assert pass_at_k(12, 1, 12).item() == 1
    assert pass_at_k(4, 2, 2).item() == pytest.approx(1 - 1 / 6)
    assert pass_at_k(5, 0, 3).item() == 0


def test_stable_for_many_samples():
    assert pass_at_k(10**6, 1, 10).item() == pytest.approx(1e-5, rel=1e-12)
    assert pass_at_k(10**6, 10**6 - 5, 10).item() == 1


def test_vectorized_over_both_counts():
    actual = pass_at_k(torch.tensor([4, 6]), torch.tensor([[1], [2]]), 3)
    expected = [[reference(4, 1, 3), reference(6, 1, 3)], [reference(4, 2, 3), reference(6, 2, 3)]]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_average():
    assert average_at_k(12, torch.tensor([0, 3, 12])).tolist() == [0, 0.25, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 1, 5), r"k: expected an integer in \[1, num_samples = 4\], got 5"),
        ((4, 1, 0), "k: expected an integer"),
        ((4, 5, 1), r"num_correct: expected integers in \[0, num_samples = 4\], got 5"),
        ((0, 0, 1), "num_samples: expected integers >= 1, got 0"),
    ],
)
def test_bad_counts(arguments, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(*arguments)
