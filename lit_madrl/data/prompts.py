"""Prompts without end: a stream that resumes exactly, and evaluation sets seen exactly once."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from typing import cast

import lightning as L
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    get_worker_info,
)

from lit_madrl.types import Problem


def seeded(*key: int | str) -> random.Random:
    """A random generator that depends on ``key`` alone, equal in every process."""
    return random.Random("/".join(map(str, key)))


class EndlessPromptSampler(Sampler[list[tuple[int, int]]]):
    """Batches of ``(position, index)`` forever.

    Positions number the prompts of the whole run: position p is item p mod n of the permutation of epoch
    p div n. A step that starts at cursor c consumes the positions c to c + B·W - 1 over all W ranks, of which
    rank r gets c + r·B to c + (r + 1)·B - 1. So the state of the stream is the cursor alone, and another
    world size continues at the very next prompt.

    Args:
        num_prompts: n.
        batch_size: B, prompts a step on each rank.
        seed: of the permutations.
        rank: r, of this data-parallel rank.
        world_size: W, number of data-parallel ranks.
        cursor: position of the first step; a callable is asked whenever an iteration starts.
    """

    def __init__(
        self,
        num_prompts: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        cursor: int | Callable[[], int] = 0,
    ) -> None:
        require_at_least(1, num_prompts=num_prompts, batch_size=batch_size, world_size=world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: expected an integer in [0, world_size = {world_size}), got {rank!r}")
        if not callable(cursor):
            require_at_least(0, cursor=cursor)
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.cursor = cursor

    def index(self, position: int) -> int:
        """The item at ``position``."""
        epoch, offset = divmod(position, self.num_prompts)
        return _permutation(self.num_prompts, self.seed, epoch)[offset]

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        start = self.cursor() if callable(self.cursor) else self.cursor
        start += self.rank * self.batch_size
        while True:
            yield [(position, self.index(position)) for position in range(start, start + self.batch_size)]
            start += self.world_size * self.batch_size


class PromptDataModule(L.LightningDataModule, ABC):
    """Lists of :class:`Problem` for training, validation and test. Every batch is a plain list.

    Training never ends and starts at the learner's ``prompt_cursor``, the number of prompts consumed by all
    ranks together (0 without a learner). Validation and test show every problem exactly once, problem i on
    rank i mod W. All ranks run equally many batches, so that collectives meet; the batch of a rank which has
    run out is empty (only where ``eval_batch_size`` is 1 or problems are fewer than ranks).

    Args:
        batch_size: prompts a step on each rank.
        eval_batch_size: most prompts a validation or test batch on each rank.
        seed: of the order of prompts and of all that a prompt randomizes.
        num_workers: processes that build batches.
    """

    def __init__(
        self, batch_size: int = 8, eval_batch_size: int = 32, seed: int = 0, num_workers: int = 0
    ) -> None:
        super().__init__()
        require_at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        require_at_least(0, num_workers=num_workers)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        self.num_workers = num_workers

    @property
    @abstractmethod
    def num_train_prompts(self) -> int:
        """How many training prompts an epoch has."""

    @abstractmethod
    def train_problem(self, index: int, position: int) -> Problem:
        """Training prompt ``index`` as it is shown at ``position``: a pure function of both and the seed."""

    @abstractmethod
    def validation_problems(self) -> Sequence[Problem]:
        """The validation set, equal on every rank."""

    @abstractmethod
    def test_problems(self) -> Sequence[Problem]:
        """The test set, equal on every rank."""

    @property
    def categories(self) -> tuple[str, ...]:
        """Names of the categories; empty when the task has none."""
        return ()

    @property
    def num_categories(self) -> int:
        """K."""
        return len(self.categories)

    @property
    def data_parallel(self) -> tuple[int, int]:
        """Rank and number of ranks among which prompts are divided; (0, 1) without a trainer."""
        if self.trainer is None:
            return 0, 1
        # Strategies of one device have no such property; under tensor parallelism it is not the global rank.
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"rank": 0, "num_replicas": 1})
        return kwargs["rank"], kwargs["num_replicas"]

    def train_dataloader(self) -> DataLoader[list[Problem]]:
        rank, world_size = self.data_parallel
        sampler = EndlessPromptSampler(
            self.num_train_prompts, self.batch_size, self.seed, rank, world_size, cursor=self._cursor
        )
        stream = _ProblemStream(sampler, self.train_problem)
        return DataLoader(stream, batch_size=None, collate_fn=list, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[list[Problem]]:
        return self._evaluation_loader(self.validation_problems())

    def test_dataloader(self) -> DataLoader[list[Problem]]:
        return self._evaluation_loader(self.test_problems())

    def transfer_batch_to_device(
        self, batch: list[Problem], device: torch.device, dataloader_idx: int
    ) -> list[Problem]:
        """Problems are text: they stay where they are (Lightning's default refuses frozen dataclasses)."""
        return batch

    def _cursor(self) -> int:
        """Asked when an iteration starts, hence after a checkpoint was restored."""
        learner = None if self.trainer is None else self.trainer.lightning_module
        return int(getattr(learner, "prompt_cursor", 0))

    def _evaluation_loader(self, problems: Sequence[Problem]) -> DataLoader[list[Problem]]:
        rank, world_size = self.data_parallel
        num_batches = -(-len(problems) // (world_size * self.eval_batch_size))
        batches = cast("Dataset[list[Problem]]", _split_evenly(problems[rank::world_size], num_batches))
        # Divided already: a DistributedSampler of one replica keeps Lightning from doing it once more.
        sampler: DistributedSampler[list[Problem]] = DistributedSampler(
            batches, num_replicas=1, rank=0, shuffle=False
        )
        return DataLoader(
            batches, batch_size=None, sampler=sampler, collate_fn=list, num_workers=self.num_workers
        )


def _split_evenly(problems: Sequence[Problem], num_batches: int) -> list[list[Problem]]:
    """Consecutive batches whose sizes differ by at most one."""
    bounds = [len(problems) * i // num_batches for i in range(num_batches + 1)] if num_batches else []
    return [list(problems[start:stop]) for start, stop in pairwise(bounds)]


class _ProblemStream(IterableDataset[list[Problem]]):
    """Turns the sampler's batches into problems; iterable, so that Lightning leaves its order alone."""

    def __init__(
        self, sampler: Iterable[list[tuple[int, int]]], problem: Callable[[int, int], Problem]
    ) -> None:
        self.sampler = sampler
        self.problem = problem

    def __iter__(self) -> Iterator[list[Problem]]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        # The loader reads its workers in turn, so the batches of a strided stream come out in order.
        for batch in islice(self.sampler, first, None, stride):
            yield [self.problem(index, position) for position, index in batch]


def require_at_least(least: int, **values: int) -> None:
    """Refuse arguments that are not integers >= ``least``."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")


@lru_cache(maxsize=4)
def _permutation(num_prompts: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_prompts))
    seeded(seed, "epoch", epoch).shuffle(order)
    return order
