"""The values that travel between the parts: problems in, rollouts and scores between, rewards out.

Letters used everywhere: P prompts, G rollouts a prompt, T tokens, K categories. Logprobs are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """One prompt with all that is known about it. Text only: the learner owns the tokenizer.

    Attributes:
        id: unique within its data set.
        prompt: plain text, or chat messages (``{"role": ..., "content": ...}``) for the chat template.
        target: target probability of each of the K categories; empty when the task has no categories.
        options: the canonical completion of each category where they can be enumerated, else empty.
        answer: the gold answer for a verifier.
        reference: a full reference solution for an augmenter.
        metadata: whatever a task's own verifier, categorizer or report wants to find again.
    """

    id: str
    prompt: str | Sequence[dict[str, str]]
    target: tuple[float, ...] = ()
    options: tuple[str, ...] = ()
    answer: str | None = None
    reference: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    Args:
        group_size: G, completions a prompt.
        max_new_tokens: longest completion, the stop token included.
        min_new_tokens: stop tokens are forbidden before this many tokens.
        temperature: 1 samples the model's own distribution, 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p; 1 keeps all.
        stop: strings that end a completion beside the end-of-sequence token; each must be one token.
    """

    group_size: int = 8
    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("group_size", self.group_size >= 1, "an integer >= 1"),
            ("max_new_tokens", self.max_new_tokens >= 1, "an integer >= 1"),
            (
                "min_new_tokens",
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"an integer in [0, max_new_tokens = {self.max_new_tokens}]",
            ),
            ("temperature", 0 <= self.temperature < float("inf"), "a finite number >= 0"),
            ("top_k", self.top_k >= 0, "an integer >= 0 (0 keeps all tokens)"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]"),
        ):
            if not valid:
                raise ValueError(f"Sampling.{name}: expected {expected}, got {getattr(self, name)!r}")

    @property
    def truncates(self) -> bool:
        """Whether the sampled distribution has a smaller support than the model's."""
        return self.top_k > 0 or self.top_p < 1 or self.temperature == 0 or self.min_new_tokens > 0


class Source(IntEnum):
    """Where a row of a group comes from."""

    SAMPLED = 0
    """The policy's own rollout of the prompt."""
    UNGUIDED = 1
    """Another rollout of the prompt, inserted because it is right."""
    GUIDED = 2
    """A continuation of a part of the reference."""
    REFERENCE = 3
    """The reference itself."""


@dataclass(frozen=True)
class Rollouts:
    """Sampled completions of P prompts, G each, right-padded to T tokens. Never mutated.

    Example: the completion ``[7, 8, eos]`` in a batch with T = 4 has the mask ``[1, 1, 1, 0]``: the stop
    token counts. The mask comes from the sampler's lengths, never from comparing ids with a pad id.

    Attributes:
        prompt_ids: P lists of token ids.
        completion_ids: ``[P, G, T]`` long, a prefix given to the engine included.
        completion_mask: ``[P, G, T]`` bool, true through the stop token.
        sampler_logprobs: ``[P, G, T]`` float, log-probability (nats) of each sampled token under the
            distribution it was drawn from (temperature, top-k, top-p renormalized); 0 off-mask and on
            prefixes.
        finished: ``[P, G]`` bool, false where the length limit cut the completion.
        prefix_lengths: ``[P, G]`` long, tokens at the start of a completion that were given, not sampled.
        source: ``[P, G]`` long, a :class:`Source` for each row; None when all are ``SAMPLED``.
    """

    prompt_ids: list[list[int]]
    completion_ids: Tensor
    completion_mask: Tensor
    sampler_logprobs: Tensor
    finished: Tensor
    prefix_lengths: Tensor
    source: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """``[P, G]`` long: tokens of each completion, the stop token included."""
        return self.completion_mask.sum(-1)

    def completions(self) -> list[list[list[int]]]:
        """The completions as P lists of G lists of token ids without padding."""
        lengths = self.lengths.tolist()
        return [
            [row[:n] for row, n in zip(group, group_lengths, strict=True)]
            for group, group_lengths in zip(self.completion_ids.tolist(), lengths, strict=True)
        ]

    def to(self, device: torch.device | str) -> Rollouts:
        """A copy whose tensors are on ``device``."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class Scores:
    """What is known about each rollout before rewards. All fields ``[P, G]``.

    Attributes:
        category: long in {-1, 0..K-1}; -1 is off-support.
        correct: float in {0, 1}; all zero when the task has no verifier.
        format: float in {0, 1}: an answer could be extracted; all zero when the task has no verifier.
        on_policy: bool; false for rows an augmenter inserted. Those are rewarded against the frequencies
            of the on-policy rows and never counted in them.
    """

    category: Tensor
    correct: Tensor
    format: Tensor
    on_policy: Tensor

    @classmethod
    def build(cls, category: Tensor, correct: Tensor | None = None, format: Tensor | None = None) -> Scores:
        """Scores of on-policy rollouts; what is not given is zero."""
        zeros = torch.zeros(category.shape, device=category.device)
        return cls(
            category=category,
            correct=zeros if correct is None else correct.float(),
            format=zeros if format is None else format.float(),
            on_policy=torch.ones_like(category, dtype=torch.bool),
        )

    def to(self, device: torch.device | str) -> Scores:
        """A copy whose tensors are on ``device``."""
        return Scores(**{k: v.to(device) for k, v in vars(self).items()})
