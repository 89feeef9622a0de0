"""ARG's rules: who is guided, what is accepted, where it goes, and what the learner makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_madrl.augmenters import (
    AdaptiveReferenceGuidance,
    FixedLevel,
    ReferenceInsertion,
    Resample,
    RolloutAugmenter,
    SeparatorBoundaries,
)
from lit_madrl.functional import group_advantages
from lit_madrl.learners import GRPOLearner, Objective
from lit_madrl.rewards import Correctness, ForwardKL, WithFormat
from lit_madrl.rewards.mixing import Additive
from lit_madrl.tasks import Completions, Verifier
from lit_madrl.types import Problem, Rollouts, Sampling, Scores, Source
from tests.helpers.augmenter_contract import (
    CUT,
    FAILED,
    REFERENCE,
    RIGHT,
    STOP,
    groups_of,
)
from tests.helpers.augmenter_contract import ScriptedCollector as Collector
from tests.helpers.learning import (
    Gradients,
    ListData,
    ScriptedEngine,
    arguments,
    assert_same,
    fit,
    gradients_of,
    start_model,
    tokenizer_of,
)
from tests.helpers.tiny_models import row_logprobs


def group_of(*rows: list[int]) -> tuple[Rollouts, Scores]:
    """One group of rollouts with its scores."""
    return groups_of(rows)


BOUNDARIES = SeparatorBoundaries(chr(CUT))
PROBLEM = Problem("p", "?")


def augment(augmenter: RolloutAugmenter, collector: Collector, *rows: list[int]) -> tuple[Rollouts, Scores]:
    return augmenter([PROBLEM], *group_of(*(rows or FAILED)), collector)


def inserted(rollouts: Rollouts, scores: Scores) -> list[tuple[list[int], Source, int]]:
    """Ids, source and prefix length of the rows that are not the policy's own."""
    rows = (~scores.on_policy[0]).nonzero().flatten().tolist()
    assert rollouts.source is None or set((rollouts.source[0] > 0).nonzero().flatten().tolist()) == set(rows)
    return [
        (rollouts.completions()[0][g], Source(int(rollouts.source[0, g])), int(rollouts.prefix_lengths[0, g]))
        for g in rows
    ]


def test_a_group_with_one_right_rollout_is_left_alone() -> None:
    collector = Collector()
    before = group_of(*FAILED[:3], [RIGHT, STOP])
    after = AdaptiveReferenceGuidance(BOUNDARIES)([PROBLEM], *before, collector)
    assert after == before
    assert collector.prefixes == []


def test_levels_become_prefixes_at_boundaries() -> None:
    """S_t = 6 - t: level 1/2 is t = 3, moved to 4 > the last boundary kept: back to 2. Level 1/4 likewise."""
    collector = Collector()
    augment(FixedLevel(0.5, BOUNDARIES, continuations=3), collector)
    assert collector.prefixes == [[[5, CUT]] * 3]
    collector = Collector()
    augment(FixedLevel(0.9, BOUNDARIES, continuations=1), collector)
    assert collector.prefixes == [[[]]]  # the latest t with S_t >= 5.4 is 0
    collector = Collector()
    augment(FixedLevel(0.8, SeparatorBoundaries(chr(CUT), keep=0), continuations=1), collector)
    assert collector.prefixes == [[[5, CUT]]]  # t = 1, moved to 2
    augment(FixedLevel(0.5, SeparatorBoundaries(chr(CUT), keep=0), continuations=1), collector)
    assert collector.prefixes[-1] == [[5, CUT, 6, CUT]]


def test_right_candidates_without_a_prefix_come_first_and_at_most_four() -> None:
    rows = [list(FAILED[0])] * 8
    resampled = augment(Resample(continuations=8), Collector(8, script=lambda p: [RIGHT, STOP]), *rows)
    assert inserted(*resampled) == [([RIGHT, STOP], Source.UNGUIDED, 0)] * 4
    assert int(resampled[1].on_policy.sum()) == 4


def test_then_one_with_the_shortest_prefix() -> None:
    """Levels 1 and 0.25 are drawn; only what continues from the prefix is right."""
    collector = Collector(8, script=lambda p: [RIGHT, STOP] if p else [8, STOP])
    augmenter = AdaptiveReferenceGuidance(BOUNDARIES, levels=(1.0, 0.5))
    rows = inserted(*augment(augmenter, collector, *([list(FAILED[0])] * 8)))
    assert rows == [([5, CUT, RIGHT, STOP], Source.GUIDED, 2)]


