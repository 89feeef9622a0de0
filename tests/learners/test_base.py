"""Building, stepping and resuming, whatever is learned."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_madrl.data import ChoiceDataModule
from lit_madrl.learners import GRPOLearner, Objective, Schedule, SFTLearner
from lit_madrl.learners.base import hash_seed
from lit_madrl.policy import PolicyConfig
from lit_madrl.prepare import write_tiny_choice
from lit_madrl.rewards import ForwardKL
from lit_madrl.types import Sampling
from tests.helpers.learning import (
    ListData,
    Log,
    TextLength,
    arguments,
    choice_problems,
    fit,
    sgd,
    start_model,
    trainer_for,
    weights,
)

PROBLEMS = choice_problems(2)


def warm_start(folder: Path, **changes: Any) -> SFTLearner:
    return SFTLearner(**arguments(folder, **changes))


def data() -> ChoiceDataModule:
    return ChoiceDataModule(answers_per_prompt=2, batch_size=2)


# Stepping


class Rates(L.Callback):
    """The learning rate of each step."""

    def __init__(self) -> None:
        self.used: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.used.append(optimizer.param_groups[0]["lr"])


def test_the_schedule_ends_with_the_run(tiny_choice: Path) -> None:
    schedule, rates = Schedule("linear", warmup_steps=2), Rates()
    trainer = fit(warm_start(tiny_choice, schedule=schedule), data(), 4, callbacks=[rates])
    assert rates.used == pytest.approx([0.05, 0.075, 0.05, 0.025])
    assert [step["train/lr"] for step in trainer.logger.steps] == rates.used  # type: ignore[union-attr]


def test_a_decay_needs_an_end(tiny_choice: Path) -> None:
    """Prompts never end; without max_steps a decay would be over at once, and train nothing unnoticed."""
    learner = warm_start(tiny_choice, schedule=Schedule("linear"))
    with pytest.raises(ValueError, match=r"trainer.max_steps: expected a number >= 1.*'linear'.*got -1"):
        fit(learner, data(), -1, max_epochs=-1)


@pytest.mark.parametrize("limit", [{"max_epochs": 1, "limit_train_batches": 3}, {"max_epochs": -1}])
def test_a_constant_rate_needs_none(tiny_choice: Path, limit: dict[str, Any]) -> None:
    class StopAfterThree(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step >= 3

    trainer = fit(warm_start(tiny_choice), data(), -1, callbacks=[StopAfterThree()], **limit)
    assert trainer.global_step == 3


def test_seeds_of_different_numbers_differ() -> None:
    seeds = {hash_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("field", "value"), [("max_grad_norm", 0.0), ("max_grad_norm", -1.0), ("micro_batch_tokens", 0)]
)
def test_arguments_are_checked(tiny_choice: Path, field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field}: expected .*, got {value}"):
        warm_start(tiny_choice, **{field: value})


def test_the_model_is_built_late_and_once(tiny_choice: Path) -> None:
    learner = warm_start(tiny_choice)
    with pytest.raises(RuntimeError, match="configure_model"):
        _ = learner.trained_policy
    learner.configure_model()
    policy = learner.trained_policy
    learner.configure_model()
    assert learner.trained_policy is policy


def test_bfloat16_mixed_keeps_master_weights(tiny_choice: Path) -> None:
    learner = warm_start(tiny_choice)
    fit(learner, data(), 1, precision="bf16-mixed")
    start = dict(start_model(tiny_choice).named_parameters())
    own = weights(learner)
    assert {tensor.dtype for tensor in own.values()} == {torch.float32}
    assert all(torch.isfinite(tensor).all() for tensor in own.values())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in own.items())


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", "float32"), ("bf16-mixed", "float32"), ("32-true", "bfloat16")],
    ids=["32-true", "bf16-mixed", "policy.dtype: bfloat16"],
)
@pytest.mark.parametrize("make", [warm_start, lambda folder, **changes: learner_for(folder, **changes)])
def test_precisions(make: Any, precision: Any, dtype: Any, tiny_choice: Path) -> None:
    learner = make(tiny_choice, policy=PolicyConfig(str(tiny_choice), dtype=dtype), optimizer=sgd)
    trainer = fit(learner, data(), 1, precision=precision)
    policy = learner.trained_policy
    assert {p.dtype for p in policy.parameters()} == {getattr(torch, dtype)}
    assert {b.dtype for name, b in policy.named_buffers() if "inv_freq" in name} == {torch.float32}
    assert trainer.logger.steps[-1]["train/grad_norm"] > 0
    before = dict(start_model(tiny_choice).to(getattr(torch, dtype)).named_parameters())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_precisions_that_round_more_than_weights_are_refused(precision: Any, tiny_choice: Path) -> None:
    message = f"expected 32-true or bf16-mixed .*policy.dtype: bfloat16.* got {precision}"
    with pytest.raises(ValueError, match=message):
        fit(warm_start(tiny_choice), data(), 1, precision=precision)
    trainer = trainer_for(precision=precision)
    with pytest.raises(ValueError, match=message):
        trainer.validate(learner_for(tiny_choice), ListData(PROBLEMS, validation=PROBLEMS))


def test_stop_strings_are_checked_before_any_work(tiny_choice: Path) -> None:
    learner = warm_start(tiny_choice, eval_sampling=Sampling(stop=("two words",)))
    with pytest.raises(ValueError, match=r"sampling.stop: expected strings of one token, got 'two words'"):
        fit(learner, data(), 1)
    assert learner.prompt_cursor == 0


# Resuming


class Diary(L.Callback):
    """What every step was shown and what it drew."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        experience = pl_module.experience
        self.steps.append(
            (
                [(problem.id, problem.prompt) for problem in experience.problems],
                experience.rollouts.completions(),
                {k: v for k, v in trainer.logger.steps[-1].items() if "seconds" not in k},
            )
        )


