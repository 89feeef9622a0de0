"""What another process or library needs to hold a copy of the policy: its configuration, its weights, and
whether they changed since they were last copied."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def named_weights(model: nn.Module, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of a checkpoint of ``model``, adapters merged, tied weights under each of their names.

    Without ``merged``, the values are those without adapters, and cost nothing.

    Raises:
        ValueError: the model's weights are sharded over processes.
    """
    layers = adapter_layers(model)
    inside = tuple(f"{name}." for name in layers)
    for name, value in _state(model):
        if not name.startswith(inside):
            yield name, value
    for name, layer in layers.items():
        if merged and not layer.disable_adapters:
            # Merging in place and undoing it would move the base weights by rounding.
            layer = copy.deepcopy(layer)
            layer.merge()
        for key, value in _state(layer.get_base_layer()):
            yield f"{name}.{key}", value


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of ``model.state_dict()``, which would put gathered weights (FSDP2) back into shares."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers}
        for name, value in own.items():
            if isinstance(value, DTensor):
                raise ValueError(
                    f"policy: expected whole weights on each process, got {prefix}.{name} sharded over several: "
                    "an engine with a copy of the weights needs FullySharded(gather_rollouts=true)"
                )
            if value is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), value.detach()


def fingerprint(model: nn.Module) -> Tensor:
    """Column sums of the weights' bits: equal before and after as good as never when a weight has changed.

    Version counters do not do: a fused optimizer step leaves ``Tensor._version`` as it was.
    """
    distinct = {value.data_ptr(): value for _, value in _state(model)}
    sums = [_column_sums(value) for value in distinct.values()]
    switches = [layer.disable_adapters for layer in adapter_layers(model).values()]
    return torch.cat([*sums, torch.tensor(switches, device=sums[0].device, dtype=torch.long)])


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that hold a frozen layer and its adapters, by name."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "get_base_layer")}


def _column_sums(value: Tensor) -> Tensor:
    integer = INTEGER_OF_SIZE[value.element_size()]
    bits = value.detach().contiguous().view(integer)
    rows = bits.reshape(-1, bits.shape[-1]) if bits.dim() > 1 else bits.reshape(1, -1)
    return rows.sum(0, dtype=integer).long()  # integers wrap around, which loses nothing


def serving_config(model: nn.Module) -> Any:
    """A copy of the model's configuration that names its class and no end-of-sequence token.

    Which tokens end a completion is an argument of every call.
    """
    config: Any = copy.deepcopy(model.config)
    config.architectures = config.architectures or [type(model).__name__]
    config.eos_token_id = None
    return config
