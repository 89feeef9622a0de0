"""Tiny decoders of several kinds, random and far from uniform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from tests.helpers.engine_contract import STOP, VOCABULARY, tiny_qwen3

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "eos_token_id": STOP,
    "bos_token_id": None,
}


def tiny_llama() -> nn.Module:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def tiny_gpt2() -> nn.Module:
    """Learned positions, and dropout that must not be active."""
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.15,
        resid_pdrop=0.5,
        eos_token_id=STOP,
        bos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def tiny_mistral() -> nn.Module:
    """Attention that reaches 5 tokens back."""
    torch.manual_seed(3)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))


def tiny_lfm2() -> nn.Module:
    """Convolution states beside attention."""
    torch.manual_seed(4)
    config = Lfm2Config(
        **{**SIZES, "num_hidden_layers": 3},
        layer_types=["conv", "full_attention", "conv"],
        block_multiple_of=8,
    )
    return Lfm2ForCausalLM(config)


def tiny_mpt() -> nn.Module:
    """Biases by the distance of columns; no ``position_ids``."""
    torch.manual_seed(5)
    config = MptConfig(
        vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4, max_seq_len=64, initializer_range=0.15
    )
    return MptForCausalLM(config)


Architecture = Callable[[], nn.Module]

FULL_ATTENTION: dict[str, Architecture] = {"qwen3": tiny_qwen3, "llama": tiny_llama, "gpt2": tiny_gpt2}
OTHER_CACHES: dict[str, Architecture] = {"mistral": tiny_mistral, "lfm2": tiny_lfm2}
ARCHITECTURES = {**FULL_ATTENTION, **OTHER_CACHES}
