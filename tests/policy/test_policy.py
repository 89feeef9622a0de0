"""The policy against forwards over one bare sequence at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_madrl.functional import logprobs as logprobs_module
from lit_madrl.policy import Policy, pack
from lit_madrl.policy import policy as policy_module
from lit_madrl.policy.attention import SHARED_PREFIX, shared_prefix_attention
from lit_madrl.policy.policy import why_not_packed
from tests.helpers.tiny_models import VOCABULARY, gradients, row_logprobs, tiny_model
from tests.policy.forms import FORMS, attention_form

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13], [3, 4, 5, 6]]
GROUPS = [
    [[5, 14, 1], [7], [2, 3, 4, 5, 6, 1], [5, 14, 1]],
    [[9], [1]],  # nothing but single tokens
    [[20, 21, 22, 1]],
    [[5, 1], [1], [6, 6, 6, 6, 6, 6, 6, 6, 1]],
]
PACKED = ["qwen3", "qwen3-tied", "llama", "llama-tied", "gpt2", "gpt2-tied", "mistral", "opt"]
FALLBACK = {
    "mistral-sliding": "sliding",
    "gemma2": "sliding",
    "granite": "logits_scaling",
    "jamba": "state",
}


def reference(model: PreTrainedModel, temperature: float = 1.0) -> Tensor:
    """``[M]`` by one forward a row, with transformers' eager attention."""
    model = copy.deepcopy(model).eval()
    model.set_attn_implementation("eager")
    rows = [
        row_logprobs(model, prompt, completion, temperature)
        for prompt, group in zip(PROMPTS, GROUPS, strict=True)
        for completion in group
    ]
    loss = weighted(torch.cat(rows))
    loss.backward()
    reference.gradients = gradients(model)  # type: ignore[attr-defined]
    return torch.cat(rows).detach()


def weighted(logprobs: Tensor) -> Tensor:
    """A loss in which every token has a weight of its own."""
    weights = torch.linspace(-1, 2, len(logprobs))
    return (weights * logprobs).sum() / len(logprobs)


def assert_equals_reference(policy: Policy, original: PreTrainedModel, temperature: float = 1.0) -> None:
    expected = reference(original, temperature)
    policy.zero_grad()
    logprobs = policy(pack(PROMPTS, GROUPS), temperature)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.detach(), expected, rtol=0, atol=1e-5)
    weighted(logprobs).backward()
    got = gradients(policy.model)
    assert got.keys() == reference.gradients.keys()  # type: ignore[attr-defined]
    for name, gradient in reference.gradients.items():  # type: ignore[attr-defined]
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", PACKED)
def test_packed_equals_one_row_at_a_time(family: str, form: str, checkpointing: bool) -> None:
    model = tiny_model(family)
    policy = Policy(copy.deepcopy(model))
    assert policy.packed
    if checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with attention_form(form):
        assert_equals_reference(policy, model)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3-tied", "gpt2", *FALLBACK])
def test_padded_equals_one_row_at_a_time(family: str, checkpointing: bool) -> None:
    model = tiny_model(family)
    policy = Policy(copy.deepcopy(model), packing="padded")
    assert not policy.packed
    if checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_equals_reference(policy, model)


@pytest.mark.parametrize(("family", "packing"), [("qwen3", "auto"), ("qwen3", "padded"), ("gemma2", "auto")])
def test_temperature_divides_the_logits(family: str, packing: Any) -> None:
    model = tiny_model(family)
    assert_equals_reference(Policy(copy.deepcopy(model), packing), model, temperature=0.6)


def test_gpt2_scales_of_its_own() -> None:
    model = tiny_model("gpt2-tied", scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True)
    assert_equals_reference(Policy(copy.deepcopy(model)), model)


def test_head_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "LOGITS_BUDGET", 5 * VOCABULARY)
    monkeypatch.setattr(logprobs_module, "KEPT_LOGITS", 0)
    model = tiny_model("qwen3-tied")
    assert_equals_reference(Policy(copy.deepcopy(model)), model)


