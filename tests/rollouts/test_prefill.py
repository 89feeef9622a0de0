from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lit_madrl.rollouts import TorchEngine
from lit_madrl.rollouts import torch_engine as torch_engine_module
from lit_madrl.rollouts.kv_cache import allows_holes
from lit_madrl.rollouts.prefill import Root, Stage, padded_tokens, plan, whole
from lit_madrl.types import Rollouts, Sampling
from tests.helpers.engine_contract import PROMPTS, SAMPLINGS, STOP, expected_logprobs, tiny_qwen3
from tests.rollouts.architectures import ARCHITECTURES, FULL_ATTENTION, Architecture, tiny_mpt

# The plan


def rows(stages: list[Stage]) -> list[tuple[int, ...]]:
    """What the rows of the last stage hold, by the definition of a stage."""
    held: list[tuple[int, ...]] = [()] * len(stages[0].parents)
    for parents, kept, segments in stages:
        assert all(k <= len(held[p]) for p, k in zip(parents, kept, strict=True))
        held = [(*held[p][:k], *s) for p, k, s in zip(parents, kept, segments, strict=True)]
    return held


def forms(stages: list[Stage]) -> list[list[list[int]]]:
    return [[list(segment) for segment in stage.segments] for stage in stages]


token_lists = st.lists(st.integers(2, 4), max_size=5).map(tuple)
distinct_roots = st.lists(
    st.tuples(token_lists.filter(len), token_lists), min_size=1, max_size=9, unique=True
)


@given(distinct_roots)
def test_a_plan_ends_with_the_roots(roots: list[Root]) -> None:
    expected = [(*prompt, *prefix) for prompt, prefix in roots]
    assert rows(whole(roots)) == expected
    assert rows(plan(roots)) == expected
    assert all(stage.width for stage in plan(roots))


@given(distinct_roots)
def test_a_plan_is_the_cheapest_of_three(roots: list[Root]) -> None:
    begun = {(prompt, (*prompt, *prefix)[:-1]) for prompt, prefix in roots}
    trunks = [
        (prompt, b)
        for prompt, b in begun
        if not any(p == prompt and len(c) > len(b) and c[: len(b)] == b for p, c in begun)
    ]
    heads = {prompt: b[: len(prompt)] for prompt, b in trunks}
    each = len(roots) * max(len(prompt) + len(prefix) for prompt, prefix in roots)
    nested = len(trunks) * max(len(b) for _, b in trunks) + len(roots)
    rest = len(trunks) * max(len(b) - len(heads[prompt]) for prompt, b in trunks)
    diverging = len(heads) * max(map(len, heads.values())) + rest + len(roots)
    assert padded_tokens(plan(roots)) == min(each, nested, diverging)
    assert len(plan(roots)) == 1 + [each, nested, diverging].index(min(each, nested, diverging))


@given(st.lists(token_lists.filter(len), min_size=1, max_size=9, unique=True), token_lists)
def test_one_root_a_prompt_is_computed_as_it_is(prompts: list[tuple[int, ...]], prefix: tuple[int]) -> None:
    roots = [(prompt, prefix) for prompt in prompts]
    assert plan(roots) == whole(roots)


def test_plans_by_hand() -> None:
    a, b = (5, 6, 7), (8, 9)
    # Nested: the longest beginning, 5 6 7 2 3 without 4, once; then the last token of each.
    nested = plan([(a, ()), (a, (2, 3, 4)), (a, (2,)), (b, ())])
    assert nested == [
        Stage(range(2), [0, 0], [(8,), (5, 6, 7, 2, 3)]),
        Stage([1, 1, 1, 0], [2, 5, 3, 1], [(7,), (4,), (2,), (9,)]),
    ]
    # Diverging: [2, 5, 2] would be 2 * 5 + 5 tokens, [1, 2, 5] is 3 + 2 * 2 + 5.
    diverging = plan([(a, ()), (a, (2, 3, 4)), (a, (2,)), (a, (9, 9, 9)), (a, (9,))])
    assert forms(diverging) == [[[5, 6, 7]], [[9, 9], [2, 3]], [[7], [4], [2], [9], [9]]]
    assert diverging[1].kept == [3, 3]
    assert diverging[2].kept == [2, 5, 3, 5, 3]
    # Of equal last tokens and nothing else in common: 2 rows of 2 tokens are as few as 1 and 1 and 2.
    assert len(plan([((2,), (3,)), ((2,), (4,))])) == 2
    assert len(plan([((2,), ()), ((3,), ())])) == 1


# The same rollouts


def each(*prefixes: list[int]) -> list[list[list[int]]]:
    return [list(prefixes)] * len(PROMPTS)


NONE: list[int] = []
MIXES: dict[str, tuple[list[list[int]], list[list[list[int]]]]] = {
    "none": (PROMPTS, each(*[NONE] * 6)),
    "nested": (PROMPTS, each([4], NONE, [4, 6, 3, 9], [4, 6], NONE, [4, 6, 3])),
    "nested, none empty": (PROMPTS, each([4], [4, 6], [4, 6, 3, 9], [4], [4, 6], [4, 6, 3])),
    "diverging": (PROMPTS, each([4, 6, 3], [4, 7], [5, 8, 2, 2], [9], [5, 8], [5, 8, 2, 2])),
    "diverging at once": (PROMPTS, each([4, 6, 3, 3, 5], NONE, [7, 4, 4, 8], [9, 3], [7, 4], [4])),
    "equal": (PROMPTS, each(*[[4, 6]] * 6)),
    "a kind for each prompt": (
        PROMPTS,
        [
            [NONE] * 6,
            [[4, 6, 3], NONE, [4], [4], [4, 6], NONE],
            [[4, 6, 3, 3], [5, 5, 5], [6, 7], [5], [8, 8, 8], NONE],
            [[4, 6]] * 6,
        ],
    ),
    "prompts of one token": (
        [[11], [3], [11], [7]],
        [
            [NONE, [4], NONE, [4, 6], [4], [4, 6, 3]],
            [[4], [5], [6], [7], [8], [4]],
            [[4, 6], [5, 7], NONE, [4], [3, 3, 3], [5]],
            [NONE] * 6,
        ],
    ),
    "one prompt": (PROMPTS[1:2], [[[4, 6, 3, 9, 2, 2, 8], [4, 6, 3], NONE, [10, 4], [10, 4, 4, 4], [4]]]),
}


