"""What the processes of a run have to agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lit_madrl.learners.rows import MicroBatch
from lit_madrl.policy.policy import Policy
from lit_madrl.policy.sharding import local_weights


def global_sum(values: Sequence[float], device: torch.device) -> list[float]:
    """Each value summed over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor]


def of_all_ranks(value: Any, ranks: int) -> list[Any]:
    """The values of all ranks, by rank."""
    values: list[Any] = [value] * ranks
    if ranks > 1:
        dist.all_gather_object(values, value)
    return values


def equally_many(batches: list[MicroBatch], policy: Policy) -> list[MicroBatch]:
    """As many micro-batches as the rank with most has, if ``policy`` is sharded: each forward is then collective.

    What is added has weight 0: it costs time in which the other ranks compute as well, and changes nothing.
    """
    if policy.sharding is None:
        return batches
    last = batches[-1]
    most = torch.tensor(len(batches), device=last.weights.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    spare = replace(last, weights=torch.zeros_like(last.weights))
    return [*batches, *[spare] * (int(most) - len(batches))]


def bit_sums(policies: Sequence[Policy]) -> list[int]:
    """For each weight the sum of its bits as integers: exact, so equal on every device and however it is divided."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    weights = [w.contiguous() for policy in policies for w in local_weights(policy)]
    if not weights:
        return []
    sums = torch.stack([w.view(kinds[w.element_size()]).sum(dtype=torch.int64) for w in weights])
    if any(policy.sharding is not None for policy in policies):
        dist.all_reduce(sums)
    values: list[int] = sums.tolist()
    return values
