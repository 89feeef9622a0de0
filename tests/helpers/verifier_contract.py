"""What every verifier must hold: subclass ``VerifierContract`` with fixtures ``verifier`` and ``examples``."""

from __future__ import annotations

import pytest
import torch

from lit_madrl.tasks.base import Verifier
from tests.helpers.judge_contract import Examples, Judge, JudgeContract


class VerifierContract(JudgeContract):
    """The suite; among the examples are right, wrong and malformed completions."""

    dtype = torch.float32

    @pytest.fixture
    def verifier(self) -> Verifier:
        raise NotImplementedError

    @pytest.fixture(params=["correct", "well_formed"])
    def judge(self, request: pytest.FixtureRequest, verifier: Verifier) -> Judge:
        return verifier if request.param == "correct" else verifier.well_formed

    def test_zero_or_one(self, judge: Judge, examples: Examples) -> None:
        assert set(judge(*examples).unique().tolist()) == {0, 1}

    def test_only_the_well_formed_are_correct(self, verifier: Verifier, examples: Examples) -> None:
        correct, well_formed = verifier(*examples), verifier.well_formed(*examples)
        assert (correct <= well_formed).all()
        assert (correct < well_formed).any()

    def test_nothing_is_neither_well_formed_nor_correct(self, judge: Judge, examples: Examples) -> None:
        assert not judge(examples[0], [["", " \n"] for _ in examples[0]]).any()
