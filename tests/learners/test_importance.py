"""Importance weights in the learner against weights written out completion by completion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from lit_madrl.augmenters.base import RolloutAugmenter
from lit_madrl.augmenters.insertion import Insertion, insert
from lit_madrl.learners import GRPOLearner, Importance, Objective
from lit_madrl.learners.mismatch import Mismatch
from lit_madrl.learners.rows import Denominators, Row, merge_rows, micro_batches
from lit_madrl.policy import Policy
from lit_madrl.rollouts import TorchEngine
from lit_madrl.types import Problem, Sampling, Source
from tests.helpers.learning import (
    EOS,
    Gradients,
    ListData,
    ReportingEngine,
    ScriptedEngine,
    assert_same,
    choice_problems,
    fit,
    gradients_of,
    grpo,
    sgd,
    slow_grpo_loss,
    start_model,
    tokenizer_of,
)
from tests.helpers.tiny_models import row_logprobs, tiny_model

PROBLEMS = choice_problems(3)
SAMPLING = Sampling(group_size=4, max_new_tokens=5)
COMPLETIONS = [
    [[40, 41, EOS], [40, 41, EOS], [50, EOS], [60, 61, 62, 63, 64]],
    [[EOS], [70, 71, 72, 73, EOS], [70, EOS], [70, EOS]],
    [[80, EOS], [81, 82, EOS], [80, EOS], [83, EOS]],
]
REWARDS = [[1.0, 1.0, -0.5, 0.25], [0.0, 2.0, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]]
CAP, FLOOR = 1.4, 0.6
KINDS = [(kind, level) for kind in ("truncate", "mask") for level in ("token", "sequence")]


def noise(prompt: list[int], copy: int, ids: list[int]) -> Tensor:
    """By how much the sampler's log-probabilities are off; identical completions differ."""
    generator = torch.Generator().manual_seed(sum(prompt) + 31 * copy + 7 * sum(ids))
    return 0.4 * torch.randn(len(ids), generator=generator)


def engine_for(folder: Path, temperature: float = 1.0) -> ReportingEngine:
    """Scripted completions, drawn with the start's log-probabilities plus noise."""
    prompts = tokenizer_of(folder)([p.prompt for p in PROBLEMS])["input_ids"]
    table = {tuple(ids): group for ids, group in zip(prompts, COMPLETIONS, strict=True)}
    model = start_model(folder)

    @torch.no_grad()
    def logprobs(prompt: list[int], copy: int, ids: list[int]) -> Tensor:
        return row_logprobs(model, prompt, ids, temperature) + noise(prompt, copy, ids)

    return ReportingEngine(table.__getitem__, logprobs)


def weigh(kind: str, level: str, log_ratios: Tensor) -> Tensor:
    """The weights of one completion's tokens, in Python floats."""
    values = log_ratios.tolist()
    ratios = [math.exp(sum(values))] * len(values) if level == "sequence" else [math.exp(x) for x in values]
    if kind == "truncate":
        return torch.tensor([min(max(ratio, FLOOR), CAP) for ratio in ratios])
    return torch.tensor([ratio if FLOOR <= ratio <= CAP else 0.0 for ratio in ratios])


def importance(kind: Any, level: Any) -> Importance:
    return Importance(kind, level, CAP, FLOOR)


def run(learner: GRPOLearner, steps: int = 1) -> tuple[list[dict[str, Tensor]], dict[str, float]]:
    """The gradients of the steps, and what the last of them logged."""
    recorder = Gradients()
    trainer: Any = fit(learner, ListData(PROBLEMS), steps, callbacks=[recorder])
    return recorder.steps, trainer.logger.steps[-1]


def slow_gradients(learner: GRPOLearner, model: Any, **arguments: Any) -> dict[str, Tensor]:
    experience = learner.experience
    assert experience is not None
    reduction = learner.objective.reduction
    return gradients_of(
        slow_grpo_loss(model, experience.rollouts, experience.advantages, reduction, **arguments), model
    )


