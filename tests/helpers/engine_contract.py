"""What every rollout engine must hold: subclass ``RolloutEngineContract`` with an ``engine`` fixture.

The suite reaches an engine through ``RolloutEngine`` alone. Everything is measured against a sampler that is
as slow and plain as can be: one sequence at a time, no cache, probabilities in Python floats.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from lit_madrl.rollouts.base import RolloutEngine
from lit_madrl.types import Rollouts, Sampling

STOP = 1
VOCABULARY = 12
PROMPTS = [[2, 5, 7], [3, 4, 4, 9, 10, 6, 8], [11], [2, 5, 7, 3]]
SAMPLINGS = {
    "plain": Sampling(group_size=8, max_new_tokens=6),
    "cool": Sampling(group_size=8, max_new_tokens=6, temperature=0.7),
    "top-k": Sampling(group_size=8, max_new_tokens=6, top_k=2),
    "top-p": Sampling(group_size=8, max_new_tokens=6, top_p=0.6),
    "all": Sampling(group_size=8, max_new_tokens=6, min_new_tokens=3, temperature=1.3, top_k=5, top_p=0.8),
}


def tiny_qwen3(seed: int = 0, vocabulary: int = VOCABULARY) -> nn.Module:
    """A random model far from uniform, with tied embeddings and room for 512 tokens."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.15,
        pad_token_id=STOP,
        eos_token_id=STOP,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def distribution(logits: Sequence[float], sampling: Sampling, forbidden: Sequence[int] = ()) -> list[float]:
    """The probabilities a token is drawn from, by the definitions of ``Sampling``."""
    scaled = [-math.inf if i in forbidden else x / sampling.temperature for i, x in enumerate(logits)]
    ranked = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    kept = [i for i in ranked[: sampling.top_k or None] if scaled[i] > -math.inf]
    weights = {i: math.exp(scaled[i] - scaled[ranked[0]]) for i in kept}
    total, nucleus, mass = sum(weights.values()), [], 0.0
    for i in kept:
        if mass < sampling.top_p:
            nucleus.append(i)
            mass += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(scaled))]


