"""Completions of many problems, drawn once and kept: what was interrupted goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track

from lit_madrl.learners.collector import Collector
from lit_madrl.learners.random_state import hash_seed
from lit_madrl.policy.build import PolicyConfig
from lit_madrl.rollouts import TorchEngine
from lit_madrl.rollouts.base import RolloutEngine
from lit_madrl.types import Problem, Sampling


class Attempt(NamedTuple):
    """One completion of a problem.

    Attributes:
        problem: id of the problem; what precedes its last ``/`` is the source.
        answer: the problem's gold answer.
        sample: number of the completion, from 0.
        completion: its text, without special tokens.
        finished: false where the length limit cut it.
    """

    problem: str
    answer: str
    sample: int
    completion: str
    finished: bool = True

    @property
    def source(self) -> str:
        """Where the problem is from."""
        return self.problem.rpartition("/")[0] or "all"


class CompletionsFile:
    """Attempts as JSON lines, one a completion; a last line that a crash cut short is dropped.

    ``<file>.settings.json`` beside it holds what they were drawn with. A file without it, made elsewhere, is read all
    the same.

    Args:
        path: the file; made on the first :meth:`append`.

    Raises:
        ValueError: a line is no attempt.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.attempts: dict[str, dict[int, Attempt]] = {}
        """By problem and sample."""
        for attempt in self._read():
            self.attempts.setdefault(attempt.problem, {})[attempt.sample] = attempt

    def lacks(self, problem: Problem, samples: int) -> bool:
        """Whether the problem has fewer completions than wanted."""
        return any(number not in self.attempts.get(problem.id, {}) for number in range(samples))

    def append(self, attempts: Sequence[Attempt]) -> None:
        """Write attempts; they are on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(a._asdict(), ensure_ascii=False) + "\n" for a in attempts))
            file.flush()
            os.fsync(file.fileno())
        for attempt in attempts:
            self.attempts.setdefault(attempt.problem, {})[attempt.sample] = attempt

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Note what the completions are drawn with.

        Raises:
            ValueError: those that are there were drawn with something else.
        """
        note = self.path.with_name(self.path.name + ".settings.json")
        wanted = json.loads(json.dumps(settings))
        if self.attempts:
            found = json.loads(note.read_text()) if note.is_file() else {}
            for name, value in wanted.items():
                if found.get(name) != value:
                    raise ValueError(
                        f"{name}: expected {found.get(name)!r}, as for the completions in {self.path}, got {value!r}; "
                        "give another file to begin anew"
                    )
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(wanted, indent=1) + "\n")

    def _read(self) -> Iterator[Attempt]:
        if not self.path.is_file():
            return
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        for number, line in enumerate(whole.decode().splitlines(), start=1):
            try:
                yield Attempt(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{self.path}, line {number}: expected a completion with the fields {', '.join(Attempt._fields)}, "
                    f"got {line[:200]!r}"
                ) from error


def draw_attempts(
    problems: Sequence[Problem],
    file: CompletionsFile,
    policy: PolicyConfig,
    sampling: Sampling,
    engine: RolloutEngine | None = None,
    seed: int = 0,
    batch_size: int = 8,
    device: str = "auto",
) -> None:
    """Draw the completions that the file lacks, ``sampling.group_size`` for each problem.

    Each batch of problems has its own seed, so an interrupted run ends with the same file as an uninterrupted one.

    Args:
        problems: with their answers.
        file: is appended to after every batch.
        policy: the model.
        sampling: how to draw.
        engine: draws; default the embedded one.
        seed: of the draws.
        batch_size: problems at a time.
        device: of the model: ``auto`` is the GPU where there is one.

    Raises:
        ValueError: the file's completions were drawn otherwise, or a problem has no answer.
    """
    for problem in problems:
        if problem.answer is None:
            raise ValueError(f"Problem.answer: expected a gold answer, got None in {problem.id!r}")
    file.claim(
        {"policy": policy.pretrained, "sampling": vars(sampling), "seed": seed, "batch_size": batch_size}
    )
    batches = [problems[start : start + batch_size] for start in range(0, len(problems), batch_size)]
    todo = [
        (number, batch)
        for number, batch in enumerate(batches)
        if any(file.lacks(problem, sampling.group_size) for problem in batch)
    ]
    if not todo:
        return
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = policy.build().to(device).eval()
    collector = Collector(model, policy.tokenizer(), engine or TorchEngine())
    for number, batch in track(todo, "drawing completions"):
        collector.engine.seed(hash_seed(seed, number))
        file.append(_draw(batch, file, collector, sampling))


def _draw(
    batch: Sequence[Problem], file: CompletionsFile, collector: Collector, sampling: Sampling
) -> list[Attempt]:
    """The completions of a batch that the file lacks; the whole batch is drawn, so that the draws are the same."""
    rollouts = collector.generate(batch, sampling)
    finished = rollouts.finished.tolist()
    return [
        Attempt(problem.id, str(problem.answer), sample, text, finished[p][sample])
        for p, (problem, texts) in enumerate(zip(batch, collector.decode(rollouts), strict=True))
        if file.lacks(problem, sampling.group_size)
        for sample, text in enumerate(texts)
    ]
