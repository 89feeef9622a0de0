"""One GRPO step of TRL's GRPOTrainer against one of GRPOLearner in a Lightning Trainer, for the same work.

    python benchmarks/vs_trl.py --json benchmarks/results/vs_trl.json
    python benchmarks/vs_trl.py --json benchmarks/results/vs_trl.json --table benchmarks/results/vs_trl.md

A row is a work (``PRESETS`` in grpo_work.py; ``-no-merge``: ours computes identical completions one by one) and a
precision: fp32, or bf16 autocast over fp32 weights. Both sides get the same weights, prompts, lengths, rewards and
beta, compute the batch at once without gradient checkpointing (but SmolLM2, which TRL takes in 4 parts for want of
memory), make one update a batch by fused AdamW, and log nothing.
Their steps alternate, each side in a process of its own; the first of each is not counted. A step is all its trainer
does: data, generation, rewards, reference, update.

Of what else TRL offers: its chunked LM head is always on; ``torch_compile`` (11 % less CPU time a step in fp32, none in
bf16) is on in fp32 where all batches have the same lengths (25m), else it compiles again and again; smaller
micro-batches (16 and 8 of 32 rows: 3 and 7 % more) and a static key/value cache in generation (18 % more) were slower;
vLLM and Liger kernels need a GPU.
TRL is installed into an environment of its own, runs/bench/venv, when the present one has none.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
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

from benchmarks.alternating import SIDES, WARM_UP, Rounds, Steps, alternate, elsewhere, now, quiet
from benchmarks.grpo_work import PRESETS, Work
from benchmarks.reporting import Results, about, chosen, print_row, ratio, rows_parser, table
from lit_madrl.learners import GRPOLearner, Objective
from lit_madrl.learners.collector import stack_targets
from lit_madrl.policy.build import PolicyConfig
from lit_madrl.rewards import ForwardKL
from lit_madrl.rollouts import TorchEngine
from lit_madrl.types import Sampling, Scores

BENCH = ROOT / "runs" / "bench"
TRL = "trl>=1.16,<2"
NO_MERGE = "-no-merge"
ROWS = (*PRESETS, *(f"{name}{NO_MERGE}" for name in ("tiny-8x16", "quickstart")))
PRECISIONS = ("fp32", "bf16")
PACKAGES = {"trl": ("trl", "accelerate"), "ours": ("lit_madrl", "lightning", "transformers", "torch")}
LEARNING_RATE = 1e-6  # so small that the completions, and with them the work, stay those of the given weights


@dataclass(frozen=True)
class Run:
    """What both sides are given.

    Args:
        work: prompts, lengths, rewards.
        model: folder of the weights.
        steps: most counted steps.
        precision: bf16 is autocast over fp32 weights.
        merge: ours computes identical completions once.
        beta: weight of the KL term; 0 for none and no reference.
        checkpointing: activations are computed again in backward.
        compile: TRL compiles its model.
    """

    work: Work
    model: Path
    steps: int
    precision: Literal["fp32", "bf16"] = "fp32"
    merge: bool = True
    beta: float = 0.04
    checkpointing: bool = False
    compile: bool = False


def ours(run: Run, steps: Steps) -> None:
    """The product: GRPOLearner in a Lightning Trainer."""
    work, data = run.work, run.work.data()
    learner: Any = GRPOLearner(
        ForwardKL(),
        Objective(advantage_scale="none", reduction="dr_grpo", beta=run.beta),
        policy=PolicyConfig(str(run.model), gradient_checkpointing=run.checkpointing),
        optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.0, fused=True),
        sampling=Sampling(work.group_size, work.max_new_tokens, stop=work.stop),
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
            trainer.should_stop = steps.end()

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
    """TRL's trainer, at its fastest settings."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    work, categorizer, shaper = run.work, run.work.categorizer(), ForwardKL()
    stream = iter(work.data().train_dataloader())
    problems = [problem for _ in range(run.steps + WARM_UP) for problem in next(stream)]
    prepared: list[
        Any
    ] = []  # when the first micro-batch of a step was: generation and reference are made then

    def reward(completions: list[str], completion_ids: list[list[int]], number: list[int], **_: Any) -> Any:
        steps.tokens.append(sum(map(len, completion_ids)) / len(completion_ids))
        asked = [problems[n] for n in number[:: work.group_size]]
        starts = range(0, len(completions), work.group_size)
        groups = [completions[start : start + work.group_size] for start in starts]
        return shaper(Scores.build(categorizer(asked, groups)), stack_targets(asked)).flatten().tolist()

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            steps.begin()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            prepared.clear()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.add("update", prepared[0])
            control.should_training_stop |= steps.end()

    columns = {"prompt": [p.prompt for p in problems], "number": list(range(len(problems)))}
    model = transformers.AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.model)
    stop = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(tokenizer.tokenize("".join(work.stop)))]
    model.generation_config.eos_token_id = stop
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
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
        prepared.append(now())  # from the first one to the end of the step: forward, backward, optimizer
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
        per_device_train_batch_size=run.work.prompts * run.work.group_size // run.work.micro_batches,
        gradient_accumulation_steps=run.work.micro_batches,
        num_generations=run.work.group_size,
        max_completion_length=run.work.max_new_tokens,
        max_steps=run.steps + WARM_UP,
        learning_rate=LEARNING_RATE,
        beta=run.beta,
        loss_type="dr_grpo",
        scale_rewards="none",
        shuffle_dataset=False,
        gradient_checkpointing=run.checkpointing,
        torch_compile=run.compile,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )


