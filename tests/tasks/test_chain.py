from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_madrl.tasks import ChainVerifier, Verifier
from lit_madrl.types import Problem
from tests.helpers.judge_contract import Examples
from tests.helpers.verifier_contract import VerifierContract

SEVEN = Problem("p", "2 + 5 ?", answer="7")
VERIFIER = ChainVerifier()


@pytest.mark.parametrize(
    ("text", "correct", "formed"),
    [
        ("+ 5 7 ; [ 7 ]", 1, 1),
        ("+ 5 7 ; [ 8 ]", 0, 1),
        ("+ 5 9 ; [ 7 ]", 1, 1),
        ("[ 7 ]", 1, 1),
        ("[7]", 1, 1),
        ("[ 8 ] [ 7 ]", 1, 1),
        ("[ 7 ] [ 8 ]", 0, 1),
        ("[ 7 ] ; + 5 8 ;", 1, 1),
        ("[ 7 ] [ ]", 1, 1),
        ("[ [ 7 ]", 1, 1),
        ("[ 7 ] [ 8", 1, 1),
        ("+ 5 7 ;", 0, 0),
        ("", 0, 0),
        ("7", 0, 0),
        ("[ 7", 0, 0),
        ("7 ]", 0, 0),
        ("[ ]", 0, 0),
        ("[ 7 7 ]", 0, 0),
        ("[ - 7 ]", 0, 0),
        ("[ ~ ]", 0, 0),
        ("[ 77 ]", 0, 1),
        ("[ 07 ]", 0, 1),
        ("[ ٧ ]", 0, 0),
        (f"[ {'7' * 10_000} ]", 0, 1),
    ],
)
def test_only_the_last_number_in_brackets_is_read(text: str, correct: int, formed: int) -> None:
    assert VERIFIER([SEVEN], [[text]]).tolist() == [[correct]]
    assert VERIFIER.well_formed([SEVEN], [[text]]).tolist() == [[formed]]


@given(st.text("0123456789[]; +-~", max_size=30), st.integers(0, 52), st.integers(0, 52))
def test_whatever_comes_before_the_last_answer_does_not_count(before: str, last: int, answer: int) -> None:
    problem = Problem("p", "", answer=str(answer))
    assert bool(VERIFIER([problem], [[f"{before}[ {last} ]"]])) == (last == answer)


def test_each_group_is_judged_by_its_own_problem() -> None:
    eight = Problem("q", "", answer="8")
    texts = [["[ 7 ]", "[ 8 ]", ""], ["[ 7 ]", "[ 8 ]", ""]]
    correct = VERIFIER([SEVEN, eight], texts)
    formed = VERIFIER.well_formed([SEVEN, eight], texts)
    assert correct.dtype == formed.dtype == torch.float32
    assert correct.tolist() == [[1, 0, 0], [0, 1, 0]]
    assert formed.tolist() == [[1, 1, 0], [1, 1, 0]]


def test_a_problem_without_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Problem\.answer: expected a number as text, got None in 'q'"):
        VERIFIER([SEVEN, Problem("q", "")], [["[ 7 ]"], ["[ 7 ]"]])


class TestContract(VerifierContract):
    @pytest.fixture
    def verifier(self) -> Verifier:
        return VERIFIER

    @pytest.fixture
    def examples(self) -> Examples:
        texts = ["[ 7 ]", "+ 5 ; [ 8 ]", "7", "[ 7 ] [ 8"]
        return [SEVEN, Problem("q", "", answer="8")], [texts, texts]
