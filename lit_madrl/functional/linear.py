"""Products with ``x W^T`` by oneDNN where PyTorch would take slower kernels.

On AMD's CPUs MKL multiplies float32 matrices at less than half of their speed, and no public function of PyTorch
takes oneDNN instead. ``torch.ops.mkldnn._linear_pointwise`` does, but is private: it is tried on a small example
first, and where anything about it is different everything here is ``F.linear``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import flop_registry, register_flop_formula

_log = logging.getLogger(__name__)

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

LEAST_WORK = 2**21
"""Multiply-adds of a product from which oneDNN is faster: a call takes some 15 microseconds more."""

LEAST_TRAINED = 2**22
"""The same where autograd records a function of ours: as much again for Python's part in it."""

LEAST_PACKED = 2**19
"""The same for a weight in oneDNN's own layout, of at least a sixteenth as many elements."""

LEAST_SIDE = 4
"""Fewer rows, and no kernel computes faster than it reads the weight."""

LONGEST_SUM = 1024
"""Terms that oneDNN adds at once: over more its rounding error passes twice that of MKL, which adds in pieces."""


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
    trained = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    kernel = _kernel_for(x, weight, LEAST_TRAINED if trained else LEAST_WORK)
    if kernel is None or (bias is not None and bias.dtype != weight.dtype):
        return F.linear(x, weight, bias)
    if trained:
        return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call, no-any-return]
    return kernel(x, weight, bias)


class PackedWeight:
    """A copy of a ``[V, E]`` weight in the layout that oneDNN computes with, which it else makes in every product.

    With few rows that takes a third of the time. For products outside autograd, while the weight does not change.

    Args:
        weight: the weight.
        bias: ``[V]`` or None.
        dtype: of the products, float32 or bfloat16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        # As in `checked_operator`; bfloat16 products add in float32, in pieces of their own.
        pieces = torch.split(weight, LONGEST_SUM, 1) if dtype is torch.float32 else (weight,)
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self.pieces = [reorder(piece.detach().to(dtype).contiguous()) for piece in pieces]
        self.widths = [piece.shape[1] for piece in pieces]
        self.bias = None if bias is None else bias.detach().to(dtype)
        self.dtype, self.columns = dtype, weight.shape[0]

    @staticmethod
    def worth(weights: Sequence[Tensor], dtype: torch.dtype) -> bool:
        """Whether there is anything to gain for these weights, one below the other, on this machine."""
        if not all(type(w) in (Tensor, nn.Parameter) and w.is_cpu and w.dim() == 2 for w in weights):
            return False
        alike = len({(w.shape[1], w.dtype) for w in weights}) == 1
        large = 16 * sum(w.numel() for w in weights) >= LEAST_PACKED
        return alike and large and onednn() is not None and can_pack(dtype)

    def takes(self, x: Tensor) -> bool:
        """Whether it is to be used for ``x``."""
        autocast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype
        large = x.numel() * self.columns >= LEAST_PACKED
        return dtype is self.dtype and large and x.dim() >= 2 and not torch.is_grad_enabled()

    def __call__(self, x: Tensor) -> Tensor:
        """``x W^T + b`` of ``[..., E]``."""
        multiply = torch.ops.mkldnn._linear_pointwise
        x = x.to(self.dtype)
        out: Tensor | None = None
        # Splitting takes as long as a small product.
        parts = torch.split(x, self.widths, -1) if len(self.pieces) > 1 else (x,)
        for part, piece in zip(parts, self.pieces, strict=True):
            product = multiply(part, piece, self.bias if out is None else None, "none", [], "")
            out = product if out is None else out.add_(product)
        assert out is not None
        return out


def matmul_transposed(a: Tensor, b: Tensor, fast: bool = True) -> Tensor:
    """``a b^T`` of ``[N, E]`` and ``[M, E]``, outside autograd; never by oneDNN's operator unless ``fast``."""
    kernel = _kernel_for(a, b) if fast else None
    return a @ b.T if kernel is None else kernel(a, b, None)