# The gradient


@pytest.mark.parametrize("micro_batch_tokens", [None, 60])
@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_the_gradient_is_weighted(
    tiny_choice: Path, kind: str, level: str, micro_batch_tokens: int | None
) -> None:
    """Two inner epochs, a clipped ratio, a KL term, and identical completions with other log-probabilities."""
    lr, clip, beta = 1.0, 0.02, 0.3
    objective = Objective(
        beta=beta, inner_epochs=2, clip_low=clip, clip_high=clip, importance=importance(kind, level)
    )
    changes = {"objective": objective, "sampling": SAMPLING, "micro_batch_tokens": micro_batch_tokens}
    learner = grpo(
        tiny_choice, REWARDS, engine=engine_for(tiny_choice), optimizer=partial(sgd, lr=lr), **changes
    )
    got, _ = run(learner, 2)
    start, model = start_model(tiny_choice), start_model(tiny_choice)
    for gradients in got:
        arguments = {"old": start, "reference": start, "clip": clip, "beta": beta}
        expected = slow_gradients(learner, model, weigh=partial(weigh, kind, level), **arguments)
        assert_same(gradients, expected, atol=5e-6)
        uncorrected = slow_gradients(learner, model, **arguments)
        assert any(not torch.allclose(expected[name], uncorrected[name], rtol=0.05) for name in expected)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= lr * expected[name]


@pytest.mark.parametrize("reduction", ["grpo", "dr_grpo"])
def test_with_other_reductions_and_temperatures(tiny_choice: Path, reduction: Any) -> None:
    sampling = Sampling(group_size=4, max_new_tokens=5, temperature=0.6)
    objective = Objective(reduction=reduction, beta=0, importance=importance("truncate", "token"))
    learner = grpo(
        tiny_choice, REWARDS, engine=engine_for(tiny_choice, 0.6), objective=objective, sampling=sampling
    )
    got, _ = run(learner)
    arguments = {"temperature": 0.6, "max_length": 5, "weigh": partial(weigh, "truncate", "token")}
    assert_same(got[0], slow_gradients(learner, start_model(tiny_choice), **arguments))


def test_without_importance_the_samplers_logprobs_change_nothing(tiny_choice: Path) -> None:
    results = []
    for reports in (True, False):
        engine: ScriptedEngine = engine_for(tiny_choice)
        engine = engine if reports else ScriptedEngine(engine.script)
        learner = grpo(tiny_choice, REWARDS, engine=engine, objective=Objective(beta=0.1), sampling=SAMPLING)
        gradients, logged = run(learner)
        results.append(gradients[0])
        assert ("train/mismatch/kl" in logged) == reports
        assert not {"train/mismatch/ess", "train/mismatch/truncated"} & logged.keys()
    assert all(torch.equal(results[0][name], tensor) for name, tensor in results[1].items())


