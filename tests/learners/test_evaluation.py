"""What validation measures, and that it leaves training alone."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lit_madrl.learners import GRPOLearner, Objective
from lit_madrl.learners.evaluation import Evaluation
from lit_madrl.rewards import ForwardKL
from lit_madrl.tasks import Verifier
from lit_madrl.types import Problem, Sampling, Scores
from tests.helpers.learning import (
    EOS,
    ListData,
    ScriptedEngine,
    TextLength,
    arguments,
    choice_problems,
    fit,
    start_model,
    tokenizer_of,
    trainer_for,
    weights,
)
from tests.helpers.tiny_models import row_logprobs

LETTERS = ("a", "b")
UNIFORM = torch.tensor([[0.5, 0.5]] * 2)
DISTRIBUTION = {
    f"{name}{suffix}" for name in ("jsd", "l2", "forward_kl", "reverse_kl") for suffix in ("", "_per_prompt")
} | {"off_support_rate", "share/a", "share/b"}
SAMPLED = DISTRIBUTION | {"coverage", "coverage_per_prompt", "jsd_floor"}
EXACT = {f"exact/{name}" for name in DISTRIBUTION}


def scores(category: list[list[int]], correct: list[list[float]] | None = None) -> Scores:
    return Scores.build(torch.tensor(category), None if correct is None else torch.tensor(correct))


def computed(evaluation: Evaluation) -> dict[str, float]:
    return {name: float(value) for name, value in evaluation.compute().items()}


# Names and numbers


def test_names() -> None:
    evaluation = Evaluation(LETTERS, samples=2, verified=True)
    evaluation.update(scores([[0, 1], [0, 0]]), UNIFORM, None)
    assert evaluation.compute().keys() == SAMPLED | {"avg_at_k", "pass_at_1", "pass_at_2"}
    evaluation.update(scores([[0, 1], [0, 0]]), UNIFORM, UNIFORM)
    assert evaluation.compute().keys() == SAMPLED | EXACT | {"avg_at_k", "pass_at_1", "pass_at_2"}
    assert Evaluation(LETTERS, samples=2, verified=False).compute() == {}


def test_without_categories_only_correctness_is_measured() -> None:
    evaluation = Evaluation((), samples=4, verified=True)
    nothing = torch.zeros(2, 0)
    evaluation.update(scores([[-1] * 4] * 2, [[1.0, 0, 0, 0], [0.0] * 4]), nothing, None)
    assert computed(evaluation) == pytest.approx({"avg_at_k": 0.125, "pass_at_1": 0.125, "pass_at_4": 0.5})


def test_pooled_numbers_hide_what_per_prompt_numbers_show() -> None:
    """One prompt always answers a, the other always b."""
    evaluation = Evaluation(LETTERS, samples=4, verified=False)
    evaluation.update(scores([[0, 0, 0, 0], [1, 1, 1, -1]]), UNIFORM, None)
    values = computed(evaluation)
    jsd_of_one = 0.5 * math.log(2 / 1.5) + 0.5 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert values["jsd"] == pytest.approx(_jsd((4 / 7, 3 / 7)), abs=1e-9)
    assert values["jsd_per_prompt"] == pytest.approx(jsd_of_one, abs=1e-9)
    assert values["l2_per_prompt"] == pytest.approx(0.25)
    assert values["off_support_rate"] == pytest.approx(1 / 8)
    assert (values["share/a"], values["share/b"]) == pytest.approx((4 / 7, 3 / 7))
    assert values["jsd_floor"] > 0


def _jsd(policy: tuple[float, float]) -> float:
    middle = [(p + 0.5) / 2 for p in policy]
    return sum(
        0.5 * (0.5 * math.log(0.5 / m) + p * math.log(p / m)) for p, m in zip(policy, middle, strict=True)
    )


def test_exact_numbers_use_probabilities_and_their_missing_mass() -> None:
    evaluation = Evaluation(LETTERS, samples=2, verified=False)
    mass = torch.tensor([[0.6, 0.2], [0.1, 0.1]], dtype=torch.float64)
    evaluation.update(scores([[0, 0], [0, 0]]), UNIFORM, mass)
    values = computed(evaluation)
    assert values["exact/off_support_rate"] == pytest.approx((0.2 + 0.8) / 2)
    assert values["exact/share/a"] == pytest.approx(0.7)
    assert values["exact/jsd"] == pytest.approx(_jsd((0.7, 0.3)), abs=1e-9)
    assert values["exact/jsd_per_prompt"] == pytest.approx(_jsd((0.75, 0.25)) / 2, abs=1e-9)


def test_each_evaluation_starts_afresh() -> None:
    evaluation = Evaluation(LETTERS, samples=2, verified=False)
    for category in (0, 1):
        evaluation.update(scores([[category] * 2] * 2), UNIFORM, None)
        assert computed(evaluation)[f"share/{LETTERS[category]}"] == 1


# In a learner


CATEGORIES = ("first", "second", "third", "fourth", "fifth")


class FirstRight(Verifier):
    """The first completion of each group is correct."""

    def __call__(self, problems: Any, completions: Any) -> Tensor:
        return torch.tensor([[1.0] + [0.0] * (len(group) - 1) for group in completions])

    def well_formed(self, problems: Any, completions: Any) -> Tensor:
        return torch.ones(len(completions), len(completions[0]))


def learner_for(folder: Path, **changes: Any) -> GRPOLearner:
    return GRPOLearner(
        ForwardKL(),
        **arguments(
            folder,
            **{
                "sampling": Sampling(group_size=6, max_new_tokens=4),
                "categorizer": TextLength(),
                "score_truncated": True,
                "categories": CATEGORIES,
                **changes,
            },
        ),
    )


def option_probability(model: Any, tokenizer: Any, problem: Problem, option: str) -> float:
    ids = [*tokenizer.encode(option, add_special_tokens=False), EOS]
    return float(row_logprobs(model, tokenizer.encode(problem.prompt), ids).sum().exp())


@pytest.mark.parametrize("split", ["validate", "test"])
def test_exact_probabilities_are_those_of_the_options_written_out(tiny_choice: Path, split: str) -> None:
    problems = choice_problems(3)
    learner = learner_for(tiny_choice, verifier=FirstRight())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (values,) = getattr(trainer_for(limit_val_batches=1.0), split)(
            learner, ListData(problems, validation=problems), verbose=False
        )
    model, tokenizer = start_model(tiny_choice).eval(), tokenizer_of(tiny_choice)
    with torch.no_grad():
        brute = [[option_probability(model, tokenizer, p, o) for o in p.options] for p in problems]
    mass = torch.tensor(brute)
    prefix = {"validate": "val", "test": "test"}[split]
    assert values[f"{prefix}/exact/off_support_rate"] == pytest.approx(
        1 - float(mass.sum(-1).mean()), abs=1e-6
    )
    shares = mass.sum(0) / mass.sum()
    for name, share in zip(CATEGORIES, shares.tolist(), strict=True):
        assert values[f"{prefix}/exact/share/{name}"] == pytest.approx(share, rel=1e-3)
    assert values[f"{prefix}/pass_at_6"] == 1
    assert values[f"{prefix}/avg_at_k"] == pytest.approx(1 / 6)
    with torch.no_grad():
        learner.configure_model()
        torch.testing.assert_close(
            learner.option_probabilities(problems), mass.double(), rtol=1e-4, atol=1e-9
        )


def test_options_that_are_not_listed_have_no_exact_numbers(tiny_choice: Path) -> None:
    problems = [*choice_problems(1), Problem("x", "one", target=(0.2,) * 5)]
    learner = learner_for(tiny_choice)
    learner.configure_model()
    assert learner.option_probabilities(problems) is None


def test_evaluation_sampling_is_its_own(tiny_choice: Path) -> None:
    problems = choice_problems(1)
    learner = learner_for(
        tiny_choice,
        engine=ScriptedEngine(lambda prompt: [[5, EOS]] * 2),
        eval_sampling=Sampling(group_size=2, max_new_tokens=2),
        verifier=FirstRight(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (values,) = trainer_for(limit_val_batches=1.0).validate(
            learner, ListData(problems, validation=problems), verbose=False
        )
    assert values["val/pass_at_2"] == 1


class Values(L.Callback):
    """The numbers of every evaluation, and the completions of every training step."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []
        self.completions: list[Any] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        self.values.append({name: float(v) for name, v in metrics.items() if name.startswith("val/")})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.completions.append(pl_module.experience.rollouts.completions())


