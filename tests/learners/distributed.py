"""Runs on one process with the joined batch, or on two with half of it each; see test_distributed.py.

As a script, ``python -m tests.learners.distributed MODEL_FOLDER OUTPUT_FOLDER STRATEGY`` is one of the two processes.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_madrl.data import ChoiceDataModule
from lit_madrl.learners import GRPOLearner, Importance, Objective, Schedule, SFTLearner
from lit_madrl.learners.base import PolicyLearner
from lit_madrl.rewards import ForwardKL
from lit_madrl.rollouts.background import in_background
from lit_madrl.strategies import FullySharded
from lit_madrl.types import Rollouts, Sampling
from tests.helpers.learning import (
    EOS,
    Gradients,
    ListData,
    ReportingEngine,
    ScriptedEngine,
    TextLength,
    arguments,
    choice_problems,
    fit,
    tokenizer_of,
    trainer_for,
)

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "sharded": FullySharded,
    "sharded, rollouts layer by layer": lambda: FullySharded(gather_rollouts=False),
}

WORDS = [" one", " two words", " a much longer answer, of many more words than the others have", ""]
PROBLEMS = [
    replace(problem, metadata={"completions": completions})
    for problem, completions in zip(
        choice_problems(4), [WORDS, WORDS[:3] * 2, [""], [" one", " one"]], strict=True
    )
]
LONG, SHORT = [[40 + i for i in range(25)], [50, EOS]], [[EOS], [60, EOS]]
LIVE = [
    [[40, 41, EOS], [40, 41, EOS], LONG[0], [50, 51, 52, EOS]],
    [LONG[0], [70, 71, 72, 73, EOS], LONG[1], LONG[1]],
    [SHORT[0], SHORT[0], SHORT[1], [61, 62, EOS]],
    [[80, 81, EOS], SHORT[0], SHORT[0], SHORT[0]],
]
DEAD_RANK = [*LIVE[:2], [SHORT[0]] * 4, [[80, 81, EOS]] * 4]
CATEGORIES = ("first", "second", "third", "fourth", "fifth")


class Record(Gradients):
    """Gradients and logged numbers of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []
        self.completions: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.trained_policy.model.named_parameters()
        self.steps.append({name: whole(p.grad).clone() for name, p in named if p.grad is not None})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        numbers = trainer.logger.steps[-1]
        self.logged.append({name: value for name, value in numbers.items() if "seconds" not in name})
        if isinstance(pl_module, GRPOLearner) and pl_module.experience is not None:
            self.completions.append(pl_module.experience.rollouts.completions())


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be divided over ranks; a collective operation."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(learner: PolicyLearner) -> dict[str, Tensor]:
    """A copy of the weights by parameter name of the model."""
    return {name: whole(p.detach()).clone() for name, p in learner.trained_policy.model.named_parameters()}


