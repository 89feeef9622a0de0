"""The contract of everything that turns prompts into sampled completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_madrl.types import Rollouts, Sampling


class RolloutEngine(ABC):
    """Samples completions from the policy's current weights.

    An engine owns its random state: equal seeds and weights give equal rollouts, whatever else the process
    drew in between, and ``state_dict`` lets a resumed run continue the very same stream.

    Attributes:
        reports_logprobs: whether ``Rollouts.sampler_logprobs`` are what they say; an engine that does not know them
            gives zeros.
        generates_ahead: whether it can go on sampling from former weights while the policy is trained.
    """

    reports_logprobs: ClassVar[bool] = True
    generates_ahead: ClassVar[bool] = False

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Restart the random stream; the learner passes a different seed on every rank."""

    @abstractmethod
    def sync_weights(self, policy: nn.Module) -> None:
        """Sample from ``policy`` (a causal language model of transformers) from now on."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        stop_ids: Sequence[int],
        prefixes: Sequence[Sequence[Sequence[int]]] | None = None,
        limits: Tensor | None = None,
    ) -> Rollouts:
        """Draw ``sampling.group_size`` completions of each prompt.

        Args:
            prompts: P non-empty lists of token ids.
            sampling: how to draw.
            stop_ids: token ids that end a completion; the stop token is its last token.
            prefixes: P lists of G token lists that completions start with; default none. Prefix tokens are
                part of ``completion_ids`` and of the length limit.
            limits: ``[P, G]`` long, longest completion a row, prefix included; default
                ``sampling.max_new_tokens`` for all.
        """

    def generate_ahead(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, stop_ids: Sequence[int]
    ) -> Future[Rollouts]:
        """Begin what :meth:`generate` does; it goes on in the background, from the weights as they are now.

        Random numbers are drawn before it returns, and a later ``generate`` waits for it: neither disturbs the other.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot generate in the background")

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The random state."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the random stream of ``state_dict``."""


class SeededEngine(RolloutEngine):
    """An engine whose random state is one generator, on the CPU.

    Args:
        seed: start of the random stream.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def seed(self, seed: int) -> None:
        """Restart the random stream."""
        self._generator.manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """The random state."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the random stream of ``state_dict``."""
        self._generator.set_state(state["generator"].cpu())
