"""From a hub name or a local folder to a policy with its tokenizer, and back to a folder."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from lit_madrl.policy.policy import Kernels, Packing, Policy
from lit_madrl.policy.sharding import Sharding, parameters_on_meta, shard_and_load, whole_weights


@dataclass(frozen=True)
class PolicyConfig:
    """Which model to train and how to hold it.

    Args:
        pretrained: hub name or local folder, for ``from_pretrained``.
        dtype: of the trained weights. ``float32`` with ``trainer.precision: bf16-mixed`` keeps master weights.
        lora: keyword arguments of ``peft.LoraConfig`` to train adapters only; none trains all weights.
        gradient_checkpointing: compute activations again in backward to save memory.
        packing: see :class:`lit_madrl.policy.policy.Policy`.
        kernels: see :class:`lit_madrl.policy.policy.Policy`.
    """

    pretrained: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: dict[str, Any] | None = None
    gradient_checkpointing: bool = False
    packing: Packing = "auto"
    kernels: Kernels = "auto"

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's own tokenizer."""
        return AutoTokenizer.from_pretrained(_checked(self.pretrained))

    def build(self, sharding: Sharding | None = None) -> Policy:
        """The policy with its pretrained weights.

        With ``sharding`` a collective operation: rank 0 alone reads the weights, to host memory, and every rank
        receives its share of one tensor after the other.

        Raises:
            ValueError: ``pretrained`` looks like a local folder and is none.
        """
        if sharding is None:
            return self._finish(
                AutoModelForCausalLM.from_pretrained(
                    _checked(self.pretrained), dtype=getattr(torch, self.dtype)
                )
            )
        weights = self.build().state_dict() if sharding.mesh.get_rank() == 0 else {}
        return shard_and_load(self.skeleton(), weights, sharding)

    def skeleton(self) -> Policy:
        """The policy with parameters on the meta device: shapes without values."""
        config = AutoConfig.from_pretrained(_checked(self.pretrained))
        with parameters_on_meta(), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.dtype))
            model.tie_weights()
            return self._finish(model)

    def restore(self, weights: Mapping[str, Tensor]) -> Policy:
        """The policy with the weights of a checkpoint.

        Raises:
            ValueError: they are those of another model or of other adapters.
        """
        policy = self.build()
        try:
            policy.load_state_dict(weights)
        except RuntimeError as error:
            first = next(line.strip() for line in str(error).splitlines()[1:])
            raise ValueError(
                f"checkpoint: expected weights of {self.pretrained!r} with lora={self.lora}, got others: {first}"
            ) from error
        return policy

    def gathered(self, policy: Policy) -> Policy | None:
        """A policy of this configuration with all its weights, if they are sharded on rank 0 alone. Collective."""
        if policy.sharding is None:
            return policy
        weights = whole_weights(policy)
        return self.restore(weights) if policy.sharding.mesh.get_rank() == 0 else None

    def _finish(self, model: PreTrainedModel) -> Policy:
        if self.lora is not None:
            model = _add_adapters(model, self.lora)
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if self.lora is not None:
                model.enable_input_require_grads()
        # from_pretrained gives evaluation mode, in which gradient checkpointing would do nothing.
        return Policy(model, self.packing, self.kernels).train()


def _checked(pretrained: str) -> str:
    path = Path(pretrained)
    local = pretrained.startswith((".", "/", "~")) or len(path.parts) > 2 or path.parts[0] == "runs"
    if local and not (path / "config.json").is_file():
        raise ValueError(
            f"policy.pretrained: expected a hub name or a folder with config.json, got {pretrained!r}, which has none "
            "(see `python -m lit_madrl.prepare --help` for models that are made locally)"
        )
    return pretrained


def _add_adapters(model: PreTrainedModel, lora: dict[str, Any]) -> PreTrainedModel:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("policy.lora: needs the 'lora' extra: pip install 'lit_madrl[lora]'") from error
    config = LoraConfig(**{"task_type": "CAUSAL_LM", **lora})
    adapted: PreTrainedModel = inject_adapter_in_model(config, model)
    # Disabling the adapters must give back the start, and merging them must be exact.
    others = [name for name, p in adapted.named_parameters() if p.requires_grad and "lora_" not in name]
    if others:
        raise ValueError(
            f"policy.lora: expected a configuration that trains adapters alone (no modules_to_save, bias 'none'), "
            f"got one that also trains {others[0]}"
        )
    ends = (adapted.get_input_embeddings(), adapted.get_output_embeddings())
    if adapted.config.tie_word_embeddings and any(hasattr(end, "merge") for end in ends):
        raise ValueError(
            "policy.lora.target_modules: expected no embedding and no head, as the model ties the two, got "
            f"{config.target_modules}"
        )
    return adapted


def adapter_layers(model: nn.Module) -> list[Any]:
    """The adapter layers inside a model; empty when all weights are trained."""
    return [m for m in model.modules() if hasattr(m, "enable_adapters") and hasattr(m, "merge")]


@contextmanager
def adapters_disabled(policy: Policy) -> Iterator[Policy]:
    """The policy as it was before adapters: the frozen reference of an adapter run, for no extra memory."""
    layers = adapter_layers(policy)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield policy
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def export(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a plain transformers folder (adapters merged) that ``from_pretrained`` loads."""
    model = cast(PreTrainedModel, policy.model)
    if adapter_layers(model):
        model = _merged(model)
    model.save_pretrained(folder)  # without the name of an attention: transformers never saves it
    tokenizer.save_pretrained(folder)


def _merged(model: PreTrainedModel) -> PreTrainedModel:
    merged = copy.deepcopy(model)
    for parent in list(merged.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "get_base_layer"):
                child.merge()
                setattr(parent, name, child.get_base_layer())
    merged._hf_peft_config_loaded = False
    return merged
