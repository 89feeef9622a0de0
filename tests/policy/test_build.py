"""From a folder to a policy and back; adapters."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_madrl.policy import Policy, PolicyConfig, export, pack
from lit_madrl.policy.build import adapter_layers, adapters_disabled
from tests.helpers.tiny_models import tiny_model

BATCH = pack([[3, 4, 5], [6, 7]], [[[8, 9, 1], [1]], [[10, 11, 1]]])
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
LORAS = {
    "attention and mlp": LORA,
    "all linear": {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.5},
    "head": {"r": 2, "target_modules": ["q_proj", "lm_head"]},
    "dora": {"r": 2, "target_modules": ["q_proj"], "use_dora": True},
}


def folder_of(family: str, folder: Path, **overrides: Any) -> str:
    tiny_model(family, **overrides).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def qwen3(tmp_path: Path) -> str:
    return folder_of("qwen3", tmp_path / "start")


def trained(policy: Policy, steps: int = 3) -> Policy:
    """After some steps of raising a batch's likelihood."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (-policy(BATCH).mean()).backward()
        optimizer.step()
    return policy


@torch.no_grad()
def logprobs(model: Any) -> Tensor:
    policy = model if isinstance(model, Policy) else Policy(model)
    return policy(BATCH)  # type: ignore[no-any-return]


def reloaded(policy: Policy, tiny_choice: Path, folder: Path) -> Any:
    export(policy, AutoTokenizer.from_pretrained(tiny_choice), folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


# Building


def test_weights_are_those_of_the_folder(qwen3: str) -> None:
    policy = PolicyConfig(qwen3).build()
    expected = AutoModelForCausalLM.from_pretrained(qwen3).state_dict()
    assert policy.packed
    assert policy.model.state_dict().keys() == expected.keys()
    assert all(torch.equal(policy.model.state_dict()[k], v) for k, v in expected.items())
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in policy.parameters())


def test_dtype_and_packing(qwen3: str) -> None:
    policy = PolicyConfig(qwen3, dtype="bfloat16", packing="padded").build()
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    assert not policy.packed


@pytest.mark.parametrize("lora", [None, LORA])
def test_gradient_checkpointing_is_at_work_and_changes_nothing(
    qwen3: str, lora: dict[str, Any] | None
) -> None:
    calls, grads = {}, {}
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy = PolicyConfig(qwen3, lora=lora, gradient_checkpointing=checkpointing).build()
        calls[checkpointing] = 0

        def count(*_: Any, key: bool = checkpointing) -> None:
            calls[key] += 1

        policy.model.get_submodule("model.layers.0.self_attn").register_forward_hook(count)
        policy(BATCH).sum().backward()
        grads[checkpointing] = [p.grad for p in policy.parameters() if p.grad is not None]
    assert calls == {False: 1, True: 2}
    assert len(grads[False]) == len(grads[True]) > 0
    for a, b in zip(grads[False], grads[True], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_the_tokenizer_is_the_models_own(tiny_choice: Path) -> None:
    tokenizer = PolicyConfig(str(tiny_choice)).tokenizer()
    assert tokenizer.eos_token == "<eos>"
    assert tokenizer.decode(tokenizer.encode("one, two")) == "one, two"


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "runs/warm_start", "a/b/c"])
def test_a_folder_that_is_none_is_named(path: str) -> None:
    config = PolicyConfig(path)
    for call in (config.build, config.tokenizer):
        with pytest.raises(ValueError, match=rf"policy.pretrained: expected .*config.json, got '{path}'"):
            call()


# Adapters


@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
def test_only_adapters_train_and_disabling_them_gives_the_start(qwen3: str, lora: dict[str, Any]) -> None:
    start = PolicyConfig(qwen3).build()
    policy = PolicyConfig(qwen3, lora=lora).build()
    assert policy.packed
    assert all("lora_" in name for name, p in policy.named_parameters() if p.requires_grad)
    assert adapter_layers(policy)
    assert_close(logprobs(policy), logprobs(start))  # a new adapter is 0
    frozen = {name: p.clone() for name, p in policy.named_parameters() if not p.requires_grad}
    trained(policy)
    assert not torch.allclose(logprobs(policy), logprobs(start), atol=1e-2)
    assert all(torch.equal(p, frozen[name]) for name, p in policy.named_parameters() if name in frozen)
    after = logprobs(policy)
    with adapters_disabled(policy) as reference:
        assert_close(logprobs(reference), logprobs(start))
    assert torch.equal(logprobs(policy), after)


