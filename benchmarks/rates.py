"""How fast a machine multiplies matrices of given shapes and moves bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.shapes import Shape

PRODUCTS = ("forward", "input gradient", "weight gradient")
MOST_ROWS = 2048
"""Larger products run at the same rate, so their time is scaled."""

Seconds = dict[str, dict[str, float]]


def clock(device: str = "cpu") -> float:
    """Seconds, when the device is done; of this process alone where one thread of a CPU computes."""
    if device == "cuda":
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def best(function: Callable[[], Any], device: str = "cpu", at_least: float = 0.1) -> float:
    """Seconds of the fastest of several calls, 3 and ``at_least`` seconds of them, after one to warm up."""
    function()
    marks = [clock(device)]
    while len(marks) < 4 or marks[-1] - marks[0] < at_least:
        function()
        marks.append(clock(device))
    return max(min(b - a for a, b in pairwise(marks)), 1e-9)


def kernels() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Functions for ``x @ w.T`` on a CPU: the public one, and oneDNN's, which float32 else reaches through no API."""
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"F.linear": F.linear}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        linear = torch.ops.mkldnn._linear_pointwise
        found["oneDNN"] = lambda x, w: linear(x, w, None, "none", [], "")
    return found


def products(shape: Shape, rows: int, head_rows: int, dtype: torch.dtype, kinds: Sequence[str]) -> Seconds:
    """Seconds of the model's products by (rows x in x out), all layers' together, and the head's.

    The weights of all layers take turns, so that they come from where the model's would.

    Args:
        shape: the model's.
        rows: N of the layers' [N, in] x [in, out].
        head_rows: N of the head's.
        dtype: of all operands.
        kinds: those of ``PRODUCTS`` to time.

    Returns:
        For each shape ``GFLOP`` of one kind, and seconds by "kind, kernel".
    """
    numbers: dict[tuple[int, int, int], int] = {(head_rows, shape.hidden, shape.vocabulary): 1}
    for matrix in shape.matrices().values():
        numbers[rows, *matrix] = numbers.get((rows, *matrix), 0) + shape.layers
    seconds: Seconds = {}
    for (n, fed, out), number in numbers.items():
        few = min(n, MOST_ROWS)
        x, g = torch.randn(few, fed).to(dtype), torch.randn(few, out).to(dtype)
        weights = [torch.randn(out, fed).to(dtype) for _ in range(number)]
        operands = {
            "forward": [(x, w) for w in weights],
            "input gradient": [(g, w.T) for w in weights],
            "weight gradient": [(g.T, x.T) for _ in weights],
        }
        by_name = seconds[f"{n} x {fed} x {out}"] = {"GFLOP": 2e-9 * n * fed * out * number}
        for kind in kinds:
            for kernel, linear in kernels().items():
                by_name[f"{kind}, {kernel}"] = best(_sweep(linear, operands[kind])) * n / few
    return seconds


def _sweep(linear: Callable[[Tensor, Tensor], Tensor], operands: list[tuple[Tensor, Tensor]]) -> Any:
    def run() -> None:
        for x, w in operands:
            linear(x, w)

    return run


def fastest(seconds: Seconds, kinds: Sequence[str], kernel: str = "") -> tuple[float, float]:
    """Seconds of all products of ``kinds``, each by the fastest kernel (or by ``kernel``), and their FLOPs a second."""
    times = [
        min(value for name, value in by_name.items() if name.startswith(kind) and name.endswith(kernel))
        for by_name in seconds.values()
        for kind in kinds
    ]
    gflop = len(kinds) * sum(by_name["GFLOP"] for by_name in seconds.values())
    return sum(times), 1e9 * gflop / sum(times)


def bandwidth(size: int, device: str = "cpu") -> dict[str, float]:
    """Bytes a second of reading ``size`` bytes, and of copying them (bytes read and written)."""
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    read = best(lambda: torch.dot(source, source), device)
    return {"read": size / read, "copy": 2 * size / best(lambda: target.copy_(source), device)}
