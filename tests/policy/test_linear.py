"""Policies whose linear layers go through oneDNN, against the same ones without."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_madrl.functional.linear import PackedWeight, can_pack
from lit_madrl.policy import Policy, PolicyConfig, export, pack
from lit_madrl.policy.build import adapters_disabled
from lit_madrl.policy.linear import FastLinear, layers_by_input, packed_weights, use_fast_linears
from lit_madrl.policy.sharding import Sharding, shard
from lit_madrl.rollouts import TorchEngine
from lit_madrl.types import Sampling
from tests.helpers.onednn import forced_onednn
from tests.helpers.tiny_models import tiny_model

BATCH = pack([[3, 4, 5], [6, 7]], [[[8, 9, 1], [1]], [[10, 11, 1]]])
LORA: dict[str, Any] = {"r": 2, "target_modules": "all-linear"}


@pytest.fixture(autouse=True)
def calls() -> Iterator[list[Any]]:
    with forced_onednn() as calls:
        yield calls


def step(policy: nn.Module) -> dict[str, Tensor]:
    """Log-probabilities and gradients."""
    policy.zero_grad()
    logprobs = policy(BATCH)
    logprobs.square().sum().backward()
    grads = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return {"logprobs": logprobs.detach(), **grads}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(
            ours[name], expected, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def pair(family: str = "qwen3", packing: Any = "auto") -> tuple[Policy, Policy]:
    """The same weights with and without."""
    model = tiny_model(family)
    return Policy(copy.deepcopy(model), packing), Policy(model, packing, kernels="torch")


def fast(model: nn.Module) -> int:
    return sum(type(module) is FastLinear for module in model.modules())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "packing"),
    [("qwen3", "auto"), ("qwen3-tied", "auto"), ("llama", "padded"), ("opt", "auto"), ("gemma2", "auto")],
)
def test_values_and_gradients(family: str, packing: str, checkpointing: bool, calls: list[Any]) -> None:
    ours, theirs = pair(family, packing)
    assert fast(ours)
    assert not fast(theirs)
    if checkpointing:
        for policy in (ours, theirs):
            policy.train()
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    got = step(ours)
    assert len(calls) > 3 * 10
    assert_same(got, step(theirs))


def test_only_the_class_changes() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 4), Own(4, 5), nn.LayerNorm(5), nn.Bilinear(2, 2, 2))
    before, names = dict(model.named_parameters()), list(model.state_dict())
    use_fast_linears(model)
    assert [type(module) for module in model] == [FastLinear, Own, nn.LayerNorm, nn.Bilinear]
    assert list(model.state_dict()) == names
    assert all(p is before[name] for name, p in model.named_parameters())


def test_copies_and_pickles() -> None:
    ours, theirs = pair("qwen3-tied")
    expected = step(theirs)
    for twin in (copy.deepcopy(ours.model), pickle.loads(pickle.dumps(ours.model))):
        assert fast(twin) == fast(ours)
        assert twin.lm_head.weight is twin.model.embed_tokens.weight
        assert_same(step(Policy(twin)), expected)


def test_frozen_policies_make_no_products_for_weights(calls: list[Any]) -> None:
    ours, theirs = pair()
    ours.requires_grad_(False)
    with torch.no_grad():
        forward = ours(BATCH)
    products = len(calls)
    torch.testing.assert_close(forward, theirs(BATCH).detach(), rtol=1e-4, atol=1e-4)
    calls.clear()
    embedded = ours.model.get_input_embeddings()(BATCH.input_ids).requires_grad_()
    ours.model(inputs_embeds=embedded).logits.sum().backward()
    assert len(calls) == 2 * products


def test_greedy_completions_are_the_same(calls: list[Any]) -> None:
    engines = []
    for policy in pair():
        engines.append(TorchEngine())
        engines[-1].sync_weights(policy.model)
    a, b = (e.generate([[3, 4, 5], [6, 7]], Sampling(2, 8, temperature=0), [1]) for e in engines)
    assert calls
    assert a.completions() == b.completions()


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_adapters(tmp_path: Path, tiny_choice: Path, choice: Any, calls: list[Any]) -> None:
    pytest.importorskip("peft")
    tiny_model("qwen3").save_pretrained(tmp_path / "start")
    policy = PolicyConfig(str(tmp_path / "start"), lora=LORA, kernels=choice).build()
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    got = step(policy)
    assert bool(calls) == bool(fast(policy))
    assert all("lora_" in name for name in got if name != "logprobs")
    use_fast_linears(policy)
    assert_same(step(policy), got)  # whether it had them or not
    with adapters_disabled(policy), torch.no_grad():
        start = Policy(tiny_model("qwen3"), kernels="torch")(BATCH)
        torch.testing.assert_close(policy(BATCH), start, rtol=1e-4, atol=1e-4)
    export(policy, AutoTokenizer.from_pretrained(tiny_choice), tmp_path / "end")
    merged = Policy(AutoModelForCausalLM.from_pretrained(tmp_path / "end"), kernels="torch")
    with torch.no_grad():
        torch.testing.assert_close(merged(BATCH), got["logprobs"], rtol=1e-4, atol=1e-4)


def test_folders_are_plain(tmp_path: Path) -> None:
    ours, theirs = pair("qwen3-tied")
    ours.model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not fast(again)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert_same(step(Policy(again)), step(theirs))


@pytest.mark.filterwarnings("ignore")
def test_distributed(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ours, theirs = pair()
        expected = step(theirs)
        replicated = step(nn.parallel.DistributedDataParallel(copy.deepcopy(ours)))
        assert_same({name.removeprefix("module."): x for name, x in replicated.items()}, expected)
        sharded = step(shard(ours, Sharding(init_device_mesh("cpu", (1,)))))
        full = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in sharded.items()}
        assert_same(full, expected)
    finally:
        dist.destroy_process_group()


def test_the_switch_is_checked() -> None:
    with pytest.raises(ValueError, match=r"policy\.kernels: expected 'auto' or 'torch', got 'mkl'"):
        Policy(tiny_model("qwen3"), kernels="mkl")  # type: ignore[arg-type]


def test_without_onednn_the_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_madrl.policy.linear.onednn", lambda: None)
    assert not fast(Policy(tiny_model("qwen3")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights(dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More columns than oneDNN adds at once; what a packed layer computes until its weight is needed again."""
    monkeypatch.setattr("lit_madrl.functional.linear.LEAST_PACKED", 1)
    monkeypatch.setattr("lit_madrl.functional.linear.LONGEST_SUM", 32)
    model = nn.Sequential(nn.Linear(70, 50, bias=bias)).to(dtype)
    use_fast_linears(model)
    x = torch.randn(3, 2, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        expected = model(x)
        with packed_weights([[model[0]]]):
            model[0].weight.zero_()  # to see which one is used
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
            torch.testing.assert_close(model(x), expected, rtol=tolerance, atol=tolerance)
            with torch.enable_grad():
                trained = model(x)
        after = model(x)
    constant = torch.zeros(50, dtype=dtype) if model[0].bias is None else model[0].bias
    assert torch.equal(trained, constant.expand_as(trained))
    assert torch.equal(after, constant.expand_as(after))


def test_packed_weights_are_those_that_autocast_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_madrl.functional.linear.LEAST_PACKED", 1)
    model = nn.Sequential(nn.Linear(70, 50))
    use_fast_linears(model)
    x = torch.randn(3, 70, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with packed_weights([[model[0]]]):
            assert model[0].packed[0].weight.dtype is torch.bfloat16
            got = model(x)
            with torch.autocast("cpu", enabled=False):
                assert model(x).dtype is torch.float32  # not by those
    assert got.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(got, expected)


class Block(nn.Module):
    """Layers that share their input, others that do not, one that is never called, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.b = nn.Linear(6, 3, bias=False)
        self.twice = nn.Linear(6, 6)
        self.late = nn.Linear(6, 2)
        self.never = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        first = self.twice(x)
        return torch.cat([self.a(x), self.twice(first), self.b(x), self.late(first)], -1)


def test_layers_are_grouped_by_what_they_are_given() -> None:
    model = Block()
    use_fast_linears(model)
    with torch.no_grad(), layers_by_input(model) as groups:
        model(torch.ones(2, 6))
    assert groups == [[model.twice, model.a, model.b], [model.late]]
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_share_an_input_are_one_product(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step after step, also where a layer gets something else than when it was watched."""
    monkeypatch.setattr("lit_madrl.functional.linear.LEAST_PACKED", 1)
    torch.manual_seed(0)
    model = Block().to(dtype)
    use_fast_linears(model)
    x = torch.randn(3, 2, 6).to(dtype)
    other = torch.randn(3, 2, 6).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    with torch.no_grad(), layers_by_input(model) as groups:
        expected = [model(x), model(other), model.b(other), model(-x)]
    with torch.no_grad(), packed_weights(groups):
        assert model.a.packed[0] is model.b.packed[0]
        got = [model(x), model(other), model.b(other)]
        got.append(model(x.neg_()))  # the same tensor with other values
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert model.a.packed is None


def test_long_completions_by_packed_weights(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    """The same tokens as without, and the model as it was."""
    monkeypatch.setattr("lit_madrl.functional.linear.LEAST_PACKED", 1)
    monkeypatch.setattr("lit_madrl.rollouts.torch_engine.TOKENS_TO_PACK", 3)
    made: list[PackedWeight] = []
    original = PackedWeight.__init__

    def watched(self: PackedWeight, *args: Any) -> None:
        made.append(self)
        original(self, *args)

    monkeypatch.setattr(PackedWeight, "__init__", watched)
    completions = []
    for policy in pair():
        engine = TorchEngine()
        engine.sync_weights(policy.model)
        assert engine.generate([[3, 4, 5]], Sampling(2, 5), [1]).completions()
        assert not made  # too few tokens
        completions.append(
            engine.generate([[3, 4, 5], [6, 7]], Sampling(2, 9, temperature=0), []).completions()
        )
        # Query, key and value together, and gate and up: 4 instead of 7 in each of two layers, and the head.
        assert len(made) == (9 if fast(policy) else 0)
        assert all(module.packed is None for module in policy.modules() if type(module) is FastLinear)
        made.clear()
    assert completions[0] == completions[1]


def test_where_weights_cannot_be_packed_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bfloat16, or a PyTorch without the private operator."""
    monkeypatch.setattr("lit_madrl.functional.linear.LEAST_PACKED", 1)
    monkeypatch.setattr("lit_madrl.functional.linear.can_pack", lambda dtype: dtype is not torch.bfloat16)
    model = nn.Sequential(nn.Linear(70, 50))
    use_fast_linears(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), packed_weights([[model[0]]]):
        assert model[0].packed is None
        assert model(torch.ones(3, 70)).dtype is torch.bfloat16


def test_an_operator_that_fails_cannot_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("not here")

    monkeypatch.setattr(PackedWeight, "__init__", fails)
    assert not can_pack.__wrapped__(torch.float32)
    monkeypatch.undo()
    assert can_pack.__wrapped__(torch.float32)
    dtypes = (torch.float32, torch.bfloat16)
    expected = [can_pack.__wrapped__(dtype) for dtype in dtypes]
    with torch.autocast("cpu", torch.bfloat16):  # where the sampler asks first
        assert [can_pack.__wrapped__(dtype) for dtype in dtypes] == expected
