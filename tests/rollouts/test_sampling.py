from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lit_madrl.rollouts import sampling as module
from lit_madrl.rollouts.sampling import draw, inverse_cdf, truncate
from lit_madrl.types import Sampling
from tests.helpers.engine_contract import distribution

INF = math.inf
ALMOST_ONE = math.nextafter(1, 0)

finite = st.floats(-40, 40, width=32)
rows = st.lists(st.one_of(finite, st.just(-INF), st.just(0.0)), min_size=1, max_size=30).filter(
    lambda row: max(row) > -INF
)
uniforms = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, ALMOST_ONE, 2.0**-53, 0.5]))
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1.0),
)


def column(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@given(rows, st.lists(uniforms, min_size=1, max_size=5), samplings)
def test_a_token_of_probability_zero_is_never_drawn(row: list[float], us: list[float], how: Sampling) -> None:
    tokens, logprobs = draw(torch.tensor([row]), column(us), how)
    assert logprobs.isfinite().all()
    assert (logprobs <= 0).all()
    for token in tokens[0].tolist():
        assert row[token] > -INF
        if how.top_k:
            assert sum(x > row[token] for x in row) < how.top_k
        if how.temperature == 0:
            assert row[token] == max(row)


@pytest.mark.parametrize("zeros", [0, 1, 3])
@pytest.mark.parametrize("u", [0.0, 2.0**-60, ALMOST_ONE, 1.0])
def test_zeros_at_either_end_are_out_of_reach(zeros: int, u: float) -> None:
    probabilities = torch.tensor([[0.0] * zeros + [0.25, 0.0, 0.75] + [0.0] * zeros])
    token = int(inverse_cdf(probabilities, column([u])))
    assert token == (zeros if u < 0.5 else zeros + 2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_is_the_first_token_whose_sum_exceeds_u(weights: list[float], u: float) -> None:
    total = math.fsum(weights)
    if total < 1e-3:
        return
    probabilities = [w / total for w in weights]
    token = int(inverse_cdf(column(probabilities), column([u])))
    assert math.fsum(probabilities[:token]) <= u + 1e-9
    assert math.fsum(probabilities[: token + 1]) >= u - 1e-9
    assert probabilities[token] > 0


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(0, 1)), min_size=1, max_size=60).filter(
        lambda w: sum(w) > 0.1
    ),
    st.lists(st.one_of(st.just(0.0), st.floats(0, 1)), min_size=2, max_size=2),
    st.integers(1, 9),
)
def test_sums_of_spans_find_what_sums_of_columns_find(
    weights: list[float], us: list[float], span: int
) -> None:
    probabilities = torch.tensor([weights]) / sum(weights)
    found = []
    for width in (10**6, span):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SPAN", width)
            found.append([int(inverse_cdf(probabilities, column([u]))) for u in (*us, ALMOST_ONE)])
    assert found[0] == found[1]


@pytest.mark.parametrize("draws", [1, 3])
def test_a_large_vocabulary(draws: int) -> None:
    """Some of 5000 columns, which is no multiple of the span, at the uniforms in the middle of their shares."""
    probabilities = torch.full((2, 5000), 1 / 4096)
    probabilities[0, :904] = 0
    probabilities[1, 4096:] = 0
    tokens = torch.tensor([[904, 1700, 4999], [0, 127, 4095]])[:, :draws]
    uniforms = (tokens - torch.tensor([[904], [0]]) + 0.5).double() / 4096
    assert torch.equal(inverse_cdf(probabilities, uniforms), tokens)


def test_inverse_cdf_by_hand() -> None:
    us = [0.0, 0.249, 0.25, 0.49, 0.5, 0.99]
    assert inverse_cdf(torch.tensor([[0.25, 0.25, 0.5]]), column(us)).tolist() == [[0, 0, 1, 1, 2, 2]]


def test_sums_are_exact_in_any_order() -> None:
    """What makes the cumulative sum monotone on devices that add in parallel."""
    torch.manual_seed(0)
    weights = ((3 * torch.randn(4, 5000)).softmax(-1) * module.RESOLUTION).round_().double()
    backwards = weights.flip(-1).cumsum(-1)[:, -1]
    assert torch.equal(weights.cumsum(-1)[:, -1], backwards)
    assert torch.equal(weights.sum(-1), backwards)
    assert (backwards / module.RESOLUTION - 1).abs().max() < 1e-5


