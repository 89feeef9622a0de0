"""The rules of screening on texts by hand, and the sample's proportions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_madrl.data.screening import is_multiple_choice, is_short_expression, sample_by_difficulty


@pytest.mark.parametrize(
    ("question", "answer", "expected"),
    [
        ("Which is prime? (A) 4 (B) 6 (C) 7 (D) 9", "7", True),
        ("Choose:\nA. yes\nB. no\nC. perhaps", "B", True),
        (r"Pick \text{(A)} 1 \text{(B)} 2 \text{(C)} 3", r"\text{(B)}", True),
        ("Which is larger, (A) or (B)?", "B", True),
        ("Let A be a matrix and B. Find C.", "3", False),
        ("Find the area of triangle ABC.", "C", False),  # a letter that the question never offers
        ("Let A, B, C be sets.", "A", False),
    ],
)
def test_multiple_choice(question: str, answer: str, expected: bool) -> None:
    assert is_multiple_choice(question, answer) is expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("42", True),
        ("1,000", True),
        (r"1,\!000,\!000", True),
        (r"\frac{\pi}{2}", True),
        ("(0, 1]", True),
        (r"\left( 3, \frac{\pi}{2} \right)", True),
        (r"\{1, 2\}", True),
        ("Yes", True),
        ("", False),
        ("1, 2", False),
        ("x = 1 or x = 2", False),
        (r"x = 1 \text{ and } y = 2", False),
        ("The sequence converges to zero", False),
        ("1\n2", False),
        ("x" * 51, False),
    ],
)
def test_short_expression(answer: str, expected: bool) -> None:
    assert is_short_expression(answer) is expected


@given(st.lists(st.floats(0, 10), max_size=30), st.integers(0, 40), st.integers(0, 3))
def test_a_sample_is_a_sorted_subset(difficulties: list[float], count: int, seed: int) -> None:
    chosen = sample_by_difficulty(difficulties, count, seed)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, len(difficulties))
    assert chosen == sample_by_difficulty(difficulties, count, seed)


def test_the_sample_is_in_proportion_to_difficulty() -> None:
    """One of three items of weights 1, 2 and 5: drawn with probability 1/8, 2/8, 5/8."""
    drawn = [sample_by_difficulty([1.0, 2.0, 5.0], 1, seed)[0] for seed in range(4000)]
    assert [drawn.count(i) / 4000 for i in range(3)] == pytest.approx([0.125, 0.25, 0.625], abs=0.025)
