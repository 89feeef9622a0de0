"""How far the policy is from the sampler that its completions were drawn from, and the weights that correct it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lit_madrl.functional import (
    kl_estimate,
    masked_weights,
    mean_of_copies,
    out_of_bounds,
    sequence_log_ratios,
    truncated_weights,
)
from lit_madrl.learners.objective import Importance
from lit_madrl.learners.rows import Drawn, MicroBatch


class Mismatch:
    """Sums over the micro-batches of a batch of rollouts.

    Args:
        importance: how weights are made; None measures and corrects nothing.
    """

    def __init__(self, importance: Importance | None) -> None:
        self.importance = importance
        self._sums: dict[str, Tensor] = {}
        self._largest: Tensor | None = None
        self._measured = False

    def corrected(self, batch: MicroBatch, old_logprobs: Tensor) -> Tensor:
        """``batch.weights`` times the importance weights, ``[M]``.

        Args:
            batch: a micro-batch.
            old_logprobs: ``[M]`` nats, under the policy before the update.
        """
        drawn = batch.drawn
        if drawn is None:
            return batch.weights
        self._measured = True
        old = old_logprobs[drawn.token]
        log_ratios = old - drawn.logprobs
        counts = batch.weights[drawn.token] > 0  # not where a micro-batch only keeps ranks in step
        self._add("tokens", counts)
        self._add("kl", kl_estimate(drawn.logprobs, old, "k3").masked_fill(~counts, 0))
        if log_ratios.numel():
            largest = log_ratios.abs().masked_fill(~counts, 0).amax()
            self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        if self.importance is None:
            return batch.weights
        weights = self._importance_weights(self.importance, log_ratios, counts, drawn)
        return batch.weights * mean_of_copies(weights, drawn.token, batch.weights.numel())

    def _importance_weights(
        self, importance: Importance, log_ratios: Tensor, counts: Tensor, drawn: Drawn
    ) -> Tensor:
        of_token: Tensor | slice = slice(None)
        if importance.level == "sequence":
            log_ratios = sequence_log_ratios(log_ratios, drawn.copy, drawn.copies)
            counts = counts.new_zeros(drawn.copies).index_put((drawn.copy,), counts)
            of_token = drawn.copy
        bounds = importance.cap, importance.floor
        weigh = truncated_weights if importance.kind == "truncate" else masked_weights
        weights = weigh(log_ratios, *bounds)
        self._add("weighted", counts)
        self._add("weight", weights * counts)
        self._add("square", weights.square() * counts)
        self._add("outside", out_of_bounds(log_ratios, *bounds) & counts)
        return weights[of_token]

    def _add(self, name: str, values: Tensor) -> None:
        total = values.sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def numbers(
        self, global_sum: Callable[..., list[float]], global_max: Callable[[float], float]
    ) -> dict[str, float]:
        """What to log, over all micro-batches and ranks; nothing where the sampler's log-probabilities are unknown.

        ``kl``: estimate (k3) of KL(sampler || policy) a token; ``max_abs``: the largest difference of a token's
        log-probabilities; ``ess``: effective sample size (sum w)^2 / (N sum w^2) as a share of the N tokens or
        sequences that have a weight; ``truncated`` or ``masked``: the share of them beyond a bound. All are about
        the tokens that are trained: those of a dead group are only computed for a KL term.
        """
        if not self._measured:
            return {}
        sums = dict(zip(self._sums, global_sum(*map(float, self._sums.values())), strict=True))
        numbers = {
            "mismatch/kl": sums["kl"] / max(sums["tokens"], 1),
            "mismatch/max_abs": global_max(0.0 if self._largest is None else float(self._largest)),
        }
        if self.importance is not None:
            count = max(sums["weighted"], 1)
            squares = count * sums["square"]
            outside = "truncated" if self.importance.kind == "truncate" else "masked"
            numbers["mismatch/ess"] = sums["weight"] ** 2 / squares if squares else 0.0
            numbers[f"mismatch/{outside}"] = sums["outside"] / count
        return numbers
