"""Chains of additions and subtractions modulo a prime, and a careless student who gets them wrong."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from lit_madrl.data.prompts import PromptDataModule, require_at_least, seeded
from lit_madrl.types import Problem

Split = Literal["test", "validation", "train"]


class Operation(NamedTuple):
    """``+`` or ``-`` and what is added or taken away, 2 to 9."""

    sign: str
    operand: int


class Question(NamedTuple):
    """A number and the operations to apply to it from left to right."""

    start: int
    operations: tuple[Operation, ...]


SYMBOLS = (";", "[", "]", "?", "+", "-", "~")
HARD = tuple(
    Operation(sign, operand)
    for sign, operands in (("+", (3, 6, 8)), ("-", (4, 7, 9)))
    for operand in operands
)
EASY = tuple(op for op in (Operation(s, d) for s in "+-" for d in range(2, 10)) if op not in HARD)

MODULUS = 97
"""The task's own: large enough that a guess is seldom right."""

_MISTAKE = 3
_TEST_QUESTIONS = 198
_VALIDATION_QUESTIONS = 66
_PROMPTS_PER_EPOCH = 4096
_SPLIT_SEED = 0


def vocabulary(modulus: int) -> tuple[str, ...]:
    """The words of all questions and solutions: the symbols, and one for each number."""
    return (*SYMBOLS, *map(str, range(modulus)))


def render_prompt(question: Question) -> str:
    """``17 + 3 - 5 ?``: words with one space between them."""
    return " ".join([str(question.start), *(f"{op.sign} {op.operand}" for op in question.operations), "?"])


def chain_values(question: Question, modulus: int) -> list[int]:
    """The value after each operation, in [0, modulus)."""
    values, value = [], question.start
    for op in question.operations:
        value = _apply(op, value) % modulus
        values.append(value)
    return values


def render_solution(question: Question, values: Sequence[int], skipped: Sequence[bool]) -> str:
    """``+ 3 20 ; - 5 15 ; [ 15 ]``: each operation with its value, or with ``~`` where that is skipped."""
    steps = [
        f"{op.sign} {op.operand} {'~' if skip else value} ;"
        for op, value, skip in zip(question.operations, values, skipped, strict=True)
    ]
    return " ".join([*steps, f"[ {values[-1]} ]"])


def draw_skips(length: int, probability: float, rng: Random, run: int = 1) -> list[bool]:
    """Which of ``length`` values are skipped: with this probability a block of ``run`` of them and a written one.

    The last value is always written, and no more than ``run`` neighbours are skipped.
    """
    skipped: list[bool] = []
    while len(skipped) < length:
        skipped += [True] * run + [False] if rng.random() < probability else [False]
    return [*skipped[: length - 1], False]


def reference_solution(question: Question, modulus: int, skip: float, run: int = 1) -> str:
    """The correct solution in another style than the student's own; its skips depend on the question alone."""
    rng = seeded("chain reference", render_prompt(question))
    return render_solution(
        question, chain_values(question, modulus), draw_skips(len(question.operations), skip, rng, run)
    )


def draw_question(
    rng: Random, lengths: Sequence[int], hard_pairs: Sequence[int], modulus: int, split: Split = "train"
) -> Question:
    """A question of ``split`` with one of these lengths and, unless empty, one of these numbers of hard pairs."""
    while True:
        length = rng.choice(lengths)
        if hard_pairs:
            hard = rng.choice(hard_pairs)
            operations = rng.choices(HARD, k=hard) + rng.choices(EASY, k=length - hard)
            rng.shuffle(operations)
        else:
            operations = rng.choices(HARD + EASY, k=length)
        question = Question(rng.randrange(modulus), tuple(operations))
        if split_of(question) == split:
            return question


def split_of(question: Question) -> Split:
    """The split a question belongs to in every run, by a checksum of its text: 1/16 test, 1/16 validation."""
    part = zlib.crc32(render_prompt(question).encode()) % 16
    return "test" if part == 0 else "validation" if part == 1 else "train"


@dataclass(frozen=True)
class Student:
    """Writes the trajectories of a warm start. The defaults are those of the careless student.

    Args:
        lengths: of the questions, whose operations are drawn uniformly from all 16.
        misconception: probability that the student adds 3 to the true result of a *hard pair*, one of +3, +6, +8,
            -4, -7 and -9, and carries on from there.
        skippers: share of trajectories that contain skips.
        skip: probability of a skip for each block of those.
        slip: probability that the value written after a skip is one too large.
    """

    lengths: tuple[int, ...] = tuple(range(2, 11))
    misconception: float = 0.5
    skippers: float = 0.2
    skip: float = 0.25
    slip: float = 0.3

    def __post_init__(self) -> None:
        _check_lengths("student.lengths", self.lengths)
        for name in ("misconception", "skippers", "skip", "slip"):
            _check_probability(f"student.{name}", getattr(self, name))

    def solve(self, question: Question, modulus: int, rng: Random) -> str:
        """One trajectory; as errors add up to less than the modulus, a wrong step never ends in the answer."""
        skip = self.skip if rng.random() < self.skippers else 0.0
        skipped = draw_skips(len(question.operations), skip, rng)
        values, value = [], question.start
        for op, after_skip in zip(question.operations, [False, *skipped[:-1]], strict=True):
            value = _apply(op, value)
            value += _MISTAKE * (op in HARD and rng.random() < self.misconception)
            value += after_skip and rng.random() < self.slip
            values.append(value % modulus)
        return render_solution(question, values, skipped)


