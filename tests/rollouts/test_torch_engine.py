from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_madrl.rollouts import RolloutEngine, TorchEngine, torch_engine
from lit_madrl.rollouts import live_rows as live_rows_module
from lit_madrl.rollouts.kv_cache import RowCache
from lit_madrl.types import Rollouts, Sampling
from tests.helpers.engine_contract import (
    PROMPTS,
    SAMPLINGS,
    STOP,
    VOCABULARY,
    RolloutEngineContract,
    expected_logprobs,
    greedy,
    next_distribution,
    tiny_qwen3,
)
from tests.rollouts.architectures import ARCHITECTURES, FULL_ATTENTION, Architecture, tiny_gpt2


@pytest.fixture(params=ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def model(request: pytest.FixtureRequest) -> nn.Module:
    built: nn.Module = request.param()
    return built.train()


def engine_for(model: nn.Module, **kwargs: Any) -> TorchEngine:
    engine = TorchEngine(**kwargs)
    engine.sync_weights(model)
    return engine


class TestContract(RolloutEngineContract):
    @pytest.fixture
    def engine(self, policy: nn.Module) -> RolloutEngine:
        return engine_for(policy)


class TestContractWithoutMerging(RolloutEngineContract):
    @pytest.fixture
    def engine(self, policy: nn.Module) -> RolloutEngine:
        return engine_for(policy, merge_identical=False, prefill_tokens=5)


# Against references


def test_greedy_equals_generate(model: nn.Module) -> None:
    rollouts = engine_for(model).generate(
        PROMPTS, Sampling(group_size=2, max_new_tokens=12, temperature=0), [STOP]
    )
    model.eval()
    for prompt, group in zip(PROMPTS, rollouts.completions(), strict=True):
        assert group == [greedy(model, prompt, 12, [STOP])] * 2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_padded_teacher_forced_forward(model: nn.Module, temperature: float) -> None:
    sampling = Sampling(group_size=6, max_new_tokens=8, temperature=temperature)
    rollouts = engine_for(model).generate(PROMPTS, sampling, [STOP])
    sequences = [
        (prompt, completion)
        for prompt, group in zip(PROMPTS, rollouts.completions(), strict=True)
        for completion in group
    ]
    width = max(len(prompt) + len(completion) for prompt, completion in sequences)
    ids = torch.tensor([[*p, *c] + [0] * (width - len(p) - len(c)) for p, c in sequences])
    keep = torch.tensor([[1] * (len(p) + len(c)) + [0] * (width - len(p) - len(c)) for p, c in sequences])
    logits = model.eval()(input_ids=ids, attention_mask=keep).logits
    logprobs = (logits[:, :-1] / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    flat = rollouts.sampler_logprobs.flatten(0, 1)
    for i, (prompt, completion) in enumerate(sequences):
        expected = logprobs[i, len(prompt) - 1 :][: len(completion)]
        torch.testing.assert_close(flat[i, : len(completion)], expected, rtol=0, atol=1e-4)


def one_by_one(
    model: nn.Module, sampling: Sampling, seed: int, prefixes: Sequence[Sequence[list[int]]], limits: Tensor
) -> list[list[list[int]]]:
    """What the engine must draw: sample i inverts the distribution of its own sequence at its uniforms."""
    generator = torch.Generator().manual_seed(seed)
    count = limits.numel()
    uniforms = [torch.rand(count, dtype=torch.float64, generator=generator).tolist() for _ in range(20)]
    groups = []
    for p, prompt in enumerate(PROMPTS):
        group = []
        for g in range(sampling.group_size):
            completion, draws = list(prefixes[p][g]), iter(uniforms)
            while True:
                u = next(draws)[p * sampling.group_size + g]
                cdf = accumulate(next_distribution(model, prompt, completion, sampling, [STOP]))
                completion.append(next((token for token, mass in enumerate(cdf) if mass > u), VOCABULARY - 1))
                if completion[-1] == STOP or len(completion) == int(limits[p, g]):
                    break
            group.append(completion)
        groups.append(group)
    return groups


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("architecture", FULL_ATTENTION.values(), ids=FULL_ATTENTION.keys())
def test_tokens_equal_those_of_a_sampler_without_cache(architecture: Architecture, name: str) -> None:
    model = architecture().eval()
    sampling = replace(SAMPLINGS[name], group_size=5)
    prefixes = [[[], [4], [4], [4, 4, 6], []] for _ in PROMPTS]
    limits = torch.tensor([[6, 6, 3, 4, 1]]).expand(len(PROMPTS), -1)
    rollouts = engine_for(model, seed=8).generate(PROMPTS, sampling, [STOP], prefixes, limits)
    assert rollouts.completions() == one_by_one(model, sampling, 8, prefixes, limits)


# Equivalent settings


def assert_same(a: Rollouts, b: Rollouts) -> None:
    for field in ("completion_ids", "completion_mask", "finished", "prefix_lengths"):
        assert torch.equal(getattr(a, field), getattr(b, field))
    torch.testing.assert_close(a.sampler_logprobs, b.sampler_logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(
    "setting",
    [{"merge_identical": False}, {"share_prompts": False}, {"prefill_tokens": 1}, {"prefill_tokens": 11}],
)
def test_settings_change_no_token(model: nn.Module, name: str, setting: dict[str, Any]) -> None:
    prompts = [*PROMPTS, PROMPTS[0]]
    prefixes = [[[]] * 10 + [[4, 2]] * 6 for _ in prompts]
    sampling = replace(SAMPLINGS[name], group_size=16)
    plain = engine_for(model).generate(prompts, sampling, [STOP], prefixes)
    assert_same(plain, engine_for(model, **setting).generate(prompts, sampling, [STOP], prefixes))


def test_a_completion_does_not_depend_on_when_others_end() -> None:
    limits = torch.full((4, 8), 6)
    limits[:, ::2] = 1
    engine = engine_for(tiny_qwen3())
    free = engine.generate(PROMPTS, SAMPLINGS["plain"], [STOP]).completions()
    engine.seed(0)
    cut = engine.generate(PROMPTS, SAMPLINGS["plain"], [STOP], limits=limits).completions()
    assert [group[1::2] for group in cut] == [group[1::2] for group in free]


def test_the_models_own_cache_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that answers with another kind of cache is followed."""
    model = tiny_qwen3()
    prefixes = [[[], [4], [4, 4], [6, 7]] * 2 for _ in PROMPTS]
    ours = engine_for(model).generate(PROMPTS, SAMPLINGS["plain"], [STOP], prefixes)
    monkeypatch.setattr(live_rows_module, "build_cache", lambda *_: None)
    assert_same(ours, engine_for(model).generate(PROMPTS, SAMPLINGS["plain"], [STOP], prefixes))


# Work


def counted(model: nn.Module) -> list[tuple[int, ...]]:
    """Filled with the shape of ``input_ids`` at each forward of the model."""
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def test_only_distinct_unfinished_rows_are_computed(model: nn.Module) -> None:
    shapes = counted(model)
    prompts = [*PROMPTS, PROMPTS[0]]
    rollouts = engine_for(model).generate(prompts, Sampling(group_size=32, max_new_tokens=5), [STOP])
    distinct = [
        {
            (*rollouts.prompt_ids[p], *completion[:t])
            for p, group in enumerate(rollouts.completions())
            for completion in group
            if len(completion) > t
        }
        for t in range(5)
    ]
    assert shapes[0] == (4, 7)  # each distinct prompt once
    assert shapes[1:] == [(len(rows), 1) for rows in distinct[1:]]
    assert shapes[1][0] < 5 * 32 / 2


def test_prefill_keeps_to_its_budget() -> None:
    model = tiny_qwen3()
    shapes = counted(model)
    engine_for(model, prefill_tokens=8).generate(PROMPTS, Sampling(max_new_tokens=1), [STOP])
    assert shapes == [(4, 2), (4, 2), (4, 2), (4, 1)]


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_full_attention_gets_the_growing_cache(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []
    build = live_rows_module.build_cache
    monkeypatch.setattr(
        live_rows_module, "build_cache", lambda *args: kinds.append(build(*args)) or kinds[-1]
    )
    engine_for(architecture()).generate([[2]], Sampling(group_size=1, max_new_tokens=2), [STOP])
    assert isinstance(kinds[0], RowCache) == (architecture in FULL_ATTENTION.values())


# The model is left as it was


def test_training_flags_come_back_and_no_gradient_is_kept(model: nn.Module) -> None:
    frozen = next(module for module in model.modules() if not list(module.children()))
    frozen.eval()
    before = {name: module.training for name, module in model.named_modules()}
    weights = copy.deepcopy(model.state_dict())
    rollouts = engine_for(model).generate(PROMPTS, SAMPLINGS["plain"], [STOP])
    assert not rollouts.sampler_logprobs.requires_grad
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_dropout_is_inactive() -> None:
    model = tiny_gpt2().train()
    rollouts = engine_for(model).generate(PROMPTS, SAMPLINGS["plain"], [STOP])
    expected = expected_logprobs(model.eval(), rollouts, SAMPLINGS["plain"])
    torch.testing.assert_close(rollouts.sampler_logprobs.double(), expected, rtol=0, atol=1e-4)


def test_diverged_weights_are_reported_and_flags_come_back(model: nn.Module) -> None:
    def poison(_: nn.Module, __: Any, output: Any) -> None:
        output.logits[1] = torch.nan

    model.register_forward_hook(poison)
    with pytest.raises(RuntimeError, match=r"logits: .* 1 of 4 rows"):
        engine_for(model).generate(PROMPTS, Sampling(max_new_tokens=2), [STOP])
    assert model.training


def test_weights_are_shared_not_copied() -> None:
    model = tiny_qwen3()
    engine = engine_for(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    rollouts = engine.generate(PROMPTS, SAMPLINGS["plain"], [STOP])
    expected = expected_logprobs(model, rollouts, SAMPLINGS["plain"])
    torch.testing.assert_close(rollouts.sampler_logprobs.double(), expected, rtol=0, atol=1e-4)


def test_the_callers_autocast_is_used() -> None:
    model = tiny_qwen3()
    seen = []
    model.register_forward_hook(lambda *args: seen.append(args[2].logits.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        rollouts = engine_for(model).generate(PROMPTS, SAMPLINGS["plain"], [STOP])
    assert set(seen) == {torch.bfloat16}
    assert rollouts.sampler_logprobs.isfinite().all()
    expected = expected_logprobs(model, rollouts, SAMPLINGS["plain"])
    torch.testing.assert_close(rollouts.sampler_logprobs.double(), expected, rtol=0, atol=0.3)


def test_weights_must_come_first() -> None:
    with pytest.raises(RuntimeError, match="sync_weights"):
        TorchEngine().generate([[2]], Sampling(), [STOP])


def test_prefill_tokens_is_checked() -> None:
    with pytest.raises(ValueError, match=r"prefill_tokens: .* got 0"):
        TorchEngine(prefill_tokens=0)


def test_long_completions_outgrow_the_first_buffer() -> None:
    """More than the spare room of the cache, with rows that end on the way."""
    model = tiny_qwen3()
    sampling = Sampling(group_size=3, max_new_tokens=300, min_new_tokens=250, temperature=1.5)
    rollouts = engine_for(model).generate([[2, 5], [3, 4, 6]], sampling, [STOP])
    for p, group in enumerate(rollouts.completions()):
        for g, completion in enumerate(group):
            ids = torch.tensor([[*rollouts.prompt_ids[p], *completion]])
            logits = model(input_ids=ids).logits[0, len(rollouts.prompt_ids[p]) - 1 : -1] / 1.5
            logits[: min(250, len(completion)), STOP] = -torch.inf
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(1)
            actual = rollouts.sampler_logprobs[p, g, : len(completion)]
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_autocast_casts_weights_once_and_leaves_nothing_behind() -> None:
    """Inside one autocast region: sample, train, sample; weights are never stale and gradients flow."""
    torch.manual_seed(0)
    model = tiny_qwen3()
    engine = TorchEngine()
    engine.sync_weights(model)
    weight = next(p for name, p in model.named_parameters() if name.endswith("q_proj.weight"))

    def sample() -> Rollouts:
        engine.seed(0)
        return engine.generate([[3, 4, 5]], Sampling(group_size=4, max_new_tokens=6), [1])

    def cast() -> Counter[str]:
        with torch.profiler.profile() as profile:
            sample()
        return Counter(event.name for event in profile.events())

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        fewer = cast()["aten::_to_copy"]
        first = sample()
        model(torch.tensor([[3, 4, 5]])).logits.float().sum().backward()
        assert weight.grad is not None
        assert bool(weight.grad.any())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)
        second = sample()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        third = sample()
    assert torch.equal(second.completion_ids, third.completion_ids)
    assert torch.equal(second.sampler_logprobs, third.sampler_logprobs)
    assert not torch.equal(first.sampler_logprobs[..., :1], second.sampler_logprobs[..., :1])
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine, "weights_cast_once", lambda _: nullcontext())
        matrices = sum(isinstance(module, nn.Linear) for module in model.modules())
        assert cast()["aten::_to_copy"] == fewer + 5 * matrices  # the prefill and five steps
