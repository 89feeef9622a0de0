"""Shapes of decoders, and what computing with them takes: parameters, FLOPs, attended pairs, keys and values.

A multiply-add is 2 FLOPs. Only matrix products are counted: norms, softmax and rotations are not. Letters: L layers,
E hidden size, H query heads, K key/value heads, D head size, I feed-forward size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Groups = Sequence[Sequence[Sequence[int]]]
"""The completions of each prompt as token ids."""


@dataclass(frozen=True)
class Shape:
    """A decoder of Llama's kind: grouped-query attention and a gated feed-forward, no biases but ``qkv_bias``."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    qk_norm: bool = True
    qkv_bias: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From the fields of a transformers ``config.json``.

        Raises:
            ValueError: the model is of another kind.
        """
        kind = config.get("model_type")
        if kind not in ("llama", "qwen2", "qwen3"):
            raise ValueError(f"model_type: expected llama, qwen2 or qwen3, got {kind!r}")
        if config.get("attention_bias") or config.get("mlp_bias"):
            raise ValueError("attention_bias, mlp_bias: expected false, got true")
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2",
        )

    @classmethod
    def read(cls, name: str) -> Shape:
        """A name of ``SHAPES``, or a ``config.json`` or the folder that holds one."""
        if name in SHAPES:
            return SHAPES[name]
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        if not path.is_file():
            raise ValueError(f"model: expected one of {', '.join(SHAPES)} or a config.json, got {name!r}")
        return cls.of(json.loads(path.read_text()))

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each linear map of a layer."""
        e, q, kv, i = (
            self.hidden,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.intermediate,
        )
        attention = {"q_proj": (e, q), "k_proj": (e, kv), "v_proj": (e, kv), "o_proj": (q, e)}
        return attention | {"gate_proj": (e, i), "up_proj": (e, i), "down_proj": (i, e)}

    def layer_weights(self) -> int:
        """Elements of a layer's matrices."""
        return sum(rows * columns for rows, columns in self.matrices().values())

    def layer_parameters(self) -> int:
        """Parameters of a layer: matrices, two norms, and norms or biases of queries and keys."""
        extra = 2 * self.head_dim if self.qk_norm else 0
        extra += (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        return self.layer_weights() + 2 * self.hidden + extra

    def root_parameters(self) -> int:
        """Parameters outside of the layers: embedding, last norm, and the head where it is not the embedding."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden

    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters() + self.root_parameters()

    def tensors(self) -> int:
        """Parameter tensors."""
        layer = len(self.matrices()) + 2 + 2 * self.qk_norm + 3 * self.qkv_bias
        return self.layers * layer + (2 if self.tied else 3)

    def config(self, **more: Any) -> Any:
        """A transformers configuration of this shape (``qk_norm`` without ``qkv_bias``)."""
        from transformers import Qwen3Config

        fields = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
        }
        return Qwen3Config(**{**fields, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, **more})


SHAPES = {
    "qwen3-0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151_936, tied=True),
    "qwen3-1.7b": Shape(28, 2048, 16, 8, 128, 6144, 151_936, tied=True),
    "qwen3-4b": Shape(36, 2560, 32, 8, 128, 9728, 151_936, tied=True),
    "qwen3-8b": Shape(36, 4096, 32, 8, 128, 12_288, 151_936, tied=False),
    "qwen3-14b": Shape(40, 5120, 40, 8, 128, 17_408, 151_936, tied=False),
    "qwen3-32b": Shape(64, 5120, 64, 8, 128, 25_600, 151_936, tied=False),
}
"""The published configurations."""


class Counts(NamedTuple):
    """What a forward computes: ``tokens`` through the layers, (query, key) ``pairs`` that attention needs, and
    positions whose logits are needed (``head``)."""

    tokens: float
    pairs: float
    head: float


def total(counts: Iterable[Counts]) -> Counts:
    """The sum."""
    return Counts(*map(sum, zip((0, 0, 0), *counts, strict=True)))


def causal(tokens: int, past: int = 0) -> int:
    """Pairs of ``tokens`` queries with ``past`` earlier keys, those before them, and themselves."""
    return tokens * past + tokens * (tokens + 1) // 2


def packed_counts(layout: Iterable[tuple[int, Sequence[int]]]) -> Counts:
    """Reference and training forward of groups given as (prompt length, lengths of its distinct completions).

    A prompt of p tokens is computed once, with p(p+1)/2 pairs. A completion of n tokens feeds f = n - 1 of them,
    which see the prompt and themselves, fp + f(f+1)/2 pairs; all its n tokens need logits.
    """
    return total(
        Counts(
            prompt + sum(n - 1 for n in lengths),
            causal(prompt) + sum(causal(n - 1, prompt) for n in lengths),
            sum(lengths),
        )
        for prompt, lengths in layout
    )


def padded_counts(layout: Sequence[tuple[int, Sequence[int]]]) -> Counts:
    """The same by right-padded rows that repeat their prompt, with all pairs and logits everywhere."""
    rows = sum(len(lengths) for _, lengths in layout)
    width = max(prompt + n - 1 for prompt, lengths in layout for n in lengths)
    return Counts(rows * width, rows * width**2, rows * width)


def prefill_counts(prompts: Iterable[int]) -> Counts:
    """Prompts of these lengths, each computed once; the last token of each needs logits."""
    return total(Counts(prompt, causal(prompt), 1) for prompt in prompts)


class Step(NamedTuple):
    """One decode step: what it computes, and the cached ``keys`` it has to read, a shared prompt's once."""

    counts: Counts
    keys: int


def decode_steps(prompts: Sequence[int], groups: Groups, merge: bool = True) -> Iterator[Step]:
    """The steps that sample these completions after prompts of these lengths.

    Step t feeds the t-th token of every completion longer than t, once for those of a prompt that are equal so far
    unless ``merge`` is off.
    """
    longest = max(len(completion) for group in groups for completion in group)
    live = [_live(group, longest, merge) for group in groups]
    for t in range(1, longest):
        rows = [group[t] for group in live]
        pairs = sum(n * (prompt + t) for n, prompt in zip(rows, prompts, strict=True))
        shared = sum(prompt for n, prompt in zip(rows, prompts, strict=True) if n)
        yield Step(Counts(sum(rows), pairs, sum(rows)), sum(rows) * t + shared)


def _live(group: Sequence[Sequence[int]], longest: int, merge: bool) -> list[int]:
    """At t: the distinct first t tokens of the completions that are longer than t."""
    nodes: dict[tuple[int, int], int] = {}
    live: list[set[int]] = [set() for _ in range(longest)]
    for number, completion in enumerate(group):
        node = 0 if merge else -1 - number
        for t, token in enumerate(completion[:-1], 1):
            node = nodes.setdefault((node, token), len(nodes) + 1)
            live[t].add(node)
    return [len(at) for at in live]


def forward_flops(shape: Shape, counts: Counts) -> float:
    """2 w L tokens + 4 L H D pairs + 2 E V head, with w the elements of a layer's matrices."""
    layers = 2 * shape.layers * shape.layer_weights() * counts.tokens
    return layers + attention_flops(shape, counts) + head_flops(shape, counts)


def attention_flops(shape: Shape, counts: Counts) -> float:
    """Scores and values: 4 L H D for each pair."""
    return 4 * shape.layers * shape.heads * shape.head_dim * counts.pairs


def head_flops(shape: Shape, counts: Counts) -> float:
    """Logits: 2 E V a position."""
    return 2 * shape.hidden * shape.vocabulary * counts.head


def training_flops(
    shape: Shape, counts: Counts, checkpointing: bool = False, logits_again: bool = False
) -> float:
    """Forward and backward: 3 times the forward, as each product has two gradients.

    Args:
        shape: the model's.
        counts: of the forward.
        checkpointing: the layers' forward is computed again in backward, but for its last product, which nothing
            that backward needs depends on.
        logits_again: the logits are.
    """
    flops = 3 * forward_flops(shape, counts)
    if checkpointing:
        last = 2 * shape.layers * shape.intermediate * shape.hidden * counts.tokens
        flops += forward_flops(shape, counts) - head_flops(shape, counts) - last
    return flops + (head_flops(shape, counts) if logits_again else 0)


def weight_elements(shape: Shape) -> int:
    """Elements of the matrices that every forward reads: the layers' and the head's."""
    return shape.layers * shape.layer_weights() + shape.vocabulary * shape.hidden


def kv_elements(shape: Shape) -> int:
    """Cached elements a token: 2 L K D."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim


def decode_bytes(shape: Shape, step: Step, element: int) -> float:
    """What a step must read and write: all weights, the cached keys and values, and the new ones.

    Args:
        shape: the model's.
        step: which one.
        element: bytes of a number.
    """
    return element * (weight_elements(shape) + kv_elements(shape) * (step.keys + step.counts.tokens))
