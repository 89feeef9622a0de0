"""Screening a small file in DeepMath's format, rule by rule, and taken up again after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_madrl.attempts import Attempt, CompletionsFile
from lit_madrl.data import ReferenceMathDataModule, Screened
from lit_madrl.screen import main
from tests.helpers.running import ROOT


def row(question: str, answer: str, difficulty: float = 6.0, solution: str | None = None) -> dict[str, Any]:
    solution = rf"So we get \boxed{{{answer}}}." if solution is None else solution
    columns = {f"r1_solution_{i}": solution for i in (1, 2, 3)}
    return {
        "question": question,
        "final_answer": answer,
        "difficulty": difficulty,
        "topic": "Algebra",
        **columns,
    }


ROWS = [
    row("What is 1 + 1?", "2"),
    row("Too easy?", "3", difficulty=4.5),
    row("Which? (A) 1 (B) 2 (C) 3", "A"),
    row("Roots?", "1, 2"),
    row("What is half?", r"\frac{1}{2}"),
    row("Always solved?", "7"),
    row("Wrong reference?", "5", solution=r"So we get \boxed{6}."),
    row("No box?", "5", solution="So we get 5."),
    row("Unreadable?", r"\frac{1}{"),
]


@pytest.fixture
def deepmath(tmp_path: Path) -> Path:
    path = tmp_path / "deepmath.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def arguments(deepmath: Path, *more: str) -> list[str]:
    source = [{"class_path": "DeepMath", "init_args": {"path": str(deepmath)}}]
    return [
        *("--config", "configs/evaluation/screening.yaml"),
        *("--output", str(deepmath.with_name("screened.jsonl"))),
        *("--data.init_args.train", json.dumps(source)),
        *("--engine", "TorchEngine"),
        *more,
    ]


def test_each_rule(deepmath: Path, monkeypatch: pytest.MonkeyPatch, chat_model: Path) -> None:
    """Attempts are there already: right ones for one problem, seven right and one wrong for another."""
    monkeypatch.chdir(ROOT)
    file = CompletionsFile(deepmath.with_name("screened.jsonl.attempts.jsonl"))
    file.claim(
        {
            "policy": str(chat_model),
            "sampling": {
                "group_size": 8,
                "max_new_tokens": 8192,
                "min_new_tokens": 0,
                "temperature": 1.0,
                "top_k": 0,
                "top_p": 1.0,
                "stop": [],
            },
            "seed": 0,
            "batch_size": 32,
        }
    )
    for number in (0, 4, 5, 6, 7):
        answer = ROWS[number]["final_answer"]
        right = {0: 7, 5: 8}.get(number, 0)
        texts = [rf"\boxed{{{answer if i < right else 99}}}" for i in range(8)]
        file.append([Attempt(f"deepmath/{number}", answer, i, text) for i, text in enumerate(texts)])
    left = main(arguments(deepmath, "--policy.pretrained", str(chat_model)))
    assert list(left.items()) == [
        ("read", 9),
        ("prompt fits", 9),
        ("difficulty", 8),
        ("no multiple choice", 7),
        ("short answer", 6),
        ("verifiable", 5),
        ("sample", 5),
        ("not always solved", 4),
        ("reference ends in the answer", 2),
    ]
    screened = Screened(str(deepmath.with_name("screened.jsonl"))).problems()
    assert [problem.question for problem in screened.values()] == ["What is 1 + 1?", "What is half?"]
    assert [problem.metadata["id"] for problem in screened.values()] == ["deepmath/0", "deepmath/4"]
    data = ReferenceMathDataModule([Screened(str(deepmath.with_name("screened.jsonl")))])
    assert data.train_problem(0, 0).answer == "2"


def test_attempts_are_drawn_and_kept(
    deepmath: Path, monkeypatch: pytest.MonkeyPatch, chat_model: Path
) -> None:
    """A random model solves nothing; the second run draws nothing and writes the same file."""
    monkeypatch.chdir(ROOT)
    call = arguments(
        deepmath,
        "--policy.pretrained",
        str(chat_model),
        "--sampling.max_new_tokens",
        "4",
        "--sampling.group_size",
        "2",
    )
    assert main(call)["reference ends in the answer"] == 3
    output, kept = deepmath.with_name("screened.jsonl"), deepmath.with_name("screened.jsonl.attempts.jsonl")
    first = output.read_bytes(), kept.read_bytes()
    assert len(kept.read_text().splitlines()) == 10
    output.unlink()
    main(call)
    assert (output.read_bytes(), kept.read_bytes()) == first


def test_sampling_and_difficulty_are_arguments(deepmath: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    left = main(arguments(deepmath, "--policy", "null", "--rules.sample", "2", "--rules.min_difficulty", "7"))
    assert left["difficulty"] == 0
    left = main(arguments(deepmath, "--policy", "null", "--rules.sample", "2"))
    assert left["sample"] == 2
    assert "not always solved" not in left
