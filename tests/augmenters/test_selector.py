from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lit_madrl.augmenters import PrefixSelector

F64 = torch.float64


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def indices(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def alone(sums: Tensor) -> Tensor:
    return sums


def over_ranks(sums: Tensor) -> Tensor:
    dist.all_reduce(sums)
    return sums


def same(actual: Tensor, expected: Tensor, atol: float = 1e-14) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def selector_at(*phi: float, baseline: float = 0.0, **arguments) -> PrefixSelector:
    selector = PrefixSelector(**arguments)
    selector.phi.copy_(vector(*phi))
    selector.baseline.fill_(baseline)
    return selector


def slowly(selector: PrefixSelector, levels: list[int], feedback: list[float]) -> tuple[Tensor, Tensor]:
    """phi and b after an update, continuation by continuation, with the score from autograd."""
    phi, epsilon = selector.phi.clone().requires_grad_(), selector.exploration
    total = torch.zeros_like(phi)
    for a, w in zip(levels, feedback, strict=True):
        rho = (1 - epsilon) * phi.softmax(-1) + epsilon / len(phi)
        (score,) = torch.autograd.grad(rho[a].log(), phi)
        total += (w - selector.baseline) * score
    mean = sum(feedback) / len(feedback)
    rate = selector.baseline_rate
    return phi.detach() + selector.learning_rate * total, (1 - rate) * selector.baseline + rate * mean


def test_starts_uniform():
    selector = PrefixSelector()
    same(selector.probabilities(), vector(1, 1, 1) / 3)
    assert selector.levels == (1.0, 0.5, 0.25)
    assert selector.baseline == 0


def test_probabilities_by_hand():
    # softmax(log 1, log 2, log 5) = 1/8, 2/8, 5/8; 0.8 of it and 1/15 each.
    rho = selector_at(0.0, math.log(2), math.log(5)).probabilities()
    same(rho, vector(0.1 + 1 / 15, 0.2 + 1 / 15, 0.5 + 1 / 15))


def test_update_by_hand():
    # Two levels at phi = 0: softmax 1/2, rho 1/2, score of level a = 0.8 * (e_a - 1/2). b = 0.25.
    # sum (W - b) score: level 0 twice with W 1, 0; level 1 once with W 0.5: (1 - 0.5) and (0.5 - 0.25), so
    # 0.8 * (0.5 - 0.25) / 2 = 0.1 and its opposite; eta = 0.3. mean W = 0.5.
    selector = selector_at(0.0, 0.0, baseline=0.25, levels=(1, 0.5))
    totals = selector.update(indices(0, 1, 0), vector(1.0, 0.5, 0.0), alone)
    same(selector.phi, vector(0.03, -0.03))
    same(selector.baseline, torch.tensor(0.9 * 0.25 + 0.1 * 0.5, dtype=F64))
    assert totals.counts.tolist() == [2, 1]
    assert totals.feedback.tolist() == [1.0, 0.5]
    assert totals.successes.tolist() == [1, 1]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1)), min_size=1, max_size=12),
    st.tuples(*[st.floats(-4, 4)] * 3),
    st.floats(-1, 1),
    st.sampled_from([0.0, 0.2, 0.7, 1.0]),
)
def test_update_equals_a_loop_with_autograd(continuations, phi, baseline, exploration):
    selector = selector_at(*phi, baseline=baseline, exploration=exploration)
    levels, feedback = [list(values) for values in zip(*continuations, strict=True)]
    expected_phi, expected_baseline = slowly(selector, levels, feedback)
    selector.update(indices(*levels), vector(*feedback), alone)
    same(selector.phi, expected_phi, 1e-12)
    same(selector.baseline, expected_baseline, 1e-12)


def test_the_largest_feedback_wins_and_every_level_is_still_observed():
    selector = PrefixSelector()
    for _ in range(200):
        selector.update(indices(0, 1, 2), vector(0.0, 0.5, 0.2), alone)
    rho = selector.probabilities()
    assert rho.argmax() == 1
    assert rho[1] > 0.8
    assert (rho >= 0.2 / 3).all()


def test_finite_far_from_the_start_without_exploration():
    selector = selector_at(0.0, -2000.0, exploration=0.0, levels=(1, 0.5))
    selector.update(indices(0, 1), vector(0.0, 1.0), alone)
    assert selector.phi.isfinite().all()
    assert selector.phi[1] > -2000


def test_no_continuation_changes_nothing():
    selector = selector_at(0.5, 0.0, 1.0, baseline=0.3)
    before = copy.deepcopy(selector.state_dict())
    totals = selector.update(indices(), vector(), alone)
    assert all(torch.equal(before[name], value) for name, value in selector.state_dict().items())
    assert totals.counts.tolist() == [0, 0, 0]


def test_one_level_is_always_drawn_and_never_moves():
    selector = PrefixSelector(levels=[0.25])
    assert selector.sample(5).tolist() == [0] * 5
    selector.update(indices(0, 0), vector(0.25, 0.0), alone)
    assert selector.phi.tolist() == [0.0]


