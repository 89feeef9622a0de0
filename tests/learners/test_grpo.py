"""GRPO steps under a real trainer against a loss that is written out row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_madrl.learners import GRPOLearner, Objective
from lit_madrl.learners import grpo as grpo_module
from lit_madrl.policy import Policy, PolicyConfig
from lit_madrl.rewards import ForwardKL
from lit_madrl.tasks import Categorizer, ChoiceCategorizer, Verifier
from lit_madrl.types import Problem, Sampling
from tests.helpers.learning import (
    EOS,
    Gradients,
    ListData,
    ScriptedRewards,
    assert_same,
    choice_problems,
    fit,
    gradients_of,
    grpo,
    sgd,
    slow_grpo_loss,
    start_model,
    tokenizer_of,
    trainer_for,
    weights,
)
from tests.helpers.tiny_models import row_logprobs

PROBLEMS = choice_problems(3)
G = 4
SAMPLING = Sampling(group_size=G, max_new_tokens=5)
# Duplicates, lengths 1 to 5, one cut at the limit, and a group whose rewards are equal.
COMPLETIONS = [
    [[40, 41, EOS], [40, 41, EOS], [50, EOS], [60, 61, 62, 63, 64]],
    [[EOS], [70, 71, 72, 73, EOS], [70, EOS], [70, EOS]],
    [[80, EOS], [81, 82, EOS], [80, EOS], [83, EOS]],
]
REWARDS = [[1.0, 1.0, -0.5, 0.25], [0.0, 2.0, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]]
DEAD = [False, False, True]


class Recorder(Gradients):
    """Also what a batch of rollouts became, and what was logged."""

    logged: dict[str, float]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.logged = trainer.logger.steps[-1]


@pytest.fixture
def script(tiny_choice: Path) -> Any:
    prompts = tokenizer_of(tiny_choice)([p.prompt for p in PROBLEMS])["input_ids"]
    table = {tuple(ids): group for ids, group in zip(prompts, COMPLETIONS, strict=True)}
    return table.__getitem__


def step(learner: GRPOLearner, steps: int = 1, problems: Sequence[Problem] = PROBLEMS) -> Recorder:
    recorder = Recorder()
    fit(learner, ListData(problems), steps, callbacks=[recorder])
    return recorder


def expected_gradients(
    learner: GRPOLearner, model: Any, loss: Any = slow_grpo_loss, **arguments: Any
) -> dict[str, Tensor]:
    assert learner.experience is not None
    objective = learner.objective
    total = loss(
        model,
        learner.experience.rollouts,
        learner.experience.advantages,
        objective.reduction,
        **{"max_length": objective.max_length or learner.sampling.max_new_tokens, **arguments},
    )
    return gradients_of(total, model)


# The loss


@pytest.mark.parametrize("micro_batch_tokens", [None, 1, 130])
@pytest.mark.parametrize("reduction", ["grpo", "dr_grpo", "dapo"])
def test_the_first_gradient_is_reinforce(
    tiny_choice: Path, script: Any, reduction: Any, micro_batch_tokens: int | None
) -> None:
    objective = Objective(reduction=reduction, beta=0)
    learner = grpo(
        tiny_choice,
        REWARDS,
        script,
        objective=objective,
        sampling=SAMPLING,
        micro_batch_tokens=micro_batch_tokens,
    )
    recorder = step(learner)
    expected = expected_gradients(learner, start_model(tiny_choice))
    assert_same(recorder.steps[0], expected)
    assert torch.equal(learner.experience.advantages[2], torch.zeros(G))  # type: ignore[union-attr]


@pytest.mark.parametrize("reduction", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("micro_batch_tokens", [None, 60])
def test_with_a_kl_term(
    tiny_choice: Path, script: Any, reduction: Any, micro_batch_tokens: int | None
) -> None:
    """Two steps: the policy is its own reference at the first, and has moved at the second."""
    objective = Objective(reduction=reduction, beta=0.5, advantage_scale="none")
    learner = grpo(
        tiny_choice,
        REWARDS,
        script,
        objective=objective,
        sampling=SAMPLING,
        micro_batch_tokens=micro_batch_tokens,
    )
    recorder = step(learner, steps=2)
    reference, model = start_model(tiny_choice), start_model(tiny_choice)
    for gradients in recorder.steps:
        expected = expected_gradients(learner, model, reference=reference, beta=0.5)
        assert_same(gradients, expected)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * expected[name]


def test_temperature_and_divisor(tiny_choice: Path, script: Any) -> None:
    objective = Objective(reduction="dr_grpo", max_length=7, beta=0.2)
    sampling = replace(SAMPLING, temperature=0.6)
    learner = grpo(tiny_choice, REWARDS, script, objective=objective, sampling=sampling)
    recorder = step(learner)
    reference = start_model(tiny_choice)
    expected = expected_gradients(
        learner, start_model(tiny_choice), reference=reference, beta=0.2, temperature=0.6, max_length=7
    )
    assert_same(recorder.steps[0], expected)


@pytest.mark.parametrize("micro_batch_tokens", [None, 60])
def test_inner_epochs_reuse_the_rollouts_with_a_clipped_ratio(
    tiny_choice: Path, script: Any, micro_batch_tokens: int | None
) -> None:
    clip, lr = 0.02, 2.0
    objective = Objective(beta=0, inner_epochs=2, clip_low=clip, clip_high=clip)
    changes = {"objective": objective, "sampling": SAMPLING, "micro_batch_tokens": micro_batch_tokens}
    learner = grpo(tiny_choice, REWARDS, script, optimizer=partial(sgd, lr=lr), **changes)
    recorder = Recorder()
    trainer = fit(learner, ListData(PROBLEMS), 2, callbacks=[recorder])
    assert trainer.global_step == len(recorder.steps) == 2
    assert learner.engine.calls == 1  # type: ignore[attr-defined]
    assert learner.prompt_cursor == 3
    old, model = start_model(tiny_choice), start_model(tiny_choice)
    first = expected_gradients(learner, model)
    assert_same(recorder.steps[0], first)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= lr * first[name]
    second = expected_gradients(learner, model, old=old, clip=clip)
    assert_same(recorder.steps[1], second, atol=2e-6)
    unclipped = expected_gradients(learner, model, old=old, clip=1e9)
    assert any(not torch.allclose(second[name], unclipped[name], rtol=0.1) for name in second)
    assert 0 < recorder.logged["train/clip_fraction"] < 1


def test_the_first_epochs_ratio_is_one(
    tiny_choice: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    differences = []
    original = grpo_module.clipped_surrogate

    def watched(logprobs: Tensor, old: Tensor, *rest: Any) -> Tensor:
        differences.append(float((logprobs - old).detach().abs().max()))
        return original(logprobs, old, *rest)

    monkeypatch.setattr(grpo_module, "clipped_surrogate", watched)
    objective = Objective(inner_epochs=2, beta=0)
    step(grpo(tiny_choice, REWARDS, script, objective=objective, sampling=SAMPLING, micro_batch_tokens=60), 2)
    half = len(differences) // 2
    assert half > 1
    assert not any(differences[:half])
    assert all(differences[half:])


def test_advantage_scale_is_the_objectives(tiny_choice: Path, script: Any) -> None:
    rewards = torch.tensor(REWARDS)
    centred = rewards - rewards.mean(-1, keepdim=True)
    for scale, divisor in (("none", 1.0), ("sample", rewards.std(-1, keepdim=True) + 1e-6)):
        objective = Objective(beta=0, advantage_scale=scale)  # type: ignore[arg-type]
        learner = grpo(tiny_choice, REWARDS, script, objective=objective, sampling=SAMPLING)
        step(learner)
        torch.testing.assert_close(learner.experience.advantages, centred / divisor)  # type: ignore[union-attr]


# The reference


def test_without_beta_there_is_no_reference(tiny_choice: Path, script: Any) -> None:
    learner = grpo(tiny_choice, REWARDS, script, objective=Objective(beta=0), sampling=SAMPLING)
    recorder = step(learner)
    assert learner._reference == []
    assert "train/kl" not in recorder.logged


def test_the_first_kl_is_zero_and_the_reference_is_neither_trained_nor_saved(
    tiny_choice: Path, script: Any
) -> None:
    learner = grpo(tiny_choice, REWARDS, script, objective=Objective(beta=0.5), sampling=SAMPLING)
    first = step(learner).logged["train/kl"]
    assert first == pytest.approx(0, abs=1e-7)
    learner = grpo(tiny_choice, REWARDS, script, objective=Objective(beta=0.5), sampling=SAMPLING)
    assert step(learner, steps=2).logged["train/kl"] > 1e-6
    start = start_model(tiny_choice).state_dict()
    reference = learner._reference[0].model.state_dict()
    assert all(torch.equal(reference[name], tensor) for name, tensor in start.items())
    assert all(name.startswith("policy.") for name in learner.state_dict())
    assert len(learner.state_dict()) == len(start)


def test_the_gradient_depends_on_the_reference(tiny_choice: Path, script: Any) -> None:
    results = []
    for shift in (0.0, 0.5):
        learner = grpo(tiny_choice, REWARDS, script, objective=Objective(beta=0.5), sampling=SAMPLING)
        learner.configure_model()
        with torch.no_grad():
            for parameter in learner._reference[0].parameters():
                parameter += shift * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        results.append(step(learner).steps[0])
        expected = expected_gradients(
            learner, start_model(tiny_choice), reference=learner._reference[0].model, beta=0.5
        )
        assert_same(results[-1], expected)
    assert any(not torch.allclose(results[0][name], results[1][name], atol=1e-4) for name in results[0])


# Dead groups


@pytest.mark.parametrize("reduction", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize(
    ("dead_groups", "beta"), [("count", 0.0), ("exclude", 0.0), ("exclude", 0.3), ("count", 0.3)]
)
def test_dead_groups_count_in_the_denominators_or_not_at_all(
    tiny_choice: Path, script: Any, reduction: Any, dead_groups: Any, beta: float
) -> None:
    objective = Objective(reduction=reduction, beta=beta, dead_groups=dead_groups)
    learner = grpo(tiny_choice, REWARDS, script, objective=objective, sampling=SAMPLING)
    recorder = step(learner)
    counted = None if dead_groups == "count" else [not dead for dead in DEAD]
    reference = start_model(tiny_choice)
    expected = expected_gradients(
        learner, start_model(tiny_choice), reference=reference, beta=beta, counted=counted
    )
    assert_same(recorder.steps[0], expected)


def test_a_dead_groups_completions_do_not_matter(tiny_choice: Path, script: Any) -> None:
    """Whatever they are, they are not computed and give no gradient."""
    prompt = tuple(tokenizer_of(tiny_choice).encode(PROBLEMS[2].prompt))
    others = [[90, EOS], [91, 92, EOS], [93, EOS], [93, EOS]]
    results = []
    for changed in (script, lambda ids: others if ids == prompt else script(ids)):
        learner = grpo(tiny_choice, REWARDS, changed, objective=Objective(beta=0), sampling=SAMPLING)
        results.append(step(learner).steps[0])
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name])


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("dead_groups", ["count", "exclude"])
def test_nothing_but_dead_groups(tiny_choice: Path, script: Any, beta: float, dead_groups: Any) -> None:
    """The step is made, and moves nothing: the policy is its own reference."""
    objective = Objective(beta=beta, dead_groups=dead_groups)
    learner = grpo(tiny_choice, [[0.5] * G] * 3, script, objective=objective, sampling=SAMPLING)
    recorder = step(learner)
    assert all(float(gradient.abs().max()) < 1e-6 for gradient in recorder.steps[0].values())
    assert recorder.logged["train/dead_groups"] == 1
    assert recorder.logged["train/loss"] == pytest.approx(0, abs=1e-6)
    assert recorder.logged.get("train/kl", 0.0) == pytest.approx(0, abs=1e-6)


class Table(Categorizer):
    """The given categories."""

    def __init__(self, *categories: Sequence[int]) -> None:
        self.categories = categories

    def __call__(self, problems: Any, completions: Any) -> Tensor:
        return torch.tensor(self.categories)


class Judge(Verifier):
    """Returns whatever it is given."""

    def __init__(self, correct: Any, format: Any = None) -> None:
        self.correct, self.format = correct, format

    def __call__(self, problems: Any, completions: Any) -> Any:
        self.seen = completions
        return self.correct

    def well_formed(self, problems: Any, completions: Any) -> Any:
        return torch.ones(3, G) if self.format is None else self.format


def test_groups_are_dead_by_their_rewards(tiny_choice: Path, script: Any) -> None:
    """All answers wrong in all groups; shaped rewards differ in the first two, whose categories do."""
    categories = Table([0, 0, 0, 1], [0, 1, 2, -1], [3, 3, 3, 3])
    learner = grpo(
        tiny_choice,
        ForwardKL(),
        script,
        sampling=SAMPLING,
        categorizer=categories,
        verifier=Judge(torch.zeros(3, G)),
        score_truncated=True,
    )
    recorder = step(learner)
    assert recorder.logged["train/dead_groups"] == pytest.approx(1 / 3)
    advantages = learner.experience.advantages  # type: ignore[union-attr]
    assert [bool(group.any()) for group in advantages] == [True, True, False]


# Rows


def rows_computed(learner: GRPOLearner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    original = Policy.forward

    def watched(self: Policy, batch: Any, *rest: Any) -> Tensor:
        counts.append(batch.num_rows)
        return original(self, batch, *rest)

    monkeypatch.setattr(Policy, "forward", watched)
    return counts


@pytest.mark.parametrize(("beta", "expected"), [(0.0, [6]), (0.1, [9, 9])])
def test_identical_completions_are_computed_once(
    tiny_choice: Path, script: Any, monkeypatch: pytest.MonkeyPatch, beta: float, expected: list[int]
) -> None:
    """3 + 3 distinct completions in the live groups, 3 in the dead one; the reference computes the same rows."""
    learner = grpo(tiny_choice, REWARDS, script, objective=Objective(beta=beta), sampling=SAMPLING)
    counts = rows_computed(learner, monkeypatch)
    step(learner)
    assert counts == expected


def test_the_loss_is_exact_and_logged(tiny_choice: Path, script: Any) -> None:
    learner = grpo(tiny_choice, REWARDS, script, objective=Objective(beta=0), sampling=SAMPLING)
    logged = step(learner).logged
    experience = learner.experience
    assert experience is not None
    expected = slow_grpo_loss(start_model(tiny_choice), experience.rollouts, experience.advantages, "dapo")
    assert logged["train/loss"] == pytest.approx(float(expected.detach()), abs=1e-6)
    assert logged["train/reward"] == pytest.approx(float(torch.tensor(REWARDS).mean()))
    assert logged["train/length"] == pytest.approx(
        sum(len(ids) for group in COMPLETIONS for ids in group) / 12
    )
    assert logged["train/truncated_rate"] == pytest.approx(1 / 12)
    assert logged["train/prompts"] == 3
    assert logged["train/lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("inner_epochs", [1, 2])
def test_logged_numbers_do_not_depend_on_micro_batches(
    tiny_choice: Path, script: Any, inner_epochs: int
) -> None:
    objective = Objective(beta=0.3, inner_epochs=inner_epochs, clip_low=0.01, clip_high=0.01)
    logged = []
    for tokens in (None, 1):
        changes = {"objective": objective, "sampling": SAMPLING, "micro_batch_tokens": tokens}
        changes |= {"categorizer": Table([0, 0, 1, -1], [2, 2, 2, 2], [0, 1, 2, 3])}
        learner = grpo(tiny_choice, REWARDS, script, optimizer=partial(sgd, lr=1.0), **changes)
        logged.append(step(learner, steps=2 * inner_epochs).logged)
    assert logged[0].keys() == logged[1].keys()
    for name, value in logged[0].items():
        if "seconds" not in name:
            assert logged[1][name] == pytest.approx(value, rel=1e-3, abs=1e-6, nan_ok=True), name


def test_gradient_clipping_scales_the_step(tiny_choice: Path, script: Any) -> None:
    """As one: also over micro-batches; the norm that is logged is the one before."""
    start = {name: p.detach().clone() for name, p in start_model(tiny_choice).named_parameters()}
    learner = grpo(tiny_choice, REWARDS, script, sampling=SAMPLING, max_grad_norm=0.01, micro_batch_tokens=60)
    recorder = step(learner)
    moved = {name: (start[name] - tensor) / 0.1 for name, tensor in weights(learner).items()}
    norm = torch.stack([tensor.square().sum() for tensor in moved.values()]).sum().sqrt()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)
    assert recorder.logged["train/grad_norm"] > 0.02


# Numbers that are none


def unchanged(learner: GRPOLearner, folder: Path) -> bool:
    start = dict(start_model(folder).named_parameters())
    return all(torch.equal(tensor, start[name]) for name, tensor in weights(learner).items())


def test_a_reward_that_is_no_number_stops_before_the_step(tiny_choice: Path, script: Any) -> None:
    rewards = [REWARDS[0], [0.0, float("nan"), 0.5, 0.5], REWARDS[2]]
    learner = grpo(tiny_choice, rewards, script, sampling=SAMPLING)
    with pytest.raises(ValueError, match=r"(?s)rewards: .*nan in group 1, row 1.*optimizer step 0"):
        step(learner)
    assert unchanged(learner, tiny_choice)


class Poison(Gradients):
    """Ruins a weight before the second batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                pl_module.trained_policy.model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
            self.before = weights(pl_module)