def learner_for(folder: Path, **changes: Any) -> GRPOLearner:
    """Everything that has a state: Adam, a decaying rate, sampling, a reference."""
    return GRPOLearner(
        ForwardKL(),
        **arguments(
            folder,
            **{
                "optimizer": partial(torch.optim.AdamW, lr=1e-3),
                "schedule": Schedule("cosine", warmup_steps=2),
                "objective": Objective(beta=0.1),
                "sampling": Sampling(group_size=6, max_new_tokens=4),
                "categorizer": TextLength(),
                "score_truncated": True,
                "seed": 5,
                **changes,
            },
        ),
    )


def run(
    folder: Path,
    checkpoints: Path,
    ckpt_path: Path | None = None,
    steps: int = 6,
    trainer: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[GRPOLearner, Diary]:
    """A run that saves a checkpoint at step 3, as another process would begin or continue it."""
    torch.manual_seed(int.from_bytes(checkpoints.name.encode()[:4], "big"))
    saver = ModelCheckpoint(checkpoints, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    learner, diary = learner_for(folder, **changes), Diary()
    data = ChoiceDataModule(batch_size=3, seed=1)
    options = {"callbacks": [saver, diary], "enable_checkpointing": True, **(trainer or {})}
    fit(learner, data, steps, ckpt_path, **options)
    return learner, diary


def test_a_resumed_run_keeps_its_logging_steps(tiny_choice: Path, tmp_path: Path) -> None:
    """Every second one, whether or not the run was cut between two."""
    logged = []
    for name, checkpoint in (("a", None), ("b", tmp_path / "a" / "step=3.ckpt")):
        log = Log()
        saver = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        trainer = {"logger": log, "log_every_n_steps": 2, "callbacks": [saver]}
        run(tiny_choice, tmp_path / name, checkpoint, trainer=trainer)
        logged.append([step["train/prompts"] for step in log.steps])
    assert logged == [[6, 12, 18], [12, 18]]


@pytest.fixture(scope="module")
def straight(tiny_choice: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[GRPOLearner, Diary, Path]:
    folder = tmp_path_factory.mktemp("straight")
    return *run(tiny_choice, folder), folder / "step=3.ckpt"


def test_a_resumed_run_is_the_run(
    tiny_choice: Path, straight: tuple[GRPOLearner, Diary, Path], tmp_path: Path
) -> None:
    """Bit for bit: weights, prompts, tokens, losses."""
    expected, expected_diary, checkpoint = straight
    learner, diary = run(tiny_choice, tmp_path, checkpoint)
    assert len(expected_diary.steps) == 6
    assert diary.steps == expected_diary.steps[3:]
    assert learner.prompt_cursor == expected.prompt_cursor == 18
    assert len({prompt for step in expected_diary.steps for prompt in step[0]}) == 18
    for name, tensor in weights(expected).items():
        assert torch.equal(weights(learner)[name], tensor)


def test_weights_alone_are_not_enough_to_resume(straight: tuple[GRPOLearner, Diary, Path]) -> None:
    """What the checkpoint holds beside them; loadable without running code."""
    state = torch.load(straight[2], weights_only=True)["lit_madrl"]
    assert state["prompt_cursor"] == 9
    assert len(state["rank_states"]) == 1
    assert all(isinstance(number, int) for number in state["reference"])
    assert len(state["reference"]) == len(list(straight[0].trained_policy.parameters()))


def test_another_pretrained_model_is_noticed(
    tmp_path: Path, straight: tuple[GRPOLearner, Diary, Path]
) -> None:
    """Its weights would be overwritten from the checkpoint, but it would be the reference."""
    other = tmp_path / "other"
    write_tiny_choice(other, hidden_size=32, layers=1, vocab_size=512, seed=1)
    with pytest.raises(
        ValueError, match=r"policy.pretrained: expected the weights this run began with.*other"
    ):
        run(other, tmp_path / "run", straight[2])


def test_a_reference_that_differs_in_one_bit_is_noticed(
    tiny_choice: Path, tmp_path: Path, straight: tuple[GRPOLearner, Diary, Path]
) -> None:
    changed = tmp_path / "changed"
    model = start_model(tiny_choice)
    with torch.no_grad():
        weight = model.model.norm.weight
        weight[0] = torch.nextafter(weight[0], torch.tensor(2.0))
    model.save_pretrained(changed)
    PolicyConfig(str(tiny_choice)).tokenizer().save_pretrained(changed)
    with pytest.raises(ValueError, match=r"policy.pretrained: expected the weights this run began with"):
        run(changed, tmp_path / "run", straight[2])


def test_without_a_reference_any_start_may_be_continued(tiny_choice: Path, tmp_path: Path) -> None:
    """The checkpoint has all weights then."""
    objective = Objective(beta=0)
    expected, _ = run(tiny_choice, tmp_path / "a", objective=objective)
    other = tmp_path / "other"
    write_tiny_choice(other, hidden_size=32, layers=1, vocab_size=512, seed=1)
    learner, _ = run(other, tmp_path / "b", tmp_path / "a" / "step=3.ckpt", objective=objective)
    for name, tensor in weights(expected).items():
        assert torch.equal(weights(learner)[name], tensor)


def test_adapters_resume(tiny_choice: Path, tmp_path: Path) -> None:
    policy = PolicyConfig(str(tiny_choice), lora={"r": 2, "target_modules": ["q_proj", "up_proj"]})
    expected, expected_diary = run(tiny_choice, tmp_path / "a", policy=policy)
    checkpoint = tmp_path / "a" / "step=3.ckpt"
    learner, diary = run(tiny_choice, tmp_path / "b", checkpoint, policy=policy)
    assert diary.steps == expected_diary.steps[3:]
    for name, tensor in weights(expected).items():
        assert torch.equal(weights(learner)[name], tensor)


def test_a_wrong_path_is_an_error(tiny_choice: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run(tiny_choice, tmp_path, tmp_path / "nowhere.ckpt")


def test_a_checkpoint_of_something_else_is_an_error(
    tiny_choice: Path, straight: tuple[GRPOLearner, Diary, Path], tmp_path: Path
) -> None:
    content = torch.load(straight[2])
    del content["lit_madrl"]
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="ckpt_path: expected a checkpoint of a lit_madrl learner"):
        run(tiny_choice, tmp_path, tmp_path / "other.ckpt")


def test_a_checkpoint_of_another_policy_is_an_error(
    tiny_choice: Path, straight: tuple[GRPOLearner, Diary, Path], tmp_path: Path
) -> None:
    policy = PolicyConfig(str(tiny_choice), lora={"r": 2, "target_modules": ["q_proj"]})
    with pytest.raises(
        ValueError, match=r"ckpt_path: expected weights of this policy, .*base_layer.* is absent instead of"
    ):
        run(tiny_choice, tmp_path, straight[2], policy=policy)


def test_seeds_make_runs(tiny_choice: Path, tmp_path: Path) -> None:
    diaries = [run(tiny_choice, tmp_path / str(i), steps=1, seed=seed)[1] for i, seed in enumerate((5, 5, 6))]
    assert diaries[0].steps == diaries[1].steps
    assert diaries[0].steps[0][0] == diaries[2].steps[0][0]
    assert diaries[0].steps[0][1] != diaries[2].steps[0][1]


def test_problems_are_not_mutated(tiny_choice: Path) -> None:
    before = copy.deepcopy(PROBLEMS)
    fit(learner_for(tiny_choice), ListData(PROBLEMS), 1)
    assert before == PROBLEMS
