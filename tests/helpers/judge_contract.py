"""What categorizers and verifiers have in common: one judgement of each text, whatever stands beside it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lit_madrl.types import Problem

Judge = Callable[[Sequence[Problem], Sequence[Sequence[str]]], Tensor]
Examples = tuple[list[Problem], list[list[str]]]

NASTY = [
    "",
    " \n",
    "\x00",
    "\ud800",
    "{" * 3000,
    "\\boxed{" * 500,
    "[" * 3000,
    "9" * 5000,
    "####" * 500,
    "a,b" * 500,
]


class JudgeContract:
    """The suite; ``examples`` are P >= 2 different problems with G >= 3 texts each."""

    dtype: torch.dtype

    @pytest.fixture
    def judge(self) -> Judge:
        raise NotImplementedError

    @pytest.fixture
    def examples(self) -> Examples:
        raise NotImplementedError

    def test_shape_and_dtype(self, judge: Judge, examples: Examples) -> None:
        problems, texts = examples
        judged = judge(problems, texts)
        assert judged.shape == (len(problems), len(texts[0]))
        assert judged.dtype == self.dtype
        assert judged.device.type == "cpu"
        assert len(judged.unique()) > 1, "the examples should not all be judged alike"

    def test_no_problems_and_no_completions_keep_their_shape(self, judge: Judge, examples: Examples) -> None:
        assert judge([], []).shape == (0, 0)
        empty = judge(examples[0], [[] for _ in examples[0]])
        assert empty.shape == (len(examples[0]), 0)
        assert empty.dtype == self.dtype

    def test_inputs_are_not_mutated(self, judge: Judge, examples: Examples) -> None:
        before = copy.deepcopy(examples)
        judge(*examples)
        assert examples == before

    def test_any_sequences_will_do(self, judge: Judge, examples: Examples) -> None:
        problems, texts = examples
        assert torch.equal(judge(tuple(problems), tuple(map(tuple, texts))), judge(problems, texts))

    def test_permuting_problems_permutes_rows(self, judge: Judge, examples: Examples) -> None:
        problems, texts = examples
        assert torch.equal(judge(problems[::-1], texts[::-1]), judge(problems, texts).flip(0))

    def test_permuting_completions_permutes_columns(self, judge: Judge, examples: Examples) -> None:
        problems, texts = examples
        order = [*range(1, len(texts[0])), 0]
        permuted = judge(problems, [[group[g] for g in order] for group in texts])
        assert torch.equal(permuted, judge(problems, texts)[:, order])

    def test_a_completion_is_judged_alone(self, judge: Judge, examples: Examples) -> None:
        problems, texts = examples
        together = judge(problems, texts)
        for p, problem in enumerate(problems):
            for g, text in enumerate(texts[p]):
                assert judge([problem], [[text]]).item() == together[p, g]

    def test_a_second_call_judges_alike(self, judge: Judge, examples: Examples) -> None:
        first = judge(*examples)
        kept = first.clone()
        assert torch.equal(judge(*examples), kept)
        first.zero_()  # nor is the result kept
        assert torch.equal(judge(*examples), kept)

    def test_threads_may_call(self, judge: Judge, examples: Examples) -> None:
        expected = judge(*examples)
        with ThreadPoolExecutor(4) as threads:
            for judged in threads.map(lambda _: judge(*examples), range(8)):
                assert torch.equal(judged, expected)

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda judge: pickle.loads(pickle.dumps(judge))])
    def test_copies_and_pickles(
        self, judge: Judge, examples: Examples, clone: Callable[[Judge], Judge]
    ) -> None:
        expected = judge(*examples)  # before and after its first use
        assert torch.equal(clone(judge)(*examples), expected)

    def test_any_text_is_judged(self, judge: Judge, examples: Examples) -> None:
        problems, _ = examples
        judged = judge(problems, [NASTY for _ in problems])
        assert judged.shape == (len(problems), len(NASTY))

    def test_bad_groups_are_refused(self, judge: Judge, examples: Examples) -> None:
        problems, texts = examples
        with pytest.raises(ValueError, match=r"completions: expected .* 1 problems, got 0"):
            judge(problems[:1], [])
        with pytest.raises(ValueError, match=r"completions: expected groups of one size, got sizes \[1, 2\]"):
            judge(problems[:2], [texts[0][:1], texts[1][:2]])
