from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lit_madrl.tasks import MathVerifier, Verifier
from lit_madrl.tasks.answers import after_hashes, normalize_answer
from lit_madrl.tasks.worker_pool import Failure
from lit_madrl.types import Problem
from tests.helpers.judge_contract import Examples
from tests.helpers.verifier_contract import VerifierContract

HOSTILE = r"\boxed{2003^{2002^{2001}}}"
DATA = Path(__file__).parents[3] / "shared" / "data"


def problem(answer: str | None, name: str = "p") -> Problem:
    return Problem(name, "", answer=answer)


def rows(file: str) -> list[dict[str, Any]]:
    if not (DATA / file).exists():
        pytest.skip(f"needs ../shared/data/{file}")
    return [json.loads(line) for line in (DATA / file).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier()
    yield verifier
    verifier.close()


@pytest.fixture
def impatient() -> Iterator[MathVerifier]:
    """Its own workers compute half a second at most."""
    verifier = MathVerifier(timeout=0.5)
    yield verifier
    verifier.close()


class TestBoxedContract(VerifierContract):
    @pytest.fixture
    def verifier(self, verifier: MathVerifier) -> Verifier:
        return verifier

    @pytest.fixture
    def examples(self) -> Examples:
        texts = [r"\boxed{0.5}", r"\boxed{\frac{2}{4}}", r"<think>\boxed{1/2}</think>", r"\boxed{x+1}", "1/2"]
        return [problem("1/2"), problem("1+x", "q")], [texts, texts]


class TestHashesContract(VerifierContract):
    @pytest.fixture(scope="class")
    def verifier(self) -> Iterator[Verifier]:
        verifier = MathVerifier("hashes", workers=1)
        yield verifier
        verifier.close()

    @pytest.fixture
    def examples(self) -> Examples:
        texts = ["#### 1,000", "so 1000", "#### 999.50 and so on", "####"]
        return [problem("1000"), problem("999.5", "q")], [texts, texts]


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        ("42", "42", 1),
        ("42", "43", 0),
        ("-3", "3", 0),
        ("1000", "1,000", 1),
        (r"\frac{1}{2}", r"\frac12", 1),
        (r"\frac{1}{2}", "0.5", 1),
        (r"\frac{1}{2}", r"\frac{3}{6}", 1),
        (r"\frac{1}{2}", r"-\frac{1}{-2}", 1),
        ("12", "\uff11\uff12", 1),
        ("12", "\u0967\u0968", 1),
        (r"\frac{1}{3}", "\\frac{\u0967}{\u0969}", 1),
        (r"\frac{1}{3}", "0.333333", 1),
        (r"\frac{1}{3}", "0.33", 0),
        (r"2\sqrt{2}", r"\sqrt{8}", 1),
        ("2x+1", "1 + 2x", 1),
        ("(x-1)(x+1)", "x^2-1", 1),
        ("5", "x = 5", 1),
        ("50", r"50\%", 1),
        ("90", r"90^{\circ}", 1),
        ("5", r"5 \text{ cm}", 1),
        (r"\text{Evelyn}", "Evelyn", 1),
        (r"\text{(C)}", "C", 1),
        (r"\{1,2\}", r"\{2, 1\}", 1),
        ("(1,2)", "(2,1)", 0),
        ("[1,2]", "(1,2)", 0),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", 1),
        (r"\pi", "3.14", 0),
        ("x", "y", 0),
        ("5", r"\text{not 5}", 0),
        ("5", "5 or 6", 0),
        ("5", "{{{", 0),
        ("0", r"10^{-9}", 0),
        ("$", r"\%", 0),  # nothing is left of either
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    ],
)
def test_equality(verifier: MathVerifier, gold: str, answer: str, correct: int) -> None:
    assert verifier([problem(gold)], [[rf"\boxed{{{answer}}}"]]).tolist() == [[correct]]


@pytest.mark.parametrize(
    ("text", "correct", "formed"),
    [
        (r"\boxed{3} or \boxed{7}", 1, 1),
        (r"\boxed{7} or \boxed{3}", 0, 1),
        (r"\boxed{7", 0, 0),
        ("7", 0, 0),
        ("#### 7", 0, 0),
        (r"\boxed{3}</think>\boxed{7}", 1, 1),
        (r"\boxed{7}</think>it is 7", 0, 0),
        (r"<think>so \boxed{7}", 0, 0),
        (r"\boxed{}", 0, 0),
        (r"\boxed{$}", 0, 1),
    ],
)
def test_the_last_box_after_thinking_is_the_answer(
    verifier: MathVerifier, text: str, correct: int, formed: int
) -> None:
    assert verifier([problem("7")], [[text]]).tolist() == [[correct]]
    assert verifier.well_formed([problem("7")], [[text]]).tolist() == [[formed]]


def test_each_group_is_judged_by_its_own_problem(verifier: MathVerifier) -> None:
    texts = [[r"\boxed{0.5}", r"\boxed{8}", ""]] * 2
    assert verifier([problem("1/2"), problem("2^3")], texts).tolist() == [[1, 0, 0], [0, 1, 0]]


