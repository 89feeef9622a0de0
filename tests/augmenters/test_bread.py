"""BREAD: the binary search by hand, and prefixes that are context rather than learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lit_madrl.augmenters import BREAD, SeparatorBoundaries
from lit_madrl.augmenters.episodes import episode_ends
from lit_madrl.functional import group_advantages
from lit_madrl.types import Problem, Source
from tests.augmenters.test_guidance import PROBLEMS, learner
from tests.helpers.augmenter_contract import CUT, FAILED, RIGHT, STOP, ScriptedCollector, groups_of
from tests.helpers.learning import Gradients, ListData, assert_same, fit, gradients_of, start_model
from tests.helpers.tiny_models import row_logprobs

BOUNDARIES = SeparatorBoundaries(chr(CUT))
LONG = [5, CUT] * 8 + [RIGHT, STOP]
"""Eight boundaries (the last is left to the continuation): 2, 4, ..., 14."""


def search(solved: Callable[[int, int], bool], **arguments: object) -> tuple[list[int], list[int], BREAD]:
    """Prefix lengths that were tried, prefix lengths of the final group, and the augmenter.

    ``solved(prefix, row)`` says whether a continuation is right.
    """
    rows = iter(range(10**6))
    collector = ScriptedCollector(
        limit=40, script=lambda p: [RIGHT, STOP] if solved(len(p), next(rows) % 4) else [8, STOP]
    )
    collector.references["p"] = LONG
    augmenter = BREAD(BOUNDARIES, episodes=9, **arguments)  # type: ignore[arg-type]
    rollouts, _ = augmenter([Problem("p", "?")], *groups_of(FAILED), collector)
    tried = [len(group[0]) for group in collector.prefixes]
    return tried, rollouts.prefix_lengths[0].tolist(), augmenter


def test_episodes_end_at_boundaries() -> None:
    """18 tokens in 9 parts: ends 2, 4, ..., 16 move to the next boundary, the last one to 14."""
    assert episode_ends([2, 4, 6, 8, 10, 12, 14], 18, 9) == [2, 4, 6, 8, 10, 12, 14, 14]
    assert episode_ends([5], 10, 3) == [5, 5]
    assert episode_ends([], 10, 3) == []


def test_the_search_halves_until_the_success_rate_is_in_range() -> None:
    """Seven prefixes 2..14, solved by half the group from 12 on and by none before: 8 fails, 12 is in range."""
    tried, final, augmenter = search(lambda prefix, row: prefix >= 12 and row < 2)
    assert tried == [8, 12]
    assert final == [12] * 4
    assert augmenter.numbers()["guidance/accepted"] == 1.0
    assert augmenter.numbers()["guidance/given_share"] == pytest.approx(12 / 18)


def test_too_easy_prefixes_shrink() -> None:
    """All succeed from 6 on, none before: 8 is too easy, 4 too hard, 6 too easy; the shortest with enough is 6."""
    tried, final, _ = search(lambda prefix, row: prefix >= 6)
    assert tried == [8, 4, 6]
    assert final == [6] * 4


def test_some_success_is_better_than_none() -> None:
    """Never in range [.5, .75]: one of four succeeds from 12 on, so the shortest such prefix that was tried."""
    tried, final, _ = search(lambda prefix, row: prefix >= 12 and row < 1, success=(0.5, 0.75))
    assert tried == [8, 12, 14]
    assert final == [12] * 4


def test_without_any_success_the_group_stays() -> None:
    tried, final, augmenter = search(lambda prefix, row: False)
    assert tried == [8, 12, 14]
    assert final == [0] * 4
    assert augmenter.numbers()["guidance/accepted"] == 0.0


def test_only_continuations_are_learned(tiny_choice: Path) -> None:
    """The prefix is context: it has no gradient and counts in no denominator."""
    gradients = Gradients()
    boundaries = SeparatorBoundaries(";", keep=0)
    trained = learner(tiny_choice, [BREAD(boundaries, success=(0.01, 1.0))], guided=True)
    fit(trained, ListData(PROBLEMS), callbacks=[gradients])
    experience = trained.experience
    assert experience is not None
    assert experience.rollouts.source is not None
    assert experience.rollouts.source.unique().tolist() == [Source.GUIDED]
    prefix = experience.rollouts.prefix_lengths
    assert bool((prefix > 0).all())
    advantages = group_advantages(experience.scores.correct * 1.2)
    assert bool(advantages.any())
    model = start_model(tiny_choice)
    loss = torch.zeros(())
    for p, group in enumerate(experience.rollouts.completions()):
        for g, ids in enumerate(group):
            logprobs = row_logprobs(model, experience.rollouts.prompt_ids[p], ids)
            loss = loss - advantages[p, g] * logprobs[int(prefix[p, g]) :].sum()
    learned = int((experience.rollouts.lengths - prefix).sum())
    assert_same(gradients.steps[0], gradients_of(loss / learned, model))


@pytest.mark.parametrize(
    ("argument", "value"), [("episodes", 1), ("success", (0.0, 0.5)), ("success", (0.6, 0.5))]
)
def test_bad_arguments(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{argument}: expected"):
        BREAD(**{argument: value})  # type: ignore[arg-type]
