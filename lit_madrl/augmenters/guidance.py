"""Adaptive reference guidance (ARG, arXiv:2610.11128) and the baselines that are special cases of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lit_madrl.augmenters.base import RolloutAugmenter, RolloutCollector
from lit_madrl.augmenters.boundaries import PrefixBoundaries, SentenceBoundaries
from lit_madrl.augmenters.candidates import Candidate, Task, judged, verified_references
from lit_madrl.augmenters.insertion import Insertion, insert
from lit_madrl.augmenters.selector import LevelTotals, PrefixSelector
from lit_madrl.functional.surprisal import reference_surprisal
from lit_madrl.types import Problem, Rollouts, Scores, Source


class AdaptiveReferenceGuidance(RolloutAugmenter):
    """Where all rollouts of a group are incorrect, continue from prefixes of the reference and insert what verifies.

    For each such group, K prefix levels are drawn from the selector, each is moved to a boundary of the reference, and
    a trajectory is continued from there (section 2). Accepted are, in this order: correct candidates without a prefix,
    up to ``max_unguided``; if these are fewer, the one correct candidate with the shortest prefix that is no copy of
    the reference; if there is none at all, the reference itself. They replace uniformly drawn rollouts of the group
    and are learned as a whole, prefix and stop token included.

    A group without a usable reference is left alone and counted: no reference, one that the verifier rejects, one
    longer than ``sampling.max_new_tokens``, or one whose surprisal S_0 is 0 or infinite.

    Args:
        boundaries: where a reference may be cut; default at ends of sentences before the boxed answer.
        continuations: K, candidates a group.
        levels: shares of the reference's surprisal that a prefix leaves; 1 is the empty prefix.
        max_unguided: most candidates without a prefix that are inserted.
        fallback: insert the reference where no candidate is accepted.
        exploration: epsilon of the selector, see :class:`PrefixSelector`, as for the others.
        learning_rate: eta.
        baseline_rate: weight of the newest mean feedback in the baseline.
        surprisal_weighting: feedback is S_t/S_0 for a success; without it, 1.
    """

    def __init__(
        self,
        boundaries: PrefixBoundaries | None = None,
        continuations: int = 8,
        levels: Sequence[float] = (1.0, 0.5, 0.25),
        max_unguided: int = 4,
        fallback: bool = True,
        exploration: float = 0.2,
        learning_rate: float = 0.3,
        baseline_rate: float = 0.1,
        surprisal_weighting: bool = True,
    ) -> None:
        super().__init__()
        for name, value in (("continuations", continuations), ("max_unguided", max_unguided)):
            if value < 0:
                raise ValueError(f"{name}: expected an integer >= 0, got {value}")
        self.boundaries = boundaries or SentenceBoundaries()
        self.continuations = continuations
        self.max_unguided = max_unguided
        self.fallback = fallback
        self.selector = PrefixSelector(
            tuple(levels), exploration, learning_rate, baseline_rate, surprisal_weighting
        )
        self._numbers: dict[str, float] = {}

    @property
    def needs_reference(self) -> bool:
        """Whether a group without a reference cannot be augmented."""
        return self.fallback or any(level < 1 for level in self.selector.levels)

    def forward(
        self, problems: Sequence[Problem], rollouts: Rollouts, scores: Scores, collector: RolloutCollector
    ) -> tuple[Rollouts, Scores]:
        """See :class:`RolloutAugmenter`."""
        failed = (scores.correct.amax(-1) == 0).nonzero().squeeze(1).tolist()
        tasks = self._tasks(failed, problems, collector) if failed else []
        generator = collector.generator()
        levels = self.selector.sample(len(tasks) * self.continuations, generator).view(
            len(tasks), self.continuations
        )
        candidates = self._continue(tasks, levels, problems, collector)
        insertions = [
            insertion
            for task, group in zip(tasks, candidates, strict=True)
            for insertion in self._insertions(task, group, rollouts.finished.shape[1], generator)
        ]
        drawn = self.selector.probabilities()
        totals = self.selector.update(
            levels.flatten(),
            self._feedback(tasks, candidates),
            lambda totals: totals.new_tensor(collector.global_sum(*totals.flatten().tolist())).view_as(
                totals
            ),
        )
        self._count(len(problems), len(failed), len(tasks), insertions, drawn, totals, collector)
        return insert(rollouts, scores, insertions)

    def numbers(self) -> dict[str, float]:
        """Shares of groups and of their sources, and the selector's state by level, of the last call."""
        return self._numbers

    def _tasks(
        self, failed: list[int], problems: Sequence[Problem], collector: RolloutCollector
    ) -> list[Task]:
        if not self.needs_reference:
            return [Task(p, None, torch.ones(1, dtype=torch.float64), []) for p in failed]
        references = verified_references(failed, problems, collector)
        if not references:
            return []
        prompts = collector.encode_prompts([problems[p] for p in references])
        groups = [[reference.text.ids] for reference in references.values()]
        token_logprobs, _ = collector.logprobs(prompts, groups)
        lengths = torch.tensor([len(group[0]) for group in groups], device=token_logprobs.device)
        surprisals = reference_surprisal(token_logprobs, lengths).cpu()
        return [
            Task(p, r.trajectory, left[: len(r.text.ids) + 1], self.boundaries(r.text.text, r.text.offsets))
            for (p, r), left in zip(references.items(), surprisals, strict=True)
            if 0 < left[0] < float("inf")
        ]

    def _continue(
        self, tasks: list[Task], levels: Tensor, problems: Sequence[Problem], collector: RolloutCollector
    ) -> list[list[Candidate]]:
        if not tasks or not self.continuations:
            return [[] for _ in tasks]
        prefixes = [
            [task.prefix(self.selector.levels[level]) for level in group]
            for task, group in zip(tasks, levels.tolist(), strict=True)
        ]
        chosen = [problems[task.prompt] for task in tasks]
        sampling = replace(collector.sampling, group_size=self.continuations)
        rollouts = collector.generate(chosen, sampling, prefixes)
        return judged(rollouts, [[len(p) for p in group] for group in prefixes], chosen, collector)

    def _feedback(self, tasks: list[Task], candidates: list[list[Candidate]]) -> Tensor:
        values = [
            self.selector.feedback(
                candidate.correct,
                not task.is_copy(candidate),
                float(task.surprisal[candidate.prefix_length] / task.surprisal[0])
                if candidate.prefix_length
                else 1.0,
            )
            for task, group in zip(tasks, candidates, strict=True)
            for candidate in group
        ]
        return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)

    def _insertions(
        self, task: Task, group: list[Candidate], rows: int, generator: torch.Generator
    ) -> list[Insertion]:
        right = [candidate for candidate in group if candidate.correct]
        new = [candidate for candidate in right if candidate.prefix_length == 0][: self.max_unguided]
        guided = [c for c in right if c.prefix_length > 0 and not task.is_copy(c)]
        if guided and len(new) < self.max_unguided:
            new.append(min(guided, key=lambda candidate: candidate.prefix_length))
        if not new and self.fallback and task.reference is not None:
            new = [task.reference]
        places = torch.randperm(rows, generator=generator)[: len(new)].tolist()
        return [
            Insertion.of(task.prompt, place, candidate, _source(task, candidate))
            for place, candidate in zip(places, new, strict=False)
        ]

    def _count(
        self,
        groups: int,
        failed: int,
        guided: int,
        insertions: list[Insertion],
        drawn: Tensor,
        totals: LevelTotals,
        collector: RolloutCollector,
    ) -> None:
        sources: dict[int, set[Source]] = {}
        for insertion in insertions:
            sources.setdefault(insertion.prompt, set()).add(insertion.source)
        kinds = list(sources.values())
        counts = collector.global_sum(
            groups,
            failed,
            guided,
            kinds.count({Source.UNGUIDED}),
            kinds.count({Source.GUIDED}),
            kinds.count({Source.UNGUIDED, Source.GUIDED}),
            kinds.count({Source.REFERENCE}),
            len(insertions),
        )
        groups_all, failed_all, guided_all, unguided, by_prefix, mixed, fallback, inserted = counts
        share = partial(_share, of=guided_all)
        self._numbers = {
            "guidance/all_failed": _share(failed_all, groups_all),
            "guidance/without_reference": _share(failed_all - guided_all, failed_all),
            "guidance/accepted": share(unguided + by_prefix + mixed),
            "guidance/source_unguided": share(unguided),
            "guidance/source_guided": share(by_prefix),
            "guidance/source_mixed": share(mixed),
            "guidance/source_fallback": share(fallback),
            "guidance/inserted": share(inserted),
        }
        for a, level in enumerate(self.selector.levels):
            count = float(totals.counts[a])
            self._numbers |= {
                f"guidance/probability_{level:g}": float(drawn[a]),
                f"guidance/count_{level:g}": count,
                f"guidance/success_{level:g}": _share(float(totals.successes[a]), count),
                f"guidance/feedback_{level:g}": _share(float(totals.feedback[a]), count),
            }


def _source(task: Task, candidate: Candidate) -> Source:
    if candidate is task.reference:
        return Source.REFERENCE
    return Source.GUIDED if candidate.prefix_length else Source.UNGUIDED


def _share(part: float, of: float) -> float:
    return part / of if of else 0.0
