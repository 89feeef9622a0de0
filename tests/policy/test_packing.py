"""Packed layouts against rows that are built one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_madrl.policy.attention import AttentionPlan, DenseGroups, GroupRows
from lit_madrl.policy.packing import PackedBatch, pack, padded_inputs
from tests.policy.forms import FORMS, attention_form

Layout = tuple[list[list[int]], list[list[list[int]]]]

tokens = st.lists(st.integers(2, 28), min_size=1, max_size=6)
layouts = st.lists(st.tuples(tokens, st.lists(tokens, max_size=4)), min_size=1, max_size=4).filter(
    lambda pairs: any(group for _, group in pairs)
)


def split(pairs: list[tuple[list[int], list[list[int]]]]) -> Layout:
    return [prompt for prompt, _ in pairs], [group for _, group in pairs]


def rows_of(prompts: list[list[int]], groups: list[list[list[int]]]) -> Iterator[tuple[list[int], list[int]]]:
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            yield prompt, completion


def visible(plan: AttentionPlan, size: int) -> Tensor:
    """``[N, N]`` bool: which tokens each token attends to, read off the attention's own output.

    Zero scores spread a query's attention evenly over what it sees, and the values are one-hot.
    """
    zeros, values = torch.zeros(size, 1, 1), torch.eye(size)[:, None]
    out = torch.cat([part(zeros, zeros, values) for part in plan.parts])
    return out[:, 0] > 0


@pytest.mark.parametrize("form", FORMS)
@given(pairs=layouts)
@settings(max_examples=60, deadline=None)
def test_every_token_is_predicted_from_its_prompt_and_its_own_completion(
    pairs: list[tuple], form: str
) -> None:
    prompts, groups = split(pairs)
    with attention_form(form):
        batch = pack(prompts, groups)
    assert {type(part) for part in batch.plan.parts} == {FORMS[form]}
    inputs, positions = batch.input_ids[0], batch.position_ids[0]
    sees = visible(batch.plan, len(inputs))
    token = 0
    for row, (prompt, completion) in enumerate(rows_of(prompts, groups)):
        for t, target in enumerate(completion):
            source = int(batch.sources[token])
            seen = sees[source].nonzero().squeeze(1)
            assert positions[seen].tolist() == list(range(len(prompt) + t))
            assert inputs[seen].tolist() == [*prompt, *completion[:t]]
            assert int(seen[-1]) == source
            assert (int(batch.targets[token]), int(batch.rows[token])) == (target, row)
            token += 1
    assert token == len(batch.targets) == len(batch.sources) == len(batch.rows)


@given(pairs=layouts)
@settings(max_examples=60, deadline=None)
def test_nothing_is_repeated_or_padded(pairs: list[tuple]) -> None:
    prompts, groups = split(pairs)
    batch = pack(prompts, groups)
    completions = [c for group in groups for c in group]
    assert batch.input_ids.shape[1] == sum(map(len, prompts)) + sum(len(c) - 1 for c in completions)
    assert batch.num_rows == len(completions)
    assert batch.lengths.tolist() == [len(c) for c in completions]
    assert batch.prompts.tolist() == [p for p, group in enumerate(groups) for _ in group]
    assert batch.prompt_lengths.tolist() == [len(prompt) for prompt in prompts]


@given(pairs=layouts)
@settings(max_examples=60, deadline=None)
def test_padded_inputs_are_the_rows_themselves(pairs: list[tuple]) -> None:
    prompts, groups = split(pairs)
    batch = pack(prompts, groups)
    input_ids, mask, sources = padded_inputs(batch)
    width, expected_sources = input_ids.shape[1], []
    for row, (prompt, completion) in enumerate(rows_of(prompts, groups)):
        fed = [*prompt, *completion[:-1]]
        padding = width - len(fed)
        assert input_ids[row].tolist() == fed + [0] * padding
        assert mask[row].tolist() == [True] * len(fed) + [False] * padding
        expected_sources += [row * width + len(prompt) - 1 + t for t in range(len(completion))]
    assert sources.tolist() == expected_sources
    assert width == max(len(p) + len(c) - 1 for p, c in rows_of(prompts, groups))


@given(pairs=layouts)
@settings(max_examples=60, deadline=None)
def test_unpack_and_row_sums(pairs: list[tuple]) -> None:
    batch = pack(*split(pairs))
    values = torch.arange(1.0, len(batch.targets) + 1, requires_grad=True)
    grid, sums = batch.unpack(values), batch.row_sums(values)
    start = 0
    for row, length in enumerate(batch.lengths.tolist()):
        own = values[start : start + length]
        assert torch.equal(grid[row, :length], own)
        assert not grid[row, length:].any()
        assert torch.equal(sums[row], own.sum())
        start += length
    (gradient,) = torch.autograd.grad(grid.sum() + sums.sum(), values)
    assert torch.equal(gradient, torch.full_like(values, 2))


def test_the_documented_example() -> None:
    batch = pack([[5, 6]], [[[7, 8, 9], [4]]])
    assert batch.input_ids.tolist() == [[5, 6, 7, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]]
    assert batch.sources.tolist() == [1, 2, 3, 1]
    assert batch.targets.tolist() == [7, 8, 9, 4]


@pytest.mark.parametrize(
    ("prompts", "groups", "message"),
    [
        ([[1], []], [[[2]], [[2]]], "prompt 1: expected non-empty"),
        ([[1], [2]], [[[2]], [[2], []]], "prompt 1: expected non-empty"),
        ([[1]], [[[2]], [[3]]], "groups: expected one group for each of 1 prompts, got 2"),
        ([[1], [2]], [[], []], "groups: expected at least one completion, got none"),
        ([], [], "groups: expected at least one completion, got none"),
    ],
)
def test_bad_input_is_named(prompts: list, groups: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(prompts, groups)


def tensors_of(batch: PackedBatch) -> list[Tensor]:
    own = [getattr(batch, f.name) for f in fields(batch)]
    parts = [value for part in batch.plan.parts for value in vars(part).values()]
    return [value for value in (*own, *parts) if isinstance(value, Tensor)]


@pytest.mark.parametrize("form", FORMS)
def test_to_moves_every_tensor_and_leaves_the_original(form: str) -> None:
    with attention_form(form):
        batch = pack([[5, 6], [7]], [[[7, 8, 9], [4]], [[3, 3]]])
    moved = batch.to("meta")
    assert {t.device.type for t in tensors_of(moved)} == {"meta"}
    assert {t.device.type for t in tensors_of(batch)} == {"cpu"}
    assert [t.shape for t in tensors_of(moved)] == [t.shape for t in tensors_of(batch)]
    assert len(tensors_of(batch)) > 8


def test_the_cheaper_form_is_chosen() -> None:
    """Short answers fit one dense call; long completions would mask away nearly all of it."""
    short = AttentionPlan.build([(40, [2] * 16)] * 8)
    long = AttentionPlan.build([(40, [500] * 16)] * 8)
    assert [type(part) for part in short.parts] == [DenseGroups]
    assert [type(part) for part in long.parts] == [GroupRows] * 8
