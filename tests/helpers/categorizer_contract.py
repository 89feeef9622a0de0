"""What every categorizer must hold: subclass ``CategorizerContract`` with its three fixtures."""

from __future__ import annotations

import pytest
import torch

from lit_madrl.tasks.base import Categorizer
from tests.helpers.judge_contract import Examples, Judge, JudgeContract


class CategorizerContract(JudgeContract):
    """The suite; among the examples are off-support completions and every one of the K categories."""

    dtype = torch.long

    @pytest.fixture
    def categorizer(self) -> Categorizer:
        raise NotImplementedError

    @pytest.fixture
    def num_categories(self) -> int:
        raise NotImplementedError

    @pytest.fixture
    def judge(self, categorizer: Categorizer) -> Judge:
        return categorizer

    def test_off_support_or_one_of_k(self, judge: Judge, examples: Examples, num_categories: int) -> None:
        assert judge(*examples).unique().tolist() == list(range(-1, num_categories))

    def test_nothing_is_off_support(self, judge: Judge, examples: Examples) -> None:
        assert (judge(examples[0], [["", " \n"] for _ in examples[0]]) == -1).all()
