"""Memory a GPU needs for GRPO with a given model, by parts, before anything is downloaded or rented.

    python benchmarks/memory.py --model qwen3-8b --strategy fsdp2 --ranks 8 --checkpointing --gpu 80

Letters: N parameters, T the trained ones (N, or the adapters'), W ranks; m bytes of a stored and c of a computed number
(m, c = 4, 4 in fp32, 4, 2 in bf16-mixed, 2, 2 in bf16). L layers, E hidden size, H query and K key/value heads, D head
size, I feed-forward size, V vocabulary. With FSDP2 what is marked * is divided by W.

- weights* m N; frozen reference* m N, none with adapters or --no-reference; gradients* m T;
  optimizer* 2 m T + 4 a tensor (AdamW); DDP buckets m T;
- computed weights: autocast keeps a bf16 copy of every matrix from forward to backward, 2 w L, or with checkpointing
  of one layer; FSDP2 gathers two layers and the root, and their gradients in c and in fp32 before they are scattered;
- activations: :func:`activations` of the largest micro-batch; head: :func:`head`; rollouts: :func:`rollouts`;
- vLLM: the share of the GPU given to it, which then holds its weights, keys and values;
- overhead: 1.5 GiB of CUDA context and 5 % fragmentation of the rest, an assumption.

Weights, reference, gradients, optimizer, buckets, vLLM and overhead are there all the time; of training and sampling
the larger counts. Attention is assumed to be fused: the scores are never stored.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.shapes import SHAPES, Shape, kv_elements
from lit_madrl.functional.logprobs import KEPT_LOGITS, LOGITS_BUDGET, chunk_tokens_for

GIB = 2**30
Strategy = Literal["single", "ddp", "fsdp2"]
Precision = Literal["fp32", "bf16-mixed", "bf16"]


@dataclass(frozen=True)
class Setup:
    """A run. Lengths are in tokens, prompts are those of a rank's step, ``gpu`` is in GiB.

    Args:
        shape: the model's.
        strategy: how ranks share the work.
        ranks: W.
        precision: of weights and arithmetic.
        reference: whether there is a KL term.
        lora: rank of adapters on all linear maps of the layers; 0 trains all weights.
        checkpointing: ``policy.gradient_checkpointing``.
        gather: ``gather_rollouts`` of FSDP2.
        prompts: prompts a step and rank, sampled together.
        group: completions a prompt.
        prompt: length of a prompt.
        completion: length of a completion.
        micro_batch_tokens: packed tokens computed at once; 0 for all.
        vllm: share of the GPU given to vLLM on it; 0 samples by the embedded engine.
        gpu: its memory.
    """

    shape: Shape
    strategy: Strategy = "single"
    ranks: int = 1
    precision: Precision = "bf16-mixed"
    reference: bool = True
    lora: int = 0
    checkpointing: bool = False
    gather: bool = True
    prompts: int = 8
    group: int = 16
    prompt: int = 512
    completion: int = 1024
    micro_batch_tokens: int = 0
    vllm: float = 0.0
    gpu: float = 80.0

    def __post_init__(self) -> None:
        least = {"lora": 0, "micro_batch_tokens": 0}
        least |= dict.fromkeys(("ranks", "prompts", "group", "prompt", "completion"), 1)
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name}: expected an integer >= {low}, got {getattr(self, name)}")
        if self.strategy == "single" and self.ranks > 1:
            raise ValueError(f"ranks: expected 1 for strategy single, got {self.ranks}")
        if not 0 <= self.vllm < 1:
            raise ValueError(f"vllm: expected a share in [0, 1), got {self.vllm}")

    @property
    def stored(self) -> int:
        """m."""
        return 2 if self.precision == "bf16" else 4

    @property
    def computed(self) -> int:
        """c."""
        return 4 if self.precision == "fp32" else 2

    @property
    def autocast(self) -> bool:
        """Weights are cast in every product; FSDP2 instead gathers them in bf16, and all else follows."""
        return self.precision == "bf16-mixed" and self.strategy != "fsdp2"

    @property
    def residual(self) -> int:
        """Bytes of a number of the residual stream."""
        return 4 if self.autocast else self.computed

    def adapters(self) -> int:
        """Parameters of the adapters: rank (in + out) a matrix."""
        return self.shape.layers * self.lora * sum(map(sum, self.shape.matrices().values()))

    def trained(self) -> int:
        """T."""
        return self.adapters() if self.lora else self.shape.parameters()

    def micro_batch(self) -> tuple[int, int]:
        """(prompts, completions of each) of the largest micro-batch: whole groups, or else a part of one."""
        group = self.prompt + self.group * self.completion
        budget = self.micro_batch_tokens or self.prompts * group
        if budget >= group:
            return min(self.prompts, budget // group), self.group
        return 1, max(1, (budget - self.prompt) // self.completion)


def static(setup: Setup) -> dict[str, float]:
    """Bytes that are there all the time."""
    weights = setup.shape.parameters() + setup.adapters()
    tensors = 2 * setup.shape.layers * len(setup.shape.matrices()) if setup.lora else setup.shape.tensors()
    share = setup.ranks if setup.strategy == "fsdp2" else 1
    has_reference = setup.reference and not setup.lora
    m, trained = setup.stored, setup.trained()
    return {
        "weights": m * weights / share,
        "reference": m * setup.shape.parameters() / share if has_reference else 0,
        "gradients": m * trained / share,
        "optimizer": 2 * m * trained / share + 4 * tensors,
        "DDP buckets": m * trained if setup.strategy == "ddp" else 0,
        "vLLM": setup.vllm * setup.gpu * GIB,
    }


def computed_weights(setup: Setup) -> float:
    """Bytes of weights in another form than stored, while a micro-batch is computed."""
    shape = setup.shape
    if setup.strategy == "fsdp2":
        units = 2 * shape.layer_parameters() + shape.root_parameters()
        return units * (setup.computed + (0 if setup.lora else setup.computed + 4))
    if not setup.autocast:
        return 0
    matrices = 2 * (shape.layer_weights() + setup.adapters() // shape.layers)
    return matrices * (1 if setup.checkpointing else shape.layers)


def layer_activations(setup: Setup) -> float:
    """Bytes that a layer keeps for backward: N tokens in groups of a prompt of p and R rows of f = completion - 1.

    - two norms: the input as the residual is held, and the output in c, which autocast makes anew for each of the 3
      and 2 matrices that read it; query and key norms keep their input in c; 4 bytes a row for the scales;
    - attention: queries, keys, values and outputs in c as the calls get them, the prompt's keys and values once for
      each row; 4 H a token for the normalizers; and the mask as c-byte numbers;
    - the input of the output projection, and gate, its activation, up and their product: c (H D + 4 I) a token.

    Adapters add c rank a matrix. Short groups, computed in one call, take up to 20 % less.
    """
    shape, c, mixed = setup.shape, setup.computed, setup.autocast
    e, h, k = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = e * (2 * setup.residual + (5 if mixed else 2) * c) + 8
    if shape.qk_norm:
        norms += (h + k) * c + 4 * (shape.heads + shape.kv_heads)
    matrices = c * (h + 4 * shape.intermediate + setup.lora * len(shape.matrices()))
    groups, rows = setup.micro_batch()
    p, f = setup.prompt, setup.completion - 1
    n = p + rows * f
    # The prompt's queries and keys are views of all of them, but where autocast copies them.
    seen = p * (h + k) + n * k if mixed else n * (h + 2 * k)
    attention = c * (seen + p * h + rows * (2 * f * h + 2 * (p + f) * k) + f * (p + f)) + 4 * shape.heads * n
    return groups * (n * (norms + matrices) + attention)


def activations(setup: Setup) -> float:
    """Bytes kept for backward: all layers', or with checkpointing their inputs and one layer's; and the last norm's."""
    shape, (groups, rows) = setup.shape, setup.micro_batch()
    tokens = groups * (setup.prompt + rows * (setup.completion - 1))
    inputs = tokens * shape.hidden * setup.residual
    last = tokens * shape.hidden * setup.residual
    rotations = 2 * tokens * shape.head_dim * setup.residual
    layer, layers = layer_activations(setup), shape.layers
    return last + rotations + (layers * inputs + layer if setup.checkpointing else layers * layer)


