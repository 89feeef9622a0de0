"""What learner tests share: scripted completions and rewards, short runs, and a slow GRPO loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from lit_madrl.data import ChoiceDataModule, PromptDataModule
from lit_madrl.learners import GRPOLearner, PolicyLearner, Schedule
from lit_madrl.policy import PolicyConfig
from lit_madrl.rewards.base import RewardShaper
from lit_madrl.rollouts.base import RolloutEngine
from lit_madrl.tasks import Categorizer, Completions
from lit_madrl.types import Problem, Rollouts, Sampling, Scores
from tests.helpers.tiny_models import row_logprobs

EOS = 1  # of the tiny choice tokenizer

Script = Callable[[tuple[int, ...]], Sequence[Sequence[int]]]


class ScriptedEngine(RolloutEngine):
    """Completions by prompt. They end as any engine's do: with the first stop token, else at the limit.

    After a prefix ``continuations`` says how they go on.
    """

    reports_logprobs = False

    def __init__(self, script: Script, continuations: Script | None = None) -> None:
        self.script = script
        self.continuations = continuations or script
        self.calls = 0

    def seed(self, seed: int) -> None:
        self.calls = 0

    def sync_weights(self, policy: nn.Module) -> None:
        pass

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        stop_ids: Sequence[int],
        prefixes: Any = None,
        limits: Any = None,
    ) -> Rollouts:
        self.calls += 1
        script = self.script if prefixes is None else self.continuations
        given = prefixes or [[[]] * sampling.group_size for _ in prompts]
        groups = [
            [
                cut([*prefix, *ids], stop_ids, sampling.max_new_tokens)
                for prefix, ids in zip(group, script(tuple(prompt)), strict=True)
            ]
            for prompt, group in zip(prompts, given, strict=True)
        ]
        assert {len(group) for group in groups} == {sampling.group_size}
        lengths = torch.tensor([[len(ids) for ids in group] for group in groups])
        width = int(lengths.max())
        ids = torch.tensor([[ids + [0] * (width - len(ids)) for ids in group] for group in groups])
        return Rollouts(
            prompt_ids=[list(prompt) for prompt in prompts],
            completion_ids=ids,
            completion_mask=torch.arange(width) < lengths[..., None],
            sampler_logprobs=torch.zeros(ids.shape),
            finished=torch.tensor([[ids[-1] in stop_ids for ids in group] for group in groups]),
            prefix_lengths=torch.tensor([[len(prefix) for prefix in group] for group in given]),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class ReportingEngine(ScriptedEngine):
    """Also says of each completion with what log-probabilities it was drawn: ``logprobs(prompt, copy, ids)``.

    ``copy`` is the completion's number in its group.
    """

    reports_logprobs = True

    def __init__(self, script: Script, logprobs: Callable[[list[int], int, list[int]], Tensor]) -> None:
        super().__init__(script)
        self.logprobs = logprobs

    def generate(self, *arguments: Any, **keywords: Any) -> Rollouts:
        rollouts = super().generate(*arguments, **keywords)
        rows = [
            self.logprobs(prompt, g, ids)
            for prompt, group in zip(rollouts.prompt_ids, rollouts.completions(), strict=True)
            for g, ids in enumerate(group)
        ]
        values = nn.utils.rnn.pad_sequence(rows, batch_first=True).view(rollouts.completion_ids.shape)
        given = torch.arange(values.shape[-1]) < rollouts.prefix_lengths[..., None]
        return replace(rollouts, sampler_logprobs=values.masked_fill(given, 0))


def cut(ids: Sequence[int], stop_ids: Sequence[int], limit: int) -> list[int]:
    """``ids`` through the first stop token, at most ``limit``."""
    ends = [i + 1 for i, token in enumerate(ids) if token in stop_ids]
    return list(ids[: min([*ends, limit])])


class ScriptedRewards(RewardShaper):
    """The given rewards ``[P, G]``, whatever the scores; remembers what it was asked."""

    def __init__(self, rewards: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self.rewards = torch.tensor(rewards, dtype=torch.float32)
        self.asked: list[Scores] = []

    def forward(self, scores: Scores, targets: Tensor) -> Tensor:
        self.asked.append(scores)
        return self.rewards.clone()


class TextLength(Categorizer):
    """Characters modulo 5: a category even for what a random model writes."""

    def __call__(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        return torch.tensor([[len(text) % 5 for text in group] for group in completions])


class ListData(PromptDataModule):
    """Given problems in their order, over and over."""

    def __init__(
        self, problems: Sequence[Problem], batch_size: int | None = None, validation: Sequence[Problem] = ()
    ) -> None:
        super().__init__(batch_size or len(problems), eval_batch_size=max(1, len(validation)))
        self.problems = list(problems)
        self.validation = list(validation)

    @property
    def num_train_prompts(self) -> int:
        return len(self.problems)

    def train_problem(self, index: int, position: int) -> Problem:
        return self.problems[position % len(self.problems)]

    def validation_problems(self) -> Sequence[Problem]:
        return self.validation

    def test_problems(self) -> Sequence[Problem]:
        return self.validation


class Log(Logger):
    """Keeps the numbers of every training step, on every rank."""

    name, version = "log", 0

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []

    def log_hyperparams(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(name.startswith("train/") for name in metrics):
            self.steps.append(dict(metrics))


class Gradients(L.Callback):
    """The gradients of every optimizer step, by parameter name of the model."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.trained_policy.model.named_parameters()
        self.steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def choice_problems(count: int, **arguments: Any) -> list[Problem]:
    """Problems of the choice task."""
    return ChoiceDataModule(**arguments).validation_problems()[:count]


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    """So plain that a step is minus lr times the gradient."""
    return torch.optim.SGD(parameters, lr=lr)


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """A learner's arguments: plain SGD, no clipping of gradients, no warm-up."""
    return {
        "policy": PolicyConfig(str(folder)),
        "optimizer": sgd,
        "schedule": Schedule(warmup_steps=0),
        "max_grad_norm": 1e9,
        **changes,
    }