@torch.no_grad()
def next_distribution(
    model: nn.Module,
    prompt: Sequence[int],
    completion: Sequence[int],
    sampling: Sampling,
    stop_ids: Sequence[int],
) -> list[float]:
    """Distribution of the token after ``completion``, from a forward over the bare sequence."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, -1].double()
    forbidden = stop_ids if len(completion) < sampling.min_new_tokens else ()
    return distribution(logits.tolist(), sampling, forbidden)


def expected_logprobs(
    model: nn.Module, rollouts: Rollouts, sampling: Sampling, stop_ids: Sequence[int] = (STOP,)
) -> Tensor:
    """``[P, G, T]`` what ``sampler_logprobs`` must be for these completions."""
    expected = torch.zeros(rollouts.completion_ids.shape, dtype=torch.float64)
    seen: dict[tuple[int, ...], float] = {}
    for p, group in enumerate(rollouts.completions()):
        for g, completion in enumerate(group):
            for t in range(int(rollouts.prefix_lengths[p, g]), len(completion)):
                key = (p, *completion[: t + 1])
                if key not in seen:
                    probabilities = next_distribution(
                        model, rollouts.prompt_ids[p], completion[:t], sampling, stop_ids
                    )
                    seen[key] = math.log(probabilities[completion[t]])
                expected[p, g, t] = seen[key]
    return expected


def greedy(model: Any, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """The completion ``model.generate`` gives to one prompt."""
    ids = torch.tensor([list(prompt)])
    stop = {"eos_token_id": list(stop_ids)} if stop_ids else {}
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
        **stop,
    )
    completion: list[int] = output[0, len(prompt) :].tolist()
    return completion


def sequence_probabilities(
    model: nn.Module, prompt: Sequence[int], sampling: Sampling
) -> dict[tuple[int, ...], float]:
    """The probability of every completion there is; they sum to 1."""
    done, partial = {}, {(): 1.0}
    while partial:
        completion, probability = partial.popitem()
        for token, p in enumerate(next_distribution(model, prompt, completion, sampling, (STOP,))):
            longer = (*completion, token)
            complete = token == STOP or len(longer) == sampling.max_new_tokens
            (done if complete else partial)[longer] = probability * p
    return done


def chi_square_p_value(
    counts: Counter[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]
) -> float:
    """Pearson's goodness of fit; outcomes expected fewer than 5 times are one cell."""
    n = sum(counts.values())
    common = [k for k, p in probabilities.items() if p * n >= 5]
    cells = [(counts[k], probabilities[k] * n) for k in common]
    rest = (n - sum(c for c, _ in cells), n - sum(e for _, e in cells))
    cells += [rest] if rest[1] > 5 else []
    statistic = torch.tensor(sum((c - e) ** 2 / e for c, e in cells), dtype=torch.float64)
    freedom = torch.tensor(len(cells) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def assert_well_formed(rollouts: Rollouts, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Shapes, types and all that is true of any rollouts with the stop token ``STOP``."""
    ids, mask = rollouts.completion_ids, rollouts.completion_mask
    assert rollouts.prompt_ids == [list(prompt) for prompt in prompts]
    assert ids.shape[:2] == (len(prompts), sampling.group_size)
    assert ids.dtype == rollouts.prefix_lengths.dtype == torch.long
    assert mask.dtype == rollouts.finished.dtype == torch.bool
    assert rollouts.sampler_logprobs.dtype == torch.float
    assert mask.shape == rollouts.sampler_logprobs.shape == ids.shape
    assert rollouts.finished.shape == rollouts.prefix_lengths.shape == ids.shape[:2]
    lengths = rollouts.lengths
    assert torch.equal(mask, torch.arange(ids.shape[-1]) < lengths[..., None])
    assert int(lengths.max()) == ids.shape[-1]
    assert (lengths > rollouts.prefix_lengths).all()
    assert not ids[~mask].any()
    assert not rollouts.sampler_logprobs[~mask].any()
    sampled = mask & (torch.arange(ids.shape[-1]) >= rollouts.prefix_lengths[..., None])
    assert not rollouts.sampler_logprobs[~sampled].any()
    assert (rollouts.sampler_logprobs <= 0).all()
    is_last = torch.arange(ids.shape[-1]) == lengths[..., None] - 1
    assert not ((ids == STOP) & sampled & ~is_last).any()
    last = ids.gather(-1, lengths[..., None] - 1).squeeze(-1)
    assert torch.equal(rollouts.finished, last == STOP)


class RolloutEngineContract:
    """The suite. ``engine`` must have been given ``policy`` by ``sync_weights``."""

    tolerance: ClassVar[float] = 1e-4
    exact_repeats: ClassVar[bool] = True
    """False where requests are batched as they arrive: then log-probabilities repeat up to rounding alone."""

    @pytest.fixture
    def policy(self) -> nn.Module:
        return tiny_qwen3()

    @pytest.fixture
    def engine(self, policy: nn.Module) -> RolloutEngine:
        raise NotImplementedError

    def generate(
        self,
        engine: RolloutEngine,
        sampling: Sampling,
        *,
        seed: int | None = 0,
        prompts: Any = PROMPTS,
        **kwargs: Any,
    ) -> Rollouts:
        """Rollouts on the CPU that hold what all rollouts hold."""
        if seed is not None:
            engine.seed(seed)
        rollouts = engine.generate(prompts, sampling, kwargs.pop("stop_ids", (STOP,)), **kwargs).to("cpu")
        assert_well_formed(rollouts, prompts, sampling)
        return rollouts

    # What is drawn

    @pytest.mark.parametrize("name", SAMPLINGS)
    def test_logprobs_are_of_the_distribution_sampled_from(
        self, engine: RolloutEngine, policy: nn.Module, name: str
    ) -> None:
        rollouts = self.generate(engine, SAMPLINGS[name])
        expected = expected_logprobs(policy, rollouts, SAMPLINGS[name])
        torch.testing.assert_close(rollouts.sampler_logprobs.double(), expected, rtol=0, atol=self.tolerance)

    @pytest.mark.parametrize("name", ["plain", "all"])
    def test_frequencies_are_the_models_probabilities(
        self, engine: RolloutEngine, policy: nn.Module, name: str
    ) -> None:
        sampling = replace(SAMPLINGS[name], group_size=2000, max_new_tokens=2, min_new_tokens=1)
        rollouts = self.generate(engine, sampling, prompts=PROMPTS[:2], seed=11)
        for prompt, group in zip(PROMPTS[:2], rollouts.completions(), strict=True):
            probabilities = sequence_probabilities(policy, prompt, sampling)
            assert sum(probabilities.values()) == pytest.approx(1)
            counts = Counter(map(tuple, group))
            assert all(probabilities.get(completion, 0) > 0 for completion in counts)
            assert chi_square_p_value(counts, probabilities) > 1e-3

    def test_temperature_zero_is_greedy(self, engine: RolloutEngine, policy: nn.Module) -> None:
        rollouts = self.generate(engine, Sampling(group_size=2, max_new_tokens=10, temperature=0))
        for prompt, group in zip(PROMPTS, rollouts.completions(), strict=True):
            assert group == [greedy(policy, prompt, 10, [STOP])] * 2
        assert not rollouts.sampler_logprobs.any()  # a point mass

    def test_stop_tokens_wait_for_min_new_tokens(self, engine: RolloutEngine) -> None:
        """After 4 tokens the fifth may be a stop token."""
        sampling = Sampling(group_size=64, max_new_tokens=6, min_new_tokens=4)
        assert set(self.generate(engine, sampling).lengths.flatten().tolist()) == {5, 6}

    # Where it ends

    def test_limits_and_stop_tokens_end_completions(self, engine: RolloutEngine) -> None:
        rollouts = self.generate(engine, Sampling(group_size=64, max_new_tokens=4))
        assert rollouts.finished.any()
        assert not rollouts.finished.all()
        assert (rollouts.lengths[~rollouts.finished] == 4).all()

    def test_each_row_has_its_own_limit(self, engine: RolloutEngine) -> None:
        limits = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1], [5, 5, 1, 1], [2, 2, 2, 2]])
        rollouts = self.generate(engine, Sampling(group_size=4, max_new_tokens=9), limits=limits)
        assert (rollouts.lengths <= limits).all()
        assert torch.equal(rollouts.lengths[~rollouts.finished], limits[~rollouts.finished])

    def test_any_of_several_stop_tokens_ends_a_completion(self, engine: RolloutEngine) -> None:
        stop_ids = (STOP, 3, 8, 9)
        engine.seed(0)
        rollouts = engine.generate(PROMPTS, Sampling(group_size=32, max_new_tokens=6), stop_ids).to("cpu")
        seen = set()
        for group, finished in zip(rollouts.completions(), rollouts.finished.tolist(), strict=True):
            for completion, done in zip(group, finished, strict=True):
                assert not set(completion[:-1]) & set(stop_ids)
                assert (completion[-1] in stop_ids) == done
                seen.add(completion[-1])
        assert set(stop_ids) <= seen

    def test_without_stop_tokens_all_reach_the_limit(self, engine: RolloutEngine) -> None:
        engine.seed(0)
        rollouts = engine.generate(PROMPTS, Sampling(group_size=16, max_new_tokens=5), ()).to("cpu")
        assert (rollouts.lengths == 5).all()
        assert not rollouts.finished.any()
        assert (rollouts.completion_ids == STOP).any()  # the end-of-sequence id is an id like any other

    def test_one_stop_token_counts_where_padding_has_its_id(self, engine: RolloutEngine) -> None:
        """``pad_token_id == eos_token_id`` in the policy: the mask still ends with the first one."""
        rollouts = self.generate(engine, Sampling(group_size=32, max_new_tokens=6))
        counted = ((rollouts.completion_ids == STOP) & rollouts.completion_mask).sum(-1)
        assert torch.equal(counted, rollouts.finished.long())

    # Prefixes

    def test_completions_continue_their_prefixes(self, engine: RolloutEngine, policy: nn.Module) -> None:
        prefixes = [
            [[], [4], [4, 4, 6], [5, 7]],
            [[9], [9], [], []],
            [[], [], [], []],
            [[2, 2], [3], [], [6]],
        ]
        limits = torch.tensor([[6, 6, 4, 3], [6, 2, 6, 1], [6, 6, 6, 6], [3, 3, 3, 3]])
        sampling = replace(SAMPLINGS["all"], group_size=4, max_new_tokens=9)
        rollouts = self.generate(engine, sampling, prefixes=prefixes, limits=limits)
        assert rollouts.prefix_lengths.tolist() == [[len(x) for x in group] for group in prefixes]
        for group, given in zip(rollouts.completions(), prefixes, strict=True):
            for completion, prefix in zip(group, given, strict=True):
                assert completion[: len(prefix)] == prefix
        assert (rollouts.lengths <= limits).all()
        expected = expected_logprobs(policy, rollouts, sampling)
        torch.testing.assert_close(rollouts.sampler_logprobs.double(), expected, rtol=0, atol=self.tolerance)

    def test_greedy_continues_a_prefix_as_it_would_a_prompt(
        self, engine: RolloutEngine, policy: nn.Module
    ) -> None:
        """Whether the other prefixes of its prompt begin it, go on from it, equal it or have nothing in common."""
        prefixes = [[4, 6], [], [4], [5, 7, 3], [4, 6], [5, 7, 3, 9, 9], [5]]
        sampling = Sampling(group_size=len(prefixes), max_new_tokens=8, temperature=0)
        rollouts = self.generate(engine, sampling, prefixes=[prefixes] * len(PROMPTS))
        for prompt, group in zip(PROMPTS, rollouts.completions(), strict=True):
            for prefix, completion in zip(prefixes, group, strict=True):
                onward = greedy(policy, [*prompt, *prefix], 8 - len(prefix), [STOP])
                assert completion == [*prefix, *onward]

    # Random state

    def test_equal_seeds_equal_rollouts(self, engine: RolloutEngine) -> None:
        sampling = SAMPLINGS["plain"]
        first = self.generate(engine, sampling, seed=3)
        torch.rand(7)  # other draws of the process do not matter
        again = self.generate(engine, sampling, seed=3)
        other = self.generate(engine, sampling, seed=4)
        onward = self.generate(engine, sampling, seed=None)
        assert first.completions() == again.completions()
        atol = 0 if self.exact_repeats else self.tolerance
        torch.testing.assert_close(first.sampler_logprobs, again.sampler_logprobs, rtol=0, atol=atol)
        assert first.completions() != other.completions()
        assert other.completions() != onward.completions()

    def test_rows_of_a_group_differ(self, engine: RolloutEngine) -> None:
        rollouts = self.generate(engine, Sampling(group_size=16, max_new_tokens=6), prompts=[[2, 5]] * 2)
        first, second = rollouts.completions()
        assert len(set(map(tuple, first))) > 4
        assert first != second  # equal prompts are drawn independently

    def test_state_dict_continues_the_stream(self, engine: RolloutEngine) -> None:
        self.generate(engine, SAMPLINGS["plain"], seed=5)
        state = copy.deepcopy(engine.state_dict())
        expected = self.generate(engine, SAMPLINGS["plain"], seed=None)
        engine.seed(99)
        engine.load_state_dict(state)
        resumed = self.generate(engine, SAMPLINGS["plain"], seed=None)
        assert resumed.completions() == expected.completions()

    def test_global_random_state_is_left_alone(self, engine: RolloutEngine) -> None:
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        self.generate(engine, SAMPLINGS["plain"])
        engine.state_dict()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.random.get_state()[1].tolist() == before[2]

    # Weights and inputs

    def test_new_weights_are_sampled_from(self, engine: RolloutEngine, policy: nn.Module) -> None:
        """Also the tied head, and also where nothing but a long prompt is shared with earlier rollouts."""
        prompts = [[2 + i % 10 for i in range(300)], [3, 4]]
        sampling = Sampling(group_size=4, max_new_tokens=3)
        before = self.generate(engine, sampling, prompts=prompts)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.1)
        engine.sync_weights(policy)
        after = self.generate(engine, sampling, prompts=prompts)
        for rollouts, near in ((after, True), (before, False)):
            error = (rollouts.sampler_logprobs - expected_logprobs(policy, rollouts, sampling)).abs().max()
            assert (error < self.tolerance) == near

    def test_inputs_are_not_mutated(self, engine: RolloutEngine) -> None:
        prompts, stop_ids = copy.deepcopy(PROMPTS), [STOP]
        prefixes = [[[4], []] for _ in PROMPTS]
        limits = torch.full((4, 2), 5)
        engine.generate(prompts, Sampling(group_size=2), stop_ids, prefixes, limits)
        assert prompts == PROMPTS
        assert stop_ids == [STOP]
        assert prefixes == [[[4], []] for _ in PROMPTS]
        assert torch.equal(limits, torch.full((4, 2), 5))

    @pytest.mark.parametrize(
        ("message", "arguments"),
        [
            (r"prompts: .*at least one", {"prompts": []}),
            (r"prompts\[1\]: .*at least one", {"prompts": [[2], []]}),
            (r"prompts\[1\]: .*<= 512.*got 510 \+ 4", {"prompts": [[2], [2] * 510]}),
            (r"ids in 0\.\.11, got 2\.\.12", {"prompts": [[2], [12]]}),
            (r"stop_ids: .*0\.\.11, got -1\.\.-1", {"stop_ids": [-1]}),
            (r"prefixes: expected 2 lists of 2, got .*\[2\]", {"prefixes": [[[], []]]}),
            (r"prefixes: expected 2 lists of 2, got .*\[2, 1\]", {"prefixes": [[[], []], [[]]]}),
            (r"limits\[0, 1\]: .*4, got 4", {"prefixes": [[[], [3] * 4], [[], []]]}),
            (r"limits\[1, 0\]: .*0, got 0", {"limits": torch.tensor([[1, 1], [0, 1]])}),
            (r"limits: .*\(2, 2\), got .*\(2, 1\)", {"limits": torch.ones(2, 1, dtype=torch.long)}),
            (r"limits: .*long", {"limits": torch.ones(2, 2)}),
        ],
    )
    def test_bad_input_is_named(self, engine: RolloutEngine, message: str, arguments: dict[str, Any]) -> None:
        valid = {
            "prompts": [[2], [3, 4]],
            "sampling": Sampling(group_size=2, max_new_tokens=4),
            "stop_ids": [STOP],
        }
        with pytest.raises(ValueError, match=message):
            engine.generate(**{**valid, **arguments})