def test_the_reference_is_the_last_resort() -> None:
    rollouts, scores = augment(AdaptiveReferenceGuidance(BOUNDARIES), Collector())
    assert inserted(rollouts, scores) == [(REFERENCE, Source.REFERENCE, len(REFERENCE))]
    assert scores.correct.sum() == 1
    assert inserted(*augment(Resample(), Collector())) == []


def test_an_exact_copy_of_the_reference_is_no_success() -> None:
    """It earns no feedback, and falls back to the reference itself."""
    collector = Collector(script=lambda p: REFERENCE[len(p) :])
    augmenter = FixedLevel(0.5, BOUNDARIES, continuations=4)
    assert inserted(*augment(augmenter, collector)) == [(REFERENCE, Source.REFERENCE, len(REFERENCE))]
    numbers = augmenter.numbers()
    assert numbers["guidance/success_0.5"] == 0.0
    assert numbers["guidance/source_fallback"] == 1.0
    assert numbers["guidance/accepted"] == 0.0


def test_feedback_is_the_share_of_surprisal_that_was_left() -> None:
    """The prefix of 2 of 6 tokens leaves 4/6 of the surprisal; without weighting a success counts 1."""
    for weighted, expected in ((True, 4 / 6), (False, 1.0)):
        collector = Collector(script=lambda p: [RIGHT, STOP])
        augmenter = AdaptiveReferenceGuidance(
            BOUNDARIES, continuations=4, levels=(0.5,), surprisal_weighting=weighted
        )
        augment(augmenter, collector)
        assert augmenter.numbers()["guidance/feedback_0.5"] == pytest.approx(expected)
        assert augmenter.numbers()["guidance/count_0.5"] == 4


@pytest.mark.parametrize(
    ("name", "reference", "nats", "why"),
    [
        ("none", None, 1.0, "there is none"),
        ("wrong", [5, CUT, 8, STOP], 1.0, "the verifier rejects it"),
        ("long", [5, CUT, *[6] * 9, RIGHT, STOP], 1.0, "it is longer than the budget"),
        ("certain", REFERENCE, 0.0, "its surprisal is 0"),
        ("impossible", REFERENCE, float("inf"), "its surprisal is infinite"),
    ],
)
def test_a_useless_reference_leaves_the_group_alone_and_is_counted(
    name: str, reference: list[int] | None, nats: float, why: str
) -> None:
    collector = Collector(script=lambda p: [RIGHT, STOP])
    collector.references["p"] = reference
    collector.nats = nats
    augmenter = AdaptiveReferenceGuidance(BOUNDARIES)
    assert inserted(*augment(augmenter, collector)) == [], why
    assert augmenter.numbers()["guidance/without_reference"] == 1.0
    assert collector.prefixes == []


def test_a_reference_whose_answer_comes_early_has_only_the_empty_prefix() -> None:
    """No boundary leaves the answer to the continuation, so every level starts from the question."""
    collector = Collector(script=lambda p: [8, STOP])
    collector.references["p"] = [RIGHT, 5, 6, 6, STOP]
    augment(FixedLevel(0.25, BOUNDARIES, continuations=2), collector)
    assert collector.prefixes == [[[], []]]


def test_nothing_is_mutated_and_shapes_stay() -> None:
    rollouts, scores = group_of(*FAILED)
    copies = [x.clone() for x in (rollouts.completion_ids, rollouts.completion_mask, scores.correct)]
    after, judged = ReferenceInsertion()([PROBLEM], rollouts, scores, Collector())
    for tensor, copy in zip(
        (rollouts.completion_ids, rollouts.completion_mask, scores.correct), copies, strict=True
    ):
        assert torch.equal(tensor, copy)
    assert judged.correct.shape == scores.correct.shape
    assert after.completion_ids.shape == (1, 4, len(REFERENCE))
    kept = [ids for ids in after.completions()[0] if ids != REFERENCE]
    assert len(kept) == 3
    assert all(ids in FAILED for ids in kept)


def test_selector_state_is_in_the_checkpoint() -> None:
    augmenter = AdaptiveReferenceGuidance(BOUNDARIES)
    for _ in range(3):
        augment(augmenter, Collector(script=lambda p: [RIGHT, STOP]))
    other = AdaptiveReferenceGuidance(BOUNDARIES)
    other.load_state_dict(augmenter.state_dict())
    assert torch.equal(other.selector.probabilities(), augmenter.selector.probabilities())
    assert float(augmenter.selector.baseline) > 0