def test_a_wrapped_head_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say, a head with an adapter; in chunks of 5 tokens."""

    class Doubled(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    monkeypatch.setattr(policy_module, "chunk_tokens_for", lambda vocabulary: 5)
    model = tiny_model("qwen3")
    head = Doubled(32, VOCABULARY, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    policy = Policy(copy.deepcopy(model))
    assert policy.packed
    assert_equals_reference(policy, model)


@pytest.mark.parametrize("family", FALLBACK)
def test_what_cannot_be_packed_takes_the_padded_path_and_says_why(family: str) -> None:
    model = tiny_model(family)
    assert FALLBACK[family] in str(why_not_packed(model))
    assert not Policy(model).packed
    with pytest.raises(ValueError, match=rf"packing: expected 'auto' or 'padded'.*{FALLBACK[family]}"):
        Policy(model, packing="shared_prefix")


def test_softcapped_attention_is_not_packed() -> None:
    """Gemma 2 with full attention in all layers: what is left is the soft cap."""
    changes = {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    for setting in ("attn_logit_softcapping", "final_logit_softcapping"):
        caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None, setting: 5.0}
        assert setting in str(why_not_packed(tiny_model("gemma2", **changes, **caps)))


def test_attention_refuses_features_the_plan_does_not_know() -> None:
    plan = pack([[3, 4]], [[[5, 6]]]).plan
    query = torch.zeros(1, 2, 3, 4)
    for feature in ({"sliding_window": 2}, {"softcap": 5.0}, {"s_aux": torch.zeros(2)}):
        with pytest.raises(ValueError, match=rf"{next(iter(feature))}.*policy.packing to 'padded'"):
            shared_prefix_attention(
                torch.nn.Identity(), query, query, query, None, shared_prefix=plan, **feature
            )


@pytest.mark.parametrize(
    ("length", "masked"), [(1, None), (1, (2, 1)), (1, (1, 1)), (1, (2, 6)), (3, (2, 1)), (3, (2, 6))]
)
def test_grouped_heads_without_copies(length: int, masked: tuple[int, int] | None) -> None:
    """As with keys and values repeated for every head; one query a head takes another way than three."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, length, 6, 8, generator=generator).transpose(1, 2)
    key, value = torch.randn(2, 2, 2, 5, 8, generator=generator)
    mask = None
    if masked is not None:
        mask = torch.rand(*masked, length, 5, generator=generator) < 0.6
        mask[..., 0] = True
    out, _ = shared_prefix_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.3)
    scores = torch.einsum("rhtd,rhld->rhtl", query, key.repeat_interleave(3, 1)) * 0.3
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    expected = torch.einsum("rhtl,rhld->rthd", scores.softmax(-1), value.repeat_interleave(3, 1))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_attention_is_computed_in_float32_on_cpus(autocast: bool) -> None:
    """In bfloat16 and under its autocast; what comes out is what the next layer expects."""
    plan = pack([[3, 4]], [[[5, 6, 7]]]).plan
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 4, 8, generator=generator).bfloat16() for _ in range(3))
    exact, _ = shared_prefix_attention(
        torch.nn.Identity(), query.float(), key.float(), value.float(), None, shared_prefix=plan
    )
    if autocast:
        query, key = query.float(), key.float()  # as behind a norm with float32 weights
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, _ = shared_prefix_attention(torch.nn.Identity(), query, key, value, None, shared_prefix=plan)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, exact.bfloat16())


def test_the_packed_model_still_decodes_and_pads_as_before() -> None:
    model = tiny_model("qwen3").eval()
    policy = Policy(copy.deepcopy(model))
    assert policy.model.config._attn_implementation == SHARED_PREFIX
    ids = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    expected, got = model(ids, attention_mask=mask).logits, policy.model(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)
    arguments = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    policy.eval()
    assert torch.equal(model.generate(ids, **arguments), policy.model.generate(ids, **arguments))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packing", ["auto", "padded"])
def test_bfloat16_autocast_is_close(form: str, packing: Any) -> None:
    model = tiny_model("qwen3-tied")
    expected = reference(model)
    policy = Policy(copy.deepcopy(model), packing)
    with attention_form(form), torch.autocast("cpu", torch.bfloat16):
        logprobs = policy(pack(PROMPTS, GROUPS))
        weighted(logprobs).backward()
    assert logprobs.dtype == torch.float32
    assert 0 < float((logprobs.detach() - expected).abs().max()) < 0.1
    for name, gradient in reference.gradients.items():  # type: ignore[attr-defined]
        got = gradients(policy.model)[name]
        assert got.dtype == torch.float32
        assert float((got - gradient).norm()) <= 0.05 * float(gradient.norm()) + 1e-3, name


def test_bfloat16_weights_are_close() -> None:
    model = tiny_model("qwen3-tied")
    expected = reference(model)
    logprobs = Policy(copy.deepcopy(model).bfloat16())(pack(PROMPTS, GROUPS))
    assert logprobs.dtype == torch.float32
    assert 0 < float((logprobs.detach() - expected).abs().max()) < 0.1


@pytest.mark.parametrize(
    ("family", "rates"),
    [
        ("gpt2", {"resid_pdrop": 0.5, "attn_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("llama", {"attention_dropout": 0.5}),
        ("opt", {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}),
    ],
)
@pytest.mark.parametrize("packing", ["auto", "padded"])
def test_dropout_is_off_in_training_mode(family: str, rates: dict[str, float], packing: Any) -> None:
    model = tiny_model(family, **rates)
    expected = reference(model)  # in evaluation mode
    policy = Policy(copy.deepcopy(model), packing).train()
    torch.testing.assert_close(policy(pack(PROMPTS, GROUPS)), expected, rtol=0, atol=1e-5)


def test_inputs_are_not_mutated() -> None:
    prompts, groups = copy.deepcopy(PROMPTS), copy.deepcopy(GROUPS)
    batch = pack(prompts, groups)
    before = copy.deepcopy(batch)
    Policy(tiny_model("qwen3"))(batch).sum().backward()
    assert (prompts, groups) == (PROMPTS, GROUPS)
    for name in ("input_ids", "position_ids", "sources", "targets", "rows", "lengths"):
        assert torch.equal(getattr(batch, name), getattr(before, name))
