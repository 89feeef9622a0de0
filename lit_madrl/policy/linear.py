"""Faster linear layers for a model that is already built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lit_madrl.functional.linear import PackedWeight, linear, onednn


class FastLinear(nn.Linear):
    """``nn.Linear`` by :func:`lit_madrl.functional.linear.linear`."""

    packed: PackedWeight | None = None

    def forward(self, input: Tensor) -> Tensor:
        """``[..., E]`` to ``[..., V]``."""
        if self.packed is not None and self.packed.takes(input):
            return self.packed(input)
        return linear(input, self.weight, self.bias)


def use_fast_linears(model: nn.Module) -> None:
    """Make every ``nn.Linear`` of a model, itself and no subclass of it, a ``FastLinear``: in place, if that gains.

    Only the class changes: parameters, their names, hooks and copies of the module stay what they are.
    """
    if onednn() is None:
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Let a model's ``FastLinear`` layers compute with packed copies of their weights: for decoding with fixed weights.

    They are made at once, in the dtype that autocast asks for; that costs about as much as it saves in 16 tokens.
    """
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    layers = [module for module in model.modules() if type(module) is FastLinear]
    try:
        for layer in layers:
            dtype = autocast or layer.weight.dtype
            if PackedWeight.worth(layer.weight, dtype):
                layer.packed = PackedWeight(layer.weight, layer.bias, dtype)
        yield
    finally:
        for layer in layers:
            layer.packed = None