def head(setup: Setup) -> float:
    """Bytes around the logits of the M completion tokens of a micro-batch.

    Hidden states c M E; under autocast the head's copy 2 V E; a chunk of logits, its gradient, and that in c;
    probabilities that are kept for backward, in c; and, when the head is trained and no part of FSDP2's root, its
    gradient c V E, under autocast in fp32 too.
    """
    shape, c = setup.shape, setup.computed
    groups, rows = setup.micro_batch()
    tokens = groups * rows * setup.completion
    matrix = shape.vocabulary * shape.hidden
    copy = 2 * matrix if setup.autocast else 0
    logits = min(tokens, chunk_tokens_for(shape.vocabulary)) * shape.vocabulary * (8 + c)
    gradient = 0 if setup.lora or setup.strategy == "fsdp2" else (c + (4 if setup.autocast else 0)) * matrix
    kept = c * min(tokens * shape.vocabulary, KEPT_LOGITS)
    return c * tokens * shape.hidden + copy + logits + kept + gradient


def cache(setup: Setup) -> float:
    """Bytes of keys and values of all rows at full length: 2 L K D numbers a token in c, every row for itself."""
    tokens = setup.prompts * setup.group * (setup.prompt + setup.completion)
    return kv_elements(setup.shape) * tokens * setup.computed


