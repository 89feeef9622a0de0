"""The divergence that a perfect policy still shows, because its frequencies are estimated from a sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_madrl.functional.divergences import jensen_shannon, validate_target


def _multinomial_counts(probabilities: Tensor, draws: int, simulations: int, seed: int) -> Tensor:
    """Counts ``[simulations, K]`` of ``draws`` draws, as a chain of binomials (memory free of ``draws``)."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.full((simulations,), float(draws), dtype=torch.float64)
    # Mass of this category and all later ones, summed as the chain needs it: the last share is exactly 1.
    tail = probabilities.flip(0).cumsum(0).flip(0)
    counts = []
    for mass, remaining in zip(probabilities.tolist(), tail.tolist(), strict=True):
        share = min(1.0, mass / remaining) if mass > 0 else 0.0
        counts.append(torch.binomial(left, torch.full_like(left, share), generator=generator))
        left = left - counts[-1]
    return torch.stack(counts, dim=-1)


def estimator_floor(
    target: Sequence[float] | Tensor, draws: int, simulations: int = 16384, seed: int = 0
) -> float:
    """Mean Jensen-Shannon divergence (nats) of ``draws`` draws from a target ``[K]`` to it, by simulation.

    Measured divergences are to be read against this floor: no policy can be expected below it. About
    (K' - 1) / (8 draws) with K' categories of positive mass. Equal arguments give equal values.

    Raises:
        ValueError: ``target`` is not a distribution, ``draws`` or ``simulations`` is below 1.
    """
    for name, count in (("draws", draws), ("simulations", simulations)):
        if count < 1:
            raise ValueError(f"{name}: expected an integer >= 1, got {count!r}")
    probabilities = torch.as_tensor(target, dtype=torch.float64, device="cpu").detach()
    if probabilities.ndim != 1:
        raise ValueError(f"target: expected one distribution [K], got shape {list(probabilities.shape)}")
    validate_target(probabilities, probabilities.shape[0])
    frequencies = _multinomial_counts(probabilities, draws, simulations, seed) / draws
    return float(jensen_shannon(probabilities, frequencies).mean())
