"""One GPU, one run of a few minutes: generation and training of Qwen3-shaped models with random weights, in bf16.

    python benchmarks/h200.py --json benchmarks/results/h200.jsonl      # on the GPU
    python benchmarks/h200.py --tiny                                   # the same code on a CPU, in seconds

Each section runs on its own: a failure is its result and the next one goes on; none begins after ``--minutes``. Every
result is printed and appended to the JSON lines file at once.

- machine: rate of a large matrix product, bandwidth of a copy;
- attention: one layer's packed attention, forward and backward, as the plan has it and by other ways to the same
  numbers (``difference`` from the plan's), with the SDPA backend that each one gets;
- head: ``selected_logprobs`` by tokens a chunk;
- generate: the embedded engine; ``bandwidth_used`` is the bytes that decoding must move, by time and measured rate;
- train: forward, backward and fused AdamW on one group, packed or padded, with and without checkpointing. ``mfu`` is
  the FLOPs that the packed step needs (benchmarks/shapes.py), whatever was computed, by time and ``--peak``;
- trl: a step of TRL's GRPOTrainer on the same shapes, beta = 0, where TRL is installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.attention_paths import AttentionPath, paths
from benchmarks.rates import bandwidth, best, clock
from benchmarks.shapes import (
    SHAPES,
    Shape,
    decode_bytes,
    decode_steps,
    packed_counts,
    training_flops,
)
from lit_madrl.functional.logprobs import selected_logprobs
from lit_madrl.policy.packing import PackedBatch, pack
from lit_madrl.policy.policy import Packing, Policy
from lit_madrl.rollouts import TorchEngine
from lit_madrl.types import Sampling

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model and its work: ``prompts`` groups are sampled together, one is trained on."""

    name: str
    shape: Shape
    device: str = "cuda"
    prompts: int = 16
    group: int = 16
    prompt: int = 512
    completion: int = 1024
    peak: float = 989e12

    def model(self) -> Any:
        """The model with random weights."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        with torch.device(self.device):
            config = self.shape.config(max_position_embeddings=40_960)
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def ids(self, *size: int) -> list[Any]:
        """Random token ids, no special ones."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, self.shape.vocabulary, size, generator=generator).tolist()

    def batch(self) -> PackedBatch:
        """One group of random completions of full length."""
        groups = self.ids(1, self.group, self.completion)
        return pack(self.ids(1, self.prompt), groups).to(self.device)


TINY = Case("tiny", Shape(2, 64, 4, 2, 16, 96, 512, tied=True), "cpu", 2, 4, 24, 12)


class Memory:
    """Peak bytes of the device since it was made; none on a CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def gib(self) -> dict[str, float]:
        """Allocated and reserved, in GiB."""
        if self.device != "cuda":
            return {}
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return dict(zip(("peak_gib", "reserved_gib"), (round(peak / GIB, 2) for peak in peaks), strict=True))


def machine(case: Case) -> dict[str, Any]:
    """What the device does at best."""
    size = 8192 if case.device == "cuda" else 256
    a, b = (torch.randn(size, size, device=case.device).bfloat16() for _ in range(2))
    copied = bandwidth(2**31 if case.device == "cuda" else 2**20, case.device)
    name = torch.cuda.get_device_name() if case.device == "cuda" else "cpu"
    versions = {
        package: importlib.import_module(package).__version__ for package in ("torch", "transformers")
    }
    return {
        "device": name,
        **versions,
        "tflops": 2e-12 * size**3 / best(lambda: a @ b, case.device),
        **copied,
    }


def attention(case: Case) -> Iterator[dict[str, Any]]:
    """One layer's attention over one group, by each path."""
    shape, batch = case.shape, case.batch()
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch.input_ids.shape[1], heads, shape.head_dim, device=case.device).bfloat16()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    made = paths(case.device, case.prompt, [case.completion - 1] * case.group)
    expected = made[0].attend(q, k, v)
    for path in made:
        memory = Memory(case.device)
        try:
            yield {"path": path.name, **timed_path(path, case.device, (q, k, v), expected), **memory.gib()}
        except Exception as error:
            yield {"path": path.name, "error": describe_error(error)}


def timed_path(
    path: AttentionPath, device: str, inputs: Sequence[Tensor], expected: Tensor
) -> dict[str, Any]:
    """Backend, largest difference, and milliseconds of one path."""
    q, k, v = (x.clone().requires_grad_(path.backward) for x in inputs)
    result: dict[str, Any] = {"backend": path.backend(q, k, v)}
    result["difference"] = float((path.attend(q, k, v).detach() - expected).abs().max())
    result["forward_ms"] = 1e3 * best(lambda: path.attend(q, k, v), device)
    if path.backward:
        result["forward_backward_ms"] = 1e3 * best(lambda: path.attend(q, k, v).sum().backward(), device)
    return result


def head(case: Case) -> Iterator[dict[str, Any]]:
    """Selected log-probabilities of one group's completion tokens, forward and backward, by tokens a chunk."""
    tokens, e, v = case.group * case.completion, case.shape.hidden, case.shape.vocabulary
    hidden = torch.randn(tokens, e, device=case.device).bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(v, e, device=case.device)).bfloat16().requires_grad_()
    ids = torch.tensor(case.ids(tokens), device=case.device)
    for chunk in (None, *(n for n in (512, 1024, 2048, 4096) if n < tokens)):
        memory = Memory(case.device)
        step = partial(selected_logprobs, hidden, weight, ids, chunk_tokens=chunk)
        seconds = best(lambda step=step: step().sum().backward(), case.device)
        yield {"chunk_tokens": chunk or "default", "forward_backward_ms": 1e3 * seconds, **memory.gib()}


