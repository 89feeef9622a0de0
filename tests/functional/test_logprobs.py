"""Selected log-probabilities against log_softmax and gather."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_madrl.functional import logprobs as module
from lit_madrl.functional.logprobs import chunk_tokens_for, selected_logprobs

N, E, V = 7, 5, 11


def example(dtype: torch.dtype = torch.float64, n: int = N) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and ids."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return draw(n, E), draw(V, E), draw(V), torch.randint(0, V, (n,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)


@pytest.mark.parametrize("chunk_tokens", [None, 1, 3, N, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("biased", [False, True])
def test_value_and_gradient(chunk_tokens: int | None, temperature: float, biased: bool) -> None:
    hidden, weight, bias, ids = example()
    inputs = (hidden, weight, bias) if biased else (hidden, weight)

    def selected(*inputs: Tensor) -> Tensor:
        hidden, weight, *rest = inputs
        return selected_logprobs(
            hidden, weight, ids, *rest, temperature=temperature, chunk_tokens=chunk_tokens
        )

    expected = plain(hidden, weight, ids, bias if biased else None, temperature)
    assert selected(*inputs).dtype == torch.float64
    torch.testing.assert_close(selected(*inputs), expected, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(selected, inputs)


@given(
    n=st.integers(1, 9),
    chunk=st.integers(1, 10),
    temperature=st.floats(0.2, 5),
    wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
)
@settings(max_examples=50, deadline=None)
def test_gradients_only_where_asked(
    n: int, chunk: int, temperature: float, wanted: tuple[bool, bool, bool]
) -> None:
    hidden, weight, bias, ids = example(n=n)
    inputs = [x.detach().requires_grad_(on) for x, on in zip((hidden, weight, bias), wanted, strict=True)]
    got = selected_logprobs(inputs[0], inputs[1], ids, inputs[2], temperature, chunk)
    expected = plain(inputs[0], inputs[1], ids, inputs[2], temperature)
    weights = torch.linspace(-1, 2, n, dtype=torch.float64)
    asked = [x for x in inputs if x.requires_grad]
    for ours, theirs in zip(
        torch.autograd.grad((weights * got).sum(), asked),
        torch.autograd.grad((weights * expected).sum(), asked),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk", [3, N])
def test_backward_can_be_repeated(chunk: int) -> None:
    """What is kept for backward is not destroyed by it."""
    hidden, weight, _, ids = example()
    total = selected_logprobs(hidden, weight, ids, chunk_tokens=chunk).sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


class Watch:
    """Counts the logits that are made, and those still alive when more are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.alive_before: list[int] = []
        self.made: list[weakref.ref[Tensor]] = []
        original = module._logits

        def watched(*args: Any) -> Tensor:
            self.alive_before.append(self.alive())
            logits = original(*args)
            self.rows.append(logits.shape[0])
            self.made.append(weakref.ref(logits))
            return logits

        monkeypatch.setattr(module, "_logits", watched)

    def alive(self) -> int:
        return sum(logits() is not None for logits in self.made)


def test_only_a_chunk_of_logits_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, ids = example()
    watch = Watch(monkeypatch)
    total = selected_logprobs(hidden, weight, ids, bias, chunk_tokens=3).sum()
    assert watch.rows == [3, 3, 1]
    assert watch.alive() == 0  # made again in backward
    total.backward()
    assert watch.rows == [3, 3, 1] * 2
    assert max(watch.alive_before) <= 1


def test_a_single_chunk_is_kept_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, ids = example()
    watch = Watch(monkeypatch)
    total = selected_logprobs(hidden, weight, ids, bias, chunk_tokens=N).sum()
    assert watch.rows == [N]
    assert watch.alive() == 1
    total.backward()
    assert watch.rows == [N]
    del total
    assert watch.alive() == 0


def test_nothing_is_kept_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, ids = example()
    watch = Watch(monkeypatch)
    with torch.no_grad():
        result = selected_logprobs(hidden, weight, ids, bias)
    assert not result.requires_grad
    assert watch.alive() == 0


def test_nothing_of_vocabulary_size_but_a_chunk_is_saved() -> None:
    """Also not inside autograd: everything saved for backward is N x E, V x E or smaller."""
    hidden, weight, _, ids = example()
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
        selected_logprobs(hidden, weight, ids, chunk_tokens=1)
    assert saved
    assert max(saved) == V * E < N * V


def test_the_budget_holds_at_any_vocabulary() -> None:
    assert chunk_tokens_for(151_936) * 151_936 <= module.LOGITS_BUDGET
    assert chunk_tokens_for(module.LOGITS_BUDGET * 2) == 1


@pytest.mark.parametrize("chunk", [3, N])
def test_autocast_computes_in_bfloat16_and_returns_float32(chunk: int) -> None:
    hidden, weight, bias, ids = example(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = selected_logprobs(hidden, weight, ids, bias, chunk_tokens=chunk)
    got.sum().backward()
    expected = selected_logprobs(hidden.detach().bfloat16(), weight.detach().bfloat16(), ids, bias.detach())
    assert got.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert torch.equal(got.detach(), expected)
    reference = example(torch.float32)
    plain(reference[0], reference[1], ids, reference[2], 1.0).sum().backward()
    for ours, theirs in zip((hidden, weight, bias), reference[:3], strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.05)


def test_bfloat16_hidden_states_on_float32_weights() -> None:
    hidden, weight, _, ids = example(torch.float32)
    got = selected_logprobs(hidden.bfloat16(), weight, ids)
    assert got.dtype == torch.float32
    got.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    got = selected_logprobs(hidden, weight, torch.tensor([0, 0]))
    assert got.tolist() == [0.0, -2e4]
    got.sum().backward()
    assert hidden.grad.tolist() == [[0.0], [2.0]]  # type: ignore[union-attr]


def test_no_tokens() -> None:
    hidden, weight, _, ids = example()
    got = selected_logprobs(hidden[:0], weight, ids[:0])
    assert got.shape == (0,)
    got.sum().backward()
    assert not weight.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_must_be_positive(temperature: float) -> None:
    hidden, weight, _, ids = example()
    with pytest.raises(ValueError, match=r"temperature: expected a number > 0, got"):
        selected_logprobs(hidden, weight, ids, temperature=temperature)
