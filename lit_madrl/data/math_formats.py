"""Published formats of mathematical problems."""

from __future__ import annotations

import re
from typing import Literal, get_args

from lit_madrl.data.math_sources import MathProblem, MathSource, Row, text, value
from lit_madrl.text import last_boxed

Final = Literal["boxed", "hashes"]

_CALCULATION = re.compile(r"<<[^<>]*>>")
_LEVEL = re.compile(r"\d+")


class DeepMath(MathSource):
    """DeepMath-103K (``zwhe99/DeepMath-103K``): an answer and three solutions by DeepSeek-R1 to each question.

    Args:
        path: see :class:`MathSource`, as for the other arguments.
        solution: which of the three is the reference.
        thinking: keep what R1 wrote before ``</think>`` as part of the reference. Without it the reference is the
            solution that R1 gave in the end, which is what a model with thinking off writes.
    """

    def __init__(
        self,
        path: str = "zwhe99/DeepMath-103K",
        split: str = "train",
        limit: int | None = None,
        name: str | None = None,
        config: str | None = None,
        solution: Literal[1, 2, 3] = 1,
        thinking: bool = False,
    ) -> None:
        super().__init__(path, split, limit, name, config)
        if solution not in (1, 2, 3):
            raise ValueError(f"solution: expected 1, 2 or 3, got {solution!r}")
        self.solution = solution
        self.thinking = thinking

    columns = (
        "question",
        "final_answer",
        "difficulty",
        "topic",
        "r1_solution_1",
        "r1_solution_2",
        "r1_solution_3",
    )

    def read(self, row: Row) -> MathProblem:
        reference = text(row, f"r1_solution_{self.solution}")
        if not self.thinking:
            reference = reference.rpartition("</think>")[2].strip()
        metadata = {key: value(row, key) for key in ("difficulty", "topic")}
        return MathProblem(text(row, "question"), text(row, "final_answer"), reference or None, metadata)


class Screened(MathSource):
    """Problems chosen from another source and written down again, with that source's id in ``metadata["id"]``."""

    columns = ("question", "answer", "reference", "difficulty", "topic", "id")

    def read(self, row: Row) -> MathProblem:
        metadata = {key: value(row, key) for key in ("id", "difficulty", "topic")}
        return MathProblem(
            text(row, "question"), text(row, "answer"), text(row, "reference") or None, metadata
        )


class GSM8K(MathSource):
    r"""GSM8K (``openai/gsm8k``): word problems whose solutions have a step on each line.

    For :class:`SentenceBoundaries` a reference needs ``lines: true``, and ``answer: "#### .*"`` where it ends so.

    Args:
        path: see :class:`MathSource`, as for the other arguments.
        final: ``hashes`` ends the reference with the published line ``#### 18``, ``boxed`` with the sentence
            ``The answer is \boxed{18}.`` instead, as a model writes that is asked for a box.
        keep_annotations: keep the calculator's annotations, the ``<<48/2=24>>`` of ``48/2 = <<48/2=24>>24``.
    """

    columns = ("question", "answer")
    hub_config = "main"

    def __init__(
        self,
        path: str = "openai/gsm8k",
        split: str = "train",
        limit: int | None = None,
        name: str | None = None,
        config: str | None = None,
        final: Final = "boxed",
        keep_annotations: bool = False,
    ) -> None:
        super().__init__(path, split, limit, name, config)
        if final not in get_args(Final):
            raise ValueError(f"final: expected {' or '.join(get_args(Final))}, got {final!r}")
        self.final = final
        self.keep_annotations = keep_annotations

    def read(self, row: Row) -> MathProblem | None:
        solution, marked, answer = text(row, "answer").rpartition("####")
        if not marked:
            return None
        answer = answer.strip().replace(",", "")
        if not self.keep_annotations:
            solution = _CALCULATION.sub("", solution)
        last = rf"The answer is \boxed{{{answer}}}." if self.final == "boxed" else f"#### {answer}"
        return MathProblem(text(row, "question"), answer, f"{solution.rstrip()}\n{last}", {})


class MATH(MathSource):
    r"""MATH and MATH-500 (``DigitalLearningGmbH/MATH-lighteval``, ``HuggingFaceH4/MATH-500``).

    Without a column ``answer`` that is what the solution's last ``\boxed{}`` holds.
    """

    columns = ("problem", "solution")

    def read(self, row: Row) -> MathProblem:
        solution = text(row, "solution")
        answer = text(row, "answer") or boxed_answer(solution)
        metadata = {"level": _level(row), "subject": text(row, "subject|type")}
        return MathProblem(text(row, "problem"), answer, solution or None, metadata)


class StepwiseMATH(MathSource):
    """MATH as UFT (arXiv:2505.16984) publishes it, with each solution split in steps.

    The question is the problem alone, without UFT's own prompt. ``metadata["steps"]`` are the steps, which joined are
    the reference. White space that is published as a step of its own belongs to the step before, at the start to the
    one after.
    """

    columns = (
        "hint",
        "level",
        "type",
        "reward_model.ground_truth.question",
        "reward_model.ground_truth.target",
    )

    def read(self, row: Row) -> MathProblem:
        steps: list[str] = []
        for step in value(row, "hint") or ():
            if steps and not (step.strip() and steps[-1].strip()):
                steps[-1] += step
            else:
                steps.append(step)
        question, answer = (text(row, f"reward_model.ground_truth.{key}") for key in ("question", "target"))
        metadata = {"level": _level(row), "subject": text(row, "type"), "steps": steps}
        return MathProblem(question, answer, "".join(steps) or None, metadata)


class Competition(MathSource):
    r"""AIME and HMMT in the columns of the hub, all of whose spellings are read.

    ``HuggingFaceH4/aime_2024``, ``Maxwell-Jia/AIME_2024``, ``opencompass/AIME2025`` (one ``config`` an exam) and
    ``MathArena``'s ``aime_2025``, ``aime_2026``, ``hmmt_feb_2025``, ``hmmt_nov_2025``, all in split ``train`` or
    ``test``. Whole numbers lose their leading zeros: 025 is 25. Without a column for the answer, as in
    ``math-ai/aime24``, it is what the solution's box holds, and there is no reference.
    """

    columns = ("problem|Problem|question", "answer|Answer|solution|Solution")

    def read(self, row: Row) -> MathProblem:
        answer, solution = text(row, "answer|Answer"), text(row, "solution|Solution")
        reference = solution if answer else ""
        answer = answer or boxed_answer(solution)
        if answer.isascii() and answer.isdigit():
            answer = str(int(answer))
        metadata = {"id": text(row, "id|ID|problem_idx")}
        subjects = value(row, "problem_type")
        if subjects:
            metadata["subject"] = subjects if isinstance(subjects, str) else ", ".join(subjects)
        return MathProblem(text(row, "problem|Problem|question"), answer, reference or None, metadata)


def boxed_answer(solution: str) -> str:
    r"""What the last ``\boxed{}`` holds; empty without one."""
    start, end = last_boxed(solution) or (0, 0)
    return solution[start:end].partition("{")[2][:-1].strip()


def _level(row: Row) -> int | None:
    """5 for ``Level 5``; None for ``Level ?``."""
    found = _LEVEL.search(text(row, "level"))
    return int(found[0]) if found else None
