"""The policy: a packed batch in, the log-probability of every completion token out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from lit_madrl.functional.logprobs import chunk_tokens_for, selected_logprobs
from lit_madrl.policy.attention import SHARED_PREFIX
from lit_madrl.policy.linear import FastLinear, use_fast_linears
from lit_madrl.policy.norm import use_fast_norms
from lit_madrl.policy.packing import PackedBatch, padded_inputs

if TYPE_CHECKING:
    from lit_madrl.policy.sharding import InStep, Sharding

Packing = Literal["auto", "shared_prefix", "padded"]
Kernels = Literal["auto", "torch"]

# Settings with which a model's logits are not `lm_head(hidden)` alone, or its attention not plain causal.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
_ATTENTION_SETTINGS = ("attn_logit_softcapping", "use_sliding_window", "alibi")


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Why a model must take the padded path, or None when packed batches are exact for it.

    A model can be packed when its attention goes through transformers' attention interface, every layer is full
    causal attention over ``position_ids``, and its logits are a linear map of the last hidden state.
    """
    config: PreTrainedConfig = model.config
    if getattr(model, "_is_stateful", False):
        return "it carries a recurrent state from token to token"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"}:
        return f"it has layers of type {', '.join(sorted(layers - {'full_attention'}))}"
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        return "it uses a sliding window"
    for setting in (*_LOGIT_SETTINGS, *_ATTENTION_SETTINGS):
        if getattr(config, setting, None) not in (None, False, 1.0):
            return f"it sets {setting}"
    if not isinstance(model.get_output_embeddings(), nn.Module):
        return "it has no output embedding"
    return None


class Policy(nn.Module):
    """A causal language model whose forward is the whole computation from token ids to log-probabilities.

    One forward holds backbone, head and selected log-softmax, so that a sharding strategy gathers the root's
    parameters once. Dropout is switched off: log-probabilities must be those of the model that was sampled.

    Args:
        model: a causal language model of transformers.
        packing: ``shared_prefix`` computes prompts once and pads nothing, ``padded`` repeats them, ``auto`` packs
            where that is exact (see :func:`why_not_packed`).
        kernels: ``auto`` computes RMS norms in fewer passes and, on CPUs where that is faster, float32 linear layers by
            oneDNN (both equal up to rounding); ``torch`` leaves the model's modules as they are.

    Attributes:
        sharding: how the weights are divided over ranks; None when each rank has all of them.
        in_step: keeps ranks in step while such a policy samples, see :func:`lit_madrl.policy.sharding.rollout_weights`.
    """

    def __init__(self, model: PreTrainedModel, packing: Packing = "auto", kernels: Kernels = "auto") -> None:
        super().__init__()
        self.model = model
        self.sharding: Sharding | None = None
        self.in_step: InStep | None = None
        reason = why_not_packed(model)
        if packing == "shared_prefix" and reason is not None:
            raise ValueError(
                f"packing: expected 'auto' or 'padded', as {type(model).__name__} cannot be packed: {reason}"
            )
        self.packed = packing != "padded" and reason is None
        if self.packed:
            model.set_attn_implementation(SHARED_PREFIX)
        if kernels not in ("auto", "torch"):
            raise ValueError(f"policy.kernels: expected 'auto' or 'torch', got {kernels!r}")
        if kernels == "auto":
            use_fast_linears(model)
            use_fast_norms(model)
        _disable_dropout(model)

    def forward(self, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
        """Log-probability (nats, float32) of each completion token: ``[M]`` in the order of ``batch.targets``."""
        if not self.packed:
            return self._padded_logprobs(batch, temperature)
        backbone = cast(nn.Module, self.model.get_decoder())
        hidden = backbone(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            # A 4-D mask is passed through untouched: the plan says it all.
            attention_mask=batch.input_ids.new_ones(1, 1, 1, 1, dtype=torch.bool),
            use_cache=False,
            shared_prefix=batch.plan,
        ).last_hidden_state[0]
        return self._head(hidden[batch.sources], batch.targets, temperature)

    def _padded_logprobs(self, batch: PackedBatch, temperature: float) -> Tensor:
        input_ids, mask, sources = padded_inputs(batch)
        logits = self.model(input_ids=input_ids, attention_mask=mask.long(), use_cache=False).logits
        chosen = logits.flatten(0, 1)[sources].float() / temperature
        return _select(chosen, batch.targets)

    def _head(self, hidden: Tensor, ids: Tensor, temperature: float) -> Tensor:
        head: Any = self.model.get_output_embeddings()
        if type(head) in (nn.Linear, FastLinear):
            fast = type(head) is FastLinear
            return selected_logprobs(hidden, head.weight, ids, head.bias, temperature, fast=fast)

        # A wrapped head (an adapter, say) is called as it is, in chunks whose logits backward makes again.
        def chunk_logprobs(h: Tensor, i: Tensor) -> Tensor:
            return _select(head(h).float() / temperature, i)

        size = chunk_tokens_for(self.model.config.vocab_size)
        parts = zip(torch.split(hidden, size), torch.split(ids, size), strict=True)
        return torch.cat(
            [cast(Tensor, checkpoint(chunk_logprobs, h, i, use_reentrant=False)) for h, i in parts]
        )


def _select(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, ids[:, None]).squeeze(-1)


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Rates of functional dropout: `dropout`, `attention_dropout`, `layerdrop`, ...
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
