"""LUFFY: where the reference goes, how its row is learned, and over whom advantages are normalized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_madrl.augmenters import LUFFY
from lit_madrl.functional import group_advantages
from lit_madrl.types import Problem, Source
from tests.augmenters.test_guidance import PROBLEMS, learner
from tests.helpers.augmenter_contract import FAILED, REFERENCE, SOLVED, ScriptedCollector, groups_of
from tests.helpers.learning import Gradients, ListData, assert_same, fit, gradients_of, start_model
from tests.helpers.tiny_models import row_logprobs


def test_the_reference_joins_every_group_also_a_solved_one() -> None:
    problems = [Problem("a", "?"), Problem("b", "?"), Problem("c", "?")]
    collector = ScriptedCollector()
    collector.references["c"] = None
    augmenter = LUFFY()
    rollouts, _ = augmenter(problems, *groups_of(FAILED, SOLVED, FAILED), collector)
    assert rollouts.source is not None
    assert rollouts.source.tolist() == [[0, 0, 0, Source.REFERENCE]] * 2 + [[0] * 4]
    assert rollouts.completions()[1][3] == REFERENCE
    assert collector.prefixes == []
    assert augmenter.numbers() == {"guidance/without_reference": pytest.approx(1 / 3)}


def test_shaped_loss_by_hand() -> None:
    """-p / (p + .1) A at p = .1 and .9; its slope in log p is .1 p / (p + .1)^2: .25 and .09."""
    logprobs = torch.tensor([0.1, 0.9], dtype=torch.float64).log().requires_grad_()
    loss = LUFFY().inserted_loss(logprobs, torch.tensor([1.0, -2.0]), torch.ones(2, dtype=torch.bool))
    torch.testing.assert_close(loss.detach(), torch.tensor([-0.5, 1.8], dtype=torch.float64))
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(slope, torch.tensor([-0.25, 2 * 0.09], dtype=torch.float64))


@pytest.mark.parametrize("normalize", ["union", "on_policy"])
def test_the_step_is_the_shaped_gradient_with_a_joint_denominator(tiny_choice: Path, normalize: str) -> None:
    gradients = Gradients()
    trained = learner(tiny_choice, [LUFFY(normalize=normalize)])  # type: ignore[arg-type]
    fit(trained, ListData(PROBLEMS), callbacks=[gradients])
    experience = trained.experience
    assert experience is not None
    rewards = experience.scores.correct * 1.2
    assert rewards[:, 3].tolist() == pytest.approx([1.2, 1.2])
    # The rollouts alone all fail: mean 0 and no std, so the reference's advantage is its reward.
    expected = group_advantages(rewards) if normalize == "union" else rewards
    torch.testing.assert_close(experience.advantages, expected)
    model = start_model(tiny_choice)
    loss = torch.zeros(())
    for p, group in enumerate(experience.rollouts.completions()):
        for g, ids in enumerate(group):
            logprobs = row_logprobs(model, experience.rollouts.prompt_ids[p], ids)
            shaped = logprobs.exp() / (logprobs.exp() + 0.1) if g == 3 else logprobs
            loss = loss - expected[p, g] * shaped.sum()
    total = int(experience.rollouts.lengths.sum())
    assert_same(gradients.steps[0], gradients_of(loss / total, model))


@pytest.mark.parametrize(("argument", "value"), [("gamma", 0.0), ("normalize", "both")])
def test_bad_arguments(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{argument}: expected"):
        LUFFY(**{argument: value})  # type: ignore[arg-type]
