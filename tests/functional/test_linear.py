"""Linear layers by oneDNN against F.linear and float64."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lit_madrl.functional import linear as module
from lit_madrl.functional.linear import linear, matmul_transposed, onednn, pays, transposed_matmul
from tests.helpers.onednn import forced_onednn


@pytest.fixture
def calls() -> Iterator[list[Any]]:
    """oneDNN for products of any size; the shapes it was called with."""
    with forced_onednn() as calls:
        yield calls


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def results(function: Any, operands: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Value and gradients."""
    operands = [operand.detach().requires_grad_() for operand in operands]
    value = function(*operands)
    return [value.detach(), *torch.autograd.grad(value, operands, grad.to(value.dtype))]


@given(
    leading=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    inner=st.integers(1, 90),
    outer=st.integers(1, 90),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_errors_are_those_of_f_linear(
    calls: list[Any], leading: list[int], inner: int, outer: int, biased: bool, seed: int
) -> None:
    operands = [draw(*leading, inner, seed=seed), draw(outer, inner, seed=seed + 1)]
    operands += [draw(outer, seed=seed + 2)] if biased else []
    grad = draw(*leading, outer, seed=seed + 3)
    before = len(calls)
    ours = results(linear, operands, grad)
    assert len(calls) == before + 3  # the value and two gradients
    theirs = results(F.linear, operands, grad)
    exact = results(F.linear, [operand.double() for operand in operands], grad)
    # What is summed may cancel, and F.linear be exact by luck: one rounding of the summed terms is always allowed.
    terms = results(F.linear, [operand.double().abs() for operand in operands], grad.abs())
    for a, b, c, size in zip(ours, theirs, exact, terms, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype == torch.float32
        assert (a - c).norm() <= 2 * (b - c).norm() + torch.finfo(torch.float32).eps * size.norm()


@pytest.mark.parametrize(("rows", "inner", "outer"), [(300, 128, 384), (96, 384, 128), (40, 384, 1024)])
def test_at_the_sizes_of_models(rows: int, inner: int, outer: int) -> None:
    assert pays(rows, inner, outer, module.LEAST_TRAINED)
    operands = [draw(rows, inner), draw(outer, inner, seed=1), draw(outer, seed=2)]
    grad = draw(rows, outer, seed=3)
    exact = results(F.linear, [operand.double() for operand in operands], grad)
    both = zip(results(linear, operands, grad), results(F.linear, operands, grad), exact, strict=True)
    for a, b, c in both:
        assert (a - c).norm() <= 2 * (b - c).norm()


@pytest.mark.parametrize(
    ("rows", "inner", "outer"), [(64, 2048, 96), (64, 96, 2048), (2048, 64, 96), (64, 1500, 96)]
)
def test_long_sums_are_as_exact(rows: int, inner: int, outer: int) -> None:
    """Over the features, the outputs (input gradient) and the rows (weight gradient)."""
    test_at_the_sizes_of_models(rows, inner, outer)


def test_gradients_only_where_asked(calls: list[Any]) -> None:
    x, weight, bias = draw(6, 5), draw(4, 5, seed=1), draw(4, seed=2)
    for wanted in ((True, False, False), (False, True, False), (False, False, True), (True, True, True)):
        operands = [t.clone().requires_grad_(on) for t, on in zip((x, weight, bias), wanted, strict=True)]
        calls.clear()
        value = linear(*operands)
        kept = [tensor is not None for tensor in value.grad_fn.saved_tensors]  # type: ignore[union-attr]
        assert kept == [wanted[1], wanted[0]]  # a frozen layer keeps no activations
        value.sum().backward()
        assert len(calls) == 1 + wanted[0] + wanted[1]
        assert [operand.grad is not None for operand in operands] == list(wanted)


def test_nothing_is_saved_without_gradient(calls: list[Any]) -> None:
    x, weight = draw(6, 5), draw(4, 5).requires_grad_()
    with torch.no_grad():
        assert not linear(x, weight).requires_grad
    assert linear(x, weight.detach()).grad_fn is None
    assert len(calls) == 2


def test_a_second_derivative_is_refused(calls: list[Any]) -> None:
    x = draw(6, 5).requires_grad_()
    (first,) = torch.autograd.grad(linear(x, draw(4, 5)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def layouts() -> dict[str, tuple[Tensor, Tensor]]:
    wide = draw(24, 30, seed=1)
    return {
        "transposed input": (draw(5, 6).T, wide[:4, :5].contiguous()),
        "every second feature": (draw(6, 10)[:, ::2], wide[:4, :5].contiguous()),
        "transposed weight": (draw(6, 5), wide[:5, :4].contiguous().T),
        "columns of a weight": (draw(6, 5), wide[:, 3:8]),
        "every second row": (draw(6, 30), wide[::2]),
        "expanded weight": (draw(6, 5), draw(1, 5).expand(4, 5)),
        "expanded input": (draw(1, 5).expand(6, 5), wide[:4, :5].contiguous()),
        "permuted batch": (draw(3, 5, 2).permute(2, 0, 1), wide[:4, :5].contiguous()),
        "one row": (draw(1, 5), wide[:4, :5].contiguous()),
    }


@pytest.mark.parametrize("name", layouts())
def test_any_layout(calls: list[Any], name: str) -> None:
    x, weight = layouts()[name]
    before = x.clone(), weight.clone()
    grad = draw(1).expand(*x.shape[:-1], len(weight))  # as from a sum
    for a, b in zip(results(linear, [x, weight], grad), results(F.linear, [x, weight], grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert calls
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


def test_no_rows(calls: list[Any]) -> None:
    value, grad_x, grad_weight = results(linear, [draw(2, 0, 5), draw(4, 5)], draw(2, 0, 4))
    assert value.shape == (2, 0, 4)
    assert grad_x.shape == (2, 0, 5)
    assert not grad_weight.any()


@pytest.mark.parametrize(("wide", "narrow"), [(9, 4), (4, 9), (5, 5)])
def test_products_outside_autograd(calls: list[Any], wide: int, narrow: int) -> None:
    a, b = draw(7, wide), draw(7, narrow, seed=1)
    torch.testing.assert_close(transposed_matmul(a, b), a.T @ b)
    torch.testing.assert_close(matmul_transposed(a.T, b.T), a.T @ b)
    assert len(calls) == 2
    assert torch.equal(transposed_matmul(a.double(), b.double()), a.double().T @ b.double())
    assert len(calls) == 2


class Marked(Tensor):
    """Some tensor that is more than its numbers."""


def others() -> dict[str, tuple[Tensor, Tensor]]:
    x, weight = draw(6, 5), draw(4, 5)
    return {
        "bfloat16": (x.bfloat16(), weight.bfloat16()),
        "float64": (x.double(), weight.double()),
        "one vector": (x[0], weight),
        "a vector of weights": (x, weight[0]),
        "a subclass": (x, weight.as_subclass(Marked)),
        "meta": (x.to("meta"), weight.to("meta")),
    }


@pytest.mark.parametrize("name", others())
def test_all_else_is_f_linear(calls: list[Any], name: str) -> None:
    x, weight = others()[name]
    got, expected = linear(x, weight), F.linear(x, weight)
    assert got.dtype == expected.dtype
    assert got.is_meta or torch.equal(got, expected)
    assert not calls


def test_autocast_and_pytorchs_own_switch_are_respected(calls: list[Any]) -> None:
    x, weight = draw(6, 5), draw(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        linear(x, weight)
    assert not calls
    linear(x, nn.Parameter(weight))
    assert calls


def test_shapes_that_do_not_fit_are_f_linears_error(calls: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(draw(6, 5), draw(4, 6))


def test_small_products_are_left_alone() -> None:
    assert not pays(127, 128, 128)
    assert pays(128, 128, 128)
    assert not pays(128, 128, 128, module.LEAST_TRAINED)
    assert not pays(3, 4096, 4096)


def test_flops_are_counted(calls: list[Any]) -> None:
    x, weight = draw(2, 3, 5).requires_grad_(), draw(4, 5).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        linear(x, weight).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 3) * 5 * 4
    assert len(calls) == 3


# What decides about the private operator


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "AMD EPYC"})
    onednn.cache_clear()
    yield
    onednn.cache_clear()


def wrong_operator(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return F.linear(x, weight) + 1e-3


def broken_operator(*args: Any) -> Tensor:
    raise RuntimeError("other arguments now")


@pytest.mark.parametrize(
    ("namespace", "reason"),
    [
        (SimpleNamespace(), "fails"),
        (SimpleNamespace(_linear_pointwise=SimpleNamespace(default=wrong_operator)), "something else"),
        (SimpleNamespace(_linear_pointwise=SimpleNamespace(default=broken_operator)), "other arguments now"),
    ],
)
def test_without_the_operator_it_is_f_linear(
    undecided: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    namespace: Any,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", namespace)
    x, weight = draw(256, 128), draw(128, 128).requires_grad_()
    with caplog.at_level(logging.DEBUG, module.__name__):
        for _ in range(3):
            assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]  # once, and for who asks
    assert reason in caplog.text


def test_a_cpu_that_mkl_serves_well_is_left_alone(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "Intel Xeon"})
    assert onednn() is None
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    onednn.cache_clear()
    assert onednn() is None
