"""Selected log-probabilities against log_softmax and gather."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_madrl.functional import logprobs as module
from lit_madrl.functional.logprobs import chunk_tokens_for, selected_logprobs, tile_shape, tiles

N, E, V = 7, 5, 11
TILES = [1, 6, 12, 100]  # of 7 x 11 logits, when 3 columns are the fewest


@pytest.fixture(autouse=True)
def narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEWEST_COLUMNS", 3)


def example(dtype: torch.dtype = torch.float64, n: int = N) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and ids."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return draw(n, E), draw(V, E), draw(V), torch.randint(0, V, (n,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)


@pytest.mark.parametrize("budget", [0, 40, 10**6])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("biased", [False, True])
def test_value_and_gradient(
    tile: int, budget: int, temperature: float, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_TILE", tile)
    monkeypatch.setattr(module, "KEPT_LOGITS", budget)
    hidden, weight, bias, ids = example()
    inputs = (hidden, weight, bias) if biased else (hidden, weight)

    def selected(*inputs: Tensor) -> Tensor:
        hidden, weight, *rest = inputs
        return selected_logprobs(hidden, weight, ids, *rest, temperature=temperature)

    expected = plain(hidden, weight, ids, bias if biased else None, temperature)
    assert selected(*inputs).dtype == torch.float64
    torch.testing.assert_close(selected(*inputs), expected, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(selected, inputs)


@given(
    n=st.integers(1, 9),
    tile=st.integers(1, 100),
    budget=st.integers(0, 100),
    temperature=st.floats(0.2, 5),
    wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_gradients_only_where_asked(
    n: int, tile: int, budget: int, temperature: float, wanted: tuple[bool, bool, bool]
) -> None:
    hidden, weight, bias, ids = example(n=n)
    inputs = [x.detach().requires_grad_(on) for x, on in zip((hidden, weight, bias), wanted, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "KEPT_LOGITS", budget)
        patch.setattr(module, "CPU_TILE", tile)
        got = selected_logprobs(inputs[0], inputs[1], ids, inputs[2], temperature)
    expected = plain(inputs[0], inputs[1], ids, inputs[2], temperature)
    weights = torch.linspace(-1, 2, n, dtype=torch.float64)
    asked = [x for x in inputs if x.requires_grad]
    for ours, theirs in zip(
        torch.autograd.grad((weights * got).sum(), asked),
        torch.autograd.grad((weights * expected).sum(), asked),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("budget", [0, 40, 10**6])
def test_backward_can_be_repeated(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for backward is not destroyed by it."""
    monkeypatch.setattr(module, "KEPT_LOGITS", budget)
    monkeypatch.setattr(module, "CPU_TILE", 12)
    hidden, weight, _, ids = example()
    total = selected_logprobs(hidden, weight, ids).sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@given(
    n=st.integers(0, 40),
    vocabulary=st.integers(1, 40),
    size=st.integers(1, 200),
    most_rows=st.none() | st.integers(1, 50),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tiles_cover_all_logits_once(n: int, vocabulary: int, size: int, most_rows: int | None) -> None:
    ids = torch.randint(0, vocabulary, (n,), generator=torch.Generator().manual_seed(n))
    seen, found = torch.zeros(n, vocabulary), torch.full((n,), -1)
    for tile in tiles(ids, vocabulary, tile_shape(n, vocabulary, size, most_rows)):
        block = seen[tile.rows, tile.columns]
        assert block.numel() <= size
        assert block.shape[0] <= (most_rows or n)
        block += 1
        own = tile.token.squeeze(1)[tile.inside] + tile.columns.start
        found[tile.rows] = found[tile.rows].masked_scatter(tile.inside, own)
    assert (seen == 1).all()
    assert torch.equal(found, ids)


class Watch:
    """Counts the tiles that are made, and those still alive when more are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.alive_before: list[int] = []
        self.made: list[weakref.ref[Tensor]] = []
        original = module._logits

        def watched(*args: Any) -> Tensor:
            self.alive_before.append(self.alive())
            logits = original(*args)
            self.shapes.append(tuple(logits.shape))
            self.made.append(weakref.ref(logits))
            return logits

        monkeypatch.setattr(module, "_logits", watched)

    def alive(self) -> int:
        return sum(logits() is not None for logits in self.made)


def test_what_the_budget_does_not_hold_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, ids = example()
    watch = Watch(monkeypatch)
    monkeypatch.setattr(module, "KEPT_LOGITS", 50)
    monkeypatch.setattr(module, "CPU_TILE", 21)
    total = selected_logprobs(hidden, weight, ids, bias).sum()
    assert watch.shapes == [(7, 3), (7, 3), (7, 3), (7, 2)]
    total.backward()
    assert watch.shapes[4:] == [(7, 3), (7, 2)]  # 42 of 77 were kept
    assert max(watch.alive_before) <= 1


@pytest.mark.parametrize("budget", [0, 42, 50, 10**6])
def test_no_more_than_the_budget_is_saved(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides what is N x E, V x E or a number a row."""
    monkeypatch.setattr(module, "KEPT_LOGITS", budget)
    monkeypatch.setattr(module, "CPU_TILE", 21)
    hidden, weight, _, ids = example()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        selected_logprobs(hidden, weight, ids)
    tiles_saved = sum(t.numel() for t in saved if t.dim() == 2 and t.shape[1] != E)
    assert tiles_saved == {0: 0, 42: 42, 50: 42, 10**6: N * V}[budget]


def test_nothing_is_kept_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, ids = example()
    watch = Watch(monkeypatch)
    with torch.no_grad():
        result = selected_logprobs(hidden, weight, ids, bias)
    assert not result.requires_grad
    assert watch.alive() == 0


def test_whole_vocabularies_in_chunks() -> None:
    assert chunk_tokens_for(151_936) * 151_936 <= module.LOGITS_BUDGET
    assert chunk_tokens_for(module.LOGITS_BUDGET * 2) == 1


def test_memory_at_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 151,936 tokens no tensor is larger than a tile, beside the weight's gradient."""
    monkeypatch.undo()

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() != weight_bytes:
                    self.elements = max(self.elements, tensor.numel())
            return out

    hidden, weight = torch.ones(600, 2, requires_grad=True), torch.zeros(151_936, 2, requires_grad=True)
    weight_bytes = weight.untyped_storage().nbytes()
    with Largest() as largest:
        selected_logprobs(hidden, weight, torch.arange(600)).sum().backward()
    assert 600 * module.FEWEST_COLUMNS <= largest.elements <= module.CPU_TILE
    assert torch.allclose(hidden.grad, torch.zeros(1))  # type: ignore[arg-type]


def test_float32_is_as_exact_as_log_softmax() -> None:
    hidden, weight = (
        torch.randn(n, 64, generator=torch.Generator().manual_seed(n), requires_grad=True)
        for n in (300, 9000)
    )
    ids = torch.arange(300) * 30

    def outcome(function: Any, dtype: torch.dtype) -> list[Tensor]:
        value = function(hidden.to(dtype), weight.to(dtype), ids, None, 1.0)
        return [value, *torch.autograd.grad(value.square().sum(), (hidden, weight))]

    exact = outcome(plain, torch.float64)
    both = zip(outcome(selected_logprobs, torch.float32), outcome(plain, torch.float32), exact, strict=True)
    for ours, theirs, true in both:
        assert (ours - true).norm() <= 2 * (theirs - true).norm() + 1e-7 * true.norm()


@pytest.mark.parametrize("tile", [12, 100])
def test_autocast_computes_in_bfloat16_and_returns_float32(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_TILE", tile)
    hidden, weight, bias, ids = example(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = selected_logprobs(hidden, weight, ids, bias)
    got.sum().backward()
    halves = hidden.detach().bfloat16(), weight.detach().bfloat16()
    expected = selected_logprobs(*halves, ids, bias.detach())
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


def test_tiles_without_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits hundreds of nats apart: neither the inverse of a tile's share nor its product is infinite."""
    monkeypatch.setattr(module, "CPU_TILE", 4 * 3)
    hidden = torch.tensor([[1.0], [-1.0], [0.5], [0.0]], requires_grad=True)
    weight = torch.linspace(-300, 300, 9)[:, None].requires_grad_()
    ids = torch.tensor([0, 0, 4, 8])
    got = torch.autograd.grad(selected_logprobs(hidden, weight, ids).sum(), (hidden, weight))
    expected = torch.autograd.grad(plain(hidden, weight, ids, None, 1.0).sum(), (hidden, weight))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_confident_tokens_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 - p = 1e-4 keeps bfloat16's relative precision, though p itself would round to 1."""
    monkeypatch.setattr(module, "CPU_TILE", 2 * 3)
    hidden = torch.tensor([[1.0, 0.0], [1.0, 0.5]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[9.2, 1.0], [0.0, 2.0], [0.0, -1.0], [-1.0, 0.5]], dtype=torch.bfloat16)
    ids = torch.tensor([0, 0])
    (got,) = torch.autograd.grad(selected_logprobs(hidden, weight, ids).sum(), hidden)
    exact = hidden.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(plain(exact, weight.double(), ids, None, 1.0).sum(), exact)
    assert float(expected.abs().max()) < 3e-3
    torch.testing.assert_close(got.double(), expected, rtol=0.02, atol=1e-7)
