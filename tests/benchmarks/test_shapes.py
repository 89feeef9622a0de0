"""Parameters, counts and FLOPs: against transformers' models, numbers worked by hand, and torch's FLOP counter."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from benchmarks import shapes
from benchmarks.limit import plan_pairs
from benchmarks.shapes import SHAPES, Counts, Shape, Step
from lit_madrl.policy import Policy, pack
from lit_madrl.policy.attention import GroupRows

SMALL = Shape(2, 64, 4, 2, 24, 80, 512, tied=True)
UNTIED = replace(SMALL, tied=False, heads=2, hidden=48)

# Published totals of the checkpoints.
PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


def build(shape, **config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(shape.config(**config))


@pytest.mark.parametrize("name", SHAPES)
def test_published_models_have_their_published_sizes(name):
    assert SHAPES[name].parameters() == PARAMETERS[name]


@pytest.mark.parametrize("kind", ["qwen3", "untied", "llama", "qwen2"])
def test_parameters_are_those_of_transformers(kind, tmp_path):
    fields = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "intermediate_size": 40}
    configs = {
        "qwen3": SMALL.config(),
        "untied": UNTIED.config(),
        "llama": LlamaConfig(**fields),
        "qwen2": Qwen2Config(**fields, tie_word_embeddings=True),
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configs[kind])
    model.config.save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "config.json"):
        shape = Shape.read(str(place))
        assert shape.parameters() == sum(p.numel() for p in model.parameters())
        assert shape.tensors() == len(list(model.parameters()))


def test_what_is_no_known_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model: expected one of qwen3-"):
        Shape.read("qwen9")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="model_type: expected llama, qwen2 or qwen3, got 'gpt2'"):
        Shape.read(str(tmp_path))


def test_counts_worked_by_hand():
    # A prompt of 3: 1 + 2 + 3 pairs. Completions of 3 and 1 tokens feed 2 and 0; those 2 see 3 + 1 and 3 + 2 keys.
    assert shapes.packed_counts([(3, [3, 1])]) == Counts(5, 15, 4)
    assert shapes.padded_counts([(3, [3, 1])]) == Counts(10, 50, 10)
    assert shapes.prefill_counts([3, 2]) == Counts(5, 9, 2)
    # Of a b c, a b d, a and e, step 1 feeds a (and not e: it is over), step 2 feeds b once.
    group = [[7, 8, 9], [7, 8, 6], [7], [5]]
    assert list(shapes.decode_steps([3], [group])) == [
        Step(Counts(1, 4, 1), 4),
        Step(Counts(1, 5, 1), 5),
    ]
    assert list(shapes.decode_steps([3], [group], merge=False)) == [
        Step(Counts(2, 8, 2), 5),
        Step(Counts(2, 10, 2), 7),
    ]
    tiny = Shape(1, 2, 1, 1, 2, 3, 5, tied=True)  # w = 4 * 4 + 3 * 6 = 34
    assert shapes.forward_flops(tiny, Counts(5, 15, 4)) == 2 * 34 * 5 + 4 * 2 * 15 + 2 * 10 * 4
    assert shapes.decode_bytes(tiny, Step(Counts(1, 4, 1), 4), 2) == 2 * (34 + 10 + 4 * (4 + 1))


groups = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=5),
    min_size=1,
    max_size=3,
)


@given(groups, st.data())
def test_prefill_and_decode_are_the_packed_forward_but_for_the_logits(groups, data):
    prompts = data.draw(st.lists(st.integers(1, 5), min_size=len(groups), max_size=len(groups)))
    decoded = shapes.total(step.counts for step in shapes.decode_steps(prompts, groups, merge=False))
    both = shapes.total([shapes.prefill_counts(prompts), decoded])
    packed = shapes.packed_counts((p, list(map(len, g))) for p, g in zip(prompts, groups, strict=True))
    assert both[:2] == packed[:2]
    # Sampling computes the logits of a prompt's last token once, training at the first token of every row.
    assert packed.head - both.head == sum(len(group) - 1 for group in groups)


@given(groups)
def test_merged_rows_are_the_distinct_partial_completions(groups):
    prompts = [4] * len(groups)
    for t, step in enumerate(shapes.decode_steps(prompts, groups), 1):
        begun = {(g, tuple(c[:t])) for g, group in enumerate(groups) for c in group if len(c) > t}
        assert step.counts.tokens == len(begun)
        assert step.keys == len(begun) * t + 4 * len({g for g, _ in begun})


def counted(function):
    """FLOPs by torch's counter, with attention as plain products, which it counts on every device.

    It does not know the in-place ``addmm_`` of the head's gradient: that one is told to it.
    """
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        function()
    return counter.get_total_flops()


LAYOUTS = {
    "dense": [(9, [4, 6, 1]), (5, [3])],
    "rows": [(60, [40] * 4)],
}


@pytest.mark.parametrize("shape", [SMALL, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_flops_are_those_that_torch_counts(name, shape):
    layout = LAYOUTS[name]
    batch = pack([[5] * p for p, _ in layout], [[[7] * n for n in lengths] for _, lengths in layout])
    assert all(isinstance(part, GroupRows) == (name == "rows") for part in batch.plan.parts)
    policy = Policy(build(shape))
    counts = shapes.packed_counts(layout)
    assert counts.tokens == batch.input_ids.shape[1]
    assert counts.head == len(batch.targets)
    computed = counts._replace(pairs=plan_pairs(batch.plan))  # the plan masks some pairs that it computes
    assert computed.pairs > counts.pairs

    with torch.no_grad():
        assert counted(lambda: policy(batch)) == shapes.forward_flops(shape, computed)
    assert counted(lambda: policy(batch).sum().backward()) == shapes.training_flops(shape, computed)

    policy.model.gradient_checkpointing_enable()
    again = shapes.training_flops(shape, computed, checkpointing=True)
    assert counted(lambda: policy.train()(batch).sum().backward()) == again


def test_chunked_logits_are_computed_again(monkeypatch):
    batch = pack([[5] * 9], [[[7] * 8] * 3])
    policy = Policy(build(SMALL))
    computed = shapes.packed_counts([(9, [8] * 3)])._replace(pairs=plan_pairs(batch.plan))
    monkeypatch.setattr("lit_madrl.functional.logprobs.KEPT_LOGITS", 10 * SMALL.vocabulary)
    expected = shapes.training_flops(SMALL, computed, logits_again=True)
    assert counted(lambda: policy(batch).sum().backward()) == expected


def test_padded_flops_are_those_that_torch_counts():
    layout = [(9, [4, 6, 1]), (5, [3])]
    batch = pack([[5] * p for p, _ in layout], [[[7] * n for n in lengths] for _, lengths in layout])
    counts = shapes.padded_counts(layout)
    with torch.no_grad():
        flops = counted(lambda: Policy(build(SMALL), "padded")(batch))
    assert flops == shapes.forward_flops(SMALL, counts)


def test_sampling_flops_are_those_that_torch_counts():
    from lit_madrl.rollouts import TorchEngine
    from lit_madrl.types import Sampling

    engine, model = TorchEngine(seed=1), build(SMALL)
    engine.sync_weights(model)
    made = []
    flops = counted(lambda: made.append(engine.generate([[5] * 9, [6] * 9], Sampling(6, 7), [1])))
    completions = made[0].completions()
    decode = [step.counts for step in shapes.decode_steps([9, 9], completions)]
    counts = shapes.total([shapes.prefill_counts([9, 9]), *decode])
    # The prompt's attention computes all 9 x 9 pairs.
    counts = counts._replace(pairs=counts.pairs + 2 * (81 - 45))
    assert flops == shapes.forward_flops(SMALL, counts)
