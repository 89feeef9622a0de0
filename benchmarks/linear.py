"""GFLOP/s of float32 linear layers on a CPU by every way PyTorch offers, for value, input and weight gradient.

    python benchmarks/linear.py --json benchmarks/results/linear.json

The ways take turns, each call long enough to time, in CPU seconds of the process; medians. ``ours`` is what
``lit_madrl.functional.linear`` chooses. "train" is one forward and backward through autograd.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe
from lit_madrl.functional.linear import linear, matmul_transposed, transposed_matmul

SHAPES = {  # in x out
    "tiny": [(128, 128), (128, 384), (384, 128), (128, 2048)],
    "25m": [(384, 384), (384, 1024), (1024, 384), (384, 32_000)],
    "SmolLM2-135M": [(576, 192), (576, 576), (576, 1536), (1536, 576), (576, 49_152)],
    "Qwen": [(896, 151_936)],
}
ROWS = (1, 16, 64, 256, 1024, 4096)
MOST_LOGITS = 2**26  # larger outputs are left out

Ways = dict[str, Callable[[], Any]]


def conv(x: Tensor, w: Tensor) -> Tensor:
    """As a 1 x 1 convolution over an image of one column, channels last."""
    return F.conv2d(x.T[None, :, :, None], w[:, :, None, None])[0, :, :, 0].T


def mkldnn_tensor(x: Tensor, w: Tensor) -> Tensor:
    """The public road to oneDNN's linear: by tensors in its layout, copied there and back."""
    return F.linear(x.to_mkldnn(), w).to_dense()


def operator(x: Tensor, w: Tensor) -> Tensor:
    """The private operator itself, whatever the size."""
    return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")


def ways(rows: int, fed: int, out: int) -> dict[str, Ways]:
    """For each kind of product the ways to compute it."""
    x, w, g = torch.randn(rows, fed), torch.randn(out, fed), torch.randn(rows, out)
    trained = [t.clone().requires_grad_() for t in (x, w)]
    return {
        "forward": {
            "F.linear": lambda: F.linear(x, w),
            "conv2d": lambda: conv(x, w),
            "to_mkldnn": lambda: mkldnn_tensor(x, w),
            "operator": lambda: operator(x, w),
            "ours": lambda: matmul_transposed(x, w),
        },
        "input gradient": {
            "matmul": lambda: g @ w,
            "operator": lambda: operator(g, w.T),
            "ours": lambda: matmul_transposed(g, w.T),
        },
        "weight gradient": {
            "matmul": lambda: g.T @ x,
            "operator": lambda: operator(g.T, x.T),
            "ours": lambda: transposed_matmul(g, x),
        },
        "train": {
            "F.linear": lambda: torch.autograd.grad(F.linear(*trained), trained, g),
            "ours": lambda: torch.autograd.grad(linear(*trained), trained, g),
        },
    }


def rates(functions: Ways, flops: float, seconds: float, repeats: int) -> dict[str, float]:
    """GFLOP/s of each function; ``seconds`` for each in all."""
    numbers = {name: max(1, int(seconds / repeats / _seconds(f, 1))) for name, f in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(_seconds(function, numbers[name]))
    return {name: round(flops / statistics.median(taken) / 1e9, 3) for name, taken in times.items()}


def _seconds(function: Callable[[], Any], number: int) -> float:
    function()
    begun = time.process_time()
    for _ in range(number):
        function()
    return max((time.process_time() - begun) / number, 1e-9)


def measure(
    models: Sequence[str], sizes: Sequence[int], seconds: float, repeats: int
) -> list[dict[str, Any]]:
    """One row a model, shape and number of rows."""
    found = []
    for model in models:
        for fed, out in SHAPES[model]:
            for rows in sizes:
                if rows * out > MOST_LOGITS:
                    continue
                row: dict[str, Any] = {"model": model, "rows": rows, "in": fed, "out": out}
                for kind, functions in ways(rows, fed, out).items():
                    flops = 2.0 * rows * fed * out * (3 if kind == "train" else 1)
                    row[kind] = rates(functions, flops, seconds, repeats)
                print(row, flush=True)
                found.append(row)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=0.1, help="for each way of each product")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = measure(options.models, options.rows, options.seconds, options.repeats)
    if options.json:
        command = shlex.join(["python", "benchmarks/linear.py", *sys.argv[1:]])
        result = {"command": command, "machine": describe("torch"), "gflops": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
