from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_madrl.data import ChainDataModule, Student
from lit_madrl.data.chain import (
    EASY,
    HARD,
    MODULUS,
    Operation,
    Question,
    chain_values,
    draw_question,
    draw_skips,
    reference_solution,
    render_prompt,
    render_solution,
    split_of,
    vocabulary,
)
from lit_madrl.tasks import ChainVerifier
from lit_madrl.types import Problem

SHORT = Question(17, (Operation("+", 3), Operation("-", 5), Operation("+", 2)))
WRAPS = Question(94, (Operation("+", 8), Operation("-", 9), Operation("-", 4)))

operations = st.builds(Operation, st.sampled_from("+-"), st.integers(2, 9))
questions = st.builds(Question, st.integers(0, 52), st.lists(operations, min_size=1, max_size=10).map(tuple))
seeds = st.integers(0, 2**32)
shares = st.sampled_from([0.0, 0.3, 1.0])


def solve(text: str, modulus: int = MODULUS) -> list[int]:
    """The values of a prompt's chain, read from its text: the slow reference."""
    words = text.split()
    assert words[-1] == "?"
    values, value = [], int(words[0])
    for sign, operand in zip(words[1:-1:2], words[2:-1:2], strict=True):
        value = (value + (1 if sign == "+" else -1) * int(operand) + modulus) % modulus
        values.append(value)
    return values


def read(solution: str) -> tuple[list[tuple[str, str]], list[int | None], int]:
    """Operations, written values (None where skipped) and final number of a solution's text."""
    *steps, end = solution.split(" ; ")
    words = [step.split() for step in steps]
    assert all(len(step) == 3 for step in words)
    left, number, right = end.split()
    assert (left, right) == ("[", "]")
    return (
        [(sign, operand) for sign, operand, _ in words],
        [None if value == "~" else int(value) for *_, value in words],
        int(number),
    )


def trained(data: ChainDataModule, count: int) -> list[Problem]:
    return [data.train_problem(0, position) for position in range(count)]


@pytest.mark.parametrize(
    ("question", "prompt", "values", "solution"),
    [
        (SHORT, "17 + 3 - 5 + 2 ?", [20, 15, 17], "+ 3 20 ; - 5 15 ; + 2 17 ; [ 17 ]"),
        (WRAPS, "94 + 8 - 9 - 4 ?", [5, 93, 89], "+ 8 5 ; - 9 93 ; - 4 89 ; [ 89 ]"),
    ],
)
def test_questions_read_as_written(question: Question, prompt: str, values: list[int], solution: str) -> None:
    assert render_prompt(question) == prompt
    assert chain_values(question, MODULUS) == values == solve(prompt)
    assert render_solution(question, values, [False] * 3) == solution


def test_a_skip_hides_the_value() -> None:
    assert render_solution(SHORT, [20, 15, 17], [True, False, False]) == "+ 3 ~ ; - 5 15 ; + 2 17 ; [ 17 ]"


@pytest.mark.parametrize(
    ("student", "solution"),
    [
        (Student(misconception=0, skippers=0), "+ 3 20 ; - 5 15 ; + 2 17 ; [ 17 ]"),
        (Student(misconception=1, skippers=0), "+ 3 23 ; - 5 18 ; + 2 20 ; [ 20 ]"),
        (Student(misconception=0, skippers=1, skip=1, slip=0), "+ 3 ~ ; - 5 15 ; + 2 17 ; [ 17 ]"),
        (Student(misconception=0, skippers=1, skip=1, slip=1), "+ 3 ~ ; - 5 16 ; + 2 18 ; [ 18 ]"),
        (Student(misconception=1, skippers=1, skip=1, slip=1), "+ 3 ~ ; - 5 19 ; + 2 21 ; [ 21 ]"),
    ],
)
def test_students_without_chance(student: Student, solution: str) -> None:
    assert student.solve(SHORT, MODULUS, Random(0)) == solution


def test_vocabulary_is_104_words_that_cover_all_text() -> None:
    words = vocabulary(MODULUS)
    assert len(words) == len(set(words)) == 104
    data = ChainDataModule(student=Student())
    for problem in trained(data, 200) + data.test_problems():
        text = [problem.prompt, problem.reference, *problem.metadata.get("completions", [])]
        assert set(" ".join(map(str, text)).split()) <= set(words)


def test_pairs_are_6_hard_and_10_easy() -> None:
    assert [f"{op.sign}{op.operand}" for op in HARD] == ["+3", "+6", "+8", "-4", "-7", "-9"]
    assert len(EASY) == 10
    assert not set(HARD) & set(EASY)


