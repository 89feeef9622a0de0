"""RMS normalization in few passes over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``w * x / sqrt(mean(x^2) + eps)``, the mean over the last dimension in float32 at least; differentiable once.

    Args:
        x: ``[..., E]``.
        weight: ``[E]``.
        eps: added to the mean of squares.

    Returns:
        ``[..., E]``: the normalized ``x``, rounded to its own dtype, times ``weight``.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call, no-any-return]
    return _normalized(x, weight, eps)[0]


def _normalized(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and the factor ``[..., 1]`` of ``x`` in it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    least = torch.scalar_tensor(eps, dtype=wide.dtype, device=x.device)
    factor = torch.addcmul(least, length, length, value=1 / x.shape[-1]).rsqrt_()
    normalized = (wide * factor).to(x.dtype)
    return normalized.mul_(weight) if weight.dtype is x.dtype else normalized * weight, factor


class _RMSNorm(torch.autograd.Function):
    """The gradient is layer normalization's, whose kernel takes any mean (here 0) and factor, but for one term.

    With ``n = x r`` and ``r`` the factor, layer normalization has
    ``dx = r (g w - mean(g w) - n mean(g w n))``, and here ``mean(g w)`` is not subtracted.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, factor = _normalized(x, weight, eps)
        ctx.save_for_backward(x, weight, factor)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, factor = ctx.saved_tensors
        grad, wide, scale = (operand.to(factor.dtype) for operand in (grad, x, weight))
        need_x, need_weight, _ = ctx.needs_input_grad
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad,
            wide,
            scale.shape,
            torch.zeros_like(factor),
            factor,
            scale,
            None,
            [need_x, need_weight, False],
        )
        if need_x:
            with torch.autocast(x.device.type, enabled=False):
                mean = (grad @ scale)[..., None].mul_(factor).div_(x.shape[-1])
            grad_x = grad_x.add_(mean).to(x.dtype)
        return grad_x, grad_weight.to(weight.dtype) if need_weight else None, None