def test_hostile_answers_are_incorrect_and_the_next_are_judged(impatient: MathVerifier) -> None:
    texts = [[HOSTILE, r"\boxed{2^3}", r"\boxed{9}"], [r"\boxed{4/2}", HOSTILE, HOSTILE]]
    with pytest.warns(UserWarning, match=r"cannot be compared \(timeout\): '2003.* with the gold answer '8'"):
        correct = impatient([problem("8"), problem("2")], texts)
    assert correct.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert impatient.well_formed([problem("8"), problem("2")], texts).all()
    assert (impatient.timeouts, impatient.crashes) == (2, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # neither a second warning nor a second comparison
        assert impatient([problem("8"), problem("2")], texts).tolist() == [[0, 1, 0], [1, 0, 0]]
        assert impatient([problem("3")], [[HOSTILE, r"\boxed{6/2}"]]).tolist() == [[0, 1]]
    assert (impatient.timeouts, impatient.crashes) == (3, 0)


def test_crashes_are_counted(impatient: MathVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impatient._pool, "map", lambda jobs: [Failure("crash")] * len(jobs))
    with pytest.warns(UserWarning, match=r"cannot be compared \(crash\)"):
        assert impatient([problem("1/2")], [[r"\boxed{0.5}"]]).tolist() == [[0]]
    assert (impatient.timeouts, impatient.crashes) == (0, 1)


def test_what_spelling_tells_starts_no_worker(impatient: MathVerifier) -> None:
    before = psutil.Process().children()
    texts = [r"\boxed{7}", r"\boxed{8}", r"\boxed{07.0}", r"\boxed{-7}", r"\boxed{x}"]
    assert impatient([problem("7")], [texts[:4]]).tolist() == [[1, 0, 1, 0]]
    assert psutil.Process().children() == before
    assert impatient([problem("7")], [texts]).tolist() == [[1, 0, 1, 0, 0]]
    assert len(psutil.Process().children()) == len(before) + 1
    impatient.close()
    assert psutil.Process().children() == before


def test_equal_comparisons_are_made_once(impatient: MathVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compare(jobs: list[Any]) -> list[bool]:
        asked.extend(jobs)
        return [job == ("x+y", "y+x") for job in jobs]

    monkeypatch.setattr(impatient._pool, "map", compare)
    monkeypatch.setattr("lit_madrl.tasks.math._REMEMBERED", 2)
    problems, texts = [problem("x+y"), problem("x+y", "q")], [r"so \boxed{y+x}", r"\boxed{y+x}", r"\boxed{z}"]
    assert impatient(problems, [texts, texts]).tolist() == [[1, 1, 0]] * 2
    assert asked == [("x+y", "y+x"), ("x+y", "z")]
    impatient(problems, [texts, texts])
    assert len(asked) == 2
    impatient(problems[:1], [texts[:1]])  # now z is what was used the longest time ago
    impatient(problems[:1], [[r"\boxed{w}"]])
    impatient(problems[:1], [texts[:1]])
    assert asked[2:] == [("x+y", "w")]
    impatient(problems[:1], [texts])
    assert asked[3:] == [("x+y", "z")]


def test_copies_share_nothing(verifier: MathVerifier) -> None:
    copied = copy.deepcopy(verifier)
    assert copied._pool._lock is not verifier._pool._lock
    copied.timeouts += 1
    assert verifier.timeouts == 0


def test_verifiable(verifier: MathVerifier) -> None:
    answers = ["42", r"\frac12", r"\text{Evelyn}", "", "  ", r"\frac{1}{", "}{", r"\boxed{", "\u0967\u0968"]
    assert verifier.verifiable(answers) == [True, True, True, False, False, False, False, False, True]
    assert verifier.verifiable([]) == []
    assert MathVerifier("hashes").verifiable(["x+1"]) == [False]


def test_bad_input(verifier: MathVerifier) -> None:
    with pytest.raises(ValueError, match=r"Problem\.answer: expected a gold answer, got None in 'q'"):
        verifier([problem("7"), problem(None, "q")], [["x"], ["x"]])
    with pytest.raises(ValueError, match="answer: expected boxed or hashes, got 'box'"):
        MathVerifier("box")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers: expected an integer >= 1, got 0"):
        MathVerifier(workers=0)


def test_math_verify_is_needed_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_madrl.tasks.math.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit_madrl\[math\]'"):
        MathVerifier()


# Real data


def test_math500_solutions_solve_their_own_problems_alone(verifier: MathVerifier) -> None:
    data = rows("math500/test_ori.jsonl")
    problems = [problem(row["answer"], row["unique_id"]) for row in data]
    solutions = [[row["solution"]] for row in data]
    assert len(data) == 500
    assert verifier(problems, solutions).all()
    wrong = verifier(problems, solutions[1:] + solutions[:1])[:, 0].nonzero()[:, 0].tolist()
    pairs = [(data[p]["answer"], data[(p + 1) % 500]["answer"]) for p in wrong]
    assert [pair for pair in pairs if normalize_answer(pair[0]) != normalize_answer(pair[1])] == [
        ("5", "x=5")
    ]
    assert verifier.timeouts == 0


def test_math500_answers_are_verifiable(verifier: MathVerifier) -> None:
    assert all(verifier.verifiable([row["answer"] for row in rows("math500/test_ori.jsonl")]))


def test_gsm8k_solutions_solve_their_own_problems_alone() -> None:
    texts = [row["answer"] for row in rows("gsm8k/test.jsonl")]
    golds = [text.rpartition("#### ")[2] for text in texts]
    problems, verifier = [problem(gold) for gold in golds], MathVerifier("hashes")
    assert len(texts) == 1319
    assert verifier(problems, [[text] for text in texts]).all()
    shifted = verifier(problems, [[text] for text in texts[1:] + texts[:1]])[:, 0]
    same = [after_hashes(a) == after_hashes(b) for a, b in zip(texts, texts[1:] + texts[:1], strict=True)]
    assert shifted.tolist() == list(map(float, same))
    assert not same[0]


def test_aime_solutions_solve_their_own_problems(verifier: MathVerifier) -> None:
    r"""Some in ``\framebox`` or in bold and parentheses, and answers with leading zeros."""
    data = rows("aime24/test.jsonl")
    assert verifier([problem(row["answer"]) for row in data], [[row["solution"]] for row in data]).all()