def fit(
    learner: PolicyLearner, data: L.LightningDataModule, steps: int = 1, ckpt_path: Any = None, **changes: Any
) -> L.Trainer:
    """Train for some optimizer steps, with every step's numbers in ``trainer.logger.steps``."""
    trainer = trainer_for(steps, **{"logger": Log(), "log_every_n_steps": 1, **changes})
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*(num_workers|log_every_n_steps|sync_dist|val_dataloader).*"
        )
        warnings.filterwarnings(
            "ignore", message=".*(group_size|validity_penalty|pre-optimization|dirpath).*"
        )
        trainer.fit(learner, data, ckpt_path=ckpt_path)
    return trainer


def trainer_for(steps: int = 1, **changes: Any) -> L.Trainer:
    """A silent trainer on one CPU."""
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
    }
    return L.Trainer(**{**defaults, **changes})


def start_model(folder: Path) -> Any:
    """The model of a folder as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder)


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder."""
    return AutoTokenizer.from_pretrained(folder)


def weights(learner: PolicyLearner) -> dict[str, Tensor]:
    """A copy of the weights by parameter name of the model."""
    return {name: p.detach().clone() for name, p in learner.trained_policy.model.named_parameters()}


def slow_grpo_loss(
    model: Any,
    rollouts: Rollouts,
    advantages: Tensor,
    reduction: str,
    *,
    reference: Any = None,
    old: Any = None,
    beta: float = 0.0,
    clip: float = 0.2,
    max_length: int = 1,
    temperature: float = 1.0,
    counted: Sequence[bool] | None = None,
    weigh: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The GRPO loss by one forward a completion, written out with nothing shared, merged or packed.

    ``old`` is the model that sampled (default ``model`` itself), ``counted`` says which groups exist at all, and
    ``weigh`` makes the weights of a completion's tokens from the log-ratios of ``old`` and the sampler.
    """
    logprobs_of = partial(row_logprobs, temperature=temperature)
    terms, lengths = [], []
    for p, group in enumerate(rollouts.completions()):
        if counted is not None and not counted[p]:
            continue
        for g, ids in enumerate(group):
            prompt, advantage = rollouts.prompt_ids[p], float(advantages[p, g])
            logprobs = logprobs_of(model, prompt, ids)
            with torch.no_grad():
                before = logprobs.detach() if old is None else logprobs_of(old, prompt, ids)
                ref = None if reference is None else logprobs_of(reference, prompt, ids)
            ratio = (logprobs - before).exp()
            loss = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            if ref is not None:
                loss = loss + beta * ((ref - logprobs).exp() - (ref - logprobs) - 1)
            if weigh is not None:
                loss = loss * weigh(before - rollouts.sampler_logprobs[p, g, : len(ids)])
            terms.append(loss)
            lengths.append(len(ids))
    if reduction == "dapo":
        return torch.cat(terms).sum() / sum(lengths)
    if reduction == "grpo":
        return torch.stack([loss.mean() for loss in terms]).mean()
    return torch.stack([loss.sum() for loss in terms]).sum() / (len(terms) * max_length)


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name."""
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def assert_same(
    got: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6, rtol: float = 1e-4
) -> None:
    """Equal names and nearly equal tensors, of which some are not zero."""
    assert got.keys() == expected.keys()
    assert any(bool(tensor.any()) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def grpo(folder: Path, rewards: Any, script: Script | None = None, **changes: Any) -> GRPOLearner:
    """A GRPO learner; with a ``script`` its completions are given."""
    rewards = rewards if isinstance(rewards, RewardShaper) else ScriptedRewards(rewards)
    engine = {} if script is None else {"engine": ScriptedEngine(script)}
    return GRPOLearner(rewards, **arguments(folder, **{**engine, **changes}))