def rollouts(setup: Setup) -> float:
    """Bytes of sampling by the embedded engine: :func:`cache`, logits in c and fp32, and a block of probabilities.

    FSDP2 gathers all weights for it in c bytes, or with ``gather`` off two layers and the root.
    """
    weights = 0.0
    if setup.strategy == "fsdp2":
        gathered = computed_weights(replace(setup, lora=1))
        weights = setup.computed * setup.shape.parameters() if setup.gather else gathered
    if setup.vllm:
        return weights
    logits = setup.prompts * setup.group * setup.shape.vocabulary * (setup.computed + 4)
    return weights + cache(setup) + logits + 8 * LOGITS_BUDGET


def parts(setup: Setup) -> dict[str, float]:
    """Bytes a GPU by part; ``total`` counts the larger of training and sampling."""
    always, sampling = static(setup), rollouts(setup)
    training = {
        "computed weights": computed_weights(setup),
        "activations": activations(setup),
        "head": head(setup),
    }
    used = sum(always.values()) + max(sum(training.values()), sampling)
    overhead = 1.5 * GIB + 0.05 * (used - always["vLLM"])
    return always | training | {"rollouts": sampling, "overhead": overhead, "total": used + overhead}


def fits(setup: Setup) -> bool:
    """Whether the total is within the GPU's memory, and vLLM's share holds its bf16 weights."""
    enough = not setup.vllm or setup.vllm * setup.gpu * GIB > 2.2 * setup.shape.parameters()
    return enough and parts(setup)["total"] <= setup.gpu * GIB


def alternatives(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Changes in the order of what they cost, each on top of those before it; more ranks share the same prompts."""
    prompts = setup.prompts * setup.ranks
    row, group = (setup.prompt + rows * setup.completion for rows in (1, setup.group))
    changes: list[dict[str, object]] = [{}, {"micro_batch_tokens": group}, {"checkpointing": True}]
    changes.append({"micro_batch_tokens": row})
    for ranks in (2, 4, 8, 16, 32, 64):
        if ranks >= setup.ranks and prompts >= ranks:
            sharded = {"strategy": "fsdp2", "ranks": ranks, "prompts": prompts // ranks}
            changes += [{**sharded, "gather": gather} for gather in (True, False)]
    made: dict[str, object] = {}
    for change in changes:
        made |= change
        new = {name: value for name, value in made.items() if value != getattr(setup, name)}
        yield " ".join(_option(*item) for item in new.items()), replace(setup, **new)  # type: ignore[arg-type]


def _option(name: str, value: object) -> str:
    option = name.replace("_", "-")
    return f"--{'' if value else 'no-'}{option}" if isinstance(value, bool) else f"--{option} {value}"


def recommendation(setup: Setup) -> str:
    """One sentence: that it fits, or the cheapest change that makes it fit."""
    for words, other in alternatives(setup):
        if fits(other):
            spare = other.gpu - parts(other)["total"] / GIB
            return f"Fits{', with ' + words if words else ''}: {spare:.1f} GiB a GPU to spare."
    adapters = next((words for words, other in alternatives(replace(setup, lora=32)) if fits(other)), None)
    if setup.lora == 0 and adapters is not None:
        return f"Does not fit with all weights trained; with {f'--lora 32 {adapters}'.strip()} it does."
    return (
        "Does not fit: fewer prompts, shorter completions, another share for vLLM or larger GPUs are needed."
    )


def table(setup: Setup) -> str:
    """The parts as markdown, with the recommendation."""
    rows = [f"| {name} | {size / GIB:.2f} |" for name, size in parts(setup).items() if size]
    return "\n".join(["| part | GiB a GPU |", "| --- | --- |", *rows, "", recommendation(setup)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", required=True, help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--strategy", choices=get_args(Strategy), default="single")
    parser.add_argument("--precision", choices=get_args(Precision), default="bf16-mixed")
    for name in ("reference", "gather"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--checkpointing", action="store_true")
    for name in ("ranks", "lora", "prompts", "group", "prompt", "completion", "micro_batch_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Setup, name))
    for name in ("vllm", "gpu"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Setup, name))
    options = vars(parser.parse_args(arguments))
    try:
        setup = Setup(Shape.read(options.pop("model")), **options)
    except ValueError as error:
        parser.error(str(error))
    print(table(setup))


if __name__ == "__main__":
    main()
