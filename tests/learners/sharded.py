"""What test_fsdp.py lets two processes do: ``python -m tests.learners.sharded MODEL_FOLDER OUTPUT_FOLDER``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lit_madrl.augmenters import AdaptiveReferenceGuidance, PrefixBoundaries
from lit_madrl.learners import GRPOLearner, Objective, Schedule, SFTLearner
from lit_madrl.learners.base import PolicyLearner
from lit_madrl.policy import PolicyConfig
from lit_madrl.policy.sharding import Sharding, rollout_weights, whole_weights
from lit_madrl.rewards import Correctness, ForwardKL
from lit_madrl.rollouts import TorchEngine
from lit_madrl.rollouts.policy_weights import fingerprint, named_weights
from lit_madrl.strategies import FullySharded
from lit_madrl.tasks import Completions, Verifier
from lit_madrl.types import Problem, Rollouts, Sampling
from tests.helpers.learning import ListData, TextLength, arguments, choice_problems, fit, trainer_for
from tests.learners.distributed import CATEGORIES, WORDS, Record, weights

REFERENCE = " one. two words. a much longer answer. and the last of them."
LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
PROBLEMS = [
    replace(problem, metadata={"completions": WORDS[: 1 + index % 4]}, reference=REFERENCE)
    for index, problem in enumerate(choice_problems(8))
]
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "gathered": FullySharded,
    "layer by layer": lambda: FullySharded(gather_rollouts=False),
}


class FirstIsHard(Verifier):
    """The first rank's problems are solved by what begins as the reference does, the others by anything."""

    def __call__(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        easy = [PROBLEMS.index(problem) % 4 >= 2 for problem in problems]
        return torch.tensor(
            [
                [float(e or text.startswith(" one.")) for text in group]
                for e, group in zip(easy, completions, strict=True)
            ]
        )

    def well_formed(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        return self(problems, completions)


class Periods(PrefixBoundaries):
    """After each sentence but the last."""

    def ends(self, text: str) -> list[tuple[int, int]]:
        return [(i, i) for i, character in enumerate(text[:-1]) if character == "."]


class Uneven(TorchEngine):
    """Lengths [10, 10] on the first rank and [200, 200] on the second."""

    def generate(self, prompts: Any, *given: Any, **named: Any) -> Rollouts:
        limits = torch.full((len(prompts), 4), 200 if torch.distributed.get_rank() else 10)
        return super().generate(prompts, *given, **named | {"limits": limits})


def run(
    learner: PolicyLearner,
    strategy: Any,
    steps: int = 2,
    ranks: int = 2,
    saver: ModelCheckpoint | None = None,
    **trainer: Any,
) -> dict[str, Any]:
    record = Record()
    callbacks = [record] if saver is None else [record, saver]
    trainer |= {"callbacks": callbacks, "enable_checkpointing": saver is not None}
    fit(learner, ListData(PROBLEMS, 4 // ranks), steps, strategy=strategy, devices=ranks, **trainer)
    return {
        "weights": weights(learner),
        "logged": record.logged,
        "completions": record.completions,
        "cursor": learner.prompt_cursor,
    }


def guided(folder: Path, strategy: Any) -> dict[str, Any]:
    """ARG, where only the first rank has anything to guide."""
    learner = GRPOLearner(
        Correctness(),
        augmenters=[AdaptiveReferenceGuidance(Periods(), continuations=3)],
        verifier=FirstIsHard(),
        **arguments(
            folder,
            sampling=Sampling(group_size=3, max_new_tokens=45),
            score_truncated=True,
            micro_batch_tokens=150,
        ),
    )
    result = run(learner, strategy, 3)
    result["selector"] = {name: b.clone() for name, b in learner.augmenters.named_buffers()}
    return result


def uneven(folder: Path, strategy: Any) -> dict[str, Any]:
    """Rollouts of 10 tokens against 200, in training and in a validation in which a rank has nothing to do."""
    learner = GRPOLearner(
        ForwardKL(),
        objective=Objective(beta=0.1, inner_epochs=2),
        **arguments(
            folder,
            engine=Uneven(),
            categorizer=TextLength(),
            categories=CATEGORIES,
            sampling=Sampling(group_size=4, max_new_tokens=200),
            score_truncated=True,
            micro_batch_tokens=100,
        ),
    )
    result = run(learner, strategy)
    result["lengths"] = [[len(ids) for group in step for ids in group] for step in result["completions"]]
    trainer = trainer_for(limit_val_batches=1.0, strategy=strategy_like(strategy), devices=2)
    (result["validation"],) = trainer.validate(
        learner, ListData(PROBLEMS, validation=PROBLEMS[:1]), verbose=False
    )
    return result


def strategy_like(strategy: Any) -> Any:
    return strategy if isinstance(strategy, str) else FullySharded(gather_rollouts=strategy.gather_rollouts)


def supervised(folder: Path, strategy: Any, ranks: int = 2, steps: int = 2, **changes: Any) -> dict[str, Any]:
    """SFT with momentum and a schedule: what a resumed run must have restored."""
    trainer = {name: changes.pop(name) for name in ("precision", "ckpt_path", "saver") if name in changes}
    learner = SFTLearner(
        **arguments(
            folder,
            optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
            schedule=Schedule("linear", warmup_steps=1),
            micro_batch_tokens=60,
            **changes,
        )
    )
    return run(learner, strategy, steps, ranks, **trainer)


def resumed(folder: Path, output: Path, distributed: bool, ranks: int) -> dict[str, Any]:
    """Four steps, and again the last two of them from the checkpoint, which stays in ``output``."""
    name = f"{'shares' if distributed else 'whole'} of {ranks}"
    make = partial(FullySharded, save_distributed_checkpoint=distributed)
    saver = ModelCheckpoint(output / name, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    straight = supervised(folder, make(), ranks, 4, saver=saver)
    return {
        "straight": straight,
        "resumed": supervised(folder, make(), ranks, 4, ckpt_path=output / name / "step=2.ckpt"),
    }


def continued(folder: Path, checkpoint: Path, ranks: int) -> dict[str, Any]:
    """The last two of four steps from a checkpoint that another number of ranks wrote."""
    return supervised(folder, FullySharded(), ranks, 4, ckpt_path=checkpoint)


def trained_adapters(
    folder: Path, strategy: Any, ranks: int, steps: int, saver: ModelCheckpoint | None = None, **trainer: Any
) -> dict[str, Any]:
    """SFT of adapters: most parameters have no optimizer state."""
    policy = PolicyConfig(str(folder), lora=LORA)
    return supervised(folder, strategy, ranks, steps, policy=policy, saver=saver, **trainer)


def adapters(folder: Path, output: Path) -> dict[str, Any]:
    """A GRPO step with adapters, whose checkpoint is in shares and whose model is exported when fitting ends."""
    learner = GRPOLearner(
        ForwardKL(),
        objective=Objective(beta=0.1),
        **arguments(
            folder,
            policy=PolicyConfig(str(folder), lora=LORA, gradient_checkpointing=True),
            categorizer=TextLength(),
            categories=CATEGORIES,
            sampling=Sampling(group_size=4, max_new_tokens=5),
            score_truncated=True,
            export_to=str(output / "adapters" / "model"),
        ),
    )
    saver = ModelCheckpoint(output / "adapters" / "checkpoints", filename="last", every_n_train_steps=1)
    return run(learner, FullySharded(save_distributed_checkpoint=True), saver=saver)


def loaded(folder: Path) -> dict[str, Any]:
    """A policy of which rank 0 alone has read the weights."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    read, AutoModelForCausalLM.from_pretrained = AutoModelForCausalLM.from_pretrained, None  # type: ignore
    try:
        if mesh.get_rank() == 0:
            AutoModelForCausalLM.from_pretrained = read
        policy = PolicyConfig(str(folder)).build(Sharding(mesh))
    finally:
        AutoModelForCausalLM.from_pretrained = read
    with rollout_weights(policy):
        sent = {name: tensor.clone() for name, tensor in named_weights(policy.model)}
        mark = fingerprint(policy.model)
        still = [name for name, tensor in policy.named_parameters() if isinstance(tensor, DTensor)]
    held = sum(p.to_local().numel() for p in policy.parameters())
    buffers = {name: b.clone() for name, b in policy.named_buffers()}
    return {
        "weights": whole_weights(policy),
        "held": held,
        "buffers": buffers,
        "sent": sent,
        "fingerprint": mark,
        "shares while gathered": still,
    }


def main(folder: Path, output: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, make in STRATEGIES.items():
        results[f"guided, {name}"] = guided(folder, make())
        results[f"uneven, {name}"] = uneven(folder, make())
    for distributed in (False, True):
        results[f"resumed, {distributed}"] = resumed(folder, output, distributed, 2)
    for checkpoint in ("whole of 1", "shares of 1"):
        results[checkpoint] = continued(folder, output / checkpoint / "step=2.ckpt", 2)
    single = output / "adapters of one device" / "step=2.ckpt"
    results["adapters of one device"] = trained_adapters(folder, FullySharded(), 2, 4, ckpt_path=single)
    results["adapters"] = adapters(folder, output)
    results["bf16-mixed"] = supervised(folder, FullySharded(), precision="bf16-mixed")
    results["bf16"] = supervised(folder, FullySharded(), policy=PolicyConfig(str(folder), dtype="bfloat16"))
    results["offloaded"] = supervised(folder, FullySharded(cpu_offload=True))
    checkpointing = PolicyConfig(str(folder), gradient_checkpointing=True)
    results["activations made again"] = supervised(folder, FullySharded(), policy=checkpointing)
    results["loaded"] = loaded(folder)
    torch.save(results, output / f"rank{os.environ['LOCAL_RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
