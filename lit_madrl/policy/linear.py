"""Faster linear layers for a model that is already built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_madrl.functional.linear import PackedWeight, linear, onednn


class FastLinear(nn.Linear):
    """``nn.Linear`` by :func:`lit_madrl.functional.linear.linear`."""

    packed: tuple[PackedLayers, int] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """``[..., E]`` to ``[..., V]``."""
        if self.packed is not None:
            layers, number = self.packed
            if layers.weight.takes(input):
                return layers(input, number)
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


class PackedLayers:
    """Layers that are given the same tensor, as one product with their packed weights when the first is called.

    Args:
        layers: in the order of their calls.
        dtype: of the product.
    """

    def __init__(self, layers: Sequence[FastLinear], dtype: torch.dtype) -> None:
        bias = None
        if any(layer.bias is not None for layer in layers):
            zeros = [layer.weight.new_zeros(layer.out_features) for layer in layers]
            bias = torch.cat(
                [z if layer.bias is None else layer.bias for layer, z in zip(layers, zeros, strict=True)]
            )
        self.weight = PackedWeight(torch.cat([layer.weight for layer in layers]), bias, dtype)
        self._sizes = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor, number: int) -> Tensor:
        """What the layer of that number makes of ``x``, which nobody changes between the calls."""
        if number == 0 or x is not self._input:
            self._input, self._outputs = x, self.weight(x).split_with_sizes(self._sizes, -1)
        return self._outputs[number]


@contextmanager
def layers_by_input(model: nn.Module) -> Iterator[list[list[FastLinear]]]:
    """Watch a forward: the ``FastLinear`` layers that are called in it, those given the same tensor together."""
    groups: list[list[FastLinear]] = []
    inputs: dict[int, tuple[Any, list[FastLinear]]] = {}  # held, or another could get the same id
    seen: set[FastLinear] = set()

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(layer, FastLinear)
        if not args or layer in seen:
            return
        seen.add(layer)
        if id(args[0]) not in inputs:
            groups.append([])
            inputs[id(args[0])] = args[0], groups[-1]
        inputs[id(args[0])][1].append(layer)

    handles = [m.register_forward_pre_hook(note) for m in model.modules() if type(m) is FastLinear]
    try:
        yield groups
    finally:
        inputs.clear()
        for handle in handles:
            handle.remove()


@contextmanager
def packed_weights(groups: Sequence[Sequence[FastLinear]]) -> Iterator[None]:
    """Let layers compute with packed copies of their weights, each group by one product: decoding with fixed weights.

    They are made at once, in the dtype that autocast asks for; that costs about as much as it saves in 16 tokens.
    """
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    try:
        for group in groups:
            dtype = autocast or group[0].weight.dtype
            if PackedWeight.worth([layer.weight for layer in group], dtype):
                layers = PackedLayers(group, dtype)
                for number, layer in enumerate(group):
                    layer.packed = layers, number
        yield
    finally:
        for group in groups:
            for layer in group:
                layer.packed = None
