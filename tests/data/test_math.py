from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from lit_madrl.augmenters import SentenceBoundaries
from lit_madrl.data import (
    GSM8K,
    MATH,
    Competition,
    MathProblem,
    MathSource,
    ReferenceMathDataModule,
    StepwiseMATH,
)
from lit_madrl.learners import GRPOLearner
from lit_madrl.types import Problem
from tests.data.test_math_sources import shared
from tests.helpers.running import SMALL_TRAINER, run


class Listed(MathSource):
    """Problems given in the test, with what they hold as their columns."""

    columns = ("question",)
    reads = 0

    def __init__(self, *problems: tuple[str, str | None], name: str = "listed") -> None:
        super().__init__("nowhere", name=name)
        self.given = problems

    def rows(self) -> Any:
        self.reads += 1
        return ({"question": question, "reference": reference} for question, reference in self.given)

    def read(self, row: Any) -> MathProblem:
        return MathProblem(row["question"], "7", row["reference"], {"level": 5})


def listed(*questions: str, name: str = "listed") -> Listed:
    return Listed(*((question, f"As {question} {{so}}: \\boxed{{7}}.") for question in questions), name=name)


def trained(data: ReferenceMathDataModule) -> list[Problem]:
    return [data.train_problem(i, i) for i in range(data.num_train_prompts)]


