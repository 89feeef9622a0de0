"""What every reward shaper must hold: subclass ``RewardShaperContract`` with a ``shaper`` fixture."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from lit_madrl.rewards.base import RewardShaper
from lit_madrl.types import Scores

NUM_CATEGORIES = 3
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def example_scores(groups: int = 6, size: int = 4, seed: int = 0) -> Scores:
    """Random scores with off-support and, in the last group, inserted rollouts; one group all off-support."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (groups, size), generator=generator)

    category = draw(-1, NUM_CATEGORIES)
    category[0] = -1
    on_policy = torch.ones(groups, size, dtype=torch.bool)
    on_policy[-1, : size // 2] = False
    return Scores(category, draw(0, 2).float(), draw(0, 2).float(), on_policy)


def example_targets(groups: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    """Uniform, peaked and zero-holding targets in turn."""
    rows = [(1 / 3, 1 / 3, 1 / 3), (0.7, 0.2, 0.1), (0.6, 0.4, 0.0)]
    return torch.tensor([rows[p % 3] for p in range(groups)], dtype=dtype)


def select(scores: Scores, groups: slice | Tensor, rows: slice | Tensor = slice(None)) -> Scores:
    """The scores of some groups, their rollouts picked or reordered."""
    return Scores(**{f.name: getattr(scores, f.name)[groups][:, rows] for f in fields(Scores)})


class RewardShaperContract:
    """The suite; K = 3 throughout."""

    @pytest.fixture
    def shaper(self) -> RewardShaper:
        raise NotImplementedError

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("device", DEVICES)
    def test_shape_dtype_device_and_finiteness(
        self, shaper: RewardShaper, dtype: torch.dtype, device: str
    ) -> None:
        scores, targets = example_scores().to(device), example_targets(dtype=dtype).to(device)
        rewards = shaper.to(device)(scores, targets)
        assert rewards.shape == scores.category.shape
        assert rewards.dtype == dtype
        assert rewards.device.type == device
        assert not rewards.requires_grad
        assert rewards.isfinite().all()

    def test_single_and_double_precision_agree(self, shaper: RewardShaper) -> None:
        single = shaper(example_scores(), example_targets(dtype=torch.float32))
        double = shaper(example_scores(), example_targets())
        torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_inputs_are_not_mutated(self, shaper: RewardShaper, dtype: torch.dtype) -> None:
        scores, targets = example_scores(), example_targets(dtype=dtype)
        before, targets_before = copy.deepcopy(scores), targets.clone()
        shaper(scores, targets).add_(1)  # nor shared with the result
        assert torch.equal(targets, targets_before)
        for field in fields(Scores):
            assert torch.equal(getattr(scores, field.name), getattr(before, field.name))

    def test_permuting_a_group_permutes_its_rewards(self, shaper: RewardShaper) -> None:
        scores, targets = example_scores(), example_targets()
        order = torch.tensor([2, 0, 3, 1])
        permuted = shaper(select(scores, slice(None), order), targets)
        torch.testing.assert_close(permuted, shaper(scores, targets)[:, order], rtol=1e-12, atol=1e-12)

    def test_a_group_does_not_see_other_groups(self, shaper: RewardShaper) -> None:
        scores, targets = example_scores(), example_targets()
        together = shaper(scores, targets)
        for p in range(len(targets)):
            alone = shaper(select(scores, slice(p, p + 1)), targets[p : p + 1])
            torch.testing.assert_close(together[p : p + 1], alone, rtol=1e-12, atol=1e-12)

    def test_off_support_reward_does_not_depend_on_the_rest_of_the_group(self, shaper: RewardShaper) -> None:
        scores = Scores.build(torch.tensor([[-1, 0, 0, 1], [-1, 2, -1, -1]]), correct=torch.ones(2, 4))
        rewards = shaper(scores, example_targets(2))
        off_support = rewards[scores.category == -1]
        assert (off_support == off_support[0]).all()

    def test_inserted_rollouts_leave_the_rewards_of_the_others_alone(self, shaper: RewardShaper) -> None:
        category = torch.tensor([[0, 0, 1, 2]])
        on_policy = torch.tensor([[True, True, True, False]])
        scores = replace(Scores.build(category), on_policy=on_policy)
        without = select(scores, slice(None), slice(3))
        targets = example_targets(2)[1:]
        with_it = shaper(scores, targets)
        assert with_it.isfinite().all()
        torch.testing.assert_close(with_it[:, :3], shaper(without, targets), rtol=1e-12, atol=1e-12)

    def test_deterministic_and_free_of_state(self, shaper: RewardShaper) -> None:
        first = shaper(example_scores(), example_targets())
        shaper(example_scores(seed=1), example_targets())
        assert torch.equal(first, shaper(example_scores(), example_targets()))

    def test_pickles(self, shaper: RewardShaper) -> None:
        restored = pickle.loads(pickle.dumps(shaper))
        assert torch.equal(
            restored(example_scores(), example_targets()), shaper(example_scores(), example_targets())
        )

    def test_works_in_inference_mode(self, shaper: RewardShaper) -> None:
        expected = shaper(example_scores(), example_targets())
        with torch.inference_mode():
            assert torch.equal(shaper(example_scores(), example_targets()), expected)

    def test_warnings_are_sentences(self, shaper: RewardShaper) -> None:
        for target in example_targets(3):
            assert all(isinstance(warning, str) for warning in shaper.warnings(target, 4))
