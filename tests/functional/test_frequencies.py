from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_madrl.functional import category_counts, group_frequencies, group_total, leave_one_out_frequencies

CATEGORY = torch.tensor([[0, 0, 2, -1], [-1, -1, -1, -1]])


def reference_leave_one_out(category, num_categories, over, counted):
    """Slow: for each rollout, the frequencies of the group with that rollout struck from it."""
    rows = []
    for i in range(len(category)):
        rest = [c for j, c in enumerate(category) if counted[j] and j != i]
        n = len([c for c in rest if c >= 0]) if over == "valid" else len(rest)
        rows.append([rest.count(z) / n if n else 0.0 for z in range(num_categories)])
    return torch.tensor(rows)


def test_golden_counts_and_frequencies():
    assert category_counts(CATEGORY, 3).tolist() == [[2, 0, 1], [0, 0, 0]]
    assert group_total(CATEGORY, "valid").tolist() == [3, 0]
    assert group_total(CATEGORY, "all").tolist() == [4, 4]
    torch.testing.assert_close(
        group_frequencies(CATEGORY, 3, "valid"), torch.tensor([[2 / 3, 0, 1 / 3], [0, 0, 0]])
    )
    torch.testing.assert_close(
        group_frequencies(CATEGORY, 3, "all"), torch.tensor([[0.5, 0, 0.25], [0, 0, 0]])
    )


def test_golden_leave_one_out():
    expected = torch.tensor([[0.5, 0, 0.5], [0.5, 0, 0.5], [1, 0, 0], [2 / 3, 0, 1 / 3]])
    torch.testing.assert_close(leave_one_out_frequencies(CATEGORY, 3, "valid")[0], expected)
    expected = torch.tensor([[1 / 3, 0, 1 / 3], [1 / 3, 0, 1 / 3], [2 / 3, 0, 0], [2 / 3, 0, 1 / 3]])
    torch.testing.assert_close(leave_one_out_frequencies(CATEGORY, 3, "all")[0], expected)


def test_a_lone_rollout_has_nobody_left_and_gives_zeros():
    assert leave_one_out_frequencies(torch.tensor([[1, -1]]), 2, "valid").tolist() == [[[0, 0], [0, 1]]]
    assert leave_one_out_frequencies(torch.tensor([[1]]), 2, "all").tolist() == [[[0, 0]]]


def test_rollouts_that_are_not_counted_change_no_frequency_and_no_denominator():
    counted = torch.tensor([[True, False, True, True]])
    category = torch.tensor([[0, 1, 1, -1]])
    assert category_counts(category, 2, counted).tolist() == [[1, 1]]
    assert group_frequencies(category, 2, "valid", counted).tolist() == [[0.5, 0.5]]
    torch.testing.assert_close(group_frequencies(category, 2, "all", counted), torch.full((1, 2), 1 / 3))
    # The rollout that is not counted has nothing to leave out.
    assert leave_one_out_frequencies(category, 2, "valid", counted)[0, 1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("over", ["valid", "all"])
@settings(deadline=None, max_examples=60)
@given(data=st.lists(st.tuples(st.integers(-1, 3), st.booleans()), min_size=1, max_size=7))
def test_against_slow_reference(over, data):
    category, counted = [c for c, _ in data], [m for _, m in data]
    tensors = torch.tensor([category]), torch.tensor([counted])
    expected = reference_leave_one_out(category, 4, over, counted)
    torch.testing.assert_close(leave_one_out_frequencies(tensors[0], 4, over, tensors[1])[0], expected)
    # Leaving out a rollout that was never in the group is the plain estimate.
    appended = reference_leave_one_out([*category, 0], 4, over, [*counted, False])[-1]
    torch.testing.assert_close(group_frequencies(tensors[0], 4, over, tensors[1])[0], appended)


@pytest.mark.parametrize(("bad", "got"), [(3, "3"), (-2, "-2")])
def test_category_out_of_range(bad, got):
    with pytest.raises(ValueError, match=rf"category: expected -1 or 0..2 for 3 categories, got {got}"):
        category_counts(torch.tensor([[0, bad]]), 3)


def test_unknown_denominator():
    with pytest.raises(ValueError, match="over: expected 'valid' or 'all', got 'some'"):
        group_frequencies(CATEGORY, 3, "some")