def measure(run: Run, rounds: Rounds, sides: Sequence[str] = SIDES, threads: int = 1) -> dict[str, Any]:
    """Medians of each side, the ratio of TRL's to ours when there are both, and the counted steps."""
    loops = {"trl": trl, "ours": ours}
    steps = alternate(
        {side: elsewhere(partial(loops[side], run), threads) for side in sides}, threads, rounds
    )
    row: dict[str, Any] = {side: steps[side].summary() for side in sides}
    if set(sides) == set(SIDES):
        row["ratio"] = ratio(steps["trl"], steps["ours"])
    return {**row, "steps": len(steps[sides[0]].seconds) - WARM_UP}


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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = rows_parser(__doc__, ROWS, PRECISIONS, budget=20)
    parser.add_argument("--side", choices=SIDES, help="measure this one alone")
    parser.add_argument("--table", type=Path, help="write the table of that file, measure nothing")
    return parser


def measured(name: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row.

    Raises:
        FileNotFoundError: its model is missing.
    """
    work = PRESETS[name.removesuffix(NO_MERGE)]
    merge = not name.endswith(NO_MERGE)
    compile = precision == "fp32" and work.random_words > 0
    run = Run(work, work.model(), options.most, precision, merge, compile=compile)
    rounds = Rounds(options.least, options.most, options.budget)
    sides = [options.side] if options.side else list(SIDES)
    prompts = work.prompt_ids()
    return {
        "work": name,
        "precision": precision,
        "threads": options.threads,
        "prompts": work.prompts,
        "group_size": work.group_size,
        "prompt_tokens": round(sum(map(len, prompts)) / len(prompts), 1),
        **measure(run, rounds, sides, options.threads),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parser().parse_args(arguments)
    names = chosen("rows", options.rows, ROWS)
    precisions = chosen("precision", options.precision, PRECISIONS)
    if options.table:
        options.table.write_text(table(json.loads(options.json.read_text())["rows"], ROWS))
        return
    if options.side != "ours":
        require_trl()
    packages = [package for side in SIDES if options.side in (None, side) for package in PACKAGES[side]]
    results = Results(
        options.json, about("vs_trl.py", options.json, *packages), ("work", "precision", "threads")
    )
    for name in names:
        for precision in precisions:
            try:
                row = measured(name, precision, options)
            except FileNotFoundError as reason:
                print(f"{name} {precision}: skipped, {reason}", flush=True)
                continue
            print_row(row)
            results.add(row)


if __name__ == "__main__":
    quiet()
    main()
