"""What every augmenter must do: subclass it and name the instances to test.

Problems have references; the scripted collector's tokens are their own text, and a trajectory with a 9 is right.
"""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_madrl.augmenters import Reference, RolloutAugmenter
from lit_madrl.augmenters.candidates import given
from lit_madrl.types import Problem, Rollouts, Sampling, Scores, Source

STOP, RIGHT, CUT = 1, 9, 7
REFERENCE = [5, CUT, 6, CUT, RIGHT, STOP]
"""Cut after each 7; a trajectory is right when it holds a 9."""
FAILED = ([8, STOP], [8, 8, STOP], [6, STOP], [8, 6, STOP])


class ScriptedCollector:
    """Tokens are their own text (``chr``); continuations come from a script, each token costs ``nats``."""

    def __init__(
        self, group_size: int = 4, limit: int = 8, script: Callable[[list[int]], list[int]] | None = None
    ):
        self.sampling = Sampling(group_size=group_size, max_new_tokens=limit)
        self.script = script or (lambda prefix: [8, STOP])
        self.prefixes: list[list[list[int]]] = []
        self.references: dict[str, list[int] | None] = {}
        self.nats = 1.0

    def encode_prompts(self, problems: Sequence[Problem]) -> list[list[int]]:
        return [[3, 4] for _ in problems]

    def encode_reference(self, problem: Problem) -> Reference | None:
        ids = self.references.get(problem.id, REFERENCE)
        if ids is None:
            return None
        text = "".join(map(chr, ids[:-1]))
        return Reference(text, ids, [(i, i + 1) for i in range(len(text))])

    def generate(self, problems: Any, sampling: Sampling, prefixes: Any = None) -> Rollouts:
        assert all(len(group) == sampling.group_size for group in prefixes)
        self.prefixes += prefixes
        groups = [[[*p, *self.script(p)] for p in group] for group in prefixes]
        return given(self.encode_prompts(problems), groups)

    def judge(self, problems: Any, rollouts: Rollouts) -> Scores:
        correct = ((rollouts.completion_ids == RIGHT) & rollouts.completion_mask).any(-1).float()
        return Scores.build(torch.full(correct.shape, -1), correct, correct)

    def logprobs(self, prompts: Any, groups: Any) -> tuple[Tensor, Tensor]:
        rollouts = given(prompts, groups)
        values = -self.nats * rollouts.completion_mask.flatten(0, 1).float()
        return values, values.sum(-1)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def global_sum(self, *values: float) -> list[float]:
        return list(values)


def groups_of(*groups: Sequence[list[int]]) -> tuple[Rollouts, Scores]:
    """Groups of sampled rollouts with their scores."""
    rollouts = given([[3, 4]] * len(groups), [list(rows) for rows in groups])
    rollouts = Rollouts(**{**vars(rollouts), "prefix_lengths": torch.zeros_like(rollouts.prefix_lengths)})
    return rollouts, ScriptedCollector().judge([None] * len(groups), rollouts)


SOLVED = ([RIGHT, STOP], *FAILED[1:])
SCRIPTS: dict[str, Callable[[list[int]], list[int]]] = {
    "all fail": lambda prefix: [8, STOP],
    "all succeed": lambda prefix: [RIGHT, STOP],
    "succeed with a prefix": lambda prefix: [RIGHT, STOP] if prefix else [8, STOP],
    "copy the reference": lambda prefix: REFERENCE[len(prefix) :],
}


class AugmenterContract(ABC):
    """Subclass it, and say how to build the augmenter."""

    @abstractmethod
    def build(self) -> RolloutAugmenter:
        """A new augmenter that cuts references after each 7."""

    problems = (Problem("a", "?"), Problem("b", "?"), Problem("c", "?"))

    def run(
        self, augmenter: RolloutAugmenter, script: str
    ) -> tuple[tuple[Rollouts, Scores], tuple[Rollouts, Scores]]:
        collector = ScriptedCollector(script=SCRIPTS[script])
        collector.references["c"] = None
        before = groups_of(FAILED, SOLVED, FAILED)
        augmenter.prefixes(self.problems, collector)
        return before, augmenter(self.problems, *before, collector)

    @pytest.mark.parametrize("script", SCRIPTS)
    def test_rows_say_of_themselves_what_they_are(self, script: str) -> None:
        before, (rollouts, scores) = self.run(self.build(), script)
        assert rollouts.finished.shape == scores.on_policy.shape == (3, 4)
        source = torch.zeros(3, 4) if rollouts.source is None else rollouts.source
        assert torch.equal(source > 0, ~scores.on_policy)
        for p in range(3):
            for g in range(4):
                ids = rollouts.completions()[p][g]
                if scores.on_policy[p, g]:
                    assert ids == before[0].completions()[p][g]
                assert float(scores.correct[p, g]) == float(RIGHT in ids)
                prefix = int(rollouts.prefix_lengths[p, g])
                assert ids[:prefix] == REFERENCE[:prefix]
                if int(source[p, g]) == Source.REFERENCE:
                    assert ids == REFERENCE
                    assert prefix == len(REFERENCE)
                if int(source[p, g]) == Source.UNGUIDED:
                    assert prefix == 0

    @pytest.mark.parametrize("script", SCRIPTS)
    def test_inputs_are_not_mutated(self, script: str) -> None:
        augmenter = self.build()
        collector = ScriptedCollector(script=SCRIPTS[script])
        rollouts, scores = groups_of(FAILED, SOLVED, FAILED)
        copies = copy.deepcopy((vars(rollouts), vars(scores)))
        augmenter(self.problems, rollouts, scores, collector)
        for value, kept in zip((vars(rollouts), vars(scores)), copies, strict=True):
            for name, tensor in kept.items():
                assert (
                    torch.equal(value[name], tensor) if isinstance(tensor, Tensor) else value[name] == tensor
                )

    def test_a_problem_without_a_reference_gets_none(self) -> None:
        _, (rollouts, _) = self.run(self.build(), "all fail")
        assert REFERENCE not in rollouts.completions()[2]

    def test_numbers_are_finite_and_named(self) -> None:
        augmenter = self.build()
        for script in SCRIPTS:
            self.run(augmenter, script)
            numbers = augmenter.numbers()
            assert all(name.startswith("guidance/") for name in numbers)
            assert all(abs(value) < float("inf") for value in numbers.values())

    def test_the_loss_of_inserted_rows_is_a_finite_number_a_token(self) -> None:
        logprobs = torch.tensor([-1e-7, -0.5, -30.0, -1e4], requires_grad=True)
        given_tokens = torch.tensor([True, True, False, False])
        for advantage in (-1.0, 0.0, 2.0):
            loss = self.build().inserted_loss(logprobs, torch.full((4,), advantage), given_tokens)
            assert loss.shape == (4,)
            (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
            assert loss.isfinite().all()
            assert gradient.isfinite().all()
            # What was sampled and is worth more becomes likelier, token by token.
            assert bool((gradient * advantage <= 0)[~given_tokens].all())

    def test_state_survives_a_checkpoint_and_pickling(self) -> None:
        augmenter = self.build()
        for script in SCRIPTS:
            self.run(augmenter, script)
        other = self.build()
        other.load_state_dict(augmenter.state_dict())
        for twin in (other, pickle.loads(pickle.dumps(augmenter)), copy.deepcopy(augmenter)):
            expected, got = (
                self.run(copy.deepcopy(a), "succeed with a prefix")[1] for a in (augmenter, twin)
            )
            assert got[0].completions() == expected[0].completions()
            assert torch.equal(got[1].on_policy, expected[1].on_policy)
