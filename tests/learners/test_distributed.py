"""Two processes with half a batch each are one process with all of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.learning import assert_same
from tests.helpers.processes import run_ranks
from tests.learners.distributed import SCENARIOS

Results = dict[str, Any]


@pytest.fixture(scope="module", params=["ddp", "sharded"])
def ranks(
    request: pytest.FixtureRequest, tiny_choice: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Results, Results]:
    """What each of two processes reports of all scenarios; they are started once a strategy."""
    output = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.learners.distributed", tiny_choice, output, request.param)
    first, second = (torch.load(output / f"rank{rank}.pt", weights_only=False) for rank in range(2))
    return first, second


@cache
def on_one_process(name: str, folder: Path) -> dict[str, Any]:
    return SCENARIOS[name](folder, 1)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_equal_one(name: str, ranks: tuple[Results, Results], tiny_choice: Path) -> None:
    expected = on_one_process(name, tiny_choice)
    for got in (ranks[0][name], ranks[1][name]):
        assert got.keys() == expected.keys()
        for step, gradients in enumerate(expected.get("gradients", [])):
            assert_same(got["gradients"][step], gradients, atol=1e-5)
        if "weights" in expected:
            assert_same(got["weights"], expected["weights"], atol=1e-5)
            assert got["cursor"] == expected["cursor"]
        assert len(got["logged"]) == len(expected["logged"])
        for values, wanted in zip(got["logged"], expected["logged"], strict=True):
            assert values == pytest.approx(wanted, rel=1e-3, abs=1e-5, nan_ok=True)


def test_the_dead_rank_is_dead(ranks: tuple[Results, Results]) -> None:
    """The scenarios are what they say."""
    assert ranks[0]["grpo"]["logged"][0]["train/dead_groups"] == 0
    assert ranks[0]["a dead rank"]["logged"][0]["train/dead_groups"] == 0.5


def test_ranks_sample_differently_and_resume_each_its_own_stream(ranks: tuple[Results, Results]) -> None:
    sampled = []
    for results in ranks:
        (weights, completions, cursor), (resumed_weights, resumed_completions, resumed_cursor) = results[
            "resumed"
        ]["runs"]
        assert cursor == resumed_cursor == 24
        assert resumed_completions == completions[3:]
        assert all(torch.equal(resumed_weights[name], tensor) for name, tensor in weights.items())
        sampled.append(completions)
    assert sampled[0] != sampled[1]
    # Not because their prompts differ: the random streams do.
    assert not torch.equal(ranks[0]["resumed"]["stream"], ranks[1]["resumed"]["stream"])
    first, second = (results["resumed"]["runs"][0][0] for results in ranks)
    assert all(torch.equal(first[name], second[name]) for name in first)