def trained(learner: PolicyLearner, ranks: int, steps: int = 2) -> dict[str, Any]:
    record = Record()
    fit(learner, ListData(PROBLEMS, len(PROBLEMS) // ranks), steps, callbacks=[record], **on(ranks))
    return {
        "gradients": record.steps,
        "logged": record.logged,
        "weights": weights(learner),
        "cursor": learner.prompt_cursor,
    }


def on(ranks: int) -> dict[str, Any]:
    """The trainer's arguments; each of two processes is told its strategy by the environment."""
    return {"strategy": STRATEGIES[os.environ["STRATEGY"]](), "devices": 2} if ranks == 2 else {}


def sft(folder: Path, ranks: int, micro_batch_tokens: int | None) -> dict[str, Any]:
    return trained(SFTLearner(**arguments(folder, micro_batch_tokens=micro_batch_tokens)), ranks)


def scripted(folder: Path, completions: list[Any], **changes: Any) -> GRPOLearner:
    prompts = tokenizer_of(folder)([problem.prompt for problem in PROBLEMS])["input_ids"]
    table = {tuple(ids): group for ids, group in zip(prompts, completions, strict=True)}
    defaults = {
        "engine": ScriptedEngine(table.__getitem__),
        "sampling": Sampling(group_size=4, max_new_tokens=25),
        "categorizer": TextLength(),
        "categories": CATEGORIES,
        "score_truncated": True,
        "micro_batch_tokens": 80,
    }
    return GRPOLearner(ForwardKL(), **arguments(folder, **{**defaults, **changes}))


def grpo(
    folder: Path,
    ranks: int,
    completions: list[Any],
    beta: float = 0.0,
    max_grad_norm: float = 1e9,
    **objective: Any,
) -> dict[str, Any]:
    learner = scripted(
        folder, completions, objective=Objective(beta=beta, **objective), max_grad_norm=max_grad_norm
    )
    return trained(learner, ranks, 2 * learner.objective.inner_epochs)


class Ahead(ReportingEngine):
    """In the background, too."""

    generates_ahead = True

    def generate_ahead(self, *arguments: Any) -> Future[Rollouts]:
        return in_background(partial(self.generate, *arguments))


def weighted(folder: Path, ranks: int, importance: Importance, ahead: Literal[0, 1] = 0) -> dict[str, Any]:
    """A sampler whose log-probabilities are some 6 nats, that of a random model, give or take one."""
    prompts = tokenizer_of(folder)([problem.prompt for problem in PROBLEMS])["input_ids"]
    table = {tuple(ids): group for ids, group in zip(prompts, LIVE, strict=True)}
    engine = Ahead(
        table.__getitem__, lambda prompt, copy, ids: -6.2 + torch.tensor(ids).add(copy + len(prompt)).cos()
    )
    objective = Objective(beta=0.3, inner_epochs=2, importance=importance)
    return trained(scripted(folder, LIVE, engine=engine, objective=objective, rollouts_ahead=ahead), ranks, 4)


def validation(folder: Path, ranks: int, count: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (values,) = trainer_for(limit_val_batches=1.0, **on(ranks)).validate(
            scripted(folder, LIVE), ListData(PROBLEMS, validation=PROBLEMS[:count]), verbose=False
        )
    return {"logged": [values]}


def resumed(folder: Path, ranks: int, output: Path) -> dict[str, Any]:
    """Six steps at once, and three more from a checkpoint at the third; what this rank sampled."""
    runs = []
    for ckpt_path in (None, output / "step=3.ckpt"):
        learner = GRPOLearner(
            ForwardKL(),
            **arguments(
                folder,
                optimizer=partial(torch.optim.AdamW, lr=1e-3),
                schedule=Schedule("linear", warmup_steps=1),
                sampling=Sampling(group_size=6, max_new_tokens=4),
                categorizer=TextLength(),
                score_truncated=True,
            ),
        )
        record = Record()
        saver = ModelCheckpoint(output, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        data = ChoiceDataModule(batch_size=2)
        callbacks = [record, saver]
        fit(learner, data, 6, ckpt_path, callbacks=callbacks, enable_checkpointing=True, **on(ranks))
        runs.append((weights(learner), record.completions, learner.prompt_cursor))
    return {"runs": runs, "stream": learner.engine.state_dict()["generator"]}


SCENARIOS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "sft": partial(sft, micro_batch_tokens=None),
    "sft in micro-batches": partial(sft, micro_batch_tokens=70),
    "grpo": partial(grpo, completions=LIVE, reduction="grpo"),
    "dapo with a KL term": partial(grpo, completions=LIVE, reduction="dapo", beta=0.3),
    "dr_grpo, gradient clipped": partial(grpo, completions=LIVE, reduction="dr_grpo", max_grad_norm=0.01),
    "two inner epochs": partial(grpo, completions=LIVE, inner_epochs=2),
    "importance of tokens": partial(weighted, importance=Importance("truncate", "token", cap=1.5)),
    "importance of sequences": partial(weighted, importance=Importance("mask", "sequence", cap=20.0)),
    "rollouts ahead": partial(weighted, importance=Importance(), ahead=1),
    "a dead rank": partial(grpo, completions=DEAD_RANK),
    "a dead rank, excluded": partial(grpo, completions=DEAD_RANK, dead_groups="exclude"),
    "a dead rank, excluded, with a KL term": partial(
        grpo, completions=DEAD_RANK, dead_groups="exclude", reduction="grpo", beta=0.3
    ),
    "validation of 4": partial(validation, count=4),
    "validation of 3": partial(validation, count=3),
    "validation of 1: a rank sees nothing": partial(validation, count=1),
}


def main(folder: Path, output: Path, strategy: str) -> None:
    torch.set_num_threads(1)
    os.environ["STRATEGY"] = strategy
    results = {name: scenario(folder, 2) for name, scenario in SCENARIOS.items()}
    results["resumed"] = resumed(folder, 2, output)
    torch.save(results, output / f"rank{os.environ['LOCAL_RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
