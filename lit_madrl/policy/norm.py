"""Faster RMS normalization for a model that is already built."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lit_madrl.functional.norm import rms_norm


class FastRMSNorm(nn.Module):
    """A transformers RMSNorm by :func:`lit_madrl.functional.norm.rms_norm`."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., E]`` to ``[..., E]``."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        """As transformers' own."""
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def use_fast_norms(model: nn.Module) -> None:
    """Make every RMSNorm that computes what :func:`rms_norm` does a ``FastRMSNorm``: in place.

    Only the class changes, as in :func:`lit_madrl.policy.linear.use_fast_linears`.
    """
    same: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in same:
            same[kind] = kind.__name__.endswith("RMSNorm") and computes_rms_norm(module)
        if same[kind]:
            module.__class__ = FastRMSNorm


@torch.no_grad()
def computes_rms_norm(module: nn.Module) -> bool:
    """Whether a module is ``rms_norm`` with its ``weight`` and ``variance_epsilon``: asked of a copy, on an example.

    Some models add one to the weight, center ``x``, gate it, or return another dtype.
    """
    eps = getattr(module, "variance_epsilon", None)
    shapes = {name: tensor.dim() for name, tensor in module.state_dict().items()}
    if shapes != {"weight": 1} or not isinstance(eps, float):
        return False
    probe = copy.deepcopy(module).to_empty(device="cpu")  # on meta, it may have no values
    weight = probe.get_parameter("weight")
    weight.copy_(torch.linspace(0.5, 1.5, weight.numel(), device="cpu"))
    # So small that eps matters as well.
    x = torch.linspace(-1.0, 2.0, 2 * weight.numel(), device="cpu").view(2, -1) * eps**0.5
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.02)):
        try:
            expected = probe(x.to(dtype))
        except (RuntimeError, TypeError):  # it takes something else
            return False
        got = rms_norm(x.to(dtype), weight, eps)
        if got.dtype is not expected.dtype or not torch.allclose(got, expected, rtol=tolerance, atol=0):
            return False
    return True