def generate(case: Case, model: Any, copied: float) -> dict[str, Any]:
    """Sampling of ``prompts`` groups by the embedded engine."""
    engine, prompts = TorchEngine(), case.ids(case.prompts, case.prompt)
    engine.sync_weights(model)
    engine.generate(prompts, Sampling(case.group, 4), stop_ids=[1])
    memory, begun = Memory(case.device), clock(case.device)
    rollouts = engine.generate(prompts, Sampling(case.group, case.completion), stop_ids=[1])
    seconds = clock(case.device) - begun
    lengths = [[[0] * n for n in group] for group in rollouts.lengths.tolist()]
    steps = decode_steps([case.prompt] * case.prompts, lengths, merge=False)
    moved = sum(decode_bytes(case.shape, step, 2) for step in steps)
    tokens = int(rollouts.lengths.sum())
    rates = {"tokens_per_s": tokens / seconds, "bandwidth_used": moved / seconds / copied}
    return {"rows": case.prompts * case.group, "tokens": tokens, "seconds": seconds, **rates, **memory.gib()}


def train(case: Case, model: Any, packing: Packing, checkpointing: bool) -> dict[str, Any]:
    """Optimizer steps on one group, and the reference's forward."""
    switch = model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable
    switch()
    model.zero_grad()
    policy, batch = Policy(model, packing).train(), case.batch()
    memory = Memory(case.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        (-policy(batch).mean()).backward()
        optimizer.step()

    with torch.no_grad():
        reference = best(lambda: policy(batch), case.device)
    seconds = best(step, case.device)
    counts = packed_counts([(case.prompt, [case.completion] * case.group)])
    return {
        "packing": packing,
        "checkpointing": checkpointing,
        "seconds": seconds,
        "reference_seconds": reference,
        "tokens_per_s": case.group * case.completion / seconds,
        "mfu": training_flops(case.shape, counts) / seconds / case.peak,
        **memory.gib(),
    }


def trl(case: Case) -> dict[str, Any]:
    """The second step of TRL's trainer on one group; the first is not counted."""
    from benchmarks.trl_step import seconds_of_a_step

    memory, model = Memory(case.device), case.model()
    checkpointing = case.shape.parameters() > 1e9  # without it a group of larger models does not fit
    stages = seconds_of_a_step(model, case.ids(2, case.prompt), case.group, case.completion, checkpointing)
    tokens = case.group * case.completion
    rates = {f"{stage}_tokens_per_s": tokens / seconds for stage, seconds in stages.items()}
    return {"checkpointing": checkpointing, **stages, **rates, **memory.gib()}


def describe_error(error: Exception) -> str:
    """Its type and first words."""
    return f"{type(error).__name__}: {error}"[:300]


class Run:
    """Runs sections until the time is up, and writes what each one says."""

    def __init__(self, json_lines: Path | None, minutes: float) -> None:
        self.json_lines = json_lines
        self.deadline = time.monotonic() + 60 * minutes
        self.results: list[dict[str, Any]] = []

    def record(self, result: dict[str, Any]) -> None:
        """Print and append."""
        self.results.append(result)
        shown = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in result.items()}
        print(json.dumps(shown), flush=True)
        if self.json_lines:
            self.json_lines.parent.mkdir(parents=True, exist_ok=True)
            with self.json_lines.open("a") as file:
                file.write(json.dumps(result) + "\n")

    def section(self, name: str, case: Case, function: Callable[..., Any], *arguments: Any) -> None:
        """Record what ``function`` returns or yields, or its error."""
        of = {"section": name, "model": case.name}
        if time.monotonic() > self.deadline:
            self.record({**of, "skipped": "no time left"})
            return
        begun = time.monotonic()
        try:
            found = function(case, *arguments)
            for result in [found] if isinstance(found, dict) else found:
                self.record({**of, **result, "took": round(time.monotonic() - begun, 1)})
        except Exception as error:  # out of memory, most likely: the rest must not be lost
            settings = [a for a in arguments if isinstance(a, str | bool)]
            self.record({**of, "settings": settings, "error": describe_error(error)})


def ours(case: Case, run: Run, copied: float) -> dict[str, Any]:
    """The sections of one model that use it."""
    model = case.model()
    for packing in ("shared_prefix", "padded"):
        for checkpointing in (False, True):
            run.section("train", case, train, model, packing, checkpointing)
    model.gradient_checkpointing_disable()
    model.zero_grad()
    run.section("generate", case, generate, model, copied)
    return {"parameters": case.shape.parameters()}


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run all sections; returns the results."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--tiny", action="store_true", help="a toy model on the CPU")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["qwen3-0.6b", "qwen3-4b"])
    for name in ("prompts", "group", "prompt", "completion"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Case, name))
    parser.add_argument(
        "--peak", type=float, default=Case.peak, help="FLOP/s that mfu is a share of (dense bf16)"
    )
    parser.add_argument("--minutes", type=float, default=8.5, help="no section begins after them")
    parser.add_argument("--json", type=Path, help="JSON lines file to append to")
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in ("prompts", "group", "prompt", "completion", "peak")}
    cases = [TINY] if options.tiny else [Case(name, SHAPES[name], **sizes) for name in options.models]
    run = Run(options.json, options.minutes)
    run.section("machine", cases[0], machine)
    copied = run.results[-1].get("copy", float("nan"))
    for case in cases:
        run.section("attention", case, attention)
        run.section("head", case, head)
    for case in cases:
        run.section("model", case, ours, run, copied)
    for case in cases if importlib.util.find_spec("trl") else ():
        run.section("trl", case, trl)
    return run.results


if __name__ == "__main__":
    main()
