"""Tiny random models of several families, built once a session; every call gives a copy of its own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 29
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.15,
    "eos_token_id": 1,
    "bos_token_id": None,
}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {**SIZES, "tie_word_embeddings": False}),
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, {**SIZES, "tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {**SIZES, "tie_word_embeddings": False}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {**SIZES, "tie_word_embeddings": True}),
    "gpt2": (GPT2Config, GPT2LMHeadModel, {**GPT2_SIZES, "tie_word_embeddings": False}),
    "gpt2-tied": (GPT2Config, GPT2LMHeadModel, {**GPT2_SIZES, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {**SIZES, "sliding_window": None}),
    "mistral-sliding": (MistralConfig, MistralForCausalLM, {**SIZES, "sliding_window": 5}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {**SIZES, "sliding_window": 5, "final_logit_softcapping": 2.0},
    ),
    "granite": (GraniteConfig, GraniteForCausalLM, {**SIZES, "logits_scaling": 4.0}),
    "opt": (
        OPTConfig,
        OPTForCausalLM,
        {
            **{
                k: SIZES[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
            },
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 64,
            "init_std": 0.15,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
        },
    ),
    "jamba": (
        JambaConfig,
        JambaForCausalLM,
        {
            **SIZES,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "num_experts": 1,
            "num_experts_per_tok": 1,
        },
    ),
}


def tiny_model(family: str, **overrides: Any) -> PreTrainedModel:
    """A new copy of the family's model, in training mode."""
    return copy.deepcopy(_built(family, json.dumps(overrides)))


@cache
def _built(family: str, overrides: str) -> PreTrainedModel:
    config_class, model_class, arguments = FAMILIES[family]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        model: PreTrainedModel = model_class(config_class(**{**arguments, **json.loads(overrides)}))
        for parameter in model.parameters():  # biases and norms start at 0 and 1: make them matter
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train()


def row_logprobs(
    model: Callable[..., Any], prompt: list[int], completion: list[int], temperature: float = 1.0
) -> Tensor:
    """Log-probability of each completion token by a forward over one bare sequence: the slow reference."""
    ids = torch.tensor([[*prompt, *completion]])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1)[range(len(completion)), completion]


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradients by parameter name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
