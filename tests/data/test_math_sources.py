from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_madrl.augmenters import SentenceBoundaries
from lit_madrl.data import (
    GSM8K,
    MATH,
    Competition,
    DeepMath,
    MathProblem,
    MathSource,
    Screened,
    StepwiseMATH,
)
from lit_madrl.data.math_formats import boxed_answer

SHARED = Path(__file__).parents[3] / "shared" / "data"
FORMATS = ("jsonl", "json", "parquet")

GSM8K_ROW = {
    "question": "Ann has 48 clips and half as many pins. How many has she?",
    "answer": "She has 48/2 = <<48/2=24>>24 pins.\nIn all 48+24 = <<48+24=72>>72 things.\n#### 1,072",
}
MATH_ROW = {
    "problem": "What is $1+1$?",
    "level": "Level 3",
    "type": "Prealgebra",
    "solution": r"Not \boxed{3}, but $\boxed{\frac{4}{2}}$.",
}
MATH500_ROW = {
    "problem": "Convert $(0,3)$.",
    "solution": r"So $\boxed{\left( 3, \frac{\pi}{2} \right)}.$",
    "answer": r"\left( 3, \frac{\pi}{2} \right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}
STEPWISE_ROW = {
    "level": "Level 5",
    "type": "Number Theory",
    "prompt": [{"content": "User: What is lcm? Show your work.", "role": "user"}],
    "hint": ["\n", "First.\n", "\n", "\n", "Then. ", r"So \boxed{8}."],
    "question": "User: What is lcm? Show your work.",
    "answer": "First.\n\n\nThen. So \\boxed{8}. </think>\n<answer> 8 </answer>",
    "reward_model": {"ground_truth": {"question": "What is lcm?", "target": "8"}, "style": "rule"},
    "extra_info": {"index": 3532, "split": "test"},
}
DEEPMATH_ROW = {
    "question": "Evaluate the limit.",
    "final_answer": "0",
    "difficulty": 4.5,
    "topic": "Mathematics -> Calculus -> Limits",
    "r1_solution_1": "Okay, so I try \\boxed{1}.\n</think>\n\nIt is **zero**.\n\n\\boxed{0}",
    "r1_solution_2": "Hm.\n</think>\n\nClearly \\boxed{0}",
    "r1_solution_3": "Straight to \\boxed{0}",
}
SCREENED_ROW = {
    "question": "Evaluate the limit.",
    "answer": "0",
    "reference": r"It is \boxed{0}",
    "difficulty": 5.0,
    "topic": "Calculus",
    "id": "deepmath/17",
}
ANY = {"question": "Q?", "answer": "#### 1"}


def write(path: Path, *rows: dict[str, Any]) -> str:
    """The rows as a file in the format its name ends in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(list(rows)))
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
    return str(path)


@pytest.fixture(params=FORMATS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"data.{request.param}"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def only(source: MathSource) -> MathProblem:
    (problem,) = source.problems().values()
    return problem


def test_gsm8k(path: Path) -> None:
    write(path, GSM8K_ROW)
    assert GSM8K(str(path), split="test").problems() == {
        "gsm8k/0": MathProblem(
            "Ann has 48 clips and half as many pins. How many has she?",
            "1072",
            "She has 48/2 = 24 pins.\nIn all 48+24 = 72 things.\nThe answer is \\boxed{1072}.",
            {},
        )
    }
    hashes = only(GSM8K(str(path), final="hashes", keep_annotations=True))
    assert hashes.reference == GSM8K_ROW["answer"].replace("1,072", "1072")
    write(path, {"question": "Which?", "answer": "Page #### 9.\n#### -2"})
    assert only(GSM8K(str(path)))[1:3] == ("-2", "Page #### 9.\nThe answer is \\boxed{-2}.")


def test_math(path: Path) -> None:
    write(path, MATH_ROW)
    assert MATH(str(path), name="train").problems() == {
        "train/0": MathProblem(
            "What is $1+1$?", r"\frac{4}{2}", MATH_ROW["solution"], {"level": 3, "subject": "Prealgebra"}
        )
    }


def test_math_500(path: Path) -> None:
    write(path, MATH500_ROW)
    problem = only(MATH(str(path)))
    assert problem.answer == MATH500_ROW["answer"] == boxed_answer(problem.reference or "")
    assert problem.metadata == {"level": 2, "subject": "Precalculus"}
    write(path, MATH500_ROW | {"answer": r"(3,\pi/2)"})
    assert only(MATH(str(path))).answer == r"(3,\pi/2)"


def test_a_level_may_be_unknown(tmp_path: Path) -> None:
    assert only(MATH(write(tmp_path / "a.jsonl", MATH_ROW | {"level": "Level ?"}))).metadata["level"] is None


def test_stepwise_math(path: Path) -> None:
    write(path, STEPWISE_ROW)
    problem = only(StepwiseMATH(str(path)))
    steps = ["\nFirst.\n\n\n", "Then. ", r"So \boxed{8}."]
    assert problem == MathProblem(
        "What is lcm?",
        "8",
        "\nFirst.\n\n\nThen. So \\boxed{8}.",
        {"level": 5, "subject": "Number Theory", "steps": steps},
    )


@pytest.mark.parametrize(
    ("solution", "thinking", "reference"),
    [
        (1, False, "It is **zero**.\n\n\\boxed{0}"),
        (1, True, DEEPMATH_ROW["r1_solution_1"]),
        (2, False, r"Clearly \boxed{0}"),
        (3, False, r"Straight to \boxed{0}"),
    ],
)
def test_deepmath(path: Path, solution: Any, thinking: bool, reference: str) -> None:
    write(path, DEEPMATH_ROW)
    topic = {"difficulty": 4.5, "topic": "Mathematics -> Calculus -> Limits"}
    expected = MathProblem("Evaluate the limit.", "0", reference, topic)
    assert only(DeepMath(str(path), solution=solution, thinking=thinking)) == expected


def test_screened(path: Path) -> None:
    write(path, SCREENED_ROW)
    origin = {"id": "deepmath/17", "difficulty": 5.0, "topic": "Calculus"}
    expected = MathProblem("Evaluate the limit.", "0", r"It is \boxed{0}", origin)
    assert Screened(str(path)).problems() == {"screened/0": expected}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"id": 60, "problem": "Q", "solution": "S", "answer": "025", "url": "u", "year": "2024"},
            ("25", "S", {"id": "60"}),
        ),
        (
            {"ID": "2024-I-1", "Problem": "Q", "Solution": "S", "Answer": 204},
            ("204", "S", {"id": "2024-I-1"}),
        ),
        (
            {"problem_idx": 1, "problem": "Q", "answer": 70, "problem_type": ["Algebra", "Geometry"]},
            ("70", None, {"id": "1", "subject": "Algebra, Geometry"}),
        ),
        (
            {"problem_idx": 2, "problem": "Q", "answer": r"\frac{1}{576}", "problem_type": ["Algebra"]},
            (r"\frac{1}{576}", None, {"id": "2", "subject": "Algebra"}),
        ),
        ({"question": "Q", "answer": "000"}, ("0", None, {"id": ""})),
        (
            {"id": 3, "problem": "Q", "solution": r"\boxed{033}", "url": "u"},
            ("33", None, {"id": "3"}),
        ),
        ({"problem": "Q", "answer": "-07"}, ("-07", None, {"id": ""})),
    ],
)
def test_competitions(path: Path, row: dict[str, Any], expected: Sequence[Any]) -> None:
    write(path, row)
    assert only(Competition(str(path))) == ("Q", *expected)


def test_csv_files_keep_whole_numbers(tmp_path: Path) -> None:
    rows = [{"problem": "A, b", "answer": 204}, {"problem": "none", "answer": None}]
    with pytest.warns(UserWarning, match="left out 1 of 2"):
        problem = only(Competition(write(tmp_path / "a.csv", *rows)))
    assert problem[:2] == ("A, b", "204")


def test_a_missing_number_is_no_answer(tmp_path: Path) -> None:
    rows = [{"problem": "a", "answer": 204.0}, {"problem": "b", "answer": float("nan")}]
    with pytest.warns(UserWarning, match="left out 1 of 2"):
        assert only(Competition(write(tmp_path / "a.parquet", *rows))).answer == "204"


def test_numbers_and_text_in_one_column(tmp_path: Path) -> None:
    rows = [{"problem": "a", "answer": 12}, {"problem": "b", "answer": r"\sqrt{2}"}]
    problems = Competition(write(tmp_path / "a.jsonl", *rows)).problems().values()
    assert [problem.answer for problem in problems] == ["12", r"\sqrt{2}"]


def test_unusable_rows_keep_their_numbers_and_are_counted(path: Path) -> None:
    bad = [{"question": "No mark?", "answer": "5"}, {"question": None, "answer": "#### 5"}]
    rows = [bad[0], ANY, bad[1], {"question": "Empty?", "answer": "so #### "}, ANY]
    source = GSM8K(write(path, *rows), name="mine")
    with pytest.warns(UserWarning, match=r"GSM8K .*left out 3 of 5 rows without question or answer"):
        assert list(source.problems()) == ["mine/1", "mine/4"]
    with pytest.warns(UserWarning, match="left out 1 of 2"):
        assert list(GSM8K(str(path), limit=2).problems()) == ["gsm8k/1"]


def test_a_source_without_problems_warns(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.warns(UserWarning, match=r"GSM8K '.*empty.jsonl' \(split 'train'\): no problems"):
        assert GSM8K(str(tmp_path / "empty.jsonl")).problems() == {}


def test_good_data_gives_no_warnings(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        GSM8K(write(tmp_path / "a.jsonl", ANY)).problems()


def test_a_folder_tells_splits_by_names(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ANY)
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ANY)
    write(tmp_path / "data" / "test-00000-of-00001.parquet", GSM8K_ROW)
    assert len(GSM8K(str(tmp_path)).problems()) == 2
    assert only(GSM8K(str(tmp_path), split="test")).answer == "1072"
    with pytest.raises(ValueError, match=r"GSM8K .*cannot be read: .*validation.*(train|test)"):
        GSM8K(str(tmp_path), split="validation").problems()


@pytest.mark.parametrize("name", ["odd [name] {1}*.jsonl", ""])
def test_what_is_edited_is_read_anew_and_leaves_no_cache(tmp_path: Path, name: str) -> None:
    import datasets

    for answer in ("1", "2"):
        write(tmp_path / (name or "train.jsonl"), ANY | {"answer": f"#### {answer}"})
        assert only(GSM8K(str(tmp_path / name))).answer == answer
    cached = Path(datasets.config.HF_DATASETS_CACHE).rglob("*")
    assert [found for found in cached if found.is_file() and found.suffix != ".lock"] == []


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        (GSM8K(split="test"), ("openai/gsm8k", "main", "test")),
        (GSM8K("some/fork", config="socratic"), ("some/fork", "socratic", "train")),
        (
            Competition("opencompass/AIME2025", "test", config="AIME2025-I"),
            ("opencompass/AIME2025", "AIME2025-I", "test"),
        ),
        (DeepMath(), ("zwhe99/DeepMath-103K", None, "train")),
    ],
)
def test_hub_names(source: MathSource, asked: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls = []

    def load_dataset(path: str, name: str | None, split: str) -> datasets.Dataset:
        calls.append((path, name, split))
        rows = [GSM8K_ROW | DEEPMATH_ROW | {"answer": "#### 1"}] * 3
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source.limit = 2
    assert len(source.problems()) == 2
    assert calls == [asked]


def test_a_hub_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(ValueError, match=r"GSM8K 'no/such' \(split 'train'\): cannot be read: .*Hub"):
        GSM8K("no/such").problems()


@pytest.mark.parametrize(
    ("source", "row", "message"),
    [
        (GSM8K, MATH_ROW, "columns question, answer, got level, problem, .* without question, answer"),
        (MATH, ANY, "columns problem, solution, got answer, question without problem, solution"),
        (DeepMath, SCREENED_ROW, "without final_answer, r1_solution_1, r1_solution_2, r1_solution_3"),
        (Screened, ANY, "without reference, difficulty, topic, id"),
        (Competition, {"problem": "Q"}, "without answer|Answer|solution|Solution"),
        (
            StepwiseMATH,
            STEPWISE_ROW | {"reward_model": {"ground_truth": {"target": "8"}}},
            "without reward_model.ground_truth.question",
        ),
        (StepwiseMATH, STEPWISE_ROW | {"reward_model": "8"}, "without reward_model.ground_truth.question, "),
    ],
)
def test_missing_columns(path: Path, source: type[MathSource], row: dict[str, Any], message: str) -> None:
    row = dict(sorted(row.items()))
    with pytest.raises(ValueError, match=f"{source.__name__} '.*{path.name}' .*: expected the .*{message}"):
        source(write(path, row)).problems()


@pytest.mark.parametrize("name", ["absent.jsonl", "./absent", "text.txt", "~/no/such/absent.parquet"])
def test_no_such_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.txt").write_text("Q")
    path = name if name.startswith("~") else str(tmp_path / name)
    with pytest.raises(
        ValueError, match=r"cannot be read: expected a folder, or a file that ends in .jsonl, "
    ):
        GSM8K(path).problems()


def test_broken_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ANY) + "\nno json\n")
    (tmp_path / "a.parquet").write_text("PAR0")
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(ValueError, match=rf"GSM8K .*{name}.*cannot be read"):
            GSM8K(str(tmp_path / name)).problems()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GSM8K("a", limit=0), "limit: expected an integer >= 1, got 0"),
        (lambda: GSM8K("a", final="box"), "final: expected boxed or hashes, got 'box'"),  # type: ignore[arg-type]
        (lambda: DeepMath("a", solution=4), "solution: expected 1, 2 or 3, got 4"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    class Sums(MathSource):
        columns = ("left", "right")

        def read(self, row: Any) -> MathProblem | None:
            if row["left"] > 3:
                return None
            return MathProblem(f"{row['left']}+{row['right']}", str(row["left"] + row["right"]), None, {})

    path = write(tmp_path / "a.jsonl", {"left": 1, "right": 2}, {"left": 4, "right": 2})
    with pytest.warns(UserWarning, match="left out 1 of 2"):
        assert Sums(path).problems() == {"sums/0": MathProblem("1+2", "3", None, {})}


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("none", ""),
        (r"\boxed{1} or \boxed{\text{a } b}", r"\text{a } b"),
        (r"\boxed { 1{2} }.", "1{2}"),
        (r"\boxed{1} \boxed{2", "1"),
    ],
)
def test_boxed_answers(solution: str, answer: str) -> None:
    assert boxed_answer(solution) == answer


def shared(name: str) -> str:
    if not (SHARED / name).exists():
        pytest.skip(f"needs the published file {name}")
    return str(SHARED / name)


def cuttable(problems: Sequence[MathProblem], rule: SentenceBoundaries) -> float:
    """The share of problems whose reference has a boundary, for tokens of one character."""
    references = [problem.reference or "" for problem in problems]
    tokens: Iterator[list[tuple[int, int]]] = ([(i, i + 1) for i in range(len(text))] for text in references)
    return sum(map(bool, map(rule, references, tokens))) / len(references)


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_all_of_gsm8k(split: str, count: int) -> None:
    path = shared(f"gsm8k/{split}.jsonl")
    problems = list(GSM8K(path, split).problems().values())
    assert len(problems) == count
    for problem in problems:
        float(problem.answer)
        assert boxed_answer(problem.reference or "") == problem.answer
        assert "<<" not in (problem.reference or "")


def test_references_of_gsm8k_can_be_cut() -> None:
    path = shared("gsm8k/test.jsonl")
    boxed = list(GSM8K(path).problems().values())
    hashes = list(GSM8K(path, final="hashes", keep_annotations=True).problems().values())
    assert cuttable(boxed, SentenceBoundaries(lines=True)) == 1
    assert 0.6 < cuttable(boxed, SentenceBoundaries()) < 0.7
    assert cuttable(hashes, SentenceBoundaries("#### .*", lines=True)) > 0.99
    assert cuttable(hashes, SentenceBoundaries()) == 0


def test_all_of_math_500() -> None:
    problems = list(MATH(shared("math500/test_ori.jsonl")).problems().values())
    assert len(problems) == 500
    assert all(boxed_answer(problem.reference or "") == problem.answer for problem in problems)
    assert {problem.metadata["level"] for problem in problems} == {1, 2, 3, 4, 5}
    assert cuttable(problems, SentenceBoundaries()) > 0.93


def test_all_of_stepwise_math() -> None:
    path = shared("uft_math/test.parquet")
    problems = list(StepwiseMATH(path).problems().values())
    assert len(problems) == 1024
    for problem, row in zip(problems, pq.read_table(path).to_pylist(), strict=True):
        steps = problem.metadata["steps"]
        # The published answer is the solution in UFT's own frame.
        target = row["reward_model"]["ground_truth"]["target"]
        assert row["answer"] == f"{problem.reference} </think>\n<answer> {target} </answer>"
        assert problem.answer == target.strip()
        assert all(step.strip() for step in steps)
        assert problem.reference == "".join(steps)
        assert boxed_answer(problem.reference) == problem.answer
    assert cuttable(problems, SentenceBoundaries()) > 0.95


def test_all_of_aime() -> None:
    problems = list(Competition(shared("aime24/test.jsonl")).problems().values())
    assert len(problems) == 30
    assert all(problem.answer == str(int(problem.answer)) for problem in problems)
    assert all(0 <= int(problem.answer) <= 999 for problem in problems)
    assert all(problem.reference for problem in problems)