@given(st.integers(1, 12), shares, seeds)
def test_skips_are_blocks_that_end_in_a_value(length: int, probability: float, seed: int) -> None:
    skipped = draw_skips(length, probability, Random(seed))
    assert len(skipped) == length
    assert not skipped[-1]
    assert not any(a and b for a, b in pairwise(skipped))
    if probability in (0.0, 1.0):
        assert sum(skipped) == probability * (length // 2)


@given(questions, shares)
def test_a_reference_is_correct_and_depends_on_its_question_alone(question: Question, skip: float) -> None:
    reference = reference_solution(question, MODULUS, skip)
    assert reference == reference_solution(question, MODULUS, skip)
    steps, written, number = read(reference)
    truth = solve(render_prompt(question))
    assert steps == [(op.sign, str(op.operand)) for op in question.operations]
    assert all(value in (None, true) for value, true in zip(written, truth, strict=True))
    assert number == written[-1] == truth[-1]


@given(questions, seeds, shares, shares, shares)
def test_no_wrong_chain_ends_in_the_answer(
    question: Question, seed: int, misconception: float, skip: float, slip: float
) -> None:
    student = Student(misconception=misconception, skippers=0.5, skip=skip, slip=slip)
    _, written, number = read(student.solve(question, MODULUS, Random(seed)))
    truth = solve(render_prompt(question))
    right = all(value in (None, true) for value, true in zip(written, truth, strict=True))
    assert number == written[-1]
    assert (number == truth[-1]) == right


def test_a_careless_student_errs_as_often_as_told() -> None:
    counts: Counter[str] = Counter()
    for problem in trained(ChainDataModule(student=Student()), 3000):
        (text,) = problem.metadata["completions"]
        steps, written, _ = read(text)
        counts["all"] += 1
        if None in written:
            counts["skipping"] += 1
            continue
        value = int(problem.prompt.split()[0])  # type: ignore[union-attr]
        for (sign, operand), result in zip(steps, written, strict=True):
            assert result is not None
            op = Operation(sign, int(operand))
            kind = "hard" if op in HARD else "easy"
            error = (result - solve(f"{value} {sign} {operand} ?")[0]) % MODULUS
            assert error in (0, 3)
            counts[kind] += 1
            counts[f"{kind} wrong"] += error == 3
            value = result
    assert counts["easy wrong"] == 0
    assert counts["hard wrong"] / counts["hard"] == pytest.approx(0.5, abs=0.03)
    assert counts["hard"] / (counts["hard"] + counts["easy"]) == pytest.approx(6 / 16, abs=0.03)
    # .2 (1 - .75^(n - 1)), the mean over lengths n = 2..10
    assert counts["skipping"] / counts["all"] == pytest.approx(0.146, abs=0.025)


def test_slips_follow_skips_alone() -> None:
    student = Student(misconception=0, skippers=1)
    slips = skips = 0
    for problem in trained(ChainDataModule(student=student), 2000):
        (text,) = problem.metadata["completions"]
        _, written, _ = read(text)
        shift = 0
        for i, (value, true) in enumerate(zip(written, solve(str(problem.prompt)), strict=True)):
            if value is None:
                continue
            slipped = (value - true) % MODULUS - shift
            assert slipped in (0, 1)
            if i and written[i - 1] is None:
                skips += 1
                slips += slipped
            else:
                assert slipped == 0
            shift += slipped
    assert slips / skips == pytest.approx(0.3, abs=0.04)


def test_training_questions_are_as_hard_as_told() -> None:
    problems = trained(ChainDataModule(), 600)
    lengths = Counter(problem.metadata["length"] for problem in problems)
    hard = Counter(problem.metadata["hard_pairs"] for problem in problems)
    assert set(lengths) == {8, 9, 10}
    assert min(lengths.values()) > 150
    assert set(hard) == {7, 8}
    assert min(hard.values()) > 240
    for problem in problems:
        prompt = str(problem.prompt)
        words = prompt.split()
        pairs = list(zip(words[1:-1:2], map(int, words[2:-1:2]), strict=True))
        assert len(pairs) == problem.metadata["length"]
        assert sum(pair in HARD for pair in pairs) == problem.metadata["hard_pairs"]
        assert problem.answer == str(solve(prompt)[-1])
        assert problem.target == problem.options == ()
        assert "completions" not in problem.metadata


def test_references_verify_and_are_in_another_style() -> None:
    problems = trained(ChainDataModule(), 400)
    references = [[str(problem.reference)] for problem in problems]
    assert ChainVerifier()(problems, references).all()
    blocks = [value for group in references for value in group[0].replace("~ ; ", "~").split(" ; ")[:-1]]
    assert sum("~" in block for block in blocks) / len(blocks) == pytest.approx(0.37, abs=0.03)
    assert sum("~" in group[0] for group in references) > 380
    own = Student(misconception=0, skippers=0)
    same = sum(own.solve(_question(problem), MODULUS, Random(0)) == problem.reference for problem in problems)
    assert same == sum("~" not in group[0] for group in references)


def _question(problem: Problem) -> Question:
    words = str(problem.prompt).split()
    pairs = zip(words[1:-1:2], map(int, words[2:-1:2]), strict=True)
    return Question(int(words[0]), tuple(Operation(*pair) for pair in pairs))


@pytest.mark.parametrize("student", [None, Student()])
def test_a_training_problem_is_a_function_of_seed_and_position(student: Student | None) -> None:
    forwards = trained(ChainDataModule(student=student, seed=3), 30)
    data = ChainDataModule(student=student, seed=3, batch_size=5)
    assert [data.train_problem(7, position) for position in reversed(range(30))] == forwards[::-1]
    other = trained(ChainDataModule(student=student, seed=4), 30)
    assert len({str(problem.prompt) for problem in forwards + other}) == 60


def test_clean_students_are_right_on_short_questions() -> None:
    clean = Student(lengths=(2, 3, 4), misconception=0.0, skippers=0.0)
    problems = trained(ChainDataModule(student=clean), 300)
    assert {problem.metadata["length"] for problem in problems} == {2, 3, 4}
    assert ChainVerifier()(problems, [problem.metadata["completions"] for problem in problems]).all()
    assert not any("~" in problem.metadata["completions"][0] for problem in problems)


def test_evaluation_sets_are_the_same_in_every_run() -> None:
    data = ChainDataModule()
    other = ChainDataModule(seed=9, batch_size=3, student=Student())
    assert data.test_problems() == other.test_problems()
    assert data.validation_problems() == other.validation_problems()
    assert Counter(problem.metadata["length"] for problem in data.test_problems()) == {8: 66, 9: 66, 10: 66}
    for problems, size in ((data.test_problems(), 198), (data.validation_problems(), 66)):
        assert len({problem.prompt for problem in problems}) == len({p.id for p in problems}) == size
        assert {problem.metadata["hard_pairs"] for problem in problems} == {7, 8}


@pytest.mark.parametrize(
    "settings",
    [{}, {"lengths": [2], "hard_pairs": [2]}, {"hard_pairs": [], "student": Student((2,))}],
    ids=["default", "few", "student"],
)
def test_training_meets_no_held_out_question(settings: dict[str, Any]) -> None:
    data = ChainDataModule(**settings)
    parts = [trained(data, 1500), data.validation_problems(), data.test_problems()]
    train, validation, test = ({str(problem.prompt) for problem in part} for part in parts)
    assert not train & validation | train & test | validation & test
    splits = [{split_of(_question(problem)) for problem in part} for part in parts]
    assert splits == [{"train"}, {"validation"}, {"test"}]


def test_splits_have_the_sizes_told() -> None:
    questions = [
        Question(v, (a, b)) for v in range(MODULUS) for a in (*HARD, *EASY) for b in (*HARD, *EASY)
    ]  # all of length 2
    shares = Counter(map(split_of, questions))
    assert shares["test"] / len(questions) == pytest.approx(1 / 16, abs=0.01)
    assert shares["validation"] / len(questions) == pytest.approx(1 / 16, abs=0.01)


def test_uniform_questions_use_every_pair() -> None:
    rng = Random(0)
    drawn = Counter(
        op for _ in range(400) for op in draw_question(rng, [8], (), MODULUS).operations
    )  # 200 of each expected
    assert set(drawn) == {*HARD, *EASY}
    assert min(drawn.values()) > 140


def test_no_categories() -> None:
    assert ChainDataModule().categories == ()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ChainDataModule(lengths=[]), r"^lengths: expected integers >= 1, at least one, got \[\]"),
        (lambda: ChainDataModule(lengths=[0]), r"^lengths: expected integers >= 1, at least one, got \[0\]"),
        (lambda: ChainDataModule(hard_pairs=[9]), r"hard_pairs: expected integers in \[0, 8\], got 9"),
        (lambda: ChainDataModule(modulus=35), "modulus: expected an integer >= 36, got 35"),
        (
            lambda: ChainDataModule(lengths=[1], hard_pairs=[], modulus=10),
            "modulus: expected an integer >= 11, got 10",
        ),
        (
            lambda: ChainDataModule(modulus=70, student=Student(lengths=(20,))),
            "modulus: expected an integer >= 71, got 70",
        ),
        (lambda: ChainDataModule(reference_skip=1.5), r"reference_skip: expected .* \[0, 1\], got 1.5"),
        (lambda: Student(lengths=()), r"student.lengths: expected integers >= 1"),
        (lambda: Student(misconception=-0.1), r"student.misconception: expected .* \[0, 1\], got -0.1"),
        (lambda: Student(slip=float("nan")), r"student.slip: expected .* got nan"),
    ],
)
def test_bad_arguments(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