class ChainDataModule(PromptDataModule):
    """Questions ``v0 op d op d ... ?``, to be evaluated from left to right modulo ``modulus``; no categories.

    Every training question is new, and none is in the fixed validation set (66) or test set (198). Each has its
    ``answer`` and a correct ``reference`` in which some values are skipped.

    Args:
        lengths: numbers of operations, those of the evaluation sets too.
        hard_pairs: how many of these the student has a misconception about (see :class:`Student`), likewise;
            empty draws all operations uniformly.
        modulus: values are in [0, modulus), so many that a student's errors cannot cancel.
        reference_skip: probability of a skip for each block of a reference.
        reference_run: values that a skip leaves out. Every one more multiplies what a student must know to imitate the
            reference by 16, the number of operations.
        student: whose trajectories to train on, one in ``metadata["completions"]`` of each training question,
            which is then drawn from the student's own lengths.
        batch_size: see :class:`PromptDataModule`, as for the other arguments.
    """

    def __init__(
        self,
        lengths: Sequence[int] = (8, 9, 10),
        hard_pairs: Sequence[int] = (7, 8),
        modulus: int = MODULUS,
        reference_skip: float = 0.4,
        reference_run: int = 1,
        student: Student | None = None,
        batch_size: int = 16,
        eval_batch_size: int = 99,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, num_workers)
        _check_lengths("lengths", lengths)
        for number in hard_pairs:
            if not 0 <= number <= min(lengths):
                raise ValueError(f"hard_pairs: expected integers in [0, {min(lengths)}], got {number!r}")
        longest = max((*lengths, *(student.lengths if student else ())))
        require_at_least(max(11, _MISTAKE * longest + longest // 2 + 1), modulus=modulus)
        _check_probability("reference_skip", reference_skip)
        require_at_least(1, reference_run=reference_run)
        self.lengths = tuple(lengths)
        self.hard_pairs = tuple(hard_pairs)
        self.modulus = modulus
        self.reference_skip = reference_skip
        self.reference_run = reference_run
        self.student = student

    @property
    def num_train_prompts(self) -> int:
        return _PROMPTS_PER_EPOCH

    def train_problem(self, index: int, position: int) -> Problem:
        rng = seeded(self.seed, "chain", position)
        if self.student is None:
            question = draw_question(rng, self.lengths, self.hard_pairs, self.modulus)
            return self._problem(f"train/{position}", question)
        question = draw_question(rng, self.student.lengths, (), self.modulus)
        problem = self._problem(f"train/{position}", question)
        problem.metadata["completions"] = [self.student.solve(question, self.modulus, rng)]
        return problem

    def validation_problems(self) -> list[Problem]:
        return self._fixed_problems("validation", _VALIDATION_QUESTIONS)

    def test_problems(self) -> list[Problem]:
        return self._fixed_problems("test", _TEST_QUESTIONS)

    def _fixed_problems(self, split: Split, count: int) -> list[Problem]:
        """As many questions of each length, the same in every run."""
        problems = []
        for i in range(count):
            rng = seeded(_SPLIT_SEED, "chain", split, i)
            length = self.lengths[i % len(self.lengths)]
            question = draw_question(rng, [length], self.hard_pairs, self.modulus, split)
            problems.append(self._problem(f"{split}/{i}", question))
        return problems

    def _problem(self, name: str, question: Question) -> Problem:
        operations = question.operations
        return Problem(
            id=name,
            prompt=render_prompt(question),
            answer=str(chain_values(question, self.modulus)[-1]),
            reference=reference_solution(question, self.modulus, self.reference_skip, self.reference_run),
            metadata={"length": len(operations), "hard_pairs": sum(op in HARD for op in operations)},
        )


def _apply(op: Operation, value: int) -> int:
    return value + op.operand if op.sign == "+" else value - op.operand


def _check_lengths(name: str, lengths: Sequence[int]) -> None:
    if not lengths or any(not isinstance(n, int) or n < 1 for n in lengths):
        raise ValueError(f"{name}: expected integers >= 1, at least one, got {list(lengths)!r}")


def _check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a number in [0, 1], got {value!r}")
