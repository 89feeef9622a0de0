from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lit_madrl.policy import PolicyConfig
from lit_madrl.policy.build import adapters_disabled, export
from lit_madrl.rollouts.policy_weights import fingerprint, named_weights, serving_config
from tests.helpers.engine_contract import tiny_qwen3


def adapted(folder: Path) -> PolicyConfig:
    return PolicyConfig(str(folder), lora={"r": 2, "target_modules": ["q_proj", "down_proj"]})


def train_adapters(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)


def test_a_tied_head_is_sent_too() -> None:
    model = tiny_qwen3()
    weights = dict(named_weights(model))
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    assert weights.keys() == model.state_dict().keys()


def test_adapters_are_merged_as_export_merges_them(tiny_choice: Path, tmp_path: Path) -> None:
    config = adapted(tiny_choice)
    policy = config.build()
    train_adapters(policy)
    before = copy.deepcopy(policy.state_dict())
    weights = dict(named_weights(policy.model))
    export(policy, config.tokenizer(), tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert weights.keys() == exported.keys()
    assert all(torch.equal(weights[name], value) for name, value in exported.items())
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())


def test_disabled_adapters_are_not_merged(tiny_choice: Path) -> None:
    policy = adapted(tiny_choice).build()
    train_adapters(policy)
    start = AutoModelForCausalLM.from_pretrained(tiny_choice).state_dict()
    mark = fingerprint(policy.model)
    with adapters_disabled(policy):
        assert not torch.equal(fingerprint(policy.model), mark)
        weights = dict(named_weights(policy.model))
    assert all(torch.equal(weights[name], value) for name, value in start.items())
    assert torch.equal(fingerprint(policy.model), mark)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_an_optimizer_step_is_seen(options: dict[str, bool], dtype: torch.dtype) -> None:
    """Also the fused one, which moves no version counter."""
    model = tiny_qwen3().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
    model(input_ids=torch.tensor([[2, 3, 4]])).logits.float().logsumexp(-1).sum().backward()
    mark = fingerprint(model)
    assert torch.equal(fingerprint(model), mark)
    optimizer.step()
    assert not torch.equal(fingerprint(model), mark)


def test_one_unit_in_the_last_place_is_seen() -> None:
    model = tiny_qwen3()
    marks = [fingerprint(model)]
    for parameter in model.parameters():
        element = parameter.data.view(-1)[-1:]
        element.copy_(element.nextafter(torch.tensor([torch.inf])))
        marks.append(fingerprint(model))
    assert all(not torch.equal(a, b) for a, b in pairwise(marks))


def test_values_that_change_places_are_seen() -> None:
    model = tiny_qwen3()
    mark = fingerprint(model)
    weight = model.get_parameter("model.norm.weight")
    weight.data[:2] = torch.tensor([2.0, 3.0])
    other = fingerprint(model)
    weight.data[:2] = torch.tensor([3.0, 2.0])
    assert not torch.equal(mark, other)
    assert not torch.equal(fingerprint(model), other)


def test_the_served_configuration_is_a_copy_without_end_token() -> None:
    model = tiny_qwen3()
    config = serving_config(model)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.eos_token_id is None
    assert model.config.eos_token_id == 1
    assert model.config.architectures is None
