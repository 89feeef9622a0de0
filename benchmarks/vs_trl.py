"""One GRPO step of TRL's GRPOTrainer against one of GRPOLearner in a Lightning Trainer, for the same work.

    python benchmarks/vs_trl.py --preset quickstart --json benchmarks/results/vs_trl_quickstart.json

Both get the same weights, prompts, lengths, rewards and beta, and make one update a batch of rollouts; their steps
alternate in one process. A step is all its trainer does: data, generation, rewards, reference, update.
TRL is installed into an environment of its own, runs/bench/venv, when the present one has none.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import lightning as L
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.alternating import STAGES, WARM_UP, Steps, alternate, now, ratio
from benchmarks.grpo_work import PRESETS, Work
from benchmarks.machine import describe
from lit_madrl.learners import GRPOLearner, Objective
from lit_madrl.learners.collector import stack_targets
from lit_madrl.policy.build import PolicyConfig
from lit_madrl.rewards import ForwardKL
from lit_madrl.rollouts import TorchEngine
from lit_madrl.types import Sampling, Scores

BENCH = ROOT / "runs" / "bench"
TRL = "trl>=1.16,<2"
SIDES = ("trl", "ours")
PACKAGES = {"trl": ("trl", "accelerate"), "ours": ("lit_madrl", "lightning", "transformers", "torch")}
BETA = 0.04
LEARNING_RATE = 1e-6  # so small that the completions, and with them the work, stay those of the given weights


@dataclass(frozen=True)
class Run:
    """What both sides are given. ``merge``: ours computes identical completions once."""

    work: Work
    model: Path
    steps: int
    precision: Literal["fp32", "bf16"] = "fp32"
    merge: bool = True


def ours(run: Run, steps: Steps) -> None:
    """The product: GRPOLearner in a Lightning Trainer."""
    work, data = run.work, run.work.data()
    learner: Any = GRPOLearner(
        ForwardKL(),
        Objective(advantage_scale="none", reduction="dr_grpo", beta=BETA),
        policy=PolicyConfig(str(run.model)),
        optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.0),
        sampling=Sampling(work.group_size, work.max_new_tokens),
        engine=TorchEngine(merge_identical=run.merge),
        categorizer=work.categorizer(),
        categories=data.categories,
    )
    learner.engine.generate = steps.timed("generation", learner.engine.generate)
    learner._reference_logprobs = steps.timed("reference", learner._reference_logprobs)
    learner.optimizer_step_over = steps.timed("update", learner.optimizer_step_over)

    class TakeTurns(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            steps.begin()

        def on_train_batch_end(self, *_: Any) -> None:
            steps.tokens.append(float(learner.experience.rollouts.lengths.float().mean()))
            steps.end()

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if run.precision == "bf16" else "32-true",
        max_steps=run.steps + WARM_UP,
        callbacks=[TakeTurns()],
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=str(BENCH),
    )
    with ExitStack() as stack:
        if not run.merge:
            stack.enter_context(mock.patch("lit_madrl.learners.experience.merge_rows", list))
        trainer.fit(learner, data)


def trl(run: Run, steps: Steps) -> None:
    """TRL's trainer at its fastest here: the whole batch at once, no gradient checkpointing, no logs."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    work, categorizer, shaper = run.work, run.work.categorizer(), ForwardKL()
    stream = iter(work.data().train_dataloader())
    problems = [problem for _ in range(run.steps + WARM_UP) for problem in next(stream)]

    def reward(completions: list[str], completion_ids: list[list[int]], number: list[int], **_: Any) -> Any:
        steps.tokens.append(sum(map(len, completion_ids)) / len(completion_ids))
        asked = [problems[n] for n in number[:: work.group_size]]
        starts = range(0, len(completions), work.group_size)
        groups = [completions[start : start + work.group_size] for start in starts]
        return shaper(Scores.build(categorizer(asked, groups)), stack_targets(asked)).flatten().tolist()

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            steps.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.add("update", trainer.prepared)
            steps.end()

    columns = {"prompt": [p.prompt for p in problems], "number": list(range(len(problems)))}
    trainer = GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(run.model),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict(columns),
        callbacks=[TakeTurns()],
        args=trl_arguments(run),
    )
    trainer.remove_callback(PrinterCallback)
    prepare, logprobs = trainer._prepare_inputs, trainer._get_per_token_logps_and_entropies
    reference_logprobs = steps.timed("reference", logprobs)

    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(*args, **kwargs)
        trainer.prepared = now()  # from here to the end of the step: forward, backward, optimizer
        return inputs

    def logprobs_by_use(*args: Any, **kwargs: Any) -> Any:
        return (logprobs if torch.is_grad_enabled() else reference_logprobs)(*args, **kwargs)

    trainer._prepare_inputs = prepare_inputs
    trainer._get_per_token_logps_and_entropies = logprobs_by_use
    trainer._generate_single_turn = steps.timed("generation", trainer._generate_single_turn)
    trainer.train()


