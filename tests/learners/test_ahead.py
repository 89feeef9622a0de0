"""Rollouts of the next batch, sampled while the policy is trained on the present one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lit_madrl.augmenters import UFT
from lit_madrl.augmenters.base import RolloutAugmenter
from lit_madrl.augmenters.insertion import Insertion, insert
from lit_madrl.learners import GRPOLearner, Importance, Objective
from lit_madrl.rewards import ForwardKL
from lit_madrl.rollouts import TorchEngine
from lit_madrl.rollouts.background import in_background
from lit_madrl.types import Problem, Rollouts, Sampling, Source
from tests.helpers.learning import (
    Gradients,
    ListData,
    TextLength,
    arguments,
    assert_same,
    choice_problems,
    fit,
    gradients_of,
    sgd,
    slow_grpo_loss,
    start_model,
    tokenizer_of,
    weights,
)
from tests.helpers.tiny_models import row_logprobs

PROBLEMS = choice_problems(14)
SAMPLING = Sampling(group_size=4, max_new_tokens=4)


class BackgroundEngine(TorchEngine):
    """Samples from copies of the weights, each batch with a seed drawn when it is asked for.

    ``hold`` is called in the background before a batch is sampled.
    """

    generates_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.hold: Any = lambda: None
        self.prompts: list[list[list[int]]] = []
        self._busy: Future[Rollouts] | None = None

    def sync_weights(self, policy: nn.Module) -> None:
        self._model = policy

    def generate(
        self, prompts: Any, sampling: Any, stop_ids: Any, prefixes: Any = None, limits: Any = None
    ) -> Any:
        return self._sampler(prompts)(prompts, sampling, stop_ids, prefixes, limits)

    def generate_ahead(self, prompts: Any, sampling: Any, stop_ids: Any) -> Future[Rollouts]:
        sampler = self._sampler(prompts)

        def work() -> Rollouts:
            self.hold()
            return sampler(prompts, sampling, stop_ids)

        self._busy = in_background(work)
        return self._busy

    def _sampler(self, prompts: Any) -> Any:
        if self._busy is not None:
            self._busy.exception()  # waits
        self.prompts.append([list(prompt) for prompt in prompts])
        engine = TorchEngine(int(torch.randint(2**31, (), generator=self._generator)))
        engine.sync_weights(copy.deepcopy(self._model))  # type: ignore[arg-type]
        return engine.generate


class Record(Gradients):
    """The batches that were trained on, the weights before each, and what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[list[str]] = []
        self.completions: list[Any] = []
        self.rollouts: list[Rollouts] = []
        self.advantages: list[Tensor] = []
        self.before: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.before.append(weights(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        experience = pl_module.experience
        self.ids.append([problem.id for problem in experience.problems])
        self.rollouts.append(experience.rollouts)
        self.completions.append(experience.rollouts.completions())
        self.advantages.append(experience.advantages)


def learner_for(folder: Path, ahead: Any = 1, lr: float = 0.0, **changes: Any) -> GRPOLearner:
    defaults = {
        "engine": BackgroundEngine(),
        "optimizer": partial(sgd, lr=lr),
        "sampling": SAMPLING,
        "categorizer": TextLength(),
        "categories": ("0", "1", "2", "3", "4"),
        "score_truncated": True,
        "objective": Objective(beta=0, importance=Importance(cap=1e3)),
        "rollouts_ahead": ahead,
    }
    return GRPOLearner(ForwardKL(), **arguments(folder, **{**defaults, **changes}))


def train(
    learner: GRPOLearner, steps: int, *callbacks: Any, **changes: Any
) -> tuple[Record, list[dict[str, float]]]:
    record = Record()
    trainer: Any = fit(learner, ListData(PROBLEMS, 2), steps, callbacks=[record, *callbacks], **changes)
    return record, trainer.logger.steps


def model_with(folder: Path, values: dict[str, Tensor]) -> Any:
    model = start_model(folder)
    model.load_state_dict(values, strict=False)
    return model


class Draw(RolloutAugmenter):
    """Puts a rollout of its own in the place of each group's last; remembers the weights it was drawn with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, problems: Sequence[Problem], rollouts: Any, scores: Any, collector: Any) -> Any:
        drawn = collector.generate(problems, Sampling(group_size=1, max_new_tokens=4))
        self.seen.append(collector.engine._model.get_input_embeddings().weight.detach().clone())
        new = [
            Insertion(p, 3, group[0], 0, Source.UNGUIDED, 0.0, 0.0, p % 5)
            for p, group in enumerate(drawn.completions())
        ]
        return insert(rollouts, scores, new)


@pytest.mark.parametrize("inner_epochs", [1, 2])
def test_without_learning_it_changes_nothing(tiny_choice: Path, inner_epochs: int) -> None:
    """Neither do an augmenter that samples and validations in between."""
    objective = Objective(beta=0, importance=Importance(), inner_epochs=inner_epochs)
    results = []
    for ahead in (0, 1):
        learner = learner_for(tiny_choice, ahead, augmenters=[Draw()], objective=objective)
        data = ListData(PROBLEMS, 2, validation=PROBLEMS[:3])
        record = Record()
        trainer: Any = fit(
            learner,
            data,
            4 * inner_epochs,
            callbacks=[record],
            limit_val_batches=1,
            val_check_interval=2,
            check_val_every_n_epoch=None,
        )
        results.append((record, trainer.logger.steps, learner))
    (first, logged, synchronous), (second, logged_ahead, asynchronous) = results
    assert first.completions == second.completions
    assert first.ids == second.ids
    for one, other in zip(first.steps, second.steps, strict=True):
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
    for numbers, numbers_ahead in zip(logged, logged_ahead, strict=True):
        numbers_ahead.pop("train/staleness", None)
        for name, value in numbers.items():
            if "seconds" not in name:
                assert numbers_ahead[name] == pytest.approx(value, nan_ok=True), name
    assert synchronous.prompt_cursor == asynchronous.prompt_cursor == 8
    # In another order: a validation comes after the next batch was begun.
    assert sorted(synchronous.engine.prompts) == sorted(asynchronous.engine.prompts)  # type: ignore[attr-defined]


def test_a_batch_is_from_the_weights_before_the_last_update(tiny_choice: Path) -> None:
    """That is what its log-probabilities and the weights of its loss say; augmenters have the present weights."""
    augmenter = Draw()
    learner = learner_for(tiny_choice, lr=3.0, augmenters=[augmenter])
    record, logged = train(learner, 4)
    assert [numbers["train/staleness"] for numbers in logged] == [0, 1, 1, 1]
    assert logged[0]["train/mismatch/max_abs"] < 1e-4
    assert all(numbers["train/mismatch/max_abs"] > 0.01 for numbers in logged[1:])
    embedding = "model.embed_tokens.weight"
    for step in range(4):
        assert torch.equal(augmenter.seen[step], record.before[step][embedding])
        sampler = model_with(tiny_choice, record.before[max(step - 1, 0)])
        rollouts, advantages = record.rollouts[step], record.advantages[step]
        for p, group in enumerate(rollouts.completions()):
            for g, ids in enumerate(group[:3]):
                expected = row_logprobs(sampler, rollouts.prompt_ids[p], ids).detach()
                got = rollouts.sampler_logprobs[p, g, : len(ids)]
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        model = model_with(tiny_choice, record.before[step])
        inserted = iter([False, False, False, True] * len(advantages))

        def weigh(log_ratios: Tensor, inserted: Any = inserted) -> Tensor:
            return torch.ones_like(log_ratios) if next(inserted) else log_ratios.exp()

        expected_gradients = gradients_of(
            slow_grpo_loss(model, rollouts, advantages, "dapo", weigh=weigh), model
        )
        assert_same(record.steps[step], expected_gradients, atol=1e-5)


def test_staleness_counts_optimizer_steps(tiny_choice: Path) -> None:
    objective = Objective(beta=0, importance=Importance(), inner_epochs=3)
    learner = learner_for(tiny_choice, lr=0.1, objective=objective)
    record, logged = train(learner, 7)
    assert [numbers["train/staleness"] for numbers in logged] == [0, 3, 3]
    assert len(learner.engine.prompts) == len(record.ids) == 3  # type: ignore[attr-defined]


class Gate(Gradients):
    """Opens when the policy is about to be updated."""

    def __init__(self) -> None:
        super().__init__()
        self.updating = threading.Event()

    def on_train_batch_start(self, *_: Any) -> None:
        self.updating.clear()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.updating.set()


def test_training_does_not_wait_for_the_next_batch(tiny_choice: Path) -> None:
    """Which here is not sampled before the present one is learned."""
    learner, gate, waited = learner_for(tiny_choice), Gate(), []
    learner.engine.hold = lambda: waited.append(gate.updating.wait(60))  # type: ignore[attr-defined]
    train(learner, 3, gate)
    assert waited == [True, True]


def prompts_of(folder: Path, numbers: Sequence[int]) -> list[list[int]]:
    return tokenizer_of(folder)([PROBLEMS[i % len(PROBLEMS)].prompt for i in numbers])["input_ids"]


@pytest.mark.parametrize("lr", [0.0, 0.5])
def test_a_resumed_run_samples_the_pending_batch_anew(tiny_choice: Path, tmp_path: Path, lr: float) -> None:
    """No prompt is lost or doubled; without learning nothing differs from the run that was not interrupted."""

    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)

    whole, _ = train(learner_for(tiny_choice, lr=lr), 6, saver(), enable_checkpointing=True)
    learner = learner_for(tiny_choice, lr=lr)
    path = tmp_path / "step=3.ckpt"
    rest, logged = train(learner, 6, saver(), enable_checkpointing=True, ckpt_path=path)
    assert whole.ids == [[p.id for p in PROBLEMS[2 * i : 2 * i + 2]] for i in range(6)]
    assert rest.ids == whole.ids[3:]
    assert learner.prompt_cursor == 12
    assert learner.engine.prompts == [prompts_of(tiny_choice, [2 * i, 2 * i + 1]) for i in (3, 4, 5)]  # type: ignore[attr-defined]
    assert [numbers["train/staleness"] for numbers in logged] == [0, 1, 1]
    assert all(torch.equal(rest.before[0][name], tensor) for name, tensor in whole.before[3].items())
    if lr == 0:
        assert rest.completions == whole.completions[3:]
        for one, other in zip(rest.steps, whole.steps[3:], strict=True):
            assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_a_second_fit_forgets_what_was_pending(tiny_choice: Path) -> None:
    learner = learner_for(tiny_choice)

    class Stop(Gradients):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = True

    first, _ = train(learner, 5, Stop())
    second, logged = train(learner, 2)
    assert [*first.ids, *second.ids] == [[p.id for p in PROBLEMS[2 * i : 2 * i + 2]] for i in range(3)]
    assert [numbers["train/staleness"] for numbers in logged] == [0, 1]


def test_epochs_end_where_the_trainer_says(tiny_choice: Path) -> None:
    learner = learner_for(tiny_choice)
    record, logged = train(learner, 5, limit_train_batches=2)
    assert record.ids == [[p.id for p in PROBLEMS[2 * i : 2 * i + 2]] for i in range(5)]
    assert [numbers["train/staleness"] for numbers in logged] == [0, 1, 1, 1, 1]


def test_a_failure_in_the_background_is_the_learners(tiny_choice: Path) -> None:
    learner = learner_for(tiny_choice)

    def fail() -> None:
        raise RuntimeError("no server is left")

    learner.engine.hold = fail  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"(?s)no server is left.*optimizer step 1"):
        train(learner, 3)


class Restless(ListData):
    """Other problems whenever it is read."""

    readings = 0

    def train_problem(self, index: int, position: int) -> Problem:
        if position == 0:
            self.readings += 1
        return self.problems[(position + self.readings) % len(self.problems)]


def test_a_loader_that_cannot_be_read_twice_is_refused(tiny_choice: Path) -> None:
    with pytest.raises(ValueError, match=r"rollouts_ahead: expected a loader that gives the same"):
        fit(learner_for(tiny_choice), Restless(PROBLEMS, 2), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": TorchEngine()}, r"rollouts_ahead: .*weights of its own.*got TorchEngine"),
        ({"objective": Objective()}, r"objective.importance: expected one with rollouts_ahead = 1, got none"),
        (
            {"augmenters": [UFT(10)]},
            r"rollouts_ahead: expected 0 with an augmenter that begins .*got 1 with UFT",
        ),
        ({"ahead": 2}, r"rollouts_ahead: expected 0 or 1, got 2"),
    ],
)
def test_what_cannot_be_is_refused(tiny_choice: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learner_for(tiny_choice, **changes)


def test_engines_that_cannot_say_so() -> None:
    with pytest.raises(NotImplementedError, match="TorchEngine"):
        TorchEngine().generate_ahead([[1]], SAMPLING, [1])
