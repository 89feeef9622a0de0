"""What a GRPO step has to compute, how fast this machine can, and how much of that the learner's stages achieve.

    python benchmarks/limit.py --preset 25m-32 --json benchmarks/results/limit_25m.json

The work is that of vs_trl.py, counted from the lengths of the completions that the learner itself samples. Formulas
(a multiply-add is 2 FLOPs; w the elements of a layer's matrices; shapes.py has them as functions):

- prefill: every prompt once, 2 w L tokens + 4 L H D pairs, and logits, 2 E V, of its last token;
- decode: the same for every distinct partial completion; each step reads all weights, and the cached keys and values
  of its rows, a shared prompt's once;
- reference: prompts once, every distinct completion but its last token once, logits of completion tokens only;
- update: 3 times that. Making logits or activations again in backward is ``computed``, not needed. AdamW and clipping
  move 40 bytes a parameter.

The limit of a stage is the time of its matrix products alone, each timed here on its own over all layers' weights, for
forward and both gradients, by the faster of ``F.linear`` and oneDNN's linear (and by ``F.linear`` alone); plus
attention at their mean rate; or the time to move the bytes, where that is longer. Norms, softmax, rotations and
sampling are not in it, so no code reaches 1. With one thread all times are CPU seconds, which a busy neighbour changes
less.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.alternating import WARM_UP, Relay, Steps
from benchmarks.grpo_work import PRESETS
from benchmarks.machine import describe
from benchmarks.rates import PRODUCTS, Seconds, bandwidth, fastest, kernels, products
from benchmarks.shapes import (
    Counts,
    Shape,
    Step,
    attention_flops,
    decode_bytes,
    decode_steps,
    forward_flops,
    packed_counts,
    prefill_counts,
    total,
    training_flops,
    weight_elements,
)
from benchmarks.vs_trl import PACKAGES, Run, ours, quiet
from lit_madrl.functional.logprobs import KEPT_LOGITS
from lit_madrl.policy.attention import AttentionPlan, DenseGroups
from lit_madrl.policy.packing import PackedBatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZER_BYTES = 40  # fp32: norm 4, scaling 8, AdamW reads p, g, m, v and writes p, m, v
LARGE = 2**28  # bytes that no cache holds

Layout = list[tuple[int, list[int]]]


class Watched(Steps):
    """Steps that keep what was sampled and what was trained on."""

    def __init__(self) -> None:
        super().__init__("ours", Relay(["ours"]))
        self.rollouts: list[Any] = []
        self.batches: list[list[PackedBatch]] = []
        self.relay.wait("ours")

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        timed = super().timed(stage, function)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = timed(*args, **kwargs)
            if stage == "generation":
                self.rollouts.append(result)
            if stage == "update":
                self.batches.append([batch.packed for batch in args[0]])
            return result

        return wrapper


class Needed(NamedTuple):
    """What one step needs."""

    prefill: Counts
    decode: list[Step]
    packed: Counts
    computed_pairs: int  # that the packed attention computes, masked ones and padding too

    @classmethod
    def of(cls, rollouts: Any, batches: Sequence[PackedBatch], merge: bool) -> Needed:
        """From a step's completions and its micro-batches."""
        prompts = list(map(len, rollouts.prompt_ids))
        return cls(
            prefill_counts(prompts),
            list(decode_steps(prompts, rollouts.completions(), merge)),
            total(packed_counts(layout(batch)) for batch in batches),
            sum(plan_pairs(batch.plan) for batch in batches),
        )


def write_row(path: Path, row: dict[str, Any]) -> None:
    """Add ``row`` to the file's list, in place of an older one of the same settings."""
    settings = ("work", "precision", "threads", "merge")
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [other for other in rows if any(other[key] != row[key] for key in settings)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*rows, row], indent=1) + "\n")


def layout(batch: PackedBatch) -> Layout:
    """(prompt length, lengths of its completions) of each group."""
    lengths, prompts = batch.lengths.tolist(), batch.prompts.tolist()
    return [
        (prompt, [n for n, p in zip(lengths, prompts, strict=True) if p == index])
        for index, prompt in enumerate(batch.prompt_lengths.tolist())
    ]


def plan_pairs(plan: AttentionPlan) -> int:
    """Pairs that the plan's calls compute."""
    return sum(
        part.mask.numel()
        if isinstance(part, DenseGroups)
        else part.prompt_length**2 + len(part.index) * part.mask.numel()
        for part in plan.parts
    )


