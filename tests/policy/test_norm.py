"""Policies whose RMS norms are ours, against the same ones with the model's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_madrl.policy import Policy, pack
from lit_madrl.policy.norm import FastRMSNorm, use_fast_norms
from tests.helpers.tiny_models import FAMILIES, tiny_model

BATCH = pack([[3, 4, 5], [6, 7]], [[[8, 9, 1], [1]], [[10, 11, 1]]])
PER_MODEL = {"qwen3": 2 * 4 + 1, "llama": 2 * 2 + 1, "mistral": 2 * 2 + 1, "granite": 2 * 2 + 1}


def fast(model: nn.Module) -> int:
    return sum(type(module) is FastRMSNorm for module in model.modules())


class Own(nn.Module):
    """An RMSNorm in one of the forms that models have; ``eps`` and ``weight`` as transformers names them."""

    def __init__(self, form: str = "plain") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.variance_epsilon: Any = 1e-5
        self.form = form
        if form == "bias":
            self.bias = nn.Parameter(torch.zeros(6))
        if form == "eps in a tensor":
            self.variance_epsilon = torch.tensor(1e-5)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = x.float()
        if self.form == "centered":
            wide = wide - wide.mean(-1, keepdim=True)
        eps = 0.0 if self.form == "no eps" else self.variance_epsilon
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if self.form == "one more":
            return (1 + self.weight) * wide.to(x.dtype)
        if self.form == "returns x's dtype":
            return (self.weight * wide).to(x.dtype)
        if self.form == "needs a gate":
            assert isinstance(gate, Tensor) or gate is None
            wide = wide * torch.sigmoid(gate)  # type: ignore[arg-type]
        return self.weight * wide.to(x.dtype)


OwnRMSNorm = type("OwnRMSNorm", (Own,), {})


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients(family: str) -> None:
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            nn.init.normal_(module.weight, 1.0, 0.2, generator=generator)
    ours, theirs = Policy(copy.deepcopy(model)), Policy(model, kernels="torch")
    assert fast(ours) == PER_MODEL.get(family.split("-")[0], fast(ours))
    assert not fast(theirs)
    if family in ("opt", "gpt2", "gemma2"):  # layer norms; one is added to the weight
        assert not fast(ours)
    results = []
    for policy in (ours, theirs):
        logprobs = policy(BATCH)
        logprobs.square().sum().backward()
        results.append({"logprobs": logprobs, **{name: p.grad for name, p in policy.named_parameters()}})
    for name, expected in results[1].items():
        torch.testing.assert_close(
            results[0][name], expected, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "form",
    ["one more", "centered", "no eps", "returns x's dtype", "needs a gate", "bias", "eps in a tensor"],
)
def test_other_formulas_stay(form: str) -> None:
    model = nn.Sequential(OwnRMSNorm(form))
    use_fast_norms(model)
    assert type(model[0]) is OwnRMSNorm


def test_only_the_class_changes() -> None:
    model = nn.Sequential(OwnRMSNorm(), Own(), nn.RMSNorm(6), nn.LayerNorm(6))
    nn.init.zeros_(model[0].weight)  # as one may be before it is loaded
    before, names = dict(model.named_parameters()), list(model.state_dict())
    use_fast_norms(model)
    assert [type(module) for module in model] == [FastRMSNorm, Own, nn.RMSNorm, nn.LayerNorm]
    assert list(model.state_dict()) == names
    assert all(p is before[name] for name, p in model.named_parameters())
    assert not model[0].weight.any()


def test_weights_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(OwnRMSNorm())
    use_fast_norms(model)
    assert type(model[0]) is FastRMSNorm
    assert model[0].weight.is_meta