def transposed_matmul(a: Tensor, b: Tensor, fast: bool = True) -> Tensor:
    """``a^T b`` of ``[N, V]`` and ``[N, E]``, the gradient of a weight; the rest as for ``matmul_transposed``."""
    if not fast or _kernel_for(a.T, b.T) is None:
        return a.T @ b
    # oneDNN's operator copies a transposed first operand: let that be the smaller one.
    return matmul_transposed(b.T, a.T).T if a.shape[1] > b.shape[1] else matmul_transposed(a.T, b.T)


def pays(rows: int, inner: int, columns: int, least: int | None = None) -> bool:
    """Whether oneDNN is the faster one for ``[rows, inner] x [inner, columns]``."""
    work = rows * inner * columns
    return work >= (LEAST_WORK if least is None else least) and min(rows, inner, columns) >= LEAST_SIDE


@cache
def onednn() -> Product | None:
    """oneDNN's ``x W^T + b`` of float32 on this machine's CPU; None where MKL is as fast or it cannot be had."""
    name = torch.cpu.get_capabilities().get("cpu_name", "")
    kernel, reason = None, f"not needed on {name}"
    if "AMD" in name:
        kernel, reason = checked_operator()
    _log.debug("float32 linear layers on CPU: %s", reason)
    return kernel


def checked_operator() -> tuple[Product | None, str]:
    """oneDNN's operator, if it is there and right, and what to say about it."""
    try:
        packet: Any = torch.ops.mkldnn._linear_pointwise
        operator = packet.default

        def kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            pieces = zip(torch.split(x, LONGEST_SUM, -1), torch.split(weight, LONGEST_SUM, 1), strict=True)
            out: Tensor | None = None
            for a, b in pieces:
                if not (b.is_contiguous() or b.T.is_contiguous()):  # an expanded gradient, say
                    b = b.contiguous()
                if out is None:
                    out = operator(a, b, bias, "none", [], "")
                else:
                    out += operator(a, b, None, "none", [], "")
            assert out is not None  # even of nothing there is one piece
            return out

        x, weight, bias = (torch.linspace(-1, 1, n, dtype=torch.float32) for n in (2 * 3 * 5, 7 * 5, 7))
        x, weight = x.view(2, 3, 5), weight.view(7, 5)
        for a, b in ((x, weight), (x, weight.view(5, 7).T), (x[0].T.contiguous().T, weight)):
            got, expected = kernel(a, b, bias), F.linear(a, b, bias)
            if got.shape != expected.shape or not torch.allclose(got, expected, rtol=0, atol=1e-5):
                return None, "F.linear, as oneDNN's operator computes something else"
        if packet not in flop_registry:  # PyTorch's counter does not know the operator
            register_flop_formula(packet)(_flops)
    except Exception as error:  # a private operator: whatever it does, there is another way
        return None, f"F.linear, as oneDNN's operator fails: {error}"
    return kernel, "oneDNN"


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes with packed weights of a dtype on this machine, tried on a small example."""
    x, weight = (torch.linspace(-1, 1, n).view(-1, 5) for n in (2 * 5, 7 * 5))
    try:
        got = PackedWeight(weight, None, dtype)(x)
    except Exception:  # a private operator: whatever it does, there is another way
        return False
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    expected = (x[:, None] * weight).sum(-1)  # not by F.linear: autocast may be on
    return got.dtype is dtype and torch.allclose(got.float(), expected, rtol=0, atol=tolerance)


def _flops(x: tuple[int, ...], weight: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def _kernel_for(x: Tensor, weight: Tensor, least: int | None = None) -> Product | None:
    """oneDNN's operator, for plain float32 tensors on a CPU that are large enough; first what refuses most often."""
    if weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        return None  # F.linear's matter, and its error message
    columns, inner = weight.shape
    if not pays(x.numel() // max(inner, 1), inner, columns, least):
        return None
    if not (x.is_cpu and weight.is_cpu and x.dtype is weight.dtype is torch.float32):
        return None
    plain = all(type(operand) in (Tensor, nn.Parameter) for operand in (x, weight))  # no DTensor, say
    if not plain or torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.enabled:
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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = None if weight is None else matmul_transposed(rows, weight.T).view(*grad.shape[:-1], -1)
        grad_weight = None if x is None else transposed_matmul(rows, x.flatten(0, -2))
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias
