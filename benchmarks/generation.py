"""Sampling a batch of groups: TorchEngine against ``generate`` of transformers, without training.

    python benchmarks/generation.py --json benchmarks/results/generation.json

Models, prompts and lengths are those of vs_trl.py, sampled at temperature 1 from all tokens. bf16 is bf16 weights.
``generate`` has its faster key/value cache, dynamic or static, as the first calls of each tell; its rows are a prompt's
G copies (``num_return_sequences``). Calls alternate; tokens are counted through the stop token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.alternating import Rounds, in_own_process, now, quiet
from benchmarks.grpo_work import PRESETS, Work
from benchmarks.reporting import Results, about, chosen, rows_parser
from benchmarks.vs_trl import NO_MERGE, PRECISIONS, ROWS
from lit_madrl.policy import Policy
from lit_madrl.rollouts import TorchEngine
from lit_madrl.types import Sampling

Batch = Sequence[Sequence[int]]
Sample = Callable[[Batch], int]
"""Samples completions of a batch of prompts; how many tokens they have."""

CACHES = ("dynamic", "static")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Run:
    """What both sides are given; ``merge``: ours computes equal partial completions once."""

    work: Work
    precision: str
    merge: bool = True

    def model(self) -> Any:
        """The model, freshly read."""
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.work.model(), dtype=DTYPES[self.precision]
        ).eval()

    def stop_ids(self) -> list[int]:
        """The end-of-sequence token and the work's stop strings."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.work.model())
        stop = [
            token for text in self.work.stop for token in tokenizer.encode(text, add_special_tokens=False)
        ]
        return [tokenizer.eos_token_id, *stop]


def ours(run: Run) -> Sample:
    """The engine that a learner samples with."""
    engine, sampling = (
        TorchEngine(merge_identical=run.merge),
        Sampling(run.work.group_size, run.work.max_new_tokens),
    )
    engine.sync_weights(Policy(run.model()).model)
    stop = run.stop_ids()
    return lambda prompts: int(engine.generate(prompts, sampling, stop).lengths.sum())


def theirs(run: Run, cache: str) -> Sample:
    """``generate`` on left-padded prompts."""
    model, stop = run.model(), run.stop_ids()
    config = transformers.GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=run.work.group_size,
        max_new_tokens=run.work.max_new_tokens,
        eos_token_id=stop,
        pad_token_id=stop[0],
        cache_implementation=cache,
    )
    model.generation_config = config  # else what it leaves open is taken from the model's

    def sample(prompts: Batch) -> int:
        width = max(map(len, prompts))
        ids = torch.tensor([[stop[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.no_grad():
            made = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:]
        return sampled_tokens(made, stop)

    return sample


def sampled_tokens(completions: torch.Tensor, stop: Sequence[int]) -> int:
    """Tokens of ``[N, T]`` completions through the first stop token of each."""
    stopped = torch.isin(completions, torch.tensor(stop)).int().cumsum(1)
    return int((stopped.roll(1, 1).index_fill(1, torch.tensor([0]), 0) == 0).sum())


def timed(sample: Sample, batch: Batch) -> dict[str, Any]:
    """Tokens, and wall and CPU seconds, of one call."""
    begun = now()
    tokens = sample(batch)
    return {"tokens": tokens, "seconds": now() - begun}


def probe(sample: Sample, batch: Batch) -> float:
    """CPU seconds of the fastest of the first calls, that take a second together or are one."""
    calls: list[float] = []
    while sum(calls) < 1:
        calls.append(float(timed(sample, batch)["seconds"][1]))
    return round(min(calls), 4)


def measure(run: Run, rounds: Rounds, threads: int) -> dict[str, Any]:
    """Tokens a second of both sides and the ratio of ours to theirs: medians over alternating calls."""
    quiet()
    torch.set_num_threads(threads)
    size, prompts = run.work.prompts, run.work.prompt_ids(8)
    batches = cycle(prompts[start : start + size] for start in range(0, len(prompts), size))
    first = next(batches)
    caches = {cache: theirs(run, cache) for cache in CACHES}
    probes = {cache: probe(sample, first) for cache, sample in caches.items()}
    fastest = min(probes, key=lambda cache: probes[cache])
    sides = {"transformers": caches[fastest], "ours": ours(run)}
    timed(sides["ours"], first)  # warm-up
    calls: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    while not rounds.over(len(calls["ours"])):
        batch = next(batches)
        for side, sample in sides.items():
            calls[side].append(timed(sample, batch))
    row: dict[str, Any] = {side: summary(made) for side, made in calls.items()}
    row["transformers"] |= {"cache": fastest, "first_calls": probes}
    rates = {side: row[side]["tokens_per_s"] for side in sides}
    ratio = {
        clock: round(rates["ours"][clock] / rates["transformers"][clock], 2) for clock in ("wall", "cpu")
    }
    return {**row, "ratio": ratio, "steps": len(calls["ours"])}


def summary(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of tokens a second, and the mean number of tokens."""
    rates = np.median([call["tokens"] / call["seconds"] for call in calls], axis=0)
    tokens = round(float(np.mean([call["tokens"] for call in calls])), 1)
    return {
        "tokens_per_s": dict(zip(("wall", "cpu"), rates.round(1).tolist(), strict=True)),
        "tokens": tokens,
    }


def print_row(row: dict[str, Any]) -> None:
    """The row as a line."""
    rates = [f"{side} {row[side]['tokens_per_s']['cpu']:.0f}" for side in ("transformers", "ours")]
    print(
        f"{row['work']} {row['precision']}, {row['steps']} calls: tokens a CPU second {', '.join(rates)}; "
        f"ratio {row['ratio']['cpu']}; {row['transformers']['cache']} cache",
        flush=True,
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    return rows_parser(__doc__, ROWS, PRECISIONS, budget=6)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parser().parse_args(arguments)
    names = chosen("rows", options.rows, ROWS)
    precisions = chosen("precision", options.precision, PRECISIONS)
    packages = ("lit_madrl", "transformers", "torch")
    results = Results(
        options.json, about("generation.py", options.json, *packages), ("work", "precision", "threads")
    )
    for name in names:
        work = PRESETS[name.removesuffix(NO_MERGE)]
        for precision in precisions:
            try:
                work.model()
            except FileNotFoundError as reason:
                print(f"{name} {precision}: skipped, {reason}", flush=True)
                continue
            run, rounds = (
                Run(work, precision, not name.endswith(NO_MERGE)),
                Rounds(options.least, options.most, options.budget),
            )
            row = {"work": name, "precision": precision, "threads": options.threads}
            row |= in_own_process(measure, run, rounds, options.threads, threads=options.threads)
            print_row(row)
            results.add(row)


if __name__ == "__main__":
    quiet()
    main()
