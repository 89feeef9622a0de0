"""What is measured on a validation or test split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lit_madrl.learners.collector import Collector
from lit_madrl.metrics import (
    AverageAtK,
    CategoryCoverage,
    CategoryFrequencies,
    ForwardKLDivergence,
    JensenShannonDivergence,
    L2Divergence,
    OffSupportRate,
    PassAtK,
    ReverseKLDivergence,
)
from lit_madrl.types import Problem, Sampling, Scores

DIVERGENCES: dict[
    str, type[JensenShannonDivergence | L2Divergence | ForwardKLDivergence | ReverseKLDivergence]
] = {
    "jsd": JensenShannonDivergence,
    "l2": L2Divergence,
    "forward_kl": ForwardKLDivergence,
    "reverse_kl": ReverseKLDivergence,
}


class Evaluation(nn.Module):
    """Distribution and correctness of the completions of one split.

    Every divergence is reported pooled over the split and as the mean over prompts (``_per_prompt``): the pooled
    number alone hides prompts that fail in opposite directions. ``exact/`` numbers use the options' probabilities
    under the policy instead of samples, so they carry no sampling noise.

    Args:
        categories: names of the K categories; without any, only correctness is measured.
        samples: completions a prompt.
        verified: whether a verifier judges correctness.
    """

    def __init__(self, categories: Sequence[str], samples: int, verified: bool) -> None:
        super().__init__()
        self.categories = tuple(categories)
        k = len(self.categories)
        self.sampled = MetricCollection(_distribution_metrics(k) if k else {})
        self.exact = MetricCollection(_distribution_metrics(k, exact=True) if k else {})
        correctness: dict[str, Metric | MetricCollection] = {}
        if verified:
            correctness = {"avg_at_k": AverageAtK(), **{f"pass_at_{n}": PassAtK(n) for n in {1, samples}}}
        self.correctness = MetricCollection(correctness)

    def update(self, scores: Scores, targets: Tensor, option_probabilities: Tensor | None) -> None:
        """Add prompts: scores ``[P, S]``, targets ``[P, K]``, option probabilities ``[P, K]`` or None."""
        if self.categories:
            self.sampled.update(policy=scores.category, targets=targets)
            if option_probabilities is not None:
                self.exact.update(policy=option_probabilities, targets=targets)
        if len(self.correctness):
            self.correctness.update(scores.correct)

    def seen(self) -> list[bool]:
        """Whether this rank has anything to measure of each kind: sampled, exact, correctness."""
        return [
            any(metric.update_called for metric in metrics.values(copy_state=False))
            for metrics in (self.sampled, self.exact, self.correctness)
        ]

    def compute(self, seen: Sequence[bool] | None = None) -> dict[str, Tensor]:
        """All numbers by name; reset for the next evaluation. A collective operation, as of every metric.

        Args:
            seen: which kinds any rank has :meth:`seen`, the same on all ranks; default this rank's own.
        """
        values: dict[str, Tensor] = {}
        parts = (("", self.sampled), ("exact/", self.exact), ("", self.correctness))
        for (prefix, metrics), measured in zip(parts, self.seen() if seen is None else seen, strict=True):
            if not measured:
                continue
            for name, value in metrics.compute().items():
                if name == "share":
                    values |= {
                        f"{prefix}share/{category}": share
                        for category, share in zip(self.categories, value, strict=True)
                    }
                else:
                    values[prefix + name] = value
        if "jsd" in values:
            values["jsd_floor"] = cast(JensenShannonDivergence, self.sampled["jsd"]).floor()
        for metrics in (self.sampled, self.exact, self.correctness):
            metrics.reset()
        return values


def option_probabilities(
    collector: Collector, problems: Sequence[Problem], sampling: Sampling
) -> Tensor | None:
    """Exact probability ``[P, K]`` of each option, stop token included, by teacher forcing.

    None when some problem's options cannot be enumerated.
    """
    if not all(problem.options for problem in problems):
        return None
    stop = collector.stop_ids(sampling)[-1]
    groups = [[collector.encode_completion(o, stop) for o in p.options] for p in problems]
    _, totals = collector.logprobs(collector.encode_prompts(problems), groups)
    return totals.double().exp().view(len(problems), -1)


def _distribution_metrics(k: int, exact: bool = False) -> dict[str, Metric | MetricCollection]:
    metrics: dict[str, Metric | MetricCollection] = {}
    for name, divergence in DIVERGENCES.items():
        metrics[name] = divergence(k)
        metrics[f"{name}_per_prompt"] = divergence(k, per_prompt=True)
    metrics["off_support_rate"] = OffSupportRate(k)
    metrics["share"] = CategoryFrequencies(k)
    if not exact:
        metrics["coverage"] = CategoryCoverage(k)
        metrics["coverage_per_prompt"] = CategoryCoverage(k, per_prompt=True)
    return metrics
