"""RMS normalization against its formula by autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lit_madrl.functional.norm import rms_norm

SHAPES = [(3,), (1, 1), (2, 5), (0, 4), (2, 3, 4), (2, 1, 3, 8)]


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x if x.dtype is torch.float64 else x.float()
    normalized = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return normalized.to(x.dtype) * weight


def operands(shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    return [x, torch.randn(shape[-1:], generator=generator).to(weight_dtype).requires_grad_()]


def test_by_hand() -> None:
    """The mean of squares of (1, 7) is 25, of (0, 0) nothing but eps."""
    got = rms_norm(torch.tensor([[1.0, 7.0], [0.0, 0.0]]), torch.tensor([10.0, -1.0]), 1e-12)
    torch.testing.assert_close(got, torch.tensor([[2.0, -1.4], [0.0, 0.0]]))
    torch.testing.assert_close(rms_norm(torch.ones(1), torch.ones(1), 3.0), torch.tensor([0.5]))


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_in_float64(shape: tuple[int, ...]) -> None:
    x, weight = operands(shape, torch.float64, torch.float64)
    got, expected = (f(x, weight, 0.1) for f in (rms_norm, formula))
    with torch.no_grad():
        assert torch.equal(rms_norm(x, weight, 0.1), got)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.linspace(-1, 2, x.numel(), dtype=torch.float64).view(shape)
    ours, theirs = (torch.autograd.grad(y, (x, weight), upstream) for y in (got, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 9),
    scale=st.floats(1e-4, 1e4),
    eps=st.sampled_from([1e-12, 1e-6, 0.1]),
)
def test_gradients_at_any_scale(rows: int, width: int, scale: float, eps: float) -> None:
    x, weight = operands((rows, width), torch.float64, torch.float64)
    expected = torch.autograd.grad(formula(scale * x, weight, eps).sin().sum(), (x, weight))
    got = torch.autograd.grad(rms_norm(scale * x, weight, eps).sin().sum(), (x, weight))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype, autocast: bool) -> None:
    """Values are rounded where the formula rounds them; gradients have their operand's dtype, also under autocast."""
    x, weight = operands((4, 70), dtype, weight_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, expected = (f(x, weight, 1e-6) for f in (rms_norm, formula))
        assert got.dtype is expected.dtype
        torch.testing.assert_close(got, expected)
        ours, theirs = (torch.autograd.grad(y.float().square().sum(), (x, weight)) for y in (got, expected))
    for name, a, b in zip(("x", "weight"), ours, theirs, strict=True):
        assert a.dtype is b.dtype
        exact = dtype is weight_dtype is torch.float32
        tolerance = 1e-5 if exact else 0.03 * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("trained", ["x", "weight"])
def test_only_what_is_trained_gets_a_gradient(trained: str) -> None:
    x, weight = operands((4, 6), torch.float64, torch.float64)
    frozen, free = (weight, x) if trained == "x" else (x, weight)
    frozen.requires_grad_(False)
    (got,) = torch.autograd.grad(rms_norm(x, weight, 0.1).exp().sum(), free)
    (expected,) = torch.autograd.grad(formula(x, weight, 0.1).exp().sum(), free)
    torch.testing.assert_close(got, expected)


def test_strided_operands() -> None:
    """Heads of a token are normalized before they are transposed, or after."""
    x, weight = operands((2, 3, 4, 8), torch.float64, torch.float64)
    turned = x.transpose(1, 2)
    got = torch.autograd.grad(rms_norm(turned, weight, 0.1).sin().transpose(1, 2).sum(), (x, weight))
    expected = torch.autograd.grad(formula(x, weight, 0.1).sin().sum(), (x, weight))
    torch.testing.assert_close(got, expected)