def drawn_from(
    model: nn.Module, mix: str, sampling: Sampling, **settings: Any
) -> tuple[Rollouts, list[Tensor]]:
    """Rollouts with limits from one token beyond the prefix on, and the logits of each step."""
    prompts, prefixes = MIXES[mix]
    limits = torch.tensor(
        [[len(x) + 1 + (p + g) % 4 for g, x in enumerate(group)] for p, group in enumerate(prefixes)]
    )
    logits: list[Tensor] = []

    def draw(step: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        logits.append(step)
        return original(step, *args)

    original = torch_engine_module.draw
    engine = TorchEngine(seed=4, **settings)
    engine.sync_weights(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine_module, "draw", draw)
        sampling = replace(sampling, group_size=6)
        return engine.generate(prompts, sampling, [STOP], prefixes, limits), logits


@pytest.mark.parametrize("prefill_tokens", [65536, 7])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("architecture", FULL_ATTENTION.values(), ids=FULL_ATTENTION.keys())
def test_sharing_changes_no_logit(architecture: Architecture, mix: str, prefill_tokens: int) -> None:
    """Stop tokens wait for three tokens, those of the prefix among them."""
    model = architecture().double()
    for name in ("plain", "all"):
        apart, expected = drawn_from(model, mix, SAMPLINGS[name], share_prompts=False)
        shared, logits = drawn_from(model, mix, SAMPLINGS[name], prefill_tokens=prefill_tokens)
        assert shared.completions() == apart.completions()
        assert torch.equal(shared.finished, apart.finished)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mix", MIXES)
def test_sharing_changes_no_draw_in_single_precision(mix: str) -> None:
    apart, _ = drawn_from(tiny_qwen3(), mix, SAMPLINGS["plain"], share_prompts=False, merge_identical=False)
    shared, _ = drawn_from(tiny_qwen3(), mix, SAMPLINGS["plain"])
    assert shared.completions() == apart.completions()
    torch.testing.assert_close(shared.sampler_logprobs, apart.sampler_logprobs, rtol=0, atol=1e-5)


# Which models share


MODELS = {**ARCHITECTURES, "mpt": tiny_mpt}


@pytest.mark.parametrize("name", MODELS)
def test_only_models_that_can_skip_columns_share(name: str) -> None:
    """The others attend by column, so a row with holes would be wrong: each root goes through by itself."""
    model = MODELS[name]().eval()
    assert allows_holes(model) == (name in FULL_ATTENTION)
    shapes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    rollouts, _ = drawn_from(model, "nested", SAMPLINGS["plain"])
    # Trunks 4 6 3 behind prompts of up to 7 tokens, then 5 distinct roots of each of 4 prompts.
    assert shapes[:2] == [(4, 10), (20, 1)] if name in FULL_ATTENTION else shapes[0] == (20, 11)
    expected = expected_logprobs(model, rollouts, SAMPLINGS["plain"])
    torch.testing.assert_close(rollouts.sampler_logprobs.double(), expected, rtol=0, atol=1e-4)


# Work


@pytest.mark.parametrize(
    ("prefixes", "apart", "shared", "often"),
    [
        # One row of 10 + 5 tokens, then three last tokens: 18 tokens instead of 10 + 13 + 16.
        ([[], [20, 21, 22], [20, 21, 22, 23, 24, 25]], (3, 16), [(1, 15), (3, 1)], {19: 2, 22: 2}),
        # The prompt, 5 and 3 tokens of two references behind it, then four last tokens.
        (
            [[20, 21, 22, 23, 24, 25], [30, 31, 32, 33], [20, 21, 22], []],
            (4, 16),
            [(1, 10), (2, 5), (4, 1)],
            {0: 2, 19: 2, 22: 2},
        ),
        ([[], [], []], (1, 10), [(1, 10)], {}),
    ],
)
def test_each_token_passes_once(
    prefixes: list[list[int]], apart: tuple[int, int], shared: list[tuple[int, int]], often: dict[int, int]
) -> None:
    """But for the last one of a prefix that another goes on from, which is asked for its logits."""
    model = tiny_qwen3(vocabulary=64)
    passed: list[Tensor] = []
    embedding = model.get_submodule("model.embed_tokens")
    embedding.register_forward_pre_hook(lambda _, args: passed.append(args[0]))
    limits = torch.tensor([[len(prefix) + 1 for prefix in prefixes]])
    for share, shapes in ((False, [apart]), (True, shared)):
        passed.clear()
        engine = TorchEngine(share_prompts=share)
        engine.sync_weights(model)
        how = Sampling(group_size=len(prefixes))
        engine.generate([list(range(10, 20))], how, [STOP], [prefixes], limits)
        assert [tuple(ids.shape) for ids in passed] == shapes
    tokens = {*range(10, 20), *(token for prefix in prefixes for token in prefix)}
    counts = Counter(token for ids in passed for token in ids.flatten().tolist())
    assert counts == {**dict.fromkeys(tokens, 1), **often}
