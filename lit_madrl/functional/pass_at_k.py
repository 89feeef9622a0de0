"""Success measures over several samples of one problem."""

from __future__ import annotations

import torch
from torch import Tensor


def _check_counts(num_samples: Tensor | int, num_correct: Tensor | int) -> tuple[Tensor, Tensor]:
    samples, correct = torch.as_tensor(num_samples), torch.as_tensor(num_correct)
    samples = samples.to(correct.device)
    if not (samples >= 1).all():
        raise ValueError(f"num_samples: expected integers >= 1, got {samples.tolist()}")
    if not ((correct >= 0) & (correct <= samples)).all():
        raise ValueError(
            f"num_correct: expected integers in [0, num_samples = {samples.tolist()}], got {correct.tolist()}"
        )
    return samples.double(), correct.double()


def pass_at_k(num_samples: Tensor | int, num_correct: Tensor | int, k: int) -> Tensor:
    """Unbiased 1 - C(n - c, k) / C(n, k), the chance that k samples hold a correct one (arXiv:2107.03374).

    ``num_samples`` n and ``num_correct`` c broadcast to ``[...]``; the result is float64 ``[...]``.

    Raises:
        ValueError: k is below 1 or above some n, or c is outside [0, n].
    """
    samples, correct = _check_counts(num_samples, num_correct)
    if k < 1 or (samples < k).any():
        raise ValueError(f"k: expected an integer in [1, num_samples = {samples.long().tolist()}], got {k!r}")
    # C(n-c, k) / C(n, k) = prod_j (1 - c / (n - j)): no factorials; logarithms keep small results exact.
    left = samples.unsqueeze(-1) - torch.arange(k, device=samples.device)
    hit = (correct.unsqueeze(-1) / left).clamp(max=1)
    return -torch.expm1(torch.log1p(-hit).sum(-1))


def average_at_k(num_samples: Tensor | int, num_correct: Tensor | int) -> Tensor:
    """avg@k, the mean success of the k = ``num_samples`` samples drawn, c / n, float64 ``[...]``.

    Raises:
        ValueError: a count is out of range.
    """
    samples, correct = _check_counts(num_samples, num_correct)
    return correct / samples
