"""BREAD: groups branch from the shortest prefix of the reference from which they succeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lit_madrl.augmenters.base import RolloutAugmenter, RolloutCollector
from lit_madrl.augmenters.boundaries import PrefixBoundaries, SentenceBoundaries
from lit_madrl.augmenters.candidates import Candidate, judged, verified_references
from lit_madrl.augmenters.episodes import episode_ends
from lit_madrl.augmenters.insertion import Insertion, insert
from lit_madrl.types import Problem, Rollouts, Scores, Source


@dataclass
class Search:
    """The binary search of one group: candidate prefixes, shortest first, and what was tried."""

    prompt: int
    reference: list[int]
    ends: list[int]
    low: int = 0
    high: int = 0
    tried: dict[int, list[Candidate]] = field(default_factory=dict)

    @property
    def middle(self) -> int:
        """Index of the next prefix to try."""
        return (self.low + self.high) // 2

    def branch(self, least: float) -> list[Candidate] | None:
        """The group of the shortest prefix with enough success; else of the shortest with any; else None."""
        share = {k: sum(c.correct for c in group) / len(group) for k, group in self.tried.items()}
        enough = [k for k, s in share.items() if s >= least] or [k for k, s in share.items() if s > 0]
        return self.tried[min(enough)] if enough else None


class BREAD(RolloutAugmenter):
    """Where all rollouts of a group fail, the group starts again from a part of the reference (arXiv:2506.17211).

    The reference is split into episodes of about equal length at its boundaries. A binary search over the number of
    given episodes looks for the shortest prefix from which a whole group of continuations has a success rate in
    ``success``: below that range the prefix grows, above it shrinks. That group replaces the failed one; where no
    prefix reaches the range, the shortest with any success does, and without any the group stays. The prefix is
    context, as the prompt is: only continuations are learned, with ratio 1.

    Args:
        boundaries: where a reference may be cut; default at ends of sentences before the boxed answer.
        episodes: parts of a reference.
        success: lowest and highest success rate of the group that is looked for.
    """

    learns_prefix = False

    def __init__(
        self,
        boundaries: PrefixBoundaries | None = None,
        episodes: int = 10,
        success: tuple[float, float] = (0.25, 0.75),
    ) -> None:
        super().__init__()
        if episodes < 2:
            raise ValueError(f"episodes: expected an integer >= 2, got {episodes}")
        if not 0 < success[0] <= success[1] <= 1:
            raise ValueError(f"success: expected 0 < lowest <= highest <= 1, got {success}")
        self.boundaries = boundaries or SentenceBoundaries()
        self.episodes = episodes
        self.success = success
        self._numbers: dict[str, float] = {}

    def forward(
        self, problems: Sequence[Problem], rollouts: Rollouts, scores: Scores, collector: RolloutCollector
    ) -> tuple[Rollouts, Scores]:
        """See :class:`RolloutAugmenter`."""
        failed = (scores.correct.amax(-1) == 0).nonzero().squeeze(1).tolist()
        searches = self._searches(failed, problems, collector)
        group_size = rollouts.finished.shape[1]
        active = searches
        while active:
            self._try(active, problems, group_size, collector)
            active = [search for search in active if self._goes_on(search)]
        branches = {search.prompt: search.branch(self.success[0]) for search in searches}
        insertions = [
            Insertion.of(p, row, candidate, Source.GUIDED)
            for p, group in branches.items()
            for row, candidate in enumerate(group or [])
        ]
        given = sum(group[0].prefix_length for group in branches.values() if group)
        of = sum(len(search.reference) for search in searches if branches[search.prompt])
        counts = (len(problems), len(failed), len(searches), len(insertions) // group_size, given, of)
        groups, all_failed, guided, accepted, given_tokens, of_tokens = collector.global_sum(*counts)
        self._numbers = {
            "guidance/all_failed": all_failed / max(groups, 1),
            "guidance/without_reference": 1 - guided / all_failed if all_failed else 0.0,
            "guidance/accepted": accepted / max(guided, 1),
            "guidance/given_share": given_tokens / max(of_tokens, 1),
        }
        return insert(rollouts, scores, insertions)

    def numbers(self) -> dict[str, float]:
        """Shares of groups, and of their references that were given, in the last call."""
        return self._numbers

    def _searches(
        self, failed: list[int], problems: Sequence[Problem], collector: RolloutCollector
    ) -> list[Search]:
        searches = []
        for p, reference in verified_references(failed, problems, collector).items():
            text, ids = reference.text, reference.text.ids
            ends = sorted(
                set(episode_ends(self.boundaries(text.text, text.offsets), len(ids), self.episodes))
            )
            if ends:
                searches.append(Search(p, ids, ends, high=len(ends) - 1))
        return searches

    def _try(
        self,
        searches: list[Search],
        problems: Sequence[Problem],
        group_size: int,
        collector: RolloutCollector,
    ) -> None:
        """Continue a whole group from the middle prefix of every search."""
        lengths = [[search.ends[search.middle]] * group_size for search in searches]
        prefixes = [
            [search.reference[:n] for n in row] for search, row in zip(searches, lengths, strict=True)
        ]
        chosen = [problems[search.prompt] for search in searches]
        sampling = replace(collector.sampling, group_size=group_size)
        continued = collector.generate(chosen, sampling, prefixes)
        for search, group in zip(searches, judged(continued, lengths, chosen, collector), strict=True):
            search.tried[search.middle] = group

    def _goes_on(self, search: Search) -> bool:
        """Narrow the search by what was just tried; false where it is over."""
        group = search.tried[search.middle]
        share = sum(candidate.correct for candidate in group) / len(group)
        if self.success[0] <= share <= self.success[1]:
            return False
        if share < self.success[0]:
            search.low = search.middle + 1
        else:
            search.high = search.middle - 1
        return search.low <= search.high
