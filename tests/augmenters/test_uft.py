"""UFT: the schedule of hints by hand, and the likelihood term on them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from lit_madrl.augmenters import UFT, SeparatorBoundaries
from lit_madrl.functional import group_advantages
from lit_madrl.types import Problem, Source
from tests.augmenters.test_guidance import PROBLEMS, learner
from tests.helpers.augmenter_contract import CUT, RIGHT, STOP, ScriptedCollector
from tests.helpers.learning import Gradients, ListData, assert_same, fit, gradients_of, start_model
from tests.helpers.tiny_models import row_logprobs

BOUNDARIES = SeparatorBoundaries(chr(CUT))
LONG = [5, CUT] * 10 + [RIGHT, STOP]


def test_the_schedule_by_hand() -> None:
    """.05 + .45 (1 + cos(pi t / 4)): .95, .5 halfway; 0 from the end on."""
    augmenter = UFT(4, BOUNDARIES)
    collector = ScriptedCollector(limit=40)
    probabilities = []
    for _ in range(6):
        probabilities.append(augmenter.hint_probability())
        augmenter.prefixes([Problem("p", "?")], collector)
    assert probabilities == pytest.approx(
        [0.95, 0.05 + 0.45 * (1 + 0.5**0.5), 0.5, 0.05 + 0.45 * (1 - 0.5**0.5), 0, 0]
    )
    assert augmenter.prefixes([Problem("p", "?")], collector) is None


def test_hints_are_whole_chunks_with_binomial_numbers() -> None:
    """22 tokens in 5 chunks end at 6, 10, 14, 18; all five leave the last separator: 18. Mean of n is 5 p."""
    augmenter = UFT(1, BOUNDARIES, lowest=0.0, highest=0.4)
    collector = ScriptedCollector(limit=40)
    problems = [Problem(str(i), "?") for i in range(4000)]
    collector.references = dict.fromkeys((p.id for p in problems), LONG)
    hints = augmenter.prefixes(problems, collector)
    assert hints is not None
    assert all(hint == LONG[: len(hint)] for hint in hints)
    share = [sum(len(hint) == n for hint in hints) / 4000 for n in (0, 6, 10, 14, 18)]
    binomial = [0.6**5, 5 * 0.4 * 0.6**4, 10 * 0.16 * 0.6**3, 10 * 0.064 * 0.36, 5 * 0.4**4 * 0.6 + 0.4**5]
    assert share == pytest.approx(binomial, abs=0.03)


def test_problems_without_a_reference_have_no_hint() -> None:
    collector = ScriptedCollector(limit=40)
    collector.references = {"a": None, "b": [8, CUT, 8, STOP], "c": LONG}
    hints = UFT(1, BOUNDARIES, lowest=1.0, highest=1.0).prefixes([Problem(i, "?") for i in "abc"], collector)
    assert hints is not None
    assert [len(hint) for hint in hints] == [0, 0, 18]


def test_the_place_in_the_schedule_is_in_the_checkpoint() -> None:
    augmenter = UFT(4, BOUNDARIES)
    augmenter.prefixes([Problem("p", "?")], ScriptedCollector(limit=40))
    other = UFT(4, BOUNDARIES)
    other.load_state_dict(copy.deepcopy(augmenter.state_dict()))
    assert other.hint_probability() == augmenter.hint_probability() < 0.95


def test_hints_have_their_likelihood_and_continuations_the_policy_gradient(tiny_choice: Path) -> None:
    gradients = Gradients()
    boundaries = SeparatorBoundaries(";", keep=0)
    augmenter = UFT(1000, boundaries, lowest=0.9, highest=0.9, sft_weight=0.5)
    trained = learner(tiny_choice, [augmenter], guided=True)
    trainer = fit(trained, ListData(PROBLEMS), callbacks=[gradients])
    experience = trained.experience
    assert experience is not None
    prefix = experience.rollouts.prefix_lengths
    assert bool((prefix > 0).all())
    assert experience.rollouts.source is not None
    assert experience.rollouts.source.unique().tolist() == [Source.GUIDED]
    advantages = group_advantages(experience.scores.correct * 1.2)
    model = start_model(tiny_choice)
    loss = torch.zeros(())
    for p, group in enumerate(experience.rollouts.completions()):
        for g, ids in enumerate(group):
            hint = int(prefix[p, g])
            logprobs = row_logprobs(model, experience.rollouts.prompt_ids[p], ids)
            loss = loss - 0.5 * logprobs[:hint].sum() - advantages[p, g] * logprobs[hint:].sum()
    total = int(experience.rollouts.lengths.sum())
    assert_same(gradients.steps[0], gradients_of(loss / total, model))
    assert trainer.logger.steps[0]["train/guidance/hinted"] == 1.0


def test_hints_are_learned_also_where_all_rewards_are_equal(tiny_choice: Path) -> None:
    gradients = Gradients()
    boundaries = SeparatorBoundaries(";", keep=0)
    trained = learner(tiny_choice, [UFT(1000, boundaries, lowest=0.9, highest=0.9)])
    fit(trained, ListData(PROBLEMS), callbacks=[gradients])
    assert trained.experience is not None
    assert not trained.experience.advantages.any()
    assert any(bool(gradient.any()) for gradient in gradients.steps[0].values())


@pytest.mark.parametrize(
    ("argument", "value"),
    [("hint_steps", 0), ("chunks", 0), ("lowest", 0.99), ("highest", 1.5), ("sft_weight", -1.0)],
)
def test_bad_arguments(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{argument}: expected"):
        UFT(**{"hint_steps": 10, argument: value})  # type: ignore[arg-type]
