"""The memory calculator against tensors that are really there, at toy size."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import memory
from benchmarks.memory import GIB, Setup
from benchmarks.shapes import SHAPES, Shape
from lit_madrl.learners.rows import Row, _split
from lit_madrl.policy import Policy, pack
from lit_madrl.rollouts import TorchEngine, kv_cache
from lit_madrl.types import Sampling

SMALL = Shape(3, 96, 4, 2, 32, 160, 320, tied=True)
LLAMA = replace(SMALL, qk_norm=False, tied=False)
TOY = Setup(SMALL, prompts=2, group=4, prompt=50, completion=41)
PRECISIONS = ("fp32", "bf16-mixed", "bf16")


@pytest.fixture(autouse=True)
def attention_in_the_dtype_asked_for(monkeypatch):
    """As on GPUs, which the calculator is for."""
    monkeypatch.setattr(
        "lit_madrl.policy.attention._attend", torch.nn.functional.scaled_dot_product_attention
    )


def build(setup):
    torch.manual_seed(0)
    shape = setup.shape
    config = shape.config()
    if not shape.qk_norm:
        keys = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "tie_word_embeddings")
        keys += ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        config = LlamaConfig(**{key: getattr(config, key) for key in keys})
    dtype = torch.bfloat16 if setup.precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if setup.lora:
        from peft import LoraConfig, inject_adapter_in_model

        targets = list(shape.matrices())
        model = inject_adapter_in_model(LoraConfig(r=setup.lora, target_modules=targets), model)
        model.enable_input_require_grads()  # or the first of three layers would keep less
    if setup.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Policy(model).train()


def autocast(setup):
    mixed = setup.precision == "bf16-mixed"
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if mixed else nullcontext()


def batch(setup):
    groups, rows = setup.micro_batch()
    return pack([[5] * setup.prompt] * groups, [[[7] * setup.completion] * rows] * groups)


def size(tensors):
    """Bytes of the storages behind tensors, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=["qwen3", "llama"])
def test_weights_gradients_and_optimizer_are_exact(shape, precision, lora):
    setup = replace(TOY, shape=shape, precision=precision, lora=lora)
    policy = build(setup)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    with autocast(setup):
        policy(batch(setup)).sum().backward()
    optimizer.step()
    state = [t for values in optimizer.state.values() for t in values.values()]
    expected = memory.static(setup)
    assert size(policy.parameters()) == expected["weights"]
    assert size(p.grad for p in trained) == expected["gradients"]
    assert size(state) == expected["optimizer"]
    assert expected["reference"] == (0 if lora else expected["weights"])


def saved(policy, setup):
    """Bytes that a forward keeps for backward, weights aside: bf16 copies of weights, and all others."""
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    shapes = {shape for p in policy.parameters() for shape in (p.shape, p.shape[::-1])}
    copies, others = [], []

    def keep(t):
        if t.untyped_storage().data_ptr() not in own:
            copy = t.dtype == torch.bfloat16 and setup.precision == "bf16-mixed" and t.shape in shapes
            (copies if copy else others).append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), autocast(setup):
        policy(batch(setup))
    return size(copies), size(others)


def head_kept(setup):
    """The part of :func:`memory.head` that the forward keeps: hidden states, and logits where one chunk holds all."""
    groups, rows = setup.micro_batch()
    return groups * rows * setup.completion * setup.computed * (setup.shape.hidden + setup.shape.vocabulary)


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=["qwen3", "llama"])
def test_activations_are_within_3_percent(shape, precision, lora):
    setup = replace(TOY, shape=shape, precision=precision, lora=lora, micro_batch_tokens=220)
    assert setup.micro_batch() == (1, 4)
    copies, others = saved(build(setup), setup)
    assert others == pytest.approx(memory.activations(setup) + head_kept(setup), rel=0.03)
    vocabulary = 2 * shape.vocabulary * shape.hidden if precision == "bf16-mixed" else 0
    assert copies == pytest.approx(memory.computed_weights(setup) + vocabulary, rel=0.01)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_short_groups_in_one_call_take_up_to_20_percent_less(precision):
    setup = replace(TOY, precision=precision, prompt=30, completion=6)
    assert setup.micro_batch() == (2, 4)
    _, others = saved(build(setup), setup)
    most = memory.activations(setup) + head_kept(setup)
    assert 0.8 * most < others <= most


@pytest.mark.parametrize("precision", PRECISIONS)
def test_checkpointing_keeps_the_inputs_of_layers(precision):
    setup = replace(TOY, precision=precision, checkpointing=True)
    policy, inputs = build(setup), []
    for layer in policy.model.model.layers:
        layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    with autocast(setup):
        policy(batch(setup))
    layers = memory.activations(setup) - memory.layer_activations(setup)
    rest = memory.activations(replace(setup, checkpointing=False))
    rest -= SMALL.layers * memory.layer_activations(setup)
    assert size(inputs) == layers - rest