def test_identical_completions_are_computed_once_all_the_same(
    tiny_choice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    original = Policy.forward

    def watched(self: Policy, batch: Any, *rest: Any) -> Tensor:
        counts.append(batch.num_rows)
        return original(self, batch, *rest)

    monkeypatch.setattr(Policy, "forward", watched)
    objective = Objective(beta=0, importance=importance("mask", "sequence"))
    run(grpo(tiny_choice, REWARDS, engine=engine_for(tiny_choice), objective=objective, sampling=SAMPLING))
    assert counts == [6]


class Insert(RolloutAugmenter):
    """Puts a trajectory in the place of the first rollout of the first group; two of its tokens are given."""

    def forward(self, problems: Any, rollouts: Any, scores: Any, collector: Any) -> Any:
        new = Insertion(0, 0, [40, 41, 42, EOS], 2, Source.GUIDED, 1.0, 0.0, 0)
        return insert(rollouts, scores, [new])


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_inserted_rows_have_the_weight_one(tiny_choice: Path, kind: str, level: str) -> None:
    objective = Objective(beta=0, importance=importance(kind, level))
    learner = grpo(
        tiny_choice,
        REWARDS,
        engine=engine_for(tiny_choice),
        objective=objective,
        sampling=SAMPLING,
        augmenters=[Insert()],
    )
    got, _ = run(learner)

    def weigh_rows(log_ratios: Tensor) -> Tensor:  # the inserted one is the only one of 4 tokens
        return torch.ones(4) if len(log_ratios) == 4 else weigh(kind, level, log_ratios)

    assert_same(got[0], slow_gradients(learner, start_model(tiny_choice), weigh=weigh_rows))


@pytest.mark.parametrize(
    ("level", "weights_of_own", "ess", "masked"),
    [
        # Ratios 2 and 1/2 against a copy with 3 and 1; the cap is 2.5.
        ("token", [1.0, (2 + 0) / 2, (0.5 + 1) / 2], (2 + 0.5 + 1) ** 2 / (4 * (4 + 0.25 + 1)), 1 / 4),
        ("sequence", [1.0, (1 + 0) / 2, (1 + 0) / 2], 1 / 2, 1 / 2),
    ],
)
def test_weights_and_numbers_by_hand(level: Any, weights_of_own: Any, ess: float, masked: float) -> None:
    """Two copies of a row of one given and two sampled tokens, an inserted row, and one without any copy."""
    logs = torch.tensor([[0.0, 2.0, 0.5], [9.0, 9.0, 9.0], [0.0, 3.0, 1.0]], dtype=torch.float64).log()
    old = torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    sampler = torch.tensor([-1.0, -2.0, -3.0]) - logs
    rows = [
        Row(0, (5, 6, 1), 1.0, given=1, members=(0,)),
        Row(0, (5, 7), 1.0, augmenter=0, members=(1,)),
        Row(0, (5, 6, 1), 1.0, given=1, members=(2,)),
        Row(0, (8,), copies=0),
    ]
    (batch,) = micro_batches(
        [[3, 4]], merge_rows(rows), "dr_grpo", Denominators(3, 8, 1), None, "cpu", sampler
    )
    assert [len(row) for row in batch.packed.unpack(torch.ones(6))] == [3, 3, 3]
    mismatch = Mismatch(Importance("mask", level, cap=2.5))
    for got in (mismatch.corrected(batch, old), mismatch.corrected(batch, old)):  # sums over micro-batches
        ratio = got / batch.weights
        assert ratio[:3].tolist() == pytest.approx(weights_of_own)
        assert ratio[3:5].tolist() == [1.0, 1.0]
    in_step = replace(
        batch, weights=0 * batch.weights
    )  # as ranks with fewer micro-batches repeat the last: not counted
    mismatch.corrected(in_step, old + 1)
    numbers = mismatch.numbers(lambda *values: list(values), lambda value: value)
    k3 = [x - 1 - math.log(x) for x in (2, 0.5, 3, 1)]
    assert numbers == pytest.approx(
        {
            "mismatch/kl": sum(k3) / 4,
            "mismatch/max_abs": math.log(3),
            "mismatch/ess": ess,
            "mismatch/masked": masked,
        }
    )


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_logged_numbers_are_those_of_all_copies(tiny_choice: Path, kind: Any, level: Any) -> None:
    objective = Objective(beta=0.1, inner_epochs=2, importance=importance(kind, level))
    logged = []
    for tokens in (None, 1):
        changes = {"objective": objective, "sampling": SAMPLING, "micro_batch_tokens": tokens}
        learner = grpo(tiny_choice, REWARDS, engine=engine_for(tiny_choice), **changes)
        logged.append(run(learner, 2)[1])
    prompts = tokenizer_of(tiny_choice)([p.prompt for p in PROBLEMS])["input_ids"]
    ratios = [
        -noise(prompt, g, ids)
        for prompt, group in zip(prompts, COMPLETIONS, strict=True)
        for g, ids in enumerate(group)
    ]
    tokens = torch.cat(ratios)
    rho = (tokens if level == "token" else torch.stack([x.sum() for x in ratios])).exp()
    outside = (rho < FLOOR) | (rho > CAP)
    w = rho.clamp(FLOOR, CAP) if kind == "truncate" else rho.masked_fill(outside, 0)
    expected = {
        "train/mismatch/kl": float((tokens.exp() - 1 - tokens).mean()),
        "train/mismatch/max_abs": float(tokens.abs().max()),
        "train/mismatch/ess": float(w.sum() ** 2 / (len(w) * w.square().sum())),
        f"train/mismatch/{'truncated' if kind == 'truncate' else 'masked'}": float(outside.float().mean()),
    }
    assert 0 < expected["train/mismatch/ess"] < 1
    for numbers in logged:
        own = {name: value for name, value in numbers.items() if "mismatch" in name}
        assert own == pytest.approx(expected, rel=1e-3)


# Real samplers


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_embedded_engine_is_exact(tiny_choice: Path, temperature: float) -> None:
    sampling = Sampling(group_size=8, max_new_tokens=5, temperature=temperature)
    rewards = [[float(g % 3) for g in range(8)]] * 3
    objective = Objective(beta=0, importance=Importance("mask", "sequence"))
    _, logged = run(grpo(tiny_choice, rewards, objective=objective, sampling=sampling))
    assert logged["train/mismatch/kl"] == pytest.approx(0, abs=1e-6)
    assert logged["train/mismatch/max_abs"] < 1e-4
    assert logged["train/mismatch/ess"] == pytest.approx(1, abs=1e-6)
    assert logged["train/mismatch/masked"] == 0


def test_truncated_sampling_shows_as_the_mass_that_it_keeps(tiny_choice: Path) -> None:
    """The sampler is renormalized and the policy is not: rho is the kept mass, less than 1."""
    sampling = Sampling(group_size=8, max_new_tokens=1, top_k=3)
    rewards = [[float(g % 3) for g in range(8)]] * 3
    objective = Objective(beta=0, importance=Importance(cap=1.0))
    learner = grpo(tiny_choice, rewards, objective=objective, sampling=sampling)
    with pytest.warns(UserWarning, match="biased"):
        _, logged = run(learner)
    model = start_model(tiny_choice)
    prompts = tokenizer_of(tiny_choice)([p.prompt for p in PROBLEMS])["input_ids"]
    masses = [model(torch.tensor([ids])).logits[0, -1].softmax(-1).topk(3).values.sum() for ids in prompts]
    logs = torch.stack(masses).log().detach()
    assert logged["train/mismatch/max_abs"] == pytest.approx(float(-logs.min()), rel=1e-3)
    assert logged["train/mismatch/truncated"] == 0
    assert logged["train/mismatch/kl"] == pytest.approx(float((logs.exp() - 1 - logs).mean()), rel=1e-3)


class Perturbed(TorchEngine):
    """Samples from another model than it is given."""

    def sync_weights(self, policy: nn.Module) -> None:
        if self._model is None:
            self._model = perturbed(start_model(Path(policy.config._name_or_path)))


def perturbed(model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    return model


def test_a_sampler_with_other_weights(tiny_choice: Path) -> None:
    sampling = Sampling(group_size=8, max_new_tokens=4)
    rewards = [[float(g % 3) for g in range(8)]] * 3
    objective = Objective(beta=0, importance=importance("truncate", "sequence"))
    learner = grpo(tiny_choice, rewards, engine=Perturbed(), objective=objective, sampling=sampling)
    got, logged = run(learner)
    assert learner.experience is not None
    ids = learner.experience.rollouts.completions()[0][0]
    sampler = perturbed(start_model(tiny_choice))
    torch.testing.assert_close(
        learner.experience.rollouts.sampler_logprobs[0, 0, : len(ids)],
        row_logprobs(sampler, learner.experience.rollouts.prompt_ids[0], ids).detach(),
        rtol=1e-4,
        atol=1e-4,
    )
    expected = slow_gradients(learner, start_model(tiny_choice), weigh=partial(weigh, "truncate", "sequence"))
    assert_same(got[0], expected, atol=1e-5)
    assert logged["train/mismatch/max_abs"] > 0.05


# In expectation


@pytest.fixture(scope="module")
def four_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with four tokens, so that all groups of two completions of two tokens can be listed."""
    folder = tmp_path_factory.mktemp("models") / "four"
    words = {"a": 0, "</s>": 1, "b": 2, "c": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="a").save_pretrained(
        folder
    )
    tiny_model("qwen3", vocab_size=4).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("weighted", "matches"), [(Importance("truncate", "sequence", cap=1e6), True), (None, False)]
)
def test_the_corrected_gradient_is_the_on_policy_one_in_expectation(
    four_words: Path, weighted: Importance | None, matches: bool
) -> None:
    """Every group the sampler can draw, once, its rewards multiplied by its probability: the gradient is linear in
    them, so one step's is the expectation. On-policy it is (1 - 1/G) times that of the expected reward.
    """
    prompt = Problem("p", "c a b")
    (ids,) = tokenizer_of(four_words)([prompt.prompt])["input_ids"]
    completions = [[EOS], *([x, y] for x in (0, 2, 3) for y in range(4))]
    values = torch.linspace(-1, 2, len(completions), dtype=torch.float64).sin()
    policy, sampler = start_model(four_words).double(), perturbed(start_model(four_words)).double()

    def total(model: Any, completion: list[int]) -> Tensor:
        return double_logprobs(model, ids, completion).sum()

    drawn = torch.stack([total(sampler, c) for c in completions]).detach().exp()
    assert float(drawn.sum()) == pytest.approx(1)
    groups = list(product(range(len(completions)), repeat=2))
    script = iter([[completions[i] for i in group] for group in groups])
    engine = ReportingEngine(
        lambda prompt: next(script), lambda p, g, c: double_logprobs(sampler, p, c).detach()
    )
    rewards = [[float(values[i] * drawn[list(group)].prod()) for i in group] for group in groups]
    objective = Objective("none", "dr_grpo", beta=0, importance=weighted)
    learner = grpo(
        four_words,
        rewards,
        engine=engine,
        objective=objective,
        sampling=Sampling(group_size=2, max_new_tokens=2),
    )
    learner.configure_model()
    learner.trained_policy.double()
    recorder = Gradients()
    fit(learner, ListData([prompt] * len(groups)), callbacks=[recorder])
    expected_reward = sum(
        total(policy, c).exp() * value for c, value in zip(completions, values, strict=True)
    )
    expected = gradients_of(-(1 - 1 / 2) * expected_reward, policy)
    # The loss is divided by max_length and the number of sequences, of which there are two a group.
    got = {name: tensor * len(groups) * 2 for name, tensor in recorder.steps[0].items()}
    difference = max(float((got[name] - tensor).abs().max()) for name, tensor in expected.items())
    size = max(float(tensor.abs().max()) for tensor in expected.values())
    assert difference < 1e-5 * size if matches else difference > 0.03 * size


def double_logprobs(model: Any, prompt: Sequence[int], completion: list[int]) -> Tensor:
    """As ``row_logprobs``, in the model's precision."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].log_softmax(-1)[range(len(completion)), completion]


# Settings


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "clip"), ("level", "group"), ("cap", 0.5), ("cap", math.inf), ("floor", -0.1), ("floor", 1.5)],
)
def test_importance_checks_its_arguments(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"objective.importance.{field}: expected .*, got {value!r}"):
        Importance(**{field: value})


def test_importance_needs_an_engine_that_reports(tiny_choice: Path) -> None:
    script: Callable[[Any], Any] = {}.__getitem__
    with pytest.raises(ValueError, match=r"objective.importance: .*reports.*got ScriptedEngine"):
        grpo(tiny_choice, REWARDS, script, objective=Objective(importance=Importance()))
