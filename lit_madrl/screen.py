"""Choose problems to train on (ARG's appendix E.1): ``python -m lit_madrl.screen --config SCREENING.yaml``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table

# Imported for their names: a YAML file says `class_path: DeepMath` for any class in them.
from lit_madrl import data as data_modules
from lit_madrl import rollouts, tasks
from lit_madrl.attempts import CompletionsFile, draw_attempts
from lit_madrl.cli_errors import one_line_errors
from lit_madrl.data import ReferenceMathDataModule
from lit_madrl.data.screening import Rules, is_multiple_choice, is_short_expression, sample_by_difficulty
from lit_madrl.learners.collector import encode_prompt
from lit_madrl.policy import PolicyConfig
from lit_madrl.rollouts import RolloutEngine
from lit_madrl.tasks import MathVerifier
from lit_madrl.types import Problem, Sampling

_COMPONENTS = (data_modules, rollouts, tasks)


def screen(
    data: ReferenceMathDataModule,
    output: Path,
    policy: PolicyConfig | None = None,
    sampling: Sampling = Sampling(group_size=8, max_new_tokens=8192),
    verifier: MathVerifier | None = None,
    engine: RolloutEngine | None = None,
    rules: Rules = Rules(),
    seed: int = 0,
    batch_size: int = 32,
    device: str = "auto",
) -> dict[str, int]:
    """Write the training problems that suit verified training with a reference, as JSON lines for ``Screened``.

    In this order: length of the prompt; difficulty; no multiple choice; the answer is one short expression; math-verify
    reads it and finds it equal to itself; ``sample`` problems are drawn in proportion to difficulty; those go that the
    model solves in all of its attempts, and those whose reference does not end in the gold answer. Attempts are kept
    in ``<output>.attempts.jsonl``, from which an interrupted screening goes on; the output appears once complete.

    Args:
        data: whose training problems to screen.
        output: the file to write.
        policy: the model that attempts; without it nothing is attempted and none is dropped for being solved.
        sampling: of the attempts; ``group_size`` is their number.
        verifier: judges; default :class:`MathVerifier`.
        engine: draws; default the embedded one.
        rules: the numbers in these rules.
        seed: of the sample and the attempts.
        batch_size: problems attempted at a time.
        device: of the model.

    Returns:
        How many problems were left after each rule.
    """
    verifier = verifier or MathVerifier()
    problems = [data.train_problem(index, index) for index in range(data.num_train_prompts)]
    left = {"read": len(problems)}

    def keep(rule: str, kept: Iterable[Problem]) -> None:
        problems[:] = list(kept)
        left[rule] = len(problems)

    if policy is not None:
        encode = partial(encode_prompt, policy.tokenizer())
        keep("prompt fits", (p for p in problems if len(encode(p.prompt)) <= rules.most_prompt_tokens))
    for rule, holds in _TEXT_RULES.items():
        keep(rule, (p for p in problems if holds(p, rules)))
    keep("verifiable", compress(problems, verifier.verifiable([str(p.answer) for p in problems])))
    chosen = sample_by_difficulty([_difficulty(p, 1.0) for p in problems], rules.sample, seed)
    keep("sample", [problems[index] for index in chosen])
    if policy is not None:
        file = CompletionsFile(output.with_name(output.name + ".attempts.jsonl"))
        draw_attempts(problems, file, policy, sampling, engine, seed, batch_size, device)
        keep("not always solved", _unsolved(problems, file, sampling.group_size, verifier))
    keep("reference ends in the answer", _answered(problems, verifier))
    _write(problems, output)
    _print(left)
    return left


def _difficulty(problem: Problem, unknown: float) -> float:
    difficulty = problem.metadata.get("difficulty")
    return unknown if difficulty is None else float(difficulty)


_TEXT_RULES: dict[str, Callable[[Problem, Rules], bool]] = {
    "difficulty": lambda p, rules: _difficulty(p, rules.min_difficulty) >= rules.min_difficulty,
    "no multiple choice": lambda p, rules: not is_multiple_choice(p.metadata["question"], str(p.answer)),
    "short answer": lambda p, rules: is_short_expression(str(p.answer), rules.most_answer_characters),
}


def _unsolved(
    problems: Sequence[Problem], file: CompletionsFile, attempts: int, verifier: MathVerifier
) -> list[Problem]:
    texts = [[file.attempts[p.id][number].completion for number in range(attempts)] for p in problems]
    solved = verifier(problems, texts).all(-1).tolist() if problems else []
    return [p for p, always in zip(problems, solved, strict=True) if not always]


def _answered(problems: Sequence[Problem], verifier: MathVerifier) -> list[Problem]:
    with_reference = [p for p in problems if p.reference]
    right = verifier(with_reference, [[str(p.reference)] for p in with_reference])
    return [p for p, ok in zip(with_reference, right.flatten().tolist(), strict=True) if ok]


def _write(problems: Sequence[Problem], output: Path) -> None:
    """All at once: a file that is there is complete."""
    rows = [
        {
            "question": p.metadata["question"],
            "answer": p.answer,
            "reference": p.reference,
            "difficulty": p.metadata.get("difficulty"),
            "topic": p.metadata.get("topic"),
            "id": p.id,
        }
        for p in problems
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial, output)


def _print(left: dict[str, int]) -> None:
    table = Table("after", "problems")
    for rule, count in left.items():
        table.add_row(rule, str(count))
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run the command on ``arguments`` (default: the program's own)."""
    with one_line_errors(_COMPONENTS):
        return auto_cli(screen, args=None if arguments is None else list(arguments), as_positional=False)


if __name__ == "__main__":
    main(sys.argv[1:])