@pytest.mark.parametrize("precision", PRECISIONS)
def test_keys_and_values_are_exact(precision, monkeypatch):
    setup = replace(TOY, precision=precision)
    buffers, make = [], kv_cache.RowBuffer.__init__

    def spy(self, *arguments):
        buffers.append(self)
        make(self, *arguments)

    monkeypatch.setattr(kv_cache.RowBuffer, "__init__", spy)
    engine, policy = TorchEngine(), build(setup)
    engine.sync_weights(policy.model)
    sampling = Sampling(setup.group, setup.completion, min_new_tokens=setup.completion)
    with autocast(setup):
        engine.generate([[5 + i] * setup.prompt for i in range(setup.prompts)], sampling, [1])
    assert size(buffer.data for buffer in buffers) == memory.cache(setup)


@pytest.mark.parametrize("budget", [45, 60, 91, 220, 300, 430, 2000])
def test_the_largest_micro_batch_is_that_of_the_learner(budget):
    setup = replace(TOY, micro_batch_tokens=budget)
    prompts = [[5] * setup.prompt] * setup.prompts
    rows = [Row(p, (7,) * setup.completion) for p in range(setup.prompts) for _ in range(setup.group)]
    largest = max(len(part) for part in _split(prompts, rows, budget))
    groups, each = setup.micro_batch()
    # Beside whole groups the learner may fit a part of another one, which is not counted.
    assert groups * each <= largest < groups * each + setup.group
    assert each == setup.group or groups * each == largest


def test_strategies_share_or_copy():
    single = memory.static(TOY)
    sharded = memory.static(replace(TOY, strategy="fsdp2", ranks=4))
    copied = memory.static(replace(TOY, strategy="ddp", ranks=4))
    for part in ("weights", "reference", "gradients"):
        assert sharded[part] * 4 == single[part] == copied[part]
    assert copied["DDP buckets"] == single["gradients"]
    assert single["DDP buckets"] == sharded["DDP buckets"] == 0
    assert memory.static(replace(TOY, reference=False))["reference"] == 0


def test_numbers_worked_by_hand():
    setup = Setup(SHAPES["qwen3-8b"], "fsdp2", 8)
    static = memory.static(setup)
    assert static["weights"] == 8_190_735_360 * 4 / 8
    # 2 * 36 layers * 8 heads * 128 numbers a token in 2 bytes; 128 rows of 1536 tokens.
    cache = 2 * 36 * 8 * 128 * 2 * 128 * 1536
    assert memory.cache(setup) == cache
    assert memory.cache(replace(setup, strategy="ddp")) == cache
    gathered = 2 * 8_190_735_360
    assert memory.rollouts(setup) == gathered + cache + 128 * 151_936 * 6 + 8 * 2**24
    assert memory.rollouts(replace(setup, vllm=0.3)) == gathered
    parts = memory.parts(setup)
    used = sum(static.values()) + parts["computed weights"] + parts["activations"] + parts["head"]
    assert parts["total"] == pytest.approx(1.05 * used + 1.5 * GIB)


def test_a_recommendation_fits():
    for name in ("qwen3-0.6b", "qwen3-4b", "qwen3-8b"):
        setup = Setup(SHAPES[name])
        words, found = next((w, s) for w, s in memory.alternatives(setup) if memory.fits(s))
        assert memory.parts(found)["total"] <= 80 * GIB
        assert f"Fits, with {words}:" in memory.recommendation(setup)
        assert memory.recommendation(found).startswith("Fits: ")
    assert memory.recommendation(Setup(SHAPES["qwen3-32b"], gpu=4)).startswith("Does not fit: ")
    adapters = memory.recommendation(Setup(SHAPES["qwen3-8b"], prompts=1))
    assert "--lora 32" in adapters
    # vLLM's share must hold the weights.
    assert not memory.fits(Setup(SHAPES["qwen3-8b"], "fsdp2", 8, checkpointing=True, prompts=1, vllm=0.1))


def test_more_ranks_keep_the_prompts_of_a_step():
    setup = Setup(SHAPES["qwen3-32b"], "fsdp2", 2, prompts=8)
    for _, other in memory.alternatives(setup):
        assert other.prompts * other.ranks == 16


def test_command_line(tmp_path, capsys):
    SMALL.config().save_pretrained(tmp_path)
    memory.main(["--model", str(tmp_path), "--prompts", "2", "--gpu", "8", "--no-reference"])
    out = capsys.readouterr().out
    assert "| total | " in out
    assert "reference" not in out
    assert out.strip().endswith("GiB a GPU to spare.")
    for wrong in (
        ["--model", "none"],
        ["--model", str(tmp_path), "--ranks", "2"],
        ["--model", str(tmp_path), "--group", "0"],
    ):
        with pytest.raises(SystemExit):
            memory.main(wrong)
        assert "expected" in capsys.readouterr().err
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
