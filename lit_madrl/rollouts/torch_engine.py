"""Sampling inside the training process, from the very weights that are trained.

One idea serves everything. A *live row* is a distinct partial completion of a prompt, and each of the
P x G samples points at one. A step draws a token for every unfinished sample from the row it points at;
the distinct (row, token) pairs are the next rows, and the cache is selected by their parents. So a prompt is
computed once for its whole group, a finished completion costs nothing, and equal partial completions are
computed once. No approximation is involved: equal prefixes have equal distributions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_madrl.policy.allocator import keep_freed_memory
from lit_madrl.policy.linear import layers_by_input, packed_weights
from lit_madrl.rollouts.base import SeededEngine
from lit_madrl.rollouts.kv_cache import allows_holes
from lit_madrl.rollouts.live_rows import LiveRows, branch
from lit_madrl.rollouts.prefill import Root, plan, whole
from lit_madrl.rollouts.sampling import draw
from lit_madrl.types import Rollouts, Sampling

Prefixes = Sequence[Sequence[Sequence[int]]]

TOKENS_TO_PACK = 16
"""Packing the weights pays after about so many tokens; it waits for as many, as completions may end before."""


class TorchEngine(SeededEngine):
    """Rollouts of a transformers decoder by plain PyTorch, on the device and in the dtype the model is in.

    Each step draws P x G uniforms on the CPU, and sample i takes the i-th whatever the others do: neither
    merging nor the end of another completion changes what it becomes. With ``temperature`` 0 all logprobs
    are 0. ``min_new_tokens`` counts a prefix, as the length limits do. Autocast is the caller's to set.

    Args:
        seed: start of the random stream.
        prefill_tokens: about how many prompt tokens go through the model at once; bounds its activations.
        merge_identical: compute equal partial completions of a prompt once; off only to measure or test.
        share_prompts: compute a prompt once for all its prefixes; off only to measure or test. Models that
            cannot skip columns of their cache (:func:`~lit_madrl.rollouts.kv_cache.allows_holes`) never share.
    """

    def __init__(
        self,
        seed: int = 0,
        prefill_tokens: int = 65536,
        merge_identical: bool = True,
        share_prompts: bool = True,
    ) -> None:
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens: expected an integer >= 1, got {prefill_tokens}")
        self.prefill_tokens = prefill_tokens
        self.merge_identical = merge_identical
        self.share_prompts = share_prompts
        super().__init__(seed)
        self._model: nn.Module | None = None

    def sync_weights(self, policy: nn.Module) -> None:
        """Sample from ``policy`` from now on. It is kept, not copied: later updates need no further sync."""
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
        """See ``RolloutEngine.generate``. The tensors are on the model's device.

        Raises:
            ValueError: an input is malformed or does not fit the model.
            RuntimeError: ``sync_weights`` was never called, or the model's logits are not finite.
        """
        if self._model is None:
            raise RuntimeError("TorchEngine.generate: expected sync_weights(policy) to be called first")
        request = Request.build(self._model, prompts, sampling, stop_ids, prefixes, limits)
        if request.room.device.type == "cpu":
            keep_freed_memory()
        with ExitStack() as stack:
            stack.enter_context(evaluation_mode(self._model))
            stack.enter_context(weights_cast_once(request.room.device.type))
            return request.rollouts(self._sample(self._model, request, sampling, stack))

    def _sample(
        self, model: nn.Module, request: Request, sampling: Sampling, stack: ExitStack
    ) -> list[Draws]:
        count, device = request.room.numel(), request.room.device
        share = self.share_prompts and allows_holes(model)
        stages = plan(request.roots) if share else whole(request.roots)
        longest = int(request.room.max())
        capacity = sum(stage.width for stage in stages) + longest
        rows = LiveRows(model, count, capacity, device)
        logits = rows.prefill(stages, self.prefill_tokens)
        # The roots as the children of themselves: every sample gets its place without a special first step.
        branches = branch(request.root, torch.zeros_like(request.root))
        sample = branches.order
        history: list[Draws] = []
        for step in range(longest):
            uniforms = torch.rand(count, dtype=torch.float64, generator=self._generator).to(device)[sample]
            if step < sampling.min_new_tokens:
                position = request.prefix_lengths.new_empty(logits.shape[0])
                position[branches.row] = request.prefix_lengths[sample] + step
                early = position < sampling.min_new_tokens
                logits = logits.masked_fill(early[:, None] & request.is_stop, -torch.inf)
            table = uniforms.new_zeros(logits.shape[0], int(branches.rank.max()) + 1)
            table[branches.row, branches.rank] = uniforms
            tokens, logprobs = (x[branches.row, branches.rank] for x in draw(logits, table, sampling))
            history.append(Draws(sample, tokens, logprobs))
            live = (~request.is_stop[tokens] & (request.room[sample] > step + 1)).nonzero().squeeze(1)
            if not live.numel():
                break
            branches = branch(branches.row[live], tokens[live], self.merge_identical)
            sample = sample[live][branches.order]
            if step == TOKENS_TO_PACK <= longest - step:
                with layers_by_input(model) as groups:
                    logits = rows.advance(branches.parents, branches.tokens)
                stack.enter_context(packed_weights(groups))
            else:
                logits = rows.advance(branches.parents, branches.tokens)
        return history


class Draws(NamedTuple):
    """What one step drew, for the M samples that were unfinished before it."""

    sample: Tensor  # [M] numbers in 0..N-1
    tokens: Tensor  # [M]
    logprobs: Tensor  # [M] nats


class Request(NamedTuple):
    """The checked input of one ``generate``: what to complete, and how far for each of N = P x G samples."""

    prompts: list[list[int]]
    prefixes: list[list[int]]  # N
    prefix_lengths: Tensor  # [N]
    roots: list[Root]  # the distinct ones
    root: Tensor  # [N] the root of each sample
    room: Tensor  # [N] most tokens to sample
    is_stop: Tensor  # [V] bool

    @classmethod
    def build(
        cls,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        stop_ids: Sequence[int],
        prefixes: Prefixes | None,
        limits: Tensor | None,
    ) -> Request:
        """Check the arguments of ``generate`` and find the distinct roots."""
        config: Any = model.config
        config = config.get_text_config(decoder=True)
        device = next(model.parameters()).device
        shape = (len(prompts), sampling.group_size)
        given = flat_prefixes(prefixes, shape)
        longest = flat_limits(limits, sampling, shape)
        check_lengths(prompts, given, longest, getattr(config, "max_position_embeddings", None))
        index: dict[Root, int] = {}
        keys = [tuple(prompt) for prompt in prompts]
        root = [
            index.setdefault((keys[i // shape[1]], tuple(prefix)), len(index))
            for i, prefix in enumerate(given)
        ]
        tokens = [token for root in index for part in root for token in part]
        check_ids("prompts and prefixes", tokens, config.vocab_size)
        check_ids("stop_ids", stop_ids, config.vocab_size)
        is_stop = torch.zeros(config.vocab_size, dtype=torch.bool)
        is_stop[list(stop_ids)] = True
        prefix_lengths = torch.tensor([len(prefix) for prefix in given], device=device)
        return cls(
            prompts=[list(prompt) for prompt in prompts],
            prefixes=given,
            prefix_lengths=prefix_lengths,
            roots=list(index),
            root=torch.tensor(root, device=device),
            room=torch.tensor(longest, device=device) - prefix_lengths,
            is_stop=is_stop.to(device),
        )

    def rollouts(self, history: list[Draws]) -> Rollouts:
        """The prefixes and the sampled tokens, laid out as ``[P, G, T]``."""
        device, count = self.room.device, self.room.numel()
        sample, tokens, logprobs = (torch.cat(x) for x in zip(*history, strict=True))
        sizes = torch.tensor([draws.sample.numel() for draws in history], device=device)
        step = torch.arange(len(history), device=device).repeat_interleave(sizes)
        position = self.prefix_lengths[sample] + step
        lengths = self.prefix_lengths + sample.bincount(minlength=count)
        columns = torch.arange(int(lengths.max()), device=device)
        ids = torch.zeros(count, columns.numel(), dtype=torch.long, device=device)
        prefix_tokens = [token for prefix in self.prefixes for token in prefix]
        ids[columns < self.prefix_lengths[:, None]] = torch.tensor(
            prefix_tokens, dtype=torch.long, device=device
        )
        ids[sample, position] = tokens
        sampler_logprobs = torch.zeros(ids.shape, device=device)
        sampler_logprobs[sample, position] = logprobs
        finished = torch.zeros(count, dtype=torch.bool, device=device)
        finished[sample[self.is_stop[tokens]]] = True
        shape = (len(self.prompts), count // len(self.prompts))
        return Rollouts(
            prompt_ids=self.prompts,
            completion_ids=ids.view(*shape, -1),
            completion_mask=(columns < lengths[:, None]).view(*shape, -1),
            sampler_logprobs=sampler_logprobs.view(*shape, -1),
            finished=finished.view(shape),
            prefix_lengths=self.prefix_lengths.view(shape),
        )


@contextmanager
def weights_cast_once(device_type: str) -> Iterator[None]:
    """Under autocast keep the cast weights for a while: Lightning's casts them in every forward, so for each token."""
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    try:
        with torch.autocast(device_type, torch.get_autocast_dtype(device_type), cache_enabled=True):
            yield
    finally:
        torch.clear_autocast_cache()  # what is kept has no gradient and is of these weights


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """``model.eval()`` for a while; afterwards every module has its own former training flag again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def flat_prefixes(prefixes: Prefixes | None, shape: tuple[int, int]) -> list[list[int]]:
    """The N prefixes, checked to be P lists of G."""
    if shape[0] == 0:
        raise ValueError("prompts: expected at least one prompt, got none")
    if prefixes is None:
        return [[]] * (shape[0] * shape[1])
    sizes = [len(group) for group in prefixes]
    if sizes != [shape[1]] * shape[0]:
        raise ValueError(f"prefixes: expected {shape[0]} lists of {shape[1]}, got lists of lengths {sizes}")
    return [list(prefix) for group in prefixes for prefix in group]


def flat_limits(limits: Tensor | None, sampling: Sampling, shape: tuple[int, int]) -> list[int]:
    """The N length limits, checked to be ``[P, G]``."""
    if limits is None:
        return [sampling.max_new_tokens] * (shape[0] * shape[1])
    if tuple(limits.shape) != shape or limits.is_floating_point():
        raise ValueError(f"limits: expected long {shape}, got {limits.dtype} {tuple(limits.shape)}")
    flat: list[int] = limits.flatten().tolist()
    return flat


def check_lengths(
    prompts: Sequence[Sequence[int]], prefixes: list[list[int]], limits: list[int], positions: int | None
) -> None:
    """Prompts are not empty, prefixes are shorter than their limits, prompt + limit fits the positions."""
    group = len(prefixes) // len(prompts)
    for i, (prefix, limit) in enumerate(zip(prefixes, limits, strict=True)):
        p, g = divmod(i, group)
        if not len(prompts[p]):
            raise ValueError(f"prompts[{p}]: expected at least one token id, got none")
        if limit <= len(prefix):
            raise ValueError(f"limits[{p}, {g}]: expected more than the prefix's {len(prefix)}, got {limit}")
        if positions is not None and len(prompts[p]) + limit > positions:
            raise ValueError(
                f"prompts[{p}]: expected prompt + length limit <= {positions} (max_position_embeddings), "
                f"got {len(prompts[p])} + {limit}"
            )


def check_ids(name: str, ids: Sequence[int], vocabulary: int) -> None:
    """All ids are in the model's vocabulary."""
    if len(ids) and (min(ids) < 0 or max(ids) >= vocabulary):
        raise ValueError(f"{name}: expected token ids in 0..{vocabulary - 1}, got {min(ids)}..{max(ids)}")
