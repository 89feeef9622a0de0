"""What the two vLLM engines share: a rollout as a list of independent jobs, and their results as rollouts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_madrl.rollouts.base import SeededEngine
from lit_madrl.rollouts.torch_engine import Draws, Prefixes, Request
from lit_madrl.types import Rollouts, Sampling

TEMPERATURES = (0.01, 2.0)
"""vLLM silently raises a lower temperature to the first and refuses one above the second."""

MOST_AT_ONCE = 64
"""Continuations in one request: a server takes no more than the number of sequences it computes at once, and
requests are what several servers share."""


class Job(NamedTuple):
    """Draw ``len(samples)`` continuations of one token list."""

    ids: list[int]
    samples: list[int]  # numbers in 0..P*G-1 of the rows that the continuations become
    max_tokens: int
    min_tokens: int
    seed: int


class Continuation(NamedTuple):
    """Sampled tokens, the stop token included, and the log-probability each was drawn with."""

    tokens: list[int]
    logprobs: list[float]


class VLLMBase(SeededEngine):
    """Rows that continue the same tokens with the same limit are one request, whose seed the engine draws.

    Args:
        seed: start of the random stream.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._model: nn.Module | None = None

    def sync_weights(self, policy: nn.Module) -> None:
        """Sample from ``policy`` from now on; its weights are sent before a ``generate`` if they have changed."""
        self._model = policy

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        stop_ids: Sequence[int],
        prefixes: Prefixes | None = None,
        limits: Tensor | None = None,
    ) -> Rollouts:
        """See ``RolloutEngine.generate``. The tensors are on the policy's device.

        Raises:
            ValueError: an input is malformed, does not fit the model, or is outside of what vLLM accepts.
            RuntimeError: ``sync_weights`` was never called, or the model's logits are not finite.
        """
        return self._begin(prompts, sampling, stop_ids, prefixes, limits)()

    def _begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        stop_ids: Sequence[int],
        prefixes: Prefixes | None = None,
        limits: Tensor | None = None,
    ) -> Callable[[], Rollouts]:
        """Check, draw seeds and prepare; what is left to do is ``_complete``, which is all that takes long."""
        model = self._model
        if model is None:
            raise RuntimeError(
                f"{type(self).__name__}.generate: expected sync_weights(policy) to be called first"
            )
        lowest, highest = TEMPERATURES
        if sampling.temperature != 0 and not lowest <= sampling.temperature <= highest:
            raise ValueError(
                f"Sampling.temperature: expected 0 or a number in [{lowest}, {highest}] (what vLLM samples with), "
                f"got {sampling.temperature}"
            )
        request = Request.build(model, prompts, sampling, stop_ids, prefixes, limits)
        jobs = split(request, sampling, self._generator)
        self._prepare(model, max(len(job.ids) + job.max_tokens for job in jobs))

        def completed() -> Rollouts:
            results = self._complete(model, jobs, sampling, list(stop_ids))
            if sampling.temperature == 0:  # a point mass; vLLM gives log-probabilities at temperature 1
                results = [
                    [Continuation(x.tokens, [0.0] * len(x.tokens)) for x in group] for group in results
                ]
            return request.rollouts(list(draws(jobs, results, request.room.device)))

        return completed

    def _prepare(self, model: nn.Module, length: int) -> None:
        """Get ready for ``length`` tokens, prompt included, where that is not a part of ``_complete``."""

    @abstractmethod
    def _complete(
        self, model: nn.Module, jobs: list[Job], sampling: Sampling, stop_ids: list[int]
    ) -> list[list[Continuation]]:
        """``len(job.samples)`` continuations of each job under the present weights of ``model``.

        At temperature 0 one is enough: all are equal.
        """


def split(request: Request, sampling: Sampling, generator: torch.Generator) -> list[Job]:
    """One job, or several, for each distinct (tokens, room), each with a seed of its own."""
    samples: dict[tuple[int, int], list[int]] = {}
    for sample, key in enumerate(zip(request.root.tolist(), request.room.tolist(), strict=True)):
        samples.setdefault(key, []).append(sample)
    parts = [
        (room, rows[start : start + MOST_AT_ONCE])
        for (_, room), rows in samples.items()
        for start in range(0, len(rows), MOST_AT_ONCE)
    ]
    seeds = torch.randint(2**62, (len(parts),), generator=generator).tolist()
    return [
        Job(
            ids=[*request.prompts[rows[0] // sampling.group_size], *request.prefixes[rows[0]]],
            samples=rows,
            max_tokens=room,
            min_tokens=min(max(sampling.min_new_tokens - len(request.prefixes[rows[0]]), 0), room),
            seed=seed,
        )
        for (room, rows), seed in zip(parts, seeds, strict=True)
    ]


def request_fields(job: Job, sampling: Sampling, stop_ids: list[int]) -> dict[str, Any]:
    """vLLM's sampling parameters of a job, by the names that its Python and its HTTP interface share."""
    greedy = sampling.temperature == 0
    return {
        "n": 1 if greedy else len(job.samples),  # vLLM refuses several equal ones
        "temperature": sampling.temperature,
        "top_k": 0 if greedy else sampling.top_k,
        "top_p": 1.0 if greedy else sampling.top_p,
        "max_tokens": job.max_tokens,
        "min_tokens": job.min_tokens,
        "seed": job.seed,
        "stop_token_ids": stop_ids,
        "ignore_eos": True,  # what ends a completion is in stop_token_ids
        "logprobs": 0,  # of the sampled token alone
    }


def room_for(config: Any, length: int) -> int:
    """Tokens of a sequence to prepare vLLM for when ``length`` are needed: twice as many, if the model has them."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(positions or 2 * length, 2 * length)


def draws(jobs: list[Job], results: list[list[Continuation]], device: torch.device) -> Iterator[Draws]:
    """The continuations step by step.

    Raises:
        RuntimeError: a log-probability is not finite, so the model's logits were not.
    """
    rows: dict[int, Continuation] = {}
    for job, continuations in zip(jobs, results, strict=True):
        if len(continuations) not in (1, len(job.samples)):
            raise RuntimeError(f"vLLM: expected {len(job.samples)} completions, got {len(continuations)}")
        for i, sample in enumerate(job.samples):
            rows[sample] = continuations[i % len(continuations)]
    for step in range(max(len(row.tokens) for row in rows.values())):
        live = [
            (i, row.tokens[step], row.logprobs[step]) for i, row in rows.items() if len(row.tokens) > step
        ]
        samples, tokens, logprobs = zip(*live, strict=True)
        values = torch.tensor(logprobs, device=device)
        if not bool(values.isfinite().all()):
            raise RuntimeError(
                f"logits: expected finite numbers, got others in {int((~values.isfinite()).sum())} of {len(live)} "
                f"rows; have the policy's weights diverged?"
            )
        yield Draws(torch.tensor(samples, device=device), torch.tensor(tokens, device=device), values)