@pytest.mark.parametrize("scripted", [True, False])
def test_a_weight_that_is_no_number_stops_before_the_step(
    tiny_choice: Path, script: Any, scripted: bool
) -> None:
    """In sampling where the policy samples itself, else in the loss."""
    poison = Poison()
    learner = grpo(tiny_choice, REWARDS, script if scripted else None, sampling=SAMPLING)
    with pytest.raises(RuntimeError if not scripted else FloatingPointError, match=r"(?s).*optimizer step 1"):
        fit(learner, ListData(PROBLEMS), 3, callbacks=[poison])
    for name, tensor in weights(learner).items():
        assert torch.equal(tensor.nan_to_num(7.0), poison.before[name].nan_to_num(7.0))


# From tokens to scores


def test_only_text_before_the_first_stop_token_counts(tiny_choice: Path) -> None:
    """Padding has the id of the stop token; what follows the first stop token is neither scored nor trained."""
    tokenizer = tokenizer_of(tiny_choice)
    tokenizer.pad_token = tokenizer.eos_token
    answer = tokenizer.encode(PROBLEMS[0].options[0], add_special_tokens=False)
    other = tokenizer.encode(PROBLEMS[0].options[1], add_special_tokens=False)
    group = [[5, 6, EOS, EOS], [*answer, EOS, *other, EOS], [EOS, *answer], [*answer, *answer]]
    learner = grpo(
        tiny_choice,
        [[1.0, 2.0, 3.0, 4.0]],
        lambda prompt: group,
        objective=Objective(beta=0),
        sampling=Sampling(group_size=4, max_new_tokens=len(answer) * 2),
        categorizer=ChoiceCategorizer(),
    )
    learner.tokenizer = tokenizer
    recorder = step(learner, problems=PROBLEMS[:1])
    experience = learner.experience
    assert experience is not None
    trained = [[5, 6, EOS], [*answer, EOS], [EOS], [*answer, *answer]]
    assert experience.rollouts.completions() == [trained]
    assert experience.texts[0][1] == PROBLEMS[0].options[0]
    assert experience.texts[0][2] == ""
    # The last one names an option too, but was cut: nobody knows what it would have become.
    assert experience.scores.category.tolist() == [[-1, 0, -1, -1]]
    assert_same(recorder.steps[0], expected_gradients(learner, start_model(tiny_choice)))