@pytest.mark.parametrize(
    ("family", "lora", "message"),
    [
        ("qwen3", {"modules_to_save": ["lm_head"]}, "adapters alone .* lm_head"),
        (
            "gpt2",
            {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"},
            "adapters alone .* bias",
        ),
        (
            "qwen3-tied",
            {"target_modules": ["q_proj", "lm_head"]},
            "target_modules: .*ties the two, got .*lm_head",
        ),
        ("qwen3-tied", {"target_modules": ["embed_tokens"]}, "target_modules: .*ties the two"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_what_cannot_be_disabled_or_merged_is_refused(
    family: str, lora: dict[str, Any], message: str, tmp_path: Path
) -> None:
    start = folder_of(family, tmp_path / "start")
    with pytest.raises(ValueError, match=rf"policy.lora.*{message}"):
        PolicyConfig(start, lora={"target_modules": ["q_proj"], **lora}).build()


def test_adapters_come_back_after_an_error(qwen3: str) -> None:
    policy = trained(PolicyConfig(qwen3, lora=LORA).build())
    after = logprobs(policy)
    with pytest.raises(RuntimeError, match="inside"), adapters_disabled(policy):
        raise RuntimeError("inside")
    assert torch.equal(logprobs(policy), after)


def test_a_policy_without_adapters_has_none_to_disable(qwen3: str) -> None:
    policy = PolicyConfig(qwen3).build()
    assert adapter_layers(policy) == []
    with adapters_disabled(policy) as same:
        assert same is policy


@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_export_merges_adapters(family: str, lora: dict[str, Any], tmp_path: Path, tiny_choice: Path) -> None:
    start = folder_of(family, tmp_path / "start")
    policy = trained(PolicyConfig(start, lora=lora).build())
    before = copy.deepcopy(policy.state_dict())
    expected = logprobs(policy)
    model = reloaded(policy, tiny_choice, tmp_path / "model")
    assert model.state_dict().keys() == AutoModelForCausalLM.from_pretrained(start).state_dict().keys()
    assert not (tmp_path / "model" / "adapter_config.json").exists()
    torch.testing.assert_close(logprobs(model), expected, rtol=0, atol=1e-5)
    assert all(torch.equal(v, before[k]) for k, v in policy.state_dict().items())  # still in training
    assert torch.equal(logprobs(policy), expected)


# Exporting


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "gpt2-tied", "gemma2"])
def test_export_round_trips(family: str, tmp_path: Path, tiny_choice: Path) -> None:
    policy = trained(PolicyConfig(folder_of(family, tmp_path / "start")).build())
    implementation = policy.model.config._attn_implementation
    model = reloaded(policy, tiny_choice, tmp_path / "model")
    assert all(torch.equal(v, policy.model.state_dict()[k]) for k, v in model.state_dict().items())
    assert torch.equal(logprobs(model), logprobs(policy))
    assert policy.model.config._attn_implementation == implementation
    assert "shared_prefix" not in (tmp_path / "model" / "config.json").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "<eos>"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == [type(policy.model).__name__]


def test_tied_embeddings_stay_tied(tmp_path: Path, tiny_choice: Path) -> None:
    policy = trained(PolicyConfig(folder_of("qwen3-tied", tmp_path / "start")).build())
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    model = reloaded(policy, tiny_choice, tmp_path / "model")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, policy.model.lm_head.weight)


def test_bfloat16_export_keeps_its_dtype(qwen3: str, tmp_path: Path, tiny_choice: Path) -> None:
    model = reloaded(PolicyConfig(qwen3, dtype="bfloat16").build(), tiny_choice, tmp_path / "model")
    assert model.dtype == torch.bfloat16
