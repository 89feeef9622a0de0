from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from lit_madrl.rollouts import TorchEngine
from lit_madrl.rollouts.kv_cache import SPARE, RowCache, build_cache
from lit_madrl.rollouts.live_rows import branch, placement
from lit_madrl.types import Rollouts, Sampling
from tests.helpers.engine_contract import PROMPTS, STOP, tiny_qwen3

pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=30)


@given(pairs, st.booleans())
def test_branches_are_the_distinct_pairs(samples: list[tuple[int, int]], merge: bool) -> None:
    row, tokens = torch.tensor(samples).unbind(1)
    result = branch(row, tokens, merge)
    assert sorted(result.order.tolist()) == list(range(len(samples)))
    children = list(zip(result.parents.tolist(), result.tokens.tolist(), strict=True))
    assert sorted(children) == sorted(set(samples) if merge else samples)
    numbered = set()
    for i, r, rank in zip(*(x.tolist() for x in (result.order, result.row, result.rank)), strict=True):
        assert children[r] == samples[i]
        assert 0 <= rank < sum(other == r for other in result.row.tolist())
        numbered.add((r, rank))
    assert len(numbered) == len(samples)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=20).map(sorted))
def test_placement_moves_no_row_that_can_stay(parents: list[int]) -> None:
    place = placement(torch.tensor(parents)).tolist()
    assert sorted(place) == list(range(len(parents)))
    stayed = {p for p, at in zip(parents, place, strict=True) if p == at}
    assert stayed == {p for p in parents if p < len(parents)}


def test_placement_by_hand() -> None:
    assert placement(torch.tensor([0, 0, 2, 5])).tolist() == [0, 1, 2, 3]
    assert placement(torch.tensor([1, 3, 4])).tolist() == [1, 0, 2]
    assert placement(torch.tensor([0, 1, 2])).tolist() == [0, 1, 2]


steps = st.lists(
    st.one_of(
        st.integers(1, 3),  # append so many tokens
        st.lists(st.integers(0, 100), min_size=1, max_size=9),  # select these rows
    ),
    max_size=12,
)


@given(st.integers(1, 4), st.integers(1, 5), steps, st.sampled_from([0, 1, 128]))
def test_row_cache_equals_dynamic_cache(
    rows: int, length: int, operations: list[int | list[int]], spare: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    caches = RowCache(2, 9, length + 36), DynamicCache()

    def append(new: int) -> None:
        for layer in range(2):
            keys = torch.rand(rows, 2, new, 3, generator=generator)
            values = torch.rand(rows, 2, new, 5, generator=generator)
            ours, theirs = (cache.update(keys, values, layer) for cache in caches)
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_madrl.rollouts.kv_cache.SPARE", spare)
        append(length)
        for operation in operations:
            if isinstance(operation, int):
                append(operation)
            else:
                parents = torch.tensor(operation) % rows
                rows = parents.numel()
                for cache in caches:
                    cache.reorder_cache(parents)
            ours, theirs = caches
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert ours.get_mask_sizes(1, 0) == theirs.get_mask_sizes(1, 0)
            for mine, other in zip(ours.layers, theirs.layers, strict=True):
                assert torch.equal(mine.keys, other.keys)
                assert torch.equal(mine.values, other.values)


def test_under_autocast_keys_take_no_more_room_than_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm makes them float32, which attention rounds in the end: what is generated is the same bit for bit."""
    caches: list[Any] = []

    def remembered(make: Any) -> Any:
        def build(config: Any, *sizes: int) -> Any:
            caches.append(make(config, *sizes))
            return caches[-1]

        return build

    def sampled(make: Any) -> Rollouts:
        monkeypatch.setattr("lit_madrl.rollouts.live_rows.build_cache", remembered(make))
        engine = TorchEngine(seed=3)
        engine.sync_weights(tiny_qwen3())
        with torch.autocast("cpu", torch.bfloat16):
            return engine.generate(PROMPTS, Sampling(group_size=6, max_new_tokens=30), [STOP])

    own = sampled(build_cache)
    plain = sampled(lambda config, *_: DynamicCache(config=config))
    assert [{layer.keys.dtype for layer in cache.layers} for cache in caches] == [
        {torch.bfloat16},
        {torch.float32},
    ]
    assert torch.equal(own.completion_ids, plain.completion_ids)
    assert torch.equal(own.sampler_logprobs, plain.sampler_logprobs)


def test_the_other_row_operations_of_a_cache_work_too() -> None:
    states = torch.rand(3, 2, 4, 5)
    cache = RowCache(1, 6, 10)
    cache.update(states, states, 0)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0, 2]))
    cache.crop(-1)
    new = torch.rand(3, 2, 1, 5)
    keys, _ = cache.update(new, new, 0)
    assert torch.equal(keys, torch.cat([states[[2, 0, 1], :, :3], new], dim=2))
    cache.reset()
    assert cache.get_seq_length() == 0
    keys, _ = cache.update(states, states, 0)
    assert torch.equal(keys, states)


def test_appending_and_dropping_copy_nothing() -> None:
    cache = RowCache(1, 4, 3 + SPARE)
    states = torch.rand(4, 2, 3, 5)
    cache.update(states, states, 0)
    address = cache.layers[0].keys.data_ptr()
    cache.reorder_cache(torch.tensor([0, 3, 2]))
    for _ in range(SPARE):
        cache.update(states[:3, :, :1], states[:3, :, :1], 0)
    assert cache.layers[0].keys.data_ptr() == address
    assert cache.layers[0].keys.shape == (3, 2, 3 + SPARE, 5)