def stage_limits(shape: Shape, steps: Sequence[Needed], precision: str) -> dict[str, Any]:
    """Limits of the stages for the mean of ``steps``, and the rates they come from."""
    dtype, element = DTYPES[precision], DTYPES[precision].itemsize
    small, large = bandwidth(max(element * weight_elements(shape), 2**20)), bandwidth(LARGE)
    prefill, decoded, packed, computed = (
        Counts(*(n / len(steps) for n in total(counts)))
        for counts in (
            [step.prefill for step in steps],
            [each.counts for step in steps for each in step.decode],
            [step.packed for step in steps],
            [step.packed._replace(pairs=step.computed_pairs) for step in steps],
        )
    )
    decode = [each for step in steps for each in step.decode]
    number = len(decode) / len(steps)
    moved = sum(decode_bytes(shape, each, element) for each in decode) / len(steps)
    forward = PRODUCTS[:1]
    first = products(shape, round(prefill.tokens), round(prefill.head), dtype, forward)
    rows = round(decoded.tokens / max(number, 1)) or 1
    each = products(shape, rows, rows, dtype, forward) if decode else {}
    rates = products(shape, round(packed.tokens), round(packed.head), dtype, PRODUCTS)

    def limits(kernel: str) -> dict[str, float]:
        def stage(rates: Seconds, kinds: Sequence[str], counts: Counts, times: float = 1) -> float:
            seconds, rate = fastest(rates, kinds, kernel)
            return times * seconds + len(kinds) * attention_flops(shape, counts) / rate

        generation = stage(first, forward, prefill)
        if decode:
            generation += max(stage(each, forward, decoded, number), moved / small["read"])
        update = stage(rates, PRODUCTS, packed) + OPTIMIZER_BYTES * shape.parameters() / large["copy"]
        return {"generation": generation, "reference": stage(rates, forward, packed), "update": update}

    again = packed.head * shape.vocabulary > KEPT_LOGITS
    stages: dict[str, dict[str, float]] = {
        "generation": {
            "flops": forward_flops(shape, prefill) + forward_flops(shape, decoded),
            "bytes": moved + element * weight_elements(shape),
        },
        "reference": {"flops": forward_flops(shape, packed), "computed": forward_flops(shape, computed)},
        "update": {
            "flops": training_flops(shape, packed),
            "computed": training_flops(shape, computed, logits_again=again),
            "with_checkpointing": training_flops(shape, computed, checkpointing=True, logits_again=again),
            "bytes": OPTIMIZER_BYTES * shape.parameters(),
        },
    }
    for name, kernel in (("limit", ""), ("limit_linear", "F.linear")):
        for stage, seconds in limits(kernel).items():
            stages[stage][name] = seconds
    counts = {"prefill": prefill, "decode": decoded, "decode_steps": number, "packed": packed}
    return {
        "counts": counts,
        "rates": rates,
        "bandwidth": {"weights": small, "large": large},
        "stages": stages,
    }


def measure(run: Run, threads: int) -> dict[str, Any]:
    """The learner's stages on the preset's work, beside their limits."""
    torch.set_num_threads(threads)
    watched = Watched()
    ours(run, watched)
    seen = zip(watched.rollouts, watched.batches, strict=True)
    needed = [Needed.of(*step, run.merge) for step in list(seen)[WARM_UP:]]
    result = stage_limits(Shape.read(str(run.model)), needed, run.precision)
    summary = watched.summary()
    for name, stage in result["stages"].items():
        stage["measured"] = summary[name]["cpu" if threads == 1 else "wall"]
        stage["fraction"] = stage["limit"] / stage["measured"]
        stage["fraction_linear"] = stage["limit_linear"] / stage["measured"]
    return result


def tables(row: dict[str, Any]) -> str:
    """The row as markdown."""
    clock = "CPU ms" if row["threads"] == 1 else "ms"
    lines = [f"## {row['work']}, {row['precision']}, {row['threads']} thread(s), {row['steps']} steps", ""]
    heads = [
        "needed GFLOP",
        "computed GFLOP",
        "MB moved",
        f"measured, {clock}",
        f"limit, {clock}",
        "fraction",
    ]
    heads += [f"F.linear's limit, {clock}", "fraction"]
    lines += [f"| stage | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    for name, stage in row["stages"].items():
        shown = [
            f"{stage[key] / unit:.4g}" if key in stage else ""
            for key, unit in (("flops", 1e9), ("computed", 1e9), ("bytes", 1e6))
        ]
        shown += [f"{1e3 * stage['measured']:.4g}"]
        for limit in (stage["limit"], stage["limit_linear"]):
            shown += [f"{1e3 * limit:.4g}", f"{limit / stage['measured']:.2f}"]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    names = [f"{kind}, {kernel}" for kind in PRODUCTS for kernel in kernels()]
    lines += ["", f"| GFLOP/s of products | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for shape, by_name in row["rates"].items():
        cells = [f"{by_name['GFLOP'] / by_name[name]:.0f}" for name in names]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    speeds = row["bandwidth"].items()
    lines += ["", "Bandwidth: " + "; ".join(f"{name} {_gigabytes(speed)}" for name, speed in speeds) + "."]
    return "\n".join(lines) + "\n"


def _gigabytes(speed: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value / 1e9:.1f} GB/s" for kind, value in speed.items())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--preset", choices=PRESETS, default="quickstart")
    parser.add_argument("--model", type=Path, help="model folder; default: the preset's")
    parser.add_argument("--steps", type=int, default=10, help=f"counted steps, after {WARM_UP} that are not")
    parser.add_argument("--precision", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--merge", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="file of rows to add the results to")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parser().parse_args(arguments)
    work = PRESETS[options.preset]
    for precision in options.precision:
        run = Run(work, options.model or work.model(), options.steps, precision, options.merge)
        row = {
            "work": options.preset,
            "precision": precision,
            "threads": options.threads,
            "merge": options.merge,
            "steps": options.steps,
            **measure(run, options.threads),
            "command": shlex.join(["python", "benchmarks/limit.py", *sys.argv[1:]]),
            "machine": describe(*PACKAGES["ours"]),
        }
        print(tables(row))
        if options.json:
            write_row(options.json, row)


if __name__ == "__main__":
    quiet()
    main()