@pytest.mark.parametrize("score_truncated", [False, True])
def test_unfinished_completions(tiny_choice: Path, score_truncated: bool) -> None:
    """Off-support and wrong unless asked otherwise; trained on in either case."""
    answer = tokenizer_of(tiny_choice).encode(PROBLEMS[0].options[0], add_special_tokens=False)
    learner = grpo(
        tiny_choice,
        [[1.0, 0.0]],
        lambda prompt: [answer, [*answer, EOS]],
        sampling=Sampling(group_size=2, max_new_tokens=len(answer) + 1),
        categorizer=ChoiceCategorizer(),
        verifier=Judge(torch.ones(1, 2), torch.ones(1, 2)),
        score_truncated=score_truncated,
    )
    step(learner, problems=PROBLEMS[:1])
    scores = learner.experience.scores  # type: ignore[union-attr]
    assert scores.category.tolist() == [[0 if score_truncated else -1, 0]]
    assert scores.correct.tolist() == scores.format.tolist() == [[float(score_truncated), 1.0]]


def test_sampled_ids_are_never_tokenized_again(tiny_choice: Path) -> None:
    """The text "one" sampled as "o", "ne" is trained as it was sampled."""
    tokenizer = tokenizer_of(tiny_choice)
    text = PROBLEMS[0].options[0]
    whole = tokenizer.encode(text, add_special_tokens=False)
    split = [i for char in text for i in tokenizer.encode(char, add_special_tokens=False)]
    assert tokenizer.decode(split) == text
    assert split != whole
    learner = grpo(
        tiny_choice,
        [[1.0, 0.0]],
        lambda prompt: [[*split, EOS], [5, EOS]],
        objective=Objective(beta=0, advantage_scale="none"),
        sampling=Sampling(group_size=2, max_new_tokens=16),
        categorizer=ChoiceCategorizer(),
    )
    recorder = step(learner, problems=PROBLEMS[:1])
    experience = learner.experience
    assert experience is not None
    assert experience.texts[0][0] == text
    assert experience.scores.category.tolist() == [[0, -1]]
    model, prompt = start_model(tiny_choice), tokenizer.encode(PROBLEMS[0].prompt)
    logprobs = [row_logprobs(model, prompt, ids) for ids in ([*split, EOS], [5, EOS])]
    loss = (-0.5 * logprobs[0].sum() + 0.5 * logprobs[1].sum()) / sum(map(len, logprobs))
    assert_same(recorder.steps[0], gradients_of(loss, model))