def test_evaluation_does_not_disturb_training(tiny_choice: Path) -> None:
    """Bit for bit the same weights, with a validation after every step or with none."""
    problems = choice_problems(4)
    runs = []
    for validation in ({}, {"limit_val_batches": 1.0, "val_check_interval": 1}):
        learner = learner_for(tiny_choice, objective=Objective(beta=0.1))
        values = Values()
        data = ListData(problems, batch_size=2, validation=problems[:2])
        fit(learner, data, 3, callbacks=[values], **validation)
        runs.append((weights(learner), values))
    assert [len(values.values) for _, values in runs] == [0, 3]
    assert runs[0][1].completions == runs[1][1].completions
    start = dict(start_model(tiny_choice).named_parameters())
    for name, tensor in runs[0][0].items():
        assert torch.equal(tensor, runs[1][0][name])
        assert not torch.equal(tensor, start[name])


def test_every_evaluation_draws_alike(tiny_choice: Path) -> None:
    """With weights that stand still, the curve is flat."""
    problems = choice_problems(4)
    values = Values()
    learner = learner_for(
        tiny_choice,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        sampling=Sampling(group_size=20, max_new_tokens=4),
    )
    data = ListData(problems, batch_size=1, validation=problems)
    fit(learner, data, 3, callbacks=[values], limit_val_batches=1.0, val_check_interval=1)
    first, *others = values.values
    assert others == [pytest.approx(first, nan_ok=True, abs=0, rel=0)] * 2
