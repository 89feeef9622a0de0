"""Batches for the metric contract: unequal prompts, off-support, one prompt without valid samples."""

from __future__ import annotations

import torch

from tests.helpers.metric_contract import Batch

SAMPLES: tuple[Batch, ...] = (
    {"policy": torch.tensor([[0, 0, 1, 2], [-1, -1, -1, -1]])},
    {"policy": torch.tensor([[2, -1, 1, 1]])},
    {"policy": torch.tensor([[1, 1, -1, 0], [0, 2, 0, 2], [-1, 2, 1, 0]])},
)
MASS: tuple[Batch, ...] = (
    {"policy": torch.tensor([[0.5, 0.2, 0.2], [0.1, 0.6, 0.3]])},
    {"policy": torch.tensor([[0.25, 0.25, 0.4]])},
    {"policy": torch.tensor([[0.3, 0.3, 0.1], [0.2, 0.1, 0.7]])},
)
_TARGETS = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])


def with_targets(batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
    """The batches with all-positive targets ``[P, 3]`` that differ from prompt to prompt."""
    return tuple({**batch, "targets": _TARGETS[: len(batch["policy"])].clone()} for batch in batches)