def gsm8k(folder: Path, count: int, split: str = "train") -> str:
    """A file of ``count`` problems as GSM8K publishes them."""
    path = folder / f"{split}.jsonl"
    rows = [
        {
            "question": f"{split}: what is {i}+1?",
            "answer": f"It is one more.\nSo it is {i}+1=<<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}",
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_chat_prompt_is_one_message_with_the_papers_instruction() -> None:
    content = "What is {x}?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    data = ReferenceMathDataModule([listed("What is {x}?")])
    assert trained(data) == [
        Problem(
            id="listed/0",
            prompt=({"role": "user", "content": content},),
            answer="7",
            reference=r"As What is {x}? {so}: \boxed{7}.",
            metadata={"source": "listed", "question": "What is {x}?", "level": 5},
        )
    ]
    (problem,) = trained(ReferenceMathDataModule([listed("Q?")], instruction=""))
    assert problem.prompt == ({"role": "user", "content": "Q?"},)


def test_a_plain_prompt_follows_the_template() -> None:
    data = ReferenceMathDataModule([listed("Q{?}")], chat=False)
    assert trained(data)[0].prompt == "Question: Q{?}\nAnswer:\n"
    data = ReferenceMathDataModule([listed("Q{?}")], chat=False, template=r"{question} Use \boxed{}: ")
    assert trained(data)[0].prompt == r"Q{?} Use \boxed{}: "


def test_sources_follow_each_other_and_keep_their_names() -> None:
    data = ReferenceMathDataModule([listed("a", "b"), listed("c", name="more")], test=[listed("d", "e")])
    assert [problem.id for problem in trained(data)] == ["listed/0", "listed/1", "more/0"]
    assert [problem.metadata["source"] for problem in trained(data)] == ["listed", "listed", "more"]
    assert [problem.id for problem in data.test_problems()] == ["listed/0", "listed/1"]
    assert data.validation_problems() == []
    assert data.categories == ()


def test_examples_are_fixed_solved_and_never_the_question_itself() -> None:
    questions = [f"q{i}" for i in range(9)]

    def build(seed: int = 0) -> ReferenceMathDataModule:
        sources = [Listed(("unsolved", None)), listed(*questions, name="solved")]
        test = [listed("new", name="test")]
        return ReferenceMathDataModule(sources, test=test, chat=False, examples=3, seed=seed)

    (new,) = build().test_problems()
    *shown, last = str(new.prompt).split("\n\n")
    assert last == "Question: new\nAnswer:\n"
    asked = [example.partition("\n")[0].removeprefix("Question: ") for example in shown]
    assert len(set(asked)) == 3
    assert shown == [f"Question: {q}\nAnswer:\nAs {q} {{so}}: \\boxed{{7}}." for q in asked]
    assert build(seed=1).test_problems() == [new]
    changed = []
    for problem in trained(build()):
        *examples, question = str(problem.prompt).split("\n\n")
        assert question not in [example.partition("As ")[0] for example in examples]
        assert len(set(examples)) == 3
        if examples != shown:
            changed.append(question)
    assert changed == [f"Question: {q}\nAnswer:\n" for q in sorted(asked)]


def test_too_few_examples() -> None:
    data = ReferenceMathDataModule([listed("a", "b", "B ")], chat=False, examples=2)
    with pytest.raises(
        ValueError, match=r"examples: expected fewer than the 2 different training questions .* 2"
    ):
        data.setup("fit")


def test_training_leaves_out_what_is_evaluated() -> None:
    train = listed("What is $1 + 1$?", "What is $1+2$?", "What is ２?", "New?")
    validation = [listed("what  IS\n$1+1$? ")]
    test = [listed("What is 2?"), listed("What is $1+2$?", name="more")]
    data = ReferenceMathDataModule([train], validation, test)
    with pytest.warns(
        UserWarning, match="train: left out 3 of 4 problems whose questions are in the validation"
    ):
        assert [problem.id for problem in trained(data)] == ["listed/3"]
    assert len(data.validation_problems()) == 1
    assert len(data.test_problems()) == 2


def test_math_500_is_kept_from_training_on_steps() -> None:
    """UFT's 1,024 problems are of MATH's old test split, to which MATH-500 belongs."""
    train = StepwiseMATH(shared("uft_math/test.parquet"))
    data = ReferenceMathDataModule([train], test=[MATH(shared("math500/test_ori.jsonl"))])
    with pytest.warns(UserWarning, match="train: left out 99 of 1024 problems"):
        data.setup("fit")
    assert data.num_train_prompts == 925


def test_no_warning_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ReferenceMathDataModule([listed("a")], [listed("b")], [listed("c")]).setup("fit")


@pytest.mark.parametrize(
    ("stage", "reads"), [("fit", (1, 1, 1)), ("validate", (0, 1, 0)), ("test", (0, 0, 1))]
)
def test_a_stage_reads_what_it_needs_and_only_once(stage: str, reads: tuple[int, ...]) -> None:
    sources = [listed("a"), listed("b"), listed("c")]
    data = ReferenceMathDataModule(*([source] for source in sources))
    assert [source.reads for source in sources] == [0, 0, 0]
    for _ in range(2):
        data.setup(stage)
    assert tuple(source.reads for source in sources) == reads


@pytest.mark.filterwarnings("ignore:.*(no problems|left out 1 of 1)")
@pytest.mark.parametrize("train", [(), [listed()], [listed("b")]])
def test_nothing_to_train_on(train: Sequence[MathSource]) -> None:
    data = ReferenceMathDataModule(train, test=[listed("b")])
    with pytest.raises(ValueError, match="train: expected at least one problem"):
        data.setup("fit")
    data.setup("test")


def test_an_unreadable_source_stops_the_setup() -> None:
    data = ReferenceMathDataModule([GSM8K("./nowhere.jsonl")])
    with pytest.raises(ValueError, match=r"GSM8K './nowhere.jsonl' .*cannot be read"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"template": "Answer:"}, "template: expected a text with '{question}' in it, got 'Answer:'"),
        ({"examples": 1}, "examples: expected 0 with chat prompts, got 1"),
        ({"examples": -1, "chat": False}, "examples: expected an integer >= 0, got -1"),
        ({"examples": 1, "chat": False}, "train: expected a source to take 1 examples from, got none"),
        (
            {"test": [Competition("a"), Competition("b")]},
            "test: expected a name of its own for each source, got 'competition' 2 times",
        ),
        ({"batch_size": 0}, "batch_size: expected an integer >= 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReferenceMathDataModule(**arguments)


def ids(data: ReferenceMathDataModule, steps: int, cursor: int = 0) -> list[str]:
    """What training sees from a cursor on."""
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        strategy=SimpleNamespace(), lightning_module=SimpleNamespace(prompt_cursor=cursor)
    )
    batches: Sequence[list[Problem]] = list(islice(data.train_dataloader(), steps))
    return [problem.id for batch in batches for problem in batch]


def test_a_resumed_run_continues_at_the_next_prompt(tmp_path: Path) -> None:
    def build(seed: int = 0) -> ReferenceMathDataModule:
        return ReferenceMathDataModule([GSM8K(gsm8k(tmp_path, 7))], batch_size=2, seed=seed)

    whole = ids(build(), 7)
    assert ids(build(), 4, cursor=6) == whole[6:]
    assert sorted(whole[:7]) == sorted(whole[7:]) == [f"gsm8k/{i}" for i in range(7)]
    assert ids(build(seed=1), 7) != whole


def test_workers_get_what_was_read(tmp_path: Path) -> None:
    data = ReferenceMathDataModule([GSM8K(gsm8k(tmp_path, 5))])
    data.setup("fit")
    (tmp_path / "train.jsonl").unlink()
    assert trained(pickle.loads(pickle.dumps(data))) == trained(data)


@pytest.mark.parametrize("final", ["boxed", "hashes"])
def test_the_command_line_trains_with_a_source_of_each_split(
    tiny_choice: Path, tmp_path: Path, final: str
) -> None:
    """From YAML with nothing but class names to a step, and a reference cut at a boundary of real tokens."""
    train = {"class_path": "GSM8K", "init_args": {"path": gsm8k(tmp_path, 6), "final": final}}
    (tmp_path / "aime.jsonl").write_text('{"ID": "2024-I-1", "Problem": "Find it.", "Answer": 25}\n')
    test = {
        "class_path": "Competition",
        "init_args": {"path": str(tmp_path / "aime.jsonl"), "name": "aime24"},
    }
    validation = {"class_path": "GSM8K", "init_args": {"path": gsm8k(tmp_path, 2, "test")}}
    config = {
        "model": {
            "class_path": "GRPOLearner",
            "init_args": {
                "policy": {"pretrained": str(tiny_choice)},
                "rewards": "Correctness",
                "verifier": "tests.helpers.running.HashVerifier",
                "score_truncated": True,
                "sampling": {"group_size": 4, "max_new_tokens": 4},
            },
        },
        "data": {
            "class_path": "ReferenceMathDataModule",
            "init_args": {
                "train": [train],
                "validation": [validation],
                "test": [test],
                "chat": False,
                "examples": 2,
            },
        },
    }
    (tmp_path / "math.yaml").write_text(yaml.safe_dump(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli = run("fit", "-c", tmp_path / "math.yaml", *SMALL_TRAINER, "--run_dir", tmp_path / "run")
    assert cli.trainer.global_step == 1
    assert isinstance(cli.model, GRPOLearner)
    assert cli.model.prompt_cursor == 2
    data = cli.datamodule
    assert [problem.id for problem in data.test_problems()] == ["aime24/0"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_choice)
    rule = SentenceBoundaries("boxed" if final == "boxed" else "#### .*", lines=True)
    for problem in trained(data):
        reference = str(problem.reference)
        offsets = tokenizer(reference, add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        lines = reference.split("\n")
        # The last step may be given too where a sentence with the answer is left to write.
        expected = [lines[0], "\n".join(lines[:2])] if final == "boxed" else [lines[0]]
        assert [reference[: offsets[t][0]].rstrip() for t in rule(reference, offsets)] == expected
