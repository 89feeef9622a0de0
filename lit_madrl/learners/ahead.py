"""Sampling the next batch of rollouts while the policy is trained on the present one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, NamedTuple

from lit_madrl.augmenters.base import RolloutAugmenter
from lit_madrl.learners.collector import Collector
from lit_madrl.rollouts.base import RolloutEngine
from lit_madrl.types import Problem, Rollouts


class Pending(NamedTuple):
    """A batch that is being sampled.

    Attributes:
        problems: its problems.
        rollouts: what will come of them.
        step: optimizer steps of the policy that samples it.
        engine_state: the engine's random state before its random numbers were drawn.
    """

    problems: list[Problem]
    rollouts: Future[Rollouts]
    step: int
    engine_state: dict[str, Any]


class RolloutsAhead:
    """At most one batch, begun after the present batch was collected and before it is trained on.

    So a batch is sampled from the weights before the last update, and everything else that needs the engine (the
    augmenters, an evaluation) finds it idle. A batch that is pending when a checkpoint is written is no part of it:
    its prompts do not count as consumed, and the resumed run samples them anew with the same random numbers.

    Args:
        engine: samples; must be able to in the background.

    Raises:
        ValueError: the engine cannot, or an augmenter begins rollouts, which it would do a batch too early.
    """

    def __init__(self, engine: RolloutEngine, augmenters: Sequence[RolloutAugmenter] = ()) -> None:
        if not engine.generates_ahead:
            raise ValueError(
                f"rollouts_ahead: expected an engine that samples in the background from weights of its own, such as "
                f"VLLMServerEngine, got {type(engine).__name__}"
            )
        for augmenter in augmenters:
            if type(augmenter).prefixes is not RolloutAugmenter.prefixes:
                raise ValueError(
                    f"rollouts_ahead: expected 0 with an augmenter that begins rollouts, got 1 with "
                    f"{type(augmenter).__name__}"
                )
        self.engine = engine
        self._upcoming: Iterator[list[Problem]] | None = None
        self._pending: Pending | None = None

    def restart(self) -> None:
        """Forget what is pending, and where the data was."""
        self._upcoming = self._pending = None

    def begin(
        self, batch: list[Problem], loader: Iterable[list[Problem]], collector: Collector, step: int
    ) -> None:
        """Begin to sample what ``loader`` gives after ``batch``, from the policy after ``step`` optimizer steps."""
        problems = self._following(batch, loader)
        if problems is None:
            return
        state = self.engine.state_dict()
        self.engine.sync_weights(collector.policy.model)
        prompts, sampling = collector.encode_prompts(problems), collector.sampling
        rollouts = self.engine.generate_ahead(prompts, sampling, collector.stop_ids(sampling))
        self._pending = Pending(problems, rollouts, step, state)

    def _following(self, batch: list[Problem], loader: Iterable[list[Problem]]) -> list[Problem] | None:
        """The next batch, by a second reading of the loader: it begins where the learner's prompt cursor is."""
        if self._upcoming is None:
            self._upcoming = iter(loader)
            check_same(next(self._upcoming, []), batch)
        problems = next(self._upcoming, None)
        if problems is None:  # the loader ends here, and is read anew
            self._upcoming = None
        return problems

    def take(self, problems: list[Problem], collector: Collector) -> tuple[Rollouts, int] | None:
        """The rollouts of ``problems`` and the optimizer steps of the policy they are from; None if none are pending.

        Raises:
            ValueError: others are pending.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        check_same(pending.problems, problems)
        rollouts = pending.rollouts.result()
        collector.generated_tokens += int((rollouts.lengths - rollouts.prefix_lengths).sum())
        # Ranks may share servers: none sends them new weights while another's batch is still being sampled.
        collector.global_sum(0.0)
        return rollouts, pending.step

    def settle(self) -> bool:
        """Wait until the engine is idle; whether it was not."""
        if self._pending is None:
            return False
        wait([self._pending.rollouts])
        return True

    @contextmanager
    def undone(self) -> Iterator[None]:
        """In here the engine's random state is as if nothing were pending."""
        state = self.engine.state_dict()
        if self._pending is not None:
            self.engine.load_state_dict(self._pending.engine_state)
        try:
            yield
        finally:
            self.engine.load_state_dict(state)


def check_same(expected: list[Problem], got: list[Problem]) -> None:
    """Refuse a loader that gives others when it is read a second time."""
    if expected != got:
        names = [[problem.id for problem in problems][:3] for problems in (expected, got)]
        raise ValueError(
            f"rollouts_ahead: expected a loader that gives the same batches whenever it is read from the same "
            f"prompt_cursor, got one that begins with problems {names[0]} and then with {names[1]}"
        )