def test_samples_follow_the_probabilities_and_the_generator():
    selector = selector_at(0.0, 1.0, -1.0)
    draws = [selector.sample(20_000, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    shares = draws[0].bincount(minlength=3) / 20_000
    assert (shares - selector.probabilities()).abs().max() < 0.015
    assert selector.sample(0).tolist() == []


def test_feedback():
    ratio = vector(0.5, 0.5, 0.5, math.nan)
    success, differs = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([True, False, True, True])
    assert PrefixSelector().feedback(success, differs, ratio).tolist() == [0.5, 0, 0, 0]
    assert PrefixSelector(surprisal_weighting=False).feedback(success, differs, ratio).tolist() == [
        1,
        0,
        0,
        0,
    ]
    assert PrefixSelector().feedback(True, True, 0.25).item() == 0.25
    with pytest.raises(ValueError, match=r"surprisal_ratio: expected numbers in \[0, 1\], got 1.5"):
        PrefixSelector().feedback(True, True, 1.5)


def test_state_survives_a_checkpoint_pickling_and_a_cast(tmp_path: Path):
    selector = PrefixSelector()
    selector.update(indices(0, 1, 1), vector(0.1, 0.7, 0.3), alone)
    torch.save(selector.state_dict(), tmp_path / "state.pt")
    restored = PrefixSelector()
    restored.load_state_dict(torch.load(tmp_path / "state.pt"))
    for other in (restored, pickle.loads(pickle.dumps(selector)), copy.deepcopy(selector)):
        assert torch.equal(other.phi, selector.phi)
        assert torch.equal(other.baseline, selector.baseline)
        other.update(indices(2), vector(0.2), alone)
    selector.update(indices(2), vector(0.2), alone)
    assert torch.equal(restored.phi, selector.phi)
    before = selector.phi.clone()
    nn.ModuleDict({"selector": selector}).to(torch.bfloat16)
    assert selector.phi.dtype == selector.baseline.dtype == F64
    assert torch.equal(selector.phi, before)
    assert not list(selector.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levels": ()}, r"PrefixSelector.levels: expected distinct numbers in \(0, 1\], got \(\)"),
        ({"levels": (1.0, 0.0)}, "levels"),
        ({"levels": (0.5, 0.5)}, "levels"),
        ({"exploration": -0.1}, r"PrefixSelector.exploration: expected a number in \[0, 1\], got -0.1"),
        ({"learning_rate": 0.0}, "learning_rate: expected a finite number > 0, got 0.0"),
        ({"baseline_rate": 1.1}, r"baseline_rate: expected a number in \[0, 1\], got 1.1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrefixSelector(**arguments)


@pytest.mark.parametrize(
    ("levels", "feedback", "message"),
    [
        (indices(0, 1), vector(1.0), r"expected shapes \[N\] and \[N\], got \[2\] and \[1\]"),
        (indices(3), vector(1.0), r"level_indices: expected integers in 0..2, got \[3\]"),
        (indices(-1), vector(1.0), r"level_indices: .* got \[-1\]"),
        (indices(0), vector(math.nan), r"feedback: expected finite numbers, got \[nan\]"),
    ],
)
def test_bad_batches(levels, feedback, message):
    with pytest.raises(ValueError, match=message):
        PrefixSelector().update(levels, feedback, alone)


LEVELS, FEEDBACK = indices(0, 2, 1, 1, 2), vector(0.0, 0.25, 0.5, 0.0, 0.2)
SPLITS = [slice(0, 2), slice(2, 5)], [slice(0, 5), slice(0, 0)], [slice(0, 0), slice(0, 0)]


def test_reduce_is_asked_for_the_sums():
    selector, expected = PrefixSelector(), PrefixSelector()
    selector.update(LEVELS, FEEDBACK, reduce=lambda sums: 2 * sums)
    expected.update(LEVELS.repeat(2), FEEDBACK.repeat(2), alone)
    same(selector.phi, expected.phi)
    same(selector.baseline, expected.baseline)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        selector = PrefixSelector()
        for split in SPLITS:
            selector.update(LEVELS[split[rank]], FEEDBACK[split[rank]], over_ranks)
        torch.save(selector.state_dict(), f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path: Path):
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    selector = PrefixSelector()
    for _ in range(2):
        selector.update(LEVELS, FEEDBACK, alone)
    for name, value in selector.state_dict().items():
        assert torch.equal(first[name], second[name])  # identical, not only close
        same(first[name], value)


def test_what_was_learned_about_other_levels_is_refused() -> None:
    saved = PrefixSelector((1.0, 0.5)).state_dict()
    PrefixSelector((1.0, 0.5)).load_state_dict(saved)
    with pytest.raises(
        ValueError, match=r"levels: expected the checkpoint's \[1.0, 0.5\], got \[1.0, 0.25\]"
    ):
        PrefixSelector((1.0, 0.25)).load_state_dict(saved)