@given(rows, samplings.filter(lambda s: s.temperature > 0.1), uniforms)
def test_logprobs_are_renormalized(row: list[float], how: Sampling, u: float) -> None:
    if len(set(row)) < len(row):
        return  # which of equal tokens top-k keeps is not said
    row = torch.tensor(row).tolist()
    expected = distribution(row, how)
    mass = [math.fsum(sorted(expected, reverse=True)[:n]) for n in range(len(row) + 1)]
    if any(abs(m - how.top_p) < 1e-6 for m in mass) and how.top_p < 1:
        return  # rounding decides
    tokens, logprobs = draw(torch.tensor([row]), column([u]), how)
    assert logprobs.item() == pytest.approx(math.log(expected[int(tokens)]), abs=1e-4)


def test_truncate_by_hand() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    assert truncate(logits, top_k=2).exp().isclose(torch.tensor([[0.0, 0.4, 0.0, 0.3]])).all()
    assert truncate(logits, top_p=0.65).exp().isclose(torch.tensor([[0.0, 0.4, 0.0, 0.3]])).all()
    assert truncate(logits, top_p=0.75).exp().isclose(torch.tensor([[0.0, 0.4, 0.2, 0.3]])).all()
    assert truncate(logits, top_p=0.01).exp().isclose(torch.tensor([[0.0, 0.4, 0.0, 0.0]])).all()
    assert torch.equal(truncate(logits, top_k=4, top_p=1.0), logits)
    # top-p sees what top-k left: .4/.7 = .57 < .6
    assert truncate(logits, top_k=2, top_p=0.6).isfinite().tolist() == [[False, True, False, True]]


def test_top_k_keeps_k_of_equal_tokens() -> None:
    assert truncate(torch.zeros(2, 9), top_k=4).isfinite().sum(-1).tolist() == [4, 4]


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    logits, us = torch.randn(23, 11), torch.rand(23, 3, dtype=torch.float64)
    for how in (Sampling(), Sampling(temperature=0), Sampling(temperature=0.5, top_k=4, top_p=0.9)):
        whole = draw(logits, us, how)
        for block in (1, 50):
            monkeypatch.setattr(module, "BLOCK", block)
            parts = draw(logits, us, how)
            assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
        monkeypatch.undo()


def test_inputs_are_not_mutated_and_half_precision_is_raised() -> None:
    logits, us = torch.randn(3, 7).bfloat16(), torch.rand(3, 2, dtype=torch.float64)
    copies = logits.clone(), us.clone()
    tokens, logprobs = draw(logits, us, Sampling(temperature=0.5, top_k=3, top_p=0.9))
    assert (tokens.dtype, logprobs.dtype) == (torch.long, torch.float)
    assert torch.equal(logits, copies[0])
    assert torch.equal(us, copies[1])


@pytest.mark.parametrize(
    "how", [Sampling(), Sampling(temperature=0.5, top_k=2, top_p=0.9), Sampling(temperature=0)]
)
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_bad_logits_are_counted(how: Sampling, bad: float) -> None:
    logits = torch.zeros(5, 4)
    logits[1, 2] = bad
    logits[3] = -INF
    with pytest.raises(RuntimeError, match=r"logits.* 2 of 5 rows"):
        draw(logits, torch.zeros(5, 1, dtype=torch.float64), how)


def test_a_tiny_temperature_does_not_overflow() -> None:
    logits = torch.tensor([[3e3, 1e3, -INF]])
    tokens, logprobs = draw(logits, column([0.0, ALMOST_ONE]), Sampling(temperature=1e-37))
    assert tokens.tolist() == [[0, 0]]
    assert not logprobs.any()


def test_probabilities_below_the_resolution_are_zero() -> None:
    assert inverse_cdf(torch.tensor([[1e-20, 1.0, 1e-20]]), column([0.0, 1.0])).tolist() == [[1, 1]]
    assert inverse_cdf(torch.tensor([[1e-15, 1.0, 0.0]]), column([0.0])).tolist() == [[0]]
