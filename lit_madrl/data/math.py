"""Mathematical problems that come with an answer and a reference solution."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import chain

from lightning.pytorch.utilities import rank_zero_warn

from lit_madrl.data.math_sources import MathProblem, MathSource
from lit_madrl.data.prompts import PromptDataModule, require_at_least, seeded
from lit_madrl.types import Problem

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
TEMPLATE = "Question: {question}\nAnswer:\n"

_EXAMPLES_SEED = 0


class ReferenceMathDataModule(PromptDataModule):
    r"""Problems of one or several sources, each with its ``answer``, and its ``reference`` where the source has one.

    ``Problem.id`` is ``source/number of its row``; ``metadata`` says the ``source``, the plain ``question``, and what
    else the source knows. Sources are read once a process. Training problems whose question, but for case and space,
    is in the validation or test sources are left out, with a warning that counts them. How long a prompt may be in
    tokens is for those to say who have the tokenizer: nothing is left out for its length here.

    Args:
        train: sources to train on, shown in the order of :class:`EndlessPromptSampler`; none for evaluation alone.
        validation: sources of the validation set.
        test: sources of the test set.
        instruction: what a chat message says after the question and a blank line; empty for the question alone.
        chat: ask in one chat message; false asks in plain text by ``template``.
        template: plain prompt, with ``{question}`` in it, right after which a solution begins.
        examples: solved training problems before each plain prompt, separated by blank lines. They are the same in
            every run, except that a question is never among its own.
        batch_size: see :class:`PromptDataModule`, as for the other arguments.
    """

    def __init__(
        self,
        train: Sequence[MathSource] = (),
        validation: Sequence[MathSource] = (),
        test: Sequence[MathSource] = (),
        instruction: str = INSTRUCTION,
        chat: bool = True,
        template: str = TEMPLATE,
        examples: int = 0,
        batch_size: int = 8,
        eval_batch_size: int = 32,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, num_workers)
        for split, sources in (("train", train), ("validation", validation), ("test", test)):
            _check_names(split, sources)
        if "{question}" not in template:
            raise ValueError(f"template: expected a text with '{{question}}' in it, got {template!r}")
        require_at_least(0, examples=examples)
        if examples and chat:
            raise ValueError(f"examples: expected 0 with chat prompts, got {examples}; or set chat to false")
        if examples and not train:
            raise ValueError(f"train: expected a source to take {examples} examples from, got none")
        self.train = tuple(train)
        self.validation = tuple(validation)
        self.test = tuple(test)
        self.instruction = instruction
        self.chat = chat
        self.template = template
        self.examples = examples

    def setup(self, stage: str) -> None:
        """Read what the stage needs, so that unreadable data stops a run before it starts."""
        if stage == "fit":
            _ = self.num_train_prompts  # to leave out what is evaluated, the other sets are read too
        elif stage == "validate":
            self.validation_problems()
        elif stage == "test":
            self.test_problems()

    @property
    def num_train_prompts(self) -> int:
        """How many training problems there are.

        Raises:
            ValueError: there is none, or too few to show as examples.
        """
        if not self._train_problems:
            raise ValueError(f"train: expected at least one problem, got none from {len(self.train)} sources")
        return len(self._train_problems)

    def train_problem(self, index: int, position: int) -> Problem:
        return self._train_problems[index]

    def validation_problems(self) -> list[Problem]:
        return self._validation_problems

    def test_problems(self) -> list[Problem]:
        return self._test_problems

    @cached_property
    def _train_problems(self) -> list[Problem]:
        return self._build(self._train_data)

    @cached_property
    def _validation_problems(self) -> list[Problem]:
        return self._build(self._validation_data)

    @cached_property
    def _test_problems(self) -> list[Problem]:
        return self._build(self._test_data)

    @cached_property
    def _train_data(self) -> dict[str, MathProblem]:
        data = _read(self.train)
        evaluated = {
            _key(problem.question)
            for problem in chain(self._validation_data.values(), self._test_data.values())
        }
        kept = {name: problem for name, problem in data.items() if _key(problem.question) not in evaluated}
        if len(kept) < len(data):
            rank_zero_warn(
                f"train: left out {len(data) - len(kept)} of {len(data)} problems whose questions are in the "
                "validation or test set"
            )
        return kept

    @cached_property
    def _validation_data(self) -> dict[str, MathProblem]:
        return _read(self.validation)

    @cached_property
    def _test_data(self) -> dict[str, MathProblem]:
        return _read(self.test)

    @cached_property
    def _solved(self) -> dict[str, str]:
        """One example more than are shown, by the key of its question: so many are left when one is the question."""
        if not self.examples:
            return {}
        solved = {
            _key(problem.question): self._ask(problem.question) + problem.reference
            for problem in self._train_data.values()
            if problem.reference
        }
        if len(solved) <= self.examples:
            raise ValueError(
                f"examples: expected fewer than the {len(solved)} different training questions with a reference, "
                f"got {self.examples}"
            )
        keys = seeded(_EXAMPLES_SEED, "math examples").sample(list(solved), self.examples + 1)
        return {key: solved[key] for key in keys}

    def _build(self, data: dict[str, MathProblem]) -> list[Problem]:
        return [
            Problem(
                id=name,
                prompt=self._prompt(problem.question),
                answer=problem.answer,
                reference=problem.reference,
                metadata=problem.metadata,
            )
            for name, problem in data.items()
        ]

    def _prompt(self, question: str) -> str | tuple[dict[str, str]]:
        if self.chat:
            parts = [question, self.instruction] if self.instruction else [question]
            return ({"role": "user", "content": "\n\n".join(parts)},)
        examples = [example for key, example in self._solved.items() if key != _key(question)]
        return "\n\n".join([*examples[: self.examples], self._ask(question)])

    def _ask(self, question: str) -> str:
        return self.template.replace("{question}", question)  # not format: a template may hold a \boxed{}


def _read(sources: Sequence[MathSource]) -> dict[str, MathProblem]:
    return {
        name: problem._replace(
            metadata={"source": source.name, "question": problem.question, **problem.metadata}
        )
        for source in sources
        for name, problem in source.problems().items()
    }


def _key(question: str) -> str:
    """What two spellings of one question have in common."""
    return "".join(unicodedata.normalize("NFKC", question).casefold().split())


def _check_names(split: str, sources: Sequence[MathSource]) -> None:
    for name, count in Counter(source.name for source in sources).items():
        if count > 1:
            raise ValueError(
                f"{split}: expected a name of its own for each source, got {name!r} {count} times"
            )
