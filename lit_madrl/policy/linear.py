"""Faster linear layers for a model that is already built."""

from __future__ import annotations

from torch import Tensor, nn

from lit_madrl.functional.linear import linear, onednn


class FastLinear(nn.Linear):
    """``nn.Linear`` by :func:`lit_madrl.functional.linear.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """``[..., E]`` to ``[..., V]``."""
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