@pytest.mark.parametrize(
    ("correct", "format", "message"),
    [
        (None, None, r"verifier: expected a tensor of shape \(3, 4\), got NoneType"),
        ([[1.0] * 4] * 3, None, r"verifier: .*got list"),
        (torch.ones(3), None, r"verifier: .*got \(3,\)"),
        (torch.ones(4, 3), None, r"verifier: .*got \(4, 3\)"),
        (
            torch.tensor([[1.0, float("nan"), 0.0, 0.0]] * 3),
            None,
            r"verifier: expected finite numbers, got 3",
        ),
        (torch.ones(3, 4), torch.ones(3, 1), r"verifier.well_formed: .*got \(3, 1\)"),
    ],
)
def test_missing_scores_are_an_error(
    tiny_choice: Path, script: Any, correct: Any, format: Any, message: str
) -> None:
    learner = grpo(tiny_choice, REWARDS, script, sampling=SAMPLING, verifier=Judge(correct, format))
    with pytest.raises(ValueError, match=message):
        step(learner)
    assert unchanged(learner, tiny_choice)


def test_zero_is_a_score(tiny_choice: Path, script: Any) -> None:
    correct = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0] * 4, [1.0] * 4])
    rewards = ScriptedRewards(REWARDS)
    learner = grpo(
        tiny_choice, rewards, script, sampling=SAMPLING, verifier=Judge(correct), score_truncated=True
    )
    recorder = step(learner)
    assert torch.equal(rewards.asked[0].correct, correct)
    assert recorder.logged["train/correct"] == 0.5
    assert recorder.logged["train/pass_at_4"] == pytest.approx(2 / 3)