def trl_arguments(run: Run) -> Any:
    """TRL's settings for the same work."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(BENCH / "trl"),
        use_cpu=True,
        bf16=run.precision == "bf16",
        per_device_train_batch_size=run.work.prompts * run.work.group_size,
        num_generations=run.work.group_size,
        max_completion_length=run.work.max_new_tokens,
        max_steps=run.steps + WARM_UP,
        learning_rate=LEARNING_RATE,
        beta=BETA,
        loss_type="dr_grpo",
        scale_rewards="none",
        shuffle_dataset=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )


def measure(run: Run, threads: int = 1, sides: Sequence[str] = SIDES) -> dict[str, Any]:
    """Medians of each side, and the ratio of TRL's to ours when there are both."""
    loops = {"trl": trl, "ours": ours}
    steps = alternate({side: partial(loops[side], run) for side in sides}, threads)
    row: dict[str, Any] = {side: steps[side].summary() for side in sides}
    if set(sides) == set(SIDES):
        row["ratio"] = ratio(steps["trl"], steps["ours"])
    return row


def require_trl() -> None:
    """Return if this environment has TRL, else go on in one that has, built first where it is missing."""
    if importlib.util.find_spec("trl") is not None:
        return
    folder = BENCH / "venv"
    python = folder / "bin" / "python"
    if Path(sys.prefix) == folder:
        raise RuntimeError(f"{folder}: expected an environment with trl; delete it and run again")
    if not python.exists():
        pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [*pip, "torch"],  # first, so that nothing else decides on its build
            [*pip, TRL, "--editable", str(ROOT)],
        ):
            print(shlex.join(command), file=sys.stderr)
            subprocess.run(command, check=True)
    os.execv(python, [str(python), *sys.argv])


def quiet() -> None:
    """No warnings and notes of the libraries between our lines."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def write_row(path: Path, row: dict[str, Any]) -> None:
    """Add ``row`` to the file's list, in place of an older one of the same settings."""
    settings = ("work", "precision", "threads", "merge")
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [other for other in rows if any(other[key] != row[key] for key in settings)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*rows, row], indent=1) + "\n")


def print_row(row: dict[str, Any]) -> None:
    """The row as a few lines."""
    print(f"{row['work']} {row['precision']}, {row['threads']} thread(s), {row['steps']} steps: wall (CPU)")
    for side in (*SIDES, "ratio"):
        if side in row:
            values = [f"{s} {row[side][s]['wall']:.4g} ({row[side][s]['cpu']:.4g})" for s in STAGES]
            print(f"{side:>5}: {'  '.join(values)}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--preset", choices=PRESETS, default="quickstart")
    parser.add_argument("--model", type=Path, help="model folder; default: the preset's")
    parser.add_argument("--steps", type=int, default=20, help=f"counted steps, after {WARM_UP} that are not")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--merge",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ours computes identical completions once",
    )
    parser.add_argument("--side", choices=SIDES, help="measure this one alone")
    parser.add_argument("--json", type=Path, help="file of rows to add the result to")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parser().parse_args(arguments)
    if options.side != "ours":
        require_trl()
    work = PRESETS[options.preset]
    sides = [options.side] if options.side else list(SIDES)
    run = Run(work, options.model or work.model(), options.steps, options.precision, options.merge)
    row = {
        "work": options.preset,
        "precision": options.precision,
        "threads": options.threads,
        "merge": options.merge,
        "steps": options.steps,
        **measure(run, options.threads, sides),
        "command": shlex.join(["python", "benchmarks/vs_trl.py", *sys.argv[1:]]),
        "machine": describe(*(package for side in sides for package in PACKAGES[side])),
    }
    print_row(row)
    if options.json:
        write_row(options.json, row)


if __name__ == "__main__":
    quiet()
    main()
