"""The synthetic choice task: one answer out of five (MaD-RL, arXiv:2609.31644, section 3)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from lit_madrl.data.choice_topics import SHOTS, TEMPLATES, TOPICS, Topic
from lit_madrl.data.prompts import PromptDataModule, require_at_least, seeded
from lit_madrl.functional.divergences import validate_target
from lit_madrl.types import Problem

Style = Literal["plain", "chat", "few_shot"]
Form = Literal["closed", "open", "both"]

CATEGORIES = ("first", "second", "third", "fourth", "fifth")
TARGETS = {"uniform": (0.2, 0.2, 0.2, 0.2, 0.2), "peaked": (0.6, 0.3, 0.1, 0.0, 0.0)}
SKEW = (0.6, 0.2, 0.1, 0.07, 0.03)

_EVALUATION_PROMPTS = 80
_SPLIT_SEED = 0


class Pair(NamedTuple):
    """Indices of a topic and of a template."""

    topic: int
    template: int


class Split(NamedTuple):
    """Disjoint (topic, template) pairs: 480 to train on, 80 to validate, 80 to test."""

    train: tuple[Pair, ...]
    validation: tuple[Pair, ...]
    test: tuple[Pair, ...]


@cache
def split_pairs() -> Split:
    """The split, the same in every run: each topic is in all three parts, in test parts once or twice."""
    rng = seeded(_SPLIT_SEED, "choice split")
    queues = [
        [Pair(t, p) for p in rng.sample(range(len(TEMPLATES)), len(TEMPLATES))] for t in range(len(TOPICS))
    ]
    parts = []
    for _ in range(2):
        twice = rng.sample(queues, _EVALUATION_PROMPTS - len(queues))
        part = [queue.pop() for queue in queues] + [queue.pop() for queue in twice]
        rng.shuffle(part)
        parts.append(tuple(part))
    return Split(tuple(pair for queue in queues for pair in queue), *parts)


def render_prompt(
    topic: Topic, template: int, options: Sequence[str], style: Style
) -> str | tuple[dict[str, str]]:
    """The prompt that lists ``options`` in this order (closed-set form), or lists none (open-set form).

    Plain and few-shot prompts end with a colon, so no token of a completion that starts with a space can
    merge with the prompt's last one.
    """
    if style == "chat":
        return (
            {"role": "user", "content": f"{_ask(topic, template, options)} Reply with your answer alone."},
        )
    question = f"{_ask(topic, template, options)}\nAnswer:"
    if style == "plain":
        return question
    shots = [
        f"{_ask(shot, template, shot.options if options else ())}\nAnswer: {answer}" for shot, answer in SHOTS
    ]
    return "\n".join([*shots, question])


def _ask(topic: Topic, template: int, options: Sequence[str]) -> str:
    text = re.sub(r"\[(.*?)\]", r"\1" if options else "", TEMPLATES[template])
    listed = f"{', '.join(options[:-1])}, and {options[-1]}" if options else ""
    return text.format(singular=topic.singular, plural=topic.plural, options=listed)


class ChoiceDataModule(PromptDataModule):
    """64 topics asked in 10 ways each; category k is the k-th answer of a topic, in whatever order listed.

    ``Problem.options`` are the five completions as the policy would write them, without a stop token: with a
    leading space in plain and few-shot style. Each training prompt draws the order of its list anew; the 80
    validation and 80 test prompts are the same in every run.

    Args:
        form: ``closed`` lists the options, ``open`` does not, ``both`` mixes the two evenly.
        target: ``uniform``, ``peaked`` (.6, .3, .1, 0, 0) or five probabilities.
        style: ``plain`` text that ends in ``Answer:``, ``chat`` messages, or ``few_shot``: the plain text after
            two worked examples, which a pretrained model continues with an answer and a line break.
        skew: probabilities from which ``answers_per_prompt`` are drawn.
        answers_per_prompt: answers to train on in ``metadata["completions"]`` of each training problem, for
            a warm start with a known skew; 0 for none.
        batch_size: see :class:`PromptDataModule`, as for the other arguments.
    """

    def __init__(
        self,
        form: Form = "closed",
        target: Literal["uniform", "peaked"] | list[float] = "uniform",
        style: Style = "plain",
        skew: Sequence[float] = SKEW,
        answers_per_prompt: int = 0,
        batch_size: int = 8,
        eval_batch_size: int = 32,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, num_workers)
        for name, value, known in (("form", form, get_args(Form)), ("style", style, get_args(Style))):
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
        require_at_least(0, answers_per_prompt=answers_per_prompt)
        self.form: Form = form
        self.style: Style = style
        self.target = _target(target)
        self.skew = _probabilities(skew, "skew")
        self.answers_per_prompt = answers_per_prompt

    @property
    def categories(self) -> tuple[str, ...]:
        return CATEGORIES

    @property
    def num_train_prompts(self) -> int:
        return len(split_pairs().train)

    def train_problem(self, index: int, position: int) -> Problem:
        rng = seeded(self.seed, "choice", position)
        closed = rng.random() < 0.5 if self.form == "both" else self.form == "closed"
        order = rng.sample(range(len(CATEGORIES)), len(CATEGORIES))
        problem = self._problem(split_pairs().train[index], closed, order)
        if self.answers_per_prompt:
            answers = rng.choices(problem.options, self.skew, k=self.answers_per_prompt)
            problem.metadata["completions"] = answers
        return problem

    def validation_problems(self) -> list[Problem]:
        return self._fixed_problems(split_pairs().validation)

    def test_problems(self) -> list[Problem]:
        return self._fixed_problems(split_pairs().test)

    def _fixed_problems(self, pairs: Sequence[Pair]) -> list[Problem]:
        problems = []
        for i, pair in enumerate(pairs):
            closed = i % 2 == 0 if self.form == "both" else self.form == "closed"
            order = seeded(_SPLIT_SEED, "choice order", *pair).sample(range(len(CATEGORIES)), len(CATEGORIES))
            problems.append(self._problem(pair, closed, order))
        return problems

    def _problem(self, pair: Pair, closed: bool, order: Sequence[int]) -> Problem:
        topic = TOPICS[pair.topic]
        listed = [topic.options[k] for k in order] if closed else []
        form = "closed" if closed else "open"
        space = "" if self.style == "chat" else " "
        metadata: dict[str, Any] = {"topic": topic.singular, "template": pair.template, "form": form}
        return Problem(
            id=f"{topic.singular}/{pair.template}/{form}",
            prompt=render_prompt(topic, pair.template, listed, self.style),
            target=self.target,
            options=tuple(space + option for option in topic.options),
            metadata=metadata | ({"order": list(order)} if closed else {}),
        )


def _target(target: str | Sequence[float]) -> tuple[float, ...]:
    if not isinstance(target, str):
        return _probabilities(target, "target")
    if target not in TARGETS:
        raise ValueError(
            f"target: expected {', '.join(TARGETS)} or {len(CATEGORIES)} probabilities, got {target!r}"
        )
    return TARGETS[target]


def _probabilities(values: Sequence[float], name: str) -> tuple[float, ...]:
    validate_target(values, len(CATEGORIES), name)
    return tuple(float(value) for value in values)
