"""The prefix selector of ARG: which share of the reference to give, learned over all questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

Reduce = Callable[[Tensor], Tensor]


class LevelTotals(NamedTuple):
    """Sums over the continuations of the global batch, each ``[A]`` float64, one entry a level.

    Attributes:
        counts: continuations.
        feedback: their W.
        successes: those with W > 0.
    """

    counts: Tensor
    feedback: Tensor
    successes: Tensor


class PrefixSelector(nn.Module):
    """A distribution over guidance levels, moved towards those with the most feedback (ARG, section 3.3).

    rho(a) = (1 - epsilon) softmax(phi)_a + epsilon / A. Each update adds
    eta * sum_j (W_j - b) grad_phi log rho(a_j) to phi, the sum over every continuation of the global batch,
    accepted or not; in expectation this is eta times the gradient of J = sum over questions and continuations of
    E[d_t S_t / S_0], whatever the baseline b. Then b <- (1 - baseline_rate) b + baseline_rate * mean(W).

    State is float64 in buffers: it is in the checkpoint and stays float64 in a module cast to bfloat16.

    Args:
        levels: share of the reference's surprisal left to the continuation, distinct, in (0, 1]; 1 is the empty
            prefix. One level alone is a fixed one.
        exploration: epsilon in [0, 1]; what keeps every level observed.
        learning_rate: eta > 0.
        baseline_rate: in [0, 1].
        surprisal_weighting: whether a success counts S_t / S_0 rather than 1.
    """

    phi: Tensor
    baseline: Tensor

    def __init__(
        self,
        levels: Sequence[float] = (1.0, 0.5, 0.25),
        exploration: float = 0.2,
        learning_rate: float = 0.3,
        baseline_rate: float = 0.1,
        surprisal_weighting: bool = True,
    ) -> None:
        super().__init__()
        for name, value, valid, expected in (
            (
                "levels",
                levels,
                len(levels) > 0 and all(0 < a <= 1 for a in levels) and len(set(levels)) == len(levels),
                "distinct numbers in (0, 1]",
            ),
            ("exploration", exploration, 0 <= exploration <= 1, "a number in [0, 1]"),
            ("learning_rate", learning_rate, 0 < learning_rate < float("inf"), "a finite number > 0"),
            ("baseline_rate", baseline_rate, 0 <= baseline_rate <= 1, "a number in [0, 1]"),
        ):
            if not valid:
                raise ValueError(f"PrefixSelector.{name}: expected {expected}, got {value!r}")
        self.levels = tuple(float(level) for level in levels)
        self.exploration = exploration
        self.learning_rate = learning_rate
        self.baseline_rate = baseline_rate
        self.surprisal_weighting = surprisal_weighting
        self.register_buffer("phi", torch.zeros(len(self.levels), dtype=torch.float64))
        self.register_buffer("baseline", torch.zeros((), dtype=torch.float64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow a module to its device but not to its dtype."""
        moved: Self = super()._apply(  # type: ignore[no-untyped-call]
            lambda state: state.to(fn(state.new_empty(0)).device), recurse
        )
        return moved

    def get_extra_state(self) -> Tensor:
        """The levels that ``phi`` is about, ``[A]`` float64."""
        return torch.tensor(self.levels, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse what was learned about other levels.

        Raises:
            ValueError: the checkpoint's levels differ from these.
        """
        saved = state.tolist()
        if tuple(saved) != self.levels:
            raise ValueError(
                f"PrefixSelector.levels: expected the checkpoint's {saved}, got {list(self.levels)}"
            )

    def probabilities(self) -> Tensor:
        """rho, ``[A]`` float64."""
        return (1 - self.exploration) * self.phi.softmax(-1) + self.exploration / len(self.levels)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """``[n]`` long: indices of levels drawn independently from rho, on the generator's device."""
        rho = self.probabilities()
        if generator is not None:
            rho = rho.to(generator.device)
        if n == 0:
            return torch.zeros(0, dtype=torch.long, device=rho.device)
        return torch.multinomial(rho, n, replacement=True, generator=generator)

    def feedback(
        self, success: Tensor | bool, differs: Tensor | bool, surprisal_ratio: Tensor | float
    ) -> Tensor:
        """W = 1[correct and not the reference] * S_t / S_0, float64, of one continuation or of many.

        Args:
            success: the whole trajectory is correct.
            differs: it is not an exact copy of the reference.
            surprisal_ratio: S_t / S_0 at the prefix that was given, in [0, 1]. Not read without
                ``surprisal_weighting``, nor where W is 0.
        """
        replaced = torch.as_tensor(success).bool() & torch.as_tensor(differs).bool()
        if not self.surprisal_weighting:
            return replaced.double()
        ratio = torch.where(replaced, torch.as_tensor(surprisal_ratio, dtype=torch.float64), 0.0)
        if not bool(((ratio >= 0) & (ratio <= 1)).all()):
            raise ValueError(f"surprisal_ratio: expected numbers in [0, 1], got {surprisal_ratio}")
        return ratio

    @torch.no_grad()
    def update(self, level_indices: Tensor, feedback: Tensor, reduce: Reduce) -> LevelTotals:
        """Learn from every continuation of a batch; nothing changes if no rank has one.

        A collective operation: call it on all ranks, those without continuations included.

        Args:
            level_indices: ``[N]`` long, the level of each of this rank's continuations.
            feedback: ``[N]``, their W.
            reduce: sums a tensor over ranks, as the collector does: an all-reduce of one's own would hang where
                ranks run a sharded model in step.

        Returns:
            The global totals by level, for logs.
        """
        totals = LevelTotals(*reduce(self._totals(level_indices, feedback)))
        count = totals.counts.sum()
        if count > 0:
            advantage = totals.feedback - self.baseline * totals.counts
            self.phi += self.learning_rate * (advantage @ self._scores())
            self.baseline += self.baseline_rate * (totals.feedback.sum() / count - self.baseline)
        return totals

    def _totals(self, level_indices: Tensor, feedback: Tensor) -> Tensor:
        """``[3, A]``: sufficient for the update, since continuations of one level share their score."""
        size = len(self.levels)
        if level_indices.ndim != 1 or level_indices.shape != feedback.shape:
            raise ValueError(
                f"level_indices, feedback: expected shapes [N] and [N], "
                f"got {list(level_indices.shape)} and {list(feedback.shape)}"
            )
        index = level_indices.to(self.phi.device, torch.long)
        if bool(((index < 0) | (index >= size)).any()):
            raise ValueError(f"level_indices: expected integers in 0..{size - 1}, got {index.tolist()}")
        w = feedback.to(self.phi)
        if not bool(w.isfinite().all()):
            raise ValueError(f"feedback: expected finite numbers, got {w.tolist()}")
        rows = torch.stack([torch.ones_like(w), w, (w > 0).to(w)])
        return self.phi.new_zeros(3, size).index_add_(1, index, rows)

    def _scores(self) -> Tensor:
        """``[A, A]``: row a is grad_phi log rho(a) = (1 - epsilon) s_a / rho_a (e_a - s), s = softmax(phi)."""
        epsilon = self.phi.new_tensor(self.exploration)
        log_learned = self.phi.log_softmax(-1) + torch.log1p(-epsilon)
        # In logarithms: without exploration a share of 0 / 0 is 1.
        share = (log_learned - log_learned.logaddexp((epsilon / len(self.levels)).log())).exp()
        soft = self.phi.softmax(-1)
        return share.unsqueeze(-1) * (torch.eye(len(soft)).to(soft) - soft)
