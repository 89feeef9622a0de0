"""Products with ``x W^T`` by oneDNN where PyTorch would take slower kernels.

On AMD's CPUs MKL multiplies float32 matrices at less than half of their speed, and no public function of PyTorch
takes oneDNN instead. ``torch.ops.mkldnn._linear_pointwise`` does, but is private: it is tried on a small example
first, and where anything about it is different everything here is ``F.linear``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_log = logging.getLogger(__name__)

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

LEAST_WORK = 2**21
"""Multiply-adds from which oneDNN is faster: its call takes about 20 microseconds more."""

LEAST_SIDE = 4
"""Fewer rows, and no kernel computes faster than it reads the weight."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, equal to it up to rounding in value and gradients.

    Where oneDNN computes it, it can be differentiated once.

    Args:
        x: ``[..., E]``.
        weight: ``[V, E]``.
        bias: ``[V]`` or None.

    Returns:
        ``[..., V]``.
    """
    kernel = _kernel_for(x, weight)
    if kernel is None or (bias is not None and bias.dtype != weight.dtype):
        return F.linear(x, weight, bias)
    trained = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and trained:
        return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call, no-any-return]
    return kernel(x, weight, bias)


def matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    """``a b^T`` of ``[N, E]`` and ``[M, E]``, outside autograd."""
    kernel = _kernel_for(a, b)
    return a @ b.T if kernel is None else kernel(a, b, None)


def transposed_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a^T b`` of ``[N, V]`` and ``[N, E]``, outside autograd: the gradient of a weight."""
    if _kernel_for(a.T, b.T) is None:
        return a.T @ b
    # oneDNN's operator copies a transposed first operand: let that be the smaller one.
    return matmul_transposed(b.T, a.T).T if a.shape[1] > b.shape[1] else matmul_transposed(a.T, b.T)


def pays(rows: int, inner: int, columns: int) -> bool:
    """Whether oneDNN is the faster one for ``[rows, inner] x [inner, columns]``."""
    return min(rows, inner, columns) >= LEAST_SIDE and rows * inner * columns >= LEAST_WORK


@cache
def onednn() -> Product | None:
    """oneDNN's ``x W^T + b`` of float32 on this machine's CPU; None where MKL is as fast or the operator is not there."""
    name = torch.cpu.get_capabilities().get("cpu_name", "")
    kernel, reason = None, f"not needed on {name}"
    if "AMD" in name:
        kernel, reason = _checked_operator()
    _log.debug("float32 linear layers on CPU: %s", reason)
    return kernel


def _checked_operator() -> tuple[Product | None, str]:
    try:
        operator: Any = torch.ops.mkldnn._linear_pointwise.default

        def kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return operator(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]

        x, weight, bias = (torch.linspace(-1, 1, n, dtype=torch.float32) for n in (2 * 3 * 5, 7 * 5, 7))
        x, weight = x.view(2, 3, 5), weight.view(7, 5)
        for a, b in ((x, weight), (x, weight.view(5, 7).T), (x[0].T.contiguous().T, weight)):
            got, expected = kernel(a, b, bias), F.linear(a, b, bias)
            if got.shape != expected.shape or not torch.allclose(got, expected, rtol=0, atol=1e-5):
                return None, "F.linear, as oneDNN's operator computes something else"
    except Exception as error:  # a private operator: whatever it does, there is another way
        return None, f"F.linear, as oneDNN's operator fails: {error}"
    return kernel, "oneDNN"


def _kernel_for(x: Tensor, weight: Tensor) -> Product | None:
    """oneDNN's operator, for plain float32 tensors on a CPU that are large enough."""
    if not (x.is_cpu and weight.is_cpu and x.dtype is weight.dtype is torch.float32):
        return None
    if weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        return None  # F.linear's matter, and its error message
    columns, inner = weight.shape
    if not pays(x.numel() // max(inner, 1), inner, columns):
        return None
    plain = all(type(operand) in (Tensor, nn.Parameter) for operand in (x, weight))  # no DTensor, say
    if not plain or torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.enabled:  # type: ignore[attr-defined]
        return None
    return onednn()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        kernel = onednn()
        assert kernel is not None  # `linear` asked
        return kernel(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = None if weight is None else matmul_transposed(rows, weight.T).view(*grad.shape[:-1], -1)
        grad_weight = None if x is None else transposed_matmul(rows, x.flatten(0, -2))
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias
