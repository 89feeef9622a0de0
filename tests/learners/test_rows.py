"""Merging and splitting rows changes no gradient."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_madrl.learners.rows import Denominators, MicroBatch, Row, merge_rows, micro_batches
from lit_madrl.policy import Policy
from tests.helpers.tiny_models import gradients, tiny_model

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10]]
ROWS = [
    Row(0, (5, 6, 1), 1.0),
    Row(0, (5, 6, 1), 1.0),
    Row(2, (5, 6, 1), 1.0),
    Row(0, (7, 1), -0.5),
    Row(1, (1,), 0.25),
    Row(0, (5, 6, 1), 1.0),
    Row(1, (1,), 0.25),
    Row(0, (5, 6, 1), 1.0, augmenter=0),
    Row(0, (5, 6, 1), 0.75),
    Row(2, (9, 9, 9, 9, 1), -2.0, copies=3),
]
DENOMINATORS = Denominators(sequences=12, tokens=38, max_length=6)

rows = st.lists(
    st.builds(
        Row,
        prompt=st.integers(0, 2),
        ids=st.lists(st.integers(2, 4), min_size=1, max_size=3).map(tuple),
        advantage=st.sampled_from([-1.0, 0.5]),
        copies=st.integers(1, 2),
        augmenter=st.sampled_from([-1, 0]),
        given=st.just(0),
        context=st.just(0),
        members=st.just(()),
    ),
    min_size=1,
    max_size=12,
)


@given(rows=rows)
@settings(max_examples=100, deadline=None)
def test_merging_keeps_every_copy(rows: list[Row]) -> None:
    def copies(rows: list[Row]) -> Counter[Any]:
        counts: Counter[Any] = Counter()
        for row in rows:
            counts[row.prompt, row.ids, row.advantage, row.augmenter] += row.copies
        return counts

    before = list(rows)
    merged = merge_rows(rows)
    assert rows == before
    assert copies(merged) == copies(rows)
    assert len(merged) == len(copies(rows))


@given(rows=rows, budget=st.none() | st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_micro_batches_hold_every_row_once_within_the_budget(rows: list[Row], budget: int | None) -> None:
    batches = micro_batches(PROMPTS, rows, "dapo", Denominators(1, 1, 1), budget, "cpu")
    found: Counter[Any] = Counter()
    for batch in batches:
        packed, start = batch.packed, 0
        prompts = [p.tolist() for p in packed_prompts(batch)]
        for row, length in enumerate(packed.lengths.tolist()):
            own = slice(start, start + length)
            assert len(set(batch.weights[own].tolist())) == len(set(batch.advantages[own].tolist())) == 1
            count, advantage = float(batch.weights[start]), float(batch.advantages[start])
            prompt = PROMPTS.index(prompts[int(packed.prompts[row])])
            found[prompt, tuple(packed.targets[own].tolist()), advantage, count] += 1
            start += length
        cost = int(packed.lengths.sum() + packed.prompt_lengths.sum())
        assert budget is None or cost <= budget or packed.num_rows == 1
    assert found == Counter((row.prompt, row.ids, row.advantage, float(row.copies)) for row in rows)
    assert budget is not None or len(batches) == 1


def packed_prompts(batch: MicroBatch) -> list[Tensor]:
    """The prompts, cut out of the packed tokens."""
    packed, prompts, start = batch.packed, [], 0
    for prompt, length in enumerate(packed.prompt_lengths.tolist()):
        prompts.append(packed.input_ids[0, start : start + length])
        start += length + int((packed.lengths - 1)[packed.prompts == prompt].sum())
    return prompts


def loss_and_gradients(
    rows: list[Row], reduction: Any, budget: int | None
) -> tuple[float, dict[str, Tensor]]:
    policy = Policy(tiny_model("qwen3"))
    total = torch.zeros(())
    for batch in micro_batches(PROMPTS, rows, reduction, DENOMINATORS, budget, "cpu"):
        loss = -(batch.weights * batch.advantages * policy(batch.packed)).sum()
        loss.backward()
        total += loss.detach()
    return float(total), gradients(policy.model)


@pytest.mark.parametrize("reduction", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize(("merged", "budget"), [(True, None), (True, 12), (False, 1), (True, 1)])
def test_merged_and_split_rows_have_the_same_loss_and_gradient(
    reduction: Any, merged: bool, budget: int | None
) -> None:
    expected, expected_gradients = loss_and_gradients(ROWS, reduction, None)
    loss, got = loss_and_gradients(merge_rows(ROWS) if merged else ROWS, reduction, budget)
    assert loss == pytest.approx(expected, abs=1e-6)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-5)


def test_weights_by_hand() -> None:
    given = [Row(0, (5, 6, 1), copies=2), Row(1, (1,))]
    for reduction, expected in (
        ("grpo", [2 / 36] * 3 + [1 / 12]),
        ("dr_grpo", [2 / 72] * 3 + [1 / 72]),
        ("dapo", [2 / 38] * 3 + [1 / 38]),
    ):
        (batch,) = micro_batches(PROMPTS, given, reduction, DENOMINATORS, None, "cpu")  # type: ignore[arg-type]
        assert batch.weights.tolist() == pytest.approx(expected)
        assert bool((batch.augmenter < 0).all())


def test_inserted_rows_are_marked_and_stay_apart() -> None:
    merged = merge_rows(ROWS)
    (batch,) = micro_batches(PROMPTS, merged, "dapo", DENOMINATORS, None, "cpu")
    assert len(merged) == 7
    assert int((batch.augmenter == 0).sum()) == 3


def test_every_copy_keeps_how_it_was_drawn() -> None:
    """Rollouts 0 and 2 are one row, whose first token was given; 1 was inserted; 3 is of another prompt."""
    logprobs = -torch.arange(12.0).view(4, 3)
    rows = [
        Row(0, (5, 6, 1), 1.0, given=1, members=(0,)),
        Row(0, (5, 6, 1), 1.0, augmenter=0, members=(1,)),
        Row(0, (5, 6, 1), 1.0, given=1, members=(2,)),
        Row(1, (5, 1), 1.0, members=(3,)),
    ]
    merged = merge_rows(rows)
    assert [(row.copies, row.members) for row in merged] == [(2, (0, 2)), (1, (1,)), (1, (3,))]
    (batch,) = micro_batches(PROMPTS, merged, "dapo", DENOMINATORS, None, "cpu", logprobs)
    drawn = batch.drawn
    assert drawn is not None
    assert drawn.logprobs.tolist() == [-1, -2, -7, -8, -9, -10]
    assert drawn.token.tolist() == [1, 2, 1, 2, 6, 7]
    assert drawn.copy.tolist() == [0, 0, 1, 1, 2, 2]
    assert drawn.copies == 3
    _, second = micro_batches(PROMPTS, merged, "dapo", DENOMINATORS, 9, "cpu", logprobs)
    assert second.drawn is not None
    assert second.drawn.token.tolist() == [0, 1]
    assert second.drawn.logprobs.tolist() == [-9, -10]
    (batch,) = micro_batches(PROMPTS, merged, "dapo", DENOMINATORS, None, "cpu")
    assert batch.drawn is None


def test_a_row_without_copies_has_no_gradient() -> None:
    loss, got = loss_and_gradients([Row(0, (5, 6, 1), advantage=1.0, copies=0)], "grpo", None)
    assert loss == 0
    assert got.keys()
    assert not any(gradient.any() for gradient in got.values())


def test_given_tokens_and_context_by_hand() -> None:
    """A row of 4 tokens, 3 of them given, 2 of those context: the denominators and weights know 2 + 1 tokens."""
    rows = [Row(0, (5, 6, 7, 1), 1.0, augmenter=1, given=3, context=2), Row(0, (8,))]
    for reduction, expected in (
        ("grpo", [0, 0, 1 / 4, 1 / 4, 1 / 2]),
        ("dr_grpo", [0, 0, 1 / 12, 1 / 12, 1 / 12]),
        ("dapo", [0, 0, 1 / 3, 1 / 3, 1 / 3]),
    ):
        (batch,) = micro_batches(PROMPTS, rows, reduction, Denominators(2, 3, 6), None, "cpu")  # type: ignore[arg-type]
        assert batch.weights.tolist() == pytest.approx(expected)
        assert batch.given.tolist() == [True, True, True, False, False]
        assert batch.augmenter.tolist() == [1, 1, 1, 1, -1]