def test_rewards_see_whole_groups(tiny_choice: Path, script: Any) -> None:
    """However small the micro-batches, the frequencies are those of all G completions."""
    categories = Table([0, 0, 1, 2], [0, 0, 0, 1], [4, 3, 2, 1])
    results = []
    for micro_batch_tokens in (None, 1):
        learner = grpo(
            tiny_choice,
            ForwardKL(),
            script,
            sampling=SAMPLING,
            categorizer=categories,
            score_truncated=True,
            micro_batch_tokens=micro_batch_tokens,
        )
        step(learner)
        results.append(learner.experience.rewards)  # type: ignore[union-attr]
    # P*/P - 1 with P* = 0.2
    half, quarter, most = 0.2 / 0.5 - 1, 0.2 / 0.25 - 1, 0.2 / 0.75 - 1
    expected = [[half, half, quarter, quarter], [most] * 3 + [quarter], [quarter] * 4]
    torch.testing.assert_close(results[0], torch.tensor(expected))
    assert torch.equal(results[0], results[1])


# Settings


@pytest.mark.filterwarnings("ignore:group_size")
def test_settings_that_cannot_learn_are_complained_about(tiny_choice: Path) -> None:
    learner = grpo(
        tiny_choice,
        ForwardKL(),
        sampling=Sampling(group_size=2, max_new_tokens=3, top_k=5),
        categorizer=ChoiceCategorizer(),
    )
    with pytest.warns(UserWarning, match="policy gradient is biased") as caught:
        trainer_for(1).fit(learner, ListData(PROBLEMS))
    messages = [str(warning.message) for warning in caught]
    assert sum("policy gradient is biased" in message for message in messages) == 1
    assert sum("group_size = 2 is too small" in message for message in messages) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip_low", 1.5),
        ("clip_high", -0.1),
        ("beta", -1),
        ("inner_epochs", 0),
        ("max_length", 0),
        ("dead_groups", "drop"),
    ],
)
def test_objective_checks_its_arguments(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"objective.{field}: expected .*, got {value!r}"):
        Objective(**{field: value})  # type: ignore[arg-type]


