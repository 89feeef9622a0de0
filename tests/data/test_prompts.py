from __future__ import annotations

from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_madrl.data import EndlessPromptSampler, PromptDataModule
from lit_madrl.data.prompts import seeded
from lit_madrl.types import Problem

N = 7


class Numbers(PromptDataModule):
    """Problems whose prompt says index and position."""

    def __init__(self, evaluation: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.evaluation = evaluation

    @property
    def num_train_prompts(self) -> int:
        return N

    def train_problem(self, index: int, position: int) -> Problem:
        return Problem(str(index), f"{index} at {position}")

    def validation_problems(self) -> list[Problem]:
        return [Problem(str(i), "") for i in range(self.evaluation)]

    def test_problems(self) -> list[Problem]:
        return self.validation_problems()[:3]


class Learner(L.LightningModule):
    """Counts prompts the way a real learner does, and remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.prompt_cursor = 0
        self.seen: list[str] = []
        self.evaluated: list[str] = []

    def training_step(self, batch: list[Problem], batch_idx: int) -> None:
        assert type(batch) is list
        self.seen += [problem.prompt for problem in batch]
        self.prompt_cursor += len(batch)
        self.optimizers().step()

    def validation_step(self, batch: list[Problem], batch_idx: int) -> None:
        self.evaluated += [problem.id for problem in batch]

    def test_step(self, batch: list[Problem], batch_idx: int) -> None:
        self.evaluated += [problem.id for problem in batch]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["cursor"] = self.prompt_cursor

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.prompt_cursor = checkpoint["cursor"]


def trainer(**kwargs: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", devices=1, **{"enable_checkpointing": False, **quiet, **kwargs})


def at_rank(data: Numbers, rank: int, world_size: int, cursor: int = 0) -> Numbers:
    """``data`` as it sees itself on one rank of a distributed run."""
    strategy = SimpleNamespace(distributed_sampler_kwargs={"rank": rank, "num_replicas": world_size})
    learner = SimpleNamespace(prompt_cursor=cursor)
    data.trainer = SimpleNamespace(strategy=strategy, lightning_module=learner)  # type: ignore[assignment]
    return data


def steps(world_size: int, batch_size: int, num: int, cursor: int = 0) -> list[list[tuple[int, int]]]:
    """What all ranks together consume in each of ``num`` steps, sorted."""
    ranks = [
        islice(EndlessPromptSampler(N, batch_size, 3, rank, world_size, cursor), num)
        for rank in range(world_size)
    ]
    return [sorted(chain.from_iterable(step)) for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_world_consumes_the_stream_of_a_single_process(world_size: int) -> None:
    single = list(chain.from_iterable(steps(1, 1, 48)))
    assert [position for position, _ in single] == list(range(48))
    batch_size = 4 // world_size
    assert steps(world_size, batch_size, 12) == [single[i : i + 4] for i in range(0, 48, 4)]


def test_each_epoch_is_another_permutation() -> None:
    sampler = EndlessPromptSampler(N, 1, seed=3)
    epochs = [[sampler.index(position) for position in range(e * N, e * N + N)] for e in range(5)]
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    other = EndlessPromptSampler(N, 1, seed=4)
    assert [other.index(position) for position in range(N)] != epochs[0]


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 5), st.integers(0, 3)), max_size=5))
def test_no_prompt_is_skipped_or_repeated_when_the_world_changes(runs: list[tuple[int, int, int]]) -> None:
    cursor, consumed = 0, []
    for world_size, batch_size, num in runs:
        for step in steps(world_size, batch_size, num, cursor):
            consumed += step
            cursor += len(step)
    assert consumed == list(chain.from_iterable(steps(1, 1, cursor)))


def test_a_rank_gets_its_slice_of_a_step() -> None:
    batch = next(iter(EndlessPromptSampler(100, 3, rank=2, world_size=4, cursor=50)))
    assert [position for position, _ in batch] == [56, 57, 58]


def test_seeded_depends_on_its_whole_key_alone() -> None:
    keys = [(0, "a", 1), (0, "a", 2), (1, "a", 1), (0, "b", 1), (0, "a", 1, 0)]
    draws = [seeded(*key).random() for key in keys]
    assert len(set(draws)) == len(keys)
    assert draws == [seeded(*key).random() for key in keys]
    assert seeded(0, "epoch", 0).sample(range(10), 10) == [
        3,
        4,
        0,
        2,
        5,
        9,
        6,
        8,
        7,
        1,
    ]  # pinned: runs must stay resumable


@pytest.mark.parametrize("num_workers", [0, 2])
def test_train_batches_are_lists_of_problems_in_order(num_workers: int) -> None:
    data = Numbers(batch_size=3, seed=3, num_workers=num_workers)
    batches = list(islice(iter(data.train_dataloader()), 5))
    assert all(type(batch) is list for batch in batches)
    expected = [f"{index} at {position}" for position, index in chain.from_iterable(steps(1, 3, 5))]
    assert [problem.prompt for batch in batches for problem in batch] == expected


def test_the_cursor_is_read_when_an_iteration_starts() -> None:
    data = at_rank(Numbers(batch_size=2), rank=1, world_size=2, cursor=10)
    loader = data.train_dataloader()
    data.trainer.lightning_module.prompt_cursor = 20  # type: ignore[union-attr]
    assert [problem.prompt.split()[-1] for problem in next(iter(loader))] == ["22", "23"]


def test_a_learner_without_a_cursor_starts_at_zero() -> None:
    data = at_rank(Numbers(batch_size=2), rank=0, world_size=1)
    data.trainer.lightning_module = SimpleNamespace()  # type: ignore[union-attr]
    assert [problem.prompt.split()[-1] for problem in next(iter(data.train_dataloader()))] == ["0", "1"]


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 9))
def test_evaluation_shows_every_problem_once_in_equally_many_batches(num: int, world: int, size: int) -> None:
    loaders = [
        list(at_rank(Numbers(num, eval_batch_size=size), rank, world).val_dataloader())
        for rank in range(world)
    ]
    assert len({len(batches) for batches in loaders}) == 1
    assert all(len(batch) <= size for batches in loaders for batch in batches)
    shown = [[int(problem.id) for batch in batches for problem in batch] for batches in loaders]
    assert shown == [list(range(rank, num, world)) for rank in range(world)]
    if num >= world and size > 1:
        assert all(batches and all(batches) for batches in loaders)


def test_resumed_training_continues_at_the_next_prompt(tmp_path: Any) -> None:
    whole = Learner()
    trainer(max_steps=8).fit(whole, Numbers(batch_size=3, seed=3))

    first = Learner()
    halfway = trainer(max_steps=3)
    halfway.fit(first, Numbers(batch_size=3, seed=3))
    halfway.save_checkpoint(tmp_path / "half.ckpt")
    second = Learner()
    # Ending epochs early restarts the loader: that must not restart the stream either.
    resumed = trainer(max_steps=8, limit_train_batches=2)
    resumed.fit(second, Numbers(batch_size=3, seed=3), ckpt_path=tmp_path / "half.ckpt")

    assert len(whole.seen) == 24
    assert first.seen + second.seen == whole.seen


def test_trainer_evaluates_every_problem_once() -> None:
    learner, data = Learner(), Numbers(evaluation=10, eval_batch_size=4)
    trainer().validate(learner, data, verbose=False)
    assert learner.evaluated == [str(i) for i in range(10)]
    learner.evaluated = []
    trainer().test(learner, data, verbose=False)
    assert learner.evaluated == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected an integer >= 1, got 0"),
        ({"eval_batch_size": -1}, "eval_batch_size: expected an integer >= 1, got -1"),
        ({"batch_size": 1.5}, r"batch_size: expected an integer >= 1, got 1\.5"),
        ({"batch_size": True}, "batch_size: expected an integer >= 1, got True"),
        ({"num_workers": -2}, "num_workers: expected an integer >= 0, got -2"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Numbers(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_prompts": 0}, "num_prompts: expected an integer >= 1, got 0"),
        ({"rank": 2, "world_size": 2}, r"rank: expected an integer in \[0, world_size = 2\), got 2"),
        ({"cursor": -1}, "cursor: expected an integer >= 0, got -1"),
    ],
)
def test_bad_sampler_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EndlessPromptSampler(**{"num_prompts": N, "batch_size": 1, **arguments})
