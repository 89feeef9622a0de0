"""pass@k and avg@k by hand, from a fixed file and end to end, with an interruption in between."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_madrl.attempts import Attempt, CompletionsFile, draw_attempts
from lit_madrl.evaluate import main, summarize
from lit_madrl.policy import PolicyConfig
from lit_madrl.rollouts import TorchEngine
from lit_madrl.tasks import ChainVerifier
from lit_madrl.types import Problem, Sampling
from tests.helpers.running import ROOT

AIME = ROOT.parent / "shared" / "data" / "aime24" / "test.jsonl"


def attempts(problem: str, answer: str, completions: list[str]) -> list[Attempt]:
    return [Attempt(problem, answer, number, text) for number, text in enumerate(completions)]


def write(path: Path, *groups: list[Attempt]) -> Path:
    CompletionsFile(path).append([attempt for group in groups for attempt in group])
    return path


BOX = r"So it is \boxed{%s}."


def test_numbers_by_hand(tmp_path: Path) -> None:
    """Twelve completions each: 3, 0 and 12 right. pass@12 is 2/3, avg@12 is 15/36; by source 1/2 and 1."""
    fixed = write(
        tmp_path / "fixed.jsonl",
        attempts("aime/0", "204", [BOX % "204"] * 2 + [BOX % "203"] * 9 + [r"\boxed{7} or \boxed{0204}"]),
        attempts("aime/1", "25", ["25"] * 11 + [r"\boxed{25"]),  # no balanced box: wrong
        attempts("hmmt/0", r"\frac{1}{2}", [BOX % "0.5", BOX % r"\frac12", BOX % "1/2"] * 4),
    )
    numbers = main(["--completions", str(fixed)])
    assert numbers["all"]["problems"] == 3
    assert numbers["all"]["pass@12"] == pytest.approx(2 / 3)
    assert numbers["all"]["avg@12"] == pytest.approx(15 / 36)
    assert numbers["aime"]["pass@12"] == pytest.approx(1 / 2)
    assert numbers["aime"]["avg@12"] == pytest.approx(3 / 24)
    assert numbers["hmmt"] == {"problems": 1.0, "pass@12": 1.0, "avg@12": 1.0, "truncated": 0.0}
    assert json.loads((tmp_path / "fixed.jsonl.metrics.json").read_text()) == numbers


def test_truncated_completions_may_count_or_not() -> None:
    group = [Attempt("a/0", "3", 0, "[ 3 ]", finished=False), Attempt("a/0", "3", 1, "[ 4 ]")]
    assert summarize([group], ChainVerifier())["all"]["avg@2"] == 0.5
    assert summarize([group], ChainVerifier(), score_truncated=False)["all"]["avg@2"] == 0.0
    assert summarize([group], ChainVerifier())["all"]["truncated"] == 0.5


def test_unequal_numbers_of_completions_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uneven = write(tmp_path / "x.jsonl", attempts("a/0", "1", ["1"]), attempts("a/1", "1", ["1", "2"]))
    with pytest.raises(SystemExit):
        main(["--completions", str(uneven)])
    assert "expected equally many for each of the problems, got [1, 2]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--completions", str(tmp_path / "none.jsonl")])
    assert "got none" in capsys.readouterr().err


def test_a_line_that_is_no_attempt_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"problem": "a"}\n')
    with pytest.raises(ValueError, match="line 1: expected a completion with the fields problem, answer"):
        CompletionsFile(path)


PROBLEMS = [Problem(f"chain/{i}", f"{i} + 3 - 5 ?", answer=str(i)) for i in range(5)]
SAMPLING = Sampling(group_size=3, max_new_tokens=6)


class Interrupted(TorchEngine):
    """Dies after some batches."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.batches -= 1
        if self.batches < 0:
            raise KeyboardInterrupt
        return super().generate(*args, **kwargs)


@pytest.mark.parametrize("cut", [0, 7])
def test_an_interrupted_file_ends_as_an_uninterrupted_one(tiny_chain: Path, tmp_path: Path, cut: int) -> None:
    """After one of three batches, also when the crash left half a line."""
    policy = PolicyConfig(str(tiny_chain))
    draw = lambda path, engine=None: draw_attempts(  # noqa: E731
        PROBLEMS, CompletionsFile(path), policy, SAMPLING, engine, seed=3, batch_size=2
    )
    draw(tmp_path / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        draw(tmp_path / "cut.jsonl", Interrupted(1))
    path = tmp_path / "cut.jsonl"
    assert len(path.read_text().splitlines()) == 6
    path.write_bytes(path.read_bytes()[: -cut or None])
    draw(path)
    ids = lambda name: sorted((tmp_path / name).read_text().splitlines())  # noqa: E731
    assert len(ids("cut.jsonl")) == 15 if not cut else len(set(ids("cut.jsonl"))) == 15
    assert set(ids("cut.jsonl")) == set(ids("whole.jsonl"))
    draw(path, Interrupted(0))  # nothing is left to draw


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda kwargs: {**kwargs, "seed": 4}, "seed"),
        (lambda kwargs: {**kwargs, "sampling": Sampling(group_size=3, max_new_tokens=7)}, "sampling"),
    ],
)
def test_other_settings_are_refused(
    tiny_chain: Path, tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], field: str
) -> None:
    policy = PolicyConfig(str(tiny_chain))
    arguments: dict[str, Any] = {"sampling": SAMPLING, "seed": 3}
    draw_attempts(PROBLEMS[:1], CompletionsFile(tmp_path / "x.jsonl"), policy, **arguments)
    with pytest.raises(ValueError, match=f"{field}: expected .* as for the completions in"):
        draw_attempts(PROBLEMS[:1], CompletionsFile(tmp_path / "x.jsonl"), policy, **change(arguments))


def test_a_problem_without_an_answer_is_refused_before_anything_is_drawn(
    tiny_chain: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"Problem.answer: expected a gold answer, got None in 'p'"):
        draw_attempts(
            [Problem("p", "1 + 2 ?")],
            CompletionsFile(tmp_path / "x.jsonl"),
            PolicyConfig(str(tiny_chain)),
            SAMPLING,
        )
    assert list(tmp_path.iterdir()) == []


def aime_file(folder: Path) -> Path:
    """Thirty problems in the published format: the real ones where they are at hand."""
    if AIME.is_file():
        return AIME
    rows = [{"id": i, "problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(30)]
    path = folder / "aime.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_thirty_aime_problems_end_to_end(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped configuration, with a tiny model and short completions."""
    monkeypatch.chdir(ROOT)
    model = tmp_path / "model"
    shutil.copytree(chat_model, model)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (model / "config.json").write_text(json.dumps(config))
    output = tmp_path / "completions.jsonl"
    numbers = main(
        [
            *("--config", "configs/evaluation/competitions.yaml"),
            *("--completions", str(output)),
            *("--policy.pretrained", str(model)),
            *("--sampling.max_new_tokens", "4"),
            *("--engine", "TorchEngine"),
            "--data.init_args.test",
            json.dumps(
                [
                    {
                        "class_path": "Competition",
                        "init_args": {"path": str(aime_file(tmp_path)), "name": "aime_2024"},
                    }
                ]
            ),
        ]
    )
    assert numbers["all"]["problems"] == numbers["aime_2024"]["problems"] == 30
    assert numbers["all"]["pass@12"] == 0.0
    assert len(output.read_text().splitlines()) == 360