def test_greedy_sampling_cannot_train(tiny_choice: Path) -> None:
    with pytest.raises(ValueError, match=r"sampling.temperature: expected a number > 0"):
        grpo(tiny_choice, REWARDS, sampling=Sampling(temperature=0))


# Adapters


def test_adapters_train_against_the_start_without_a_copy_of_it(tiny_choice: Path, script: Any) -> None:
    policy = PolicyConfig(str(tiny_choice), lora={"r": 2, "target_modules": ["q_proj", "up_proj"]})
    torch.manual_seed(0)
    learner = grpo(
        tiny_choice,
        REWARDS,
        script,
        policy=policy,
        objective=Objective(beta=0.5),
        sampling=SAMPLING,
        optimizer=partial(sgd, lr=50.0),
    )
    recorder = step(learner, steps=2)
    assert learner._reference == []
    assert recorder.logged["train/kl"] > 1e-6
    start = dict(start_model(tiny_choice).named_parameters())
    own = weights(learner)
    assert {name for name in own if "lora_" in name} == recorder.steps[0].keys()
    frozen = {name.replace(".base_layer", ""): tensor for name, tensor in own.items() if "lora_" not in name}
    assert frozen.keys() == start.keys()
    assert all(torch.equal(tensor, start[name]) for name, tensor in frozen.items())