# Through the real learner.


class HasAnswer(Verifier):
    """Right when the text holds the problem's answer."""

    def __call__(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        rows = [
            [float(p.answer in text) for text in group]
            for p, group in zip(problems, completions, strict=True)
        ]
        return torch.tensor(rows)

    def well_formed(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        return self(problems, completions)


PROBLEMS = [
    Problem(
        "a", "Name one of the five oceans.\nAnswer:", answer="Arctic", reference=" Pacific; Atlantic; Arctic"
    ),
    Problem("b", "Pick a metal.\nAnswer:", answer="gold", reference=" tin; silver; gold"),
]


def learner(
    folder: Path,
    augmenters: list[RolloutAugmenter],
    rewards: Any = None,
    guided: bool = False,
    **changes: Any,
) -> GRPOLearner:
    """All rollouts fail; with ``guided`` two of four continuations of a prefix hold the answer."""
    tokenizer = tokenizer_of(folder)
    failed = [[50, 51, 1], [52, 1], [53, 54, 55, 1], [56, 1]]

    def continued(prompt: tuple[int, ...]) -> list[list[int]]:
        (answer,) = (p.answer for p in PROBLEMS if p.prompt == tokenizer.decode(prompt))
        right = [*tokenizer.encode(f" {answer}", add_special_tokens=False), 1]
        return [right, *failed[1:3], [57, *right]]

    engine = ScriptedEngine(lambda prompt: failed, continued if guided else None)
    return GRPOLearner(
        rewards or WithFormat(Correctness(), 0.2),
        Objective(beta=0.0, reduction="dapo"),
        augmenters=augmenters,
        **arguments(
            folder,
            engine=engine,
            sampling=Sampling(group_size=4, max_new_tokens=48),
            verifier=HasAnswer(),
            **changes,
        ),
    )


def test_an_inserted_row_is_learned_whole_under_the_question(tiny_choice: Path) -> None:
    """The step is -(1/T) sum_i A_i grad log pi(y_i | x), the inserted trajectory with all its tokens among them."""
    gradients = Gradients()
    trained = learner(tiny_choice, [ReferenceInsertion()])
    fit(trained, ListData(PROBLEMS), callbacks=[gradients])
    experience = trained.experience
    assert experience is not None
    assert (~experience.scores.on_policy).sum(-1).tolist() == [1, 1]
    rewards = experience.scores.correct * 1.2
    advantages = group_advantages(rewards, "sample")
    torch.testing.assert_close(experience.advantages, advantages)
    model = start_model(tiny_choice)
    total = int(experience.rollouts.lengths.sum())
    loss = -sum(
        advantages[p, g] * row_logprobs(model, experience.rollouts.prompt_ids[p], ids).sum()
        for p, group in enumerate(experience.rollouts.completions())
        for g, ids in enumerate(group)
    )
    assert_same(gradients.steps[0], gradients_of(loss / total, model))


def test_guidance_goes_by_correctness_not_by_shaped_reward(tiny_choice: Path) -> None:
    """All wrong, but a shaped reward that differs within the group: ARG still acts."""
    problems = [
        Problem(p.id, p.prompt, (0.5, 0.5), ("x", "y"), answer=p.answer, reference=p.reference)
        for p in PROBLEMS
    ]
    trained = learner(
        tiny_choice,
        [ReferenceInsertion()],
        Additive(ForwardKL(), 0.5),
        categories=("x", "y"),
        categorizer=Halves(),
    )
    fit(trained, ListData(problems))
    assert trained.experience is not None
    assert (~trained.experience.scores.on_policy).sum(-1).tolist() == [1, 1]


class Halves:
    """The first half of a group in category 0, the rest in 1."""

    def __call__(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        return torch.tensor([[int(g >= len(group) / 2) for g in range(len(group))] for group in completions])


def test_augmenters_run_in_their_order(tiny_choice: Path) -> None:
    """The second finds nothing left to do."""
    first, second = ReferenceInsertion(), AdaptiveReferenceGuidance()
    trained = learner(tiny_choice, [first, second])
    trainer = fit(trained, ListData(PROBLEMS))
    assert trained.experience is not None
    assert trained.experience.rollouts.source is not None
    assert sorted(trained.experience.rollouts.source.flatten().tolist()) == [0] * 6 + [3] * 2
    assert trainer.logger.steps[0]["train/guidance/all_failed"] == 0.0
    assert trainer.logger.steps[0]["train/correct"] == 0.0
