"""pass@k and avg@k of completions: ``python -m lit_madrl.evaluate --config EVALUATION.yaml``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table

# Imported for their names: a YAML file says `class_path: Competition` for any class in them.
from lit_madrl import data as data_modules
from lit_madrl import rollouts, tasks
from lit_madrl.attempts import Attempt, CompletionsFile, draw_attempts
from lit_madrl.cli_errors import one_line_errors
from lit_madrl.data import PromptDataModule
from lit_madrl.functional import average_at_k, pass_at_k
from lit_madrl.policy import PolicyConfig
from lit_madrl.rollouts import RolloutEngine
from lit_madrl.tasks import MathVerifier, Verifier
from lit_madrl.types import Problem, Sampling

_COMPONENTS = (data_modules, rollouts, tasks)
Numbers = dict[str, dict[str, float]]


def evaluate(
    completions: Path,
    data: PromptDataModule | None = None,
    policy: PolicyConfig | None = None,
    sampling: Sampling = Sampling(group_size=12, max_new_tokens=16384, temperature=1.0, top_k=20, top_p=0.95),
    verifier: Verifier | None = None,
    engine: RolloutEngine | None = None,
    score_truncated: bool = True,
    seed: int = 1234,
    batch_size: int = 8,
    device: str = "auto",
) -> Numbers:
    """Draw what a completions file lacks, judge all of it, and print pass@k and avg@k by source.

    Without ``policy`` the file is judged as it is. Results are also written to ``<completions>.metrics.json``. The
    defaults are the evaluation of ARG's paper: 12 samples, temperature 1, top-p .95, top-k 20, seed 1234.

    Args:
        completions: JSON lines with problem, answer, sample, completion and finished; an interrupted evaluation goes on
            from it.
        data: its test problems are evaluated.
        policy: the model to draw from.
        sampling: how to draw; ``group_size`` is k.
        verifier: judges; default math-verify on the last boxed answer.
        engine: draws; default the embedded one.
        score_truncated: judge what the length limit cut, which may hold an answer all the same.
        seed: of the draws.
        batch_size: problems drawn at a time.
        device: of the model: ``auto`` is the GPU where there is one.

    Returns:
        The numbers by source, ``all`` of them together: the mean over questions.

    Raises:
        ValueError: there is nothing to evaluate, or problems have different numbers of completions.
    """
    file = CompletionsFile(completions)
    if policy is not None:
        if data is None:
            raise ValueError("data: expected a data module whose test problems to complete, got none")
        problems = list(data.test_problems())
        draw_attempts(problems, file, policy, sampling, engine, seed, batch_size, device)
        wanted = {problem.id: sampling.group_size for problem in problems}
    else:
        wanted = {name: len(samples) for name, samples in file.attempts.items()}
    groups = [[file.attempts[name][number] for number in range(count)] for name, count in wanted.items()]
    numbers = summarize(groups, verifier or MathVerifier(), score_truncated)
    target = completions.with_name(completions.name + ".metrics.json")
    target.write_text(json.dumps(numbers, indent=1) + "\n")
    _print(numbers)
    return numbers


def summarize(
    groups: Sequence[Sequence[Attempt]], verifier: Verifier, score_truncated: bool = True
) -> Numbers:
    """pass@1, pass@k and avg@k by source and over all, k the completions a problem.

    Raises:
        ValueError: there are no problems, or they have different numbers of completions.
    """
    sizes = sorted({len(group) for group in groups})
    if len(sizes) != 1:
        raise ValueError(
            f"completions: expected equally many for each of the problems, got {sizes or 'none'}"
        )
    (k,) = sizes
    problems = [Problem(group[0].problem, "", answer=group[0].answer) for group in groups]
    correct = verifier(problems, [[attempt.completion for attempt in group] for group in groups])
    finished = torch.tensor([[attempt.finished for attempt in group] for group in groups])
    if not score_truncated:
        correct = correct * finished
    hits = correct.sum(-1)
    sources = [group[0].source for group in groups]
    numbers: Numbers = {}
    for source in [*dict.fromkeys(sources), "all"]:
        chosen = torch.tensor([source in (own, "all") for own in sources])
        numbers[source] = {
            "problems": float(chosen.sum()),
            f"pass@{k}": float(pass_at_k(k, hits[chosen], k).mean()),
            f"avg@{k}": float(average_at_k(k, hits[chosen]).mean()),
            "truncated": 1 - float(finished[chosen].float().mean()),
        }
    return numbers


def _print(numbers: Numbers) -> None:
    table = Table("source", *numbers["all"])
    for source, values in numbers.items():
        row = (f"{value:.0f}" if name == "problems" else f"{value:.2%}" for name, value in values.items())
        table.add_row(source, *row)
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> Any:
    """Run the command on ``arguments`` (default: the program's own)."""
    with one_line_errors(_COMPONENTS):
        return auto_cli(evaluate, args=None if arguments is None else list(arguments), as_positional=False)


if __name__ == "__main__":
    main(sys.argv[1:])
