"""What a step needs, and the limits made of it, with a clock that always says a millisecond."""

import json

import pytest
import torch

from benchmarks import grpo_work, limit, rates, shapes
from benchmarks.limit import Needed
from benchmarks.shapes import Counts, Shape, Step
from lit_madrl.policy import pack
from lit_madrl.prepare import write_tiny_choice
from lit_madrl.types import Rollouts

SHAPE = Shape(3, 8, 2, 1, 4, 16, 32, tied=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(rates, "best", lambda function, *_: (function(), 1e-3)[1])
    monkeypatch.setattr(limit, "LARGE", 2**20)
    yield
    torch.set_num_threads(threads)


def rollouts(prompts, groups):
    width = max(len(c) for group in groups for c in group)
    ids = torch.tensor([[c + [0] * (width - len(c)) for c in group] for group in groups])
    lengths = torch.tensor([[len(c) for c in group] for group in groups])
    mask = torch.arange(width) < lengths[..., None]
    finished = torch.ones_like(lengths, dtype=torch.bool)
    return Rollouts(prompts, ids, mask, torch.zeros(ids.shape), finished, torch.zeros_like(lengths))


def test_what_a_step_needs():
    prompts, groups = [[5, 6, 4], [9]], [[[7, 8, 1], [7, 8, 1]], [[1], [7, 1]]]
    # Training merges equal completions, and takes the groups in two micro-batches here.
    batches = [pack([prompts[0]], [groups[0][:1]]), pack([prompts[1]], [groups[1]])]
    needed = Needed.of(rollouts(prompts, groups), batches, merge=True)
    assert needed.prefill == Counts(4, 6 + 1, 2)
    # Step 1: one row for both of the first prompt, one of the second; step 2: one of the first.
    assert needed.decode == [Step(Counts(2, 4 + 2, 2), 4 + 2), Step(Counts(1, 5, 1), 5)]
    assert needed.packed == Counts(5 + 2, (6 + 4 + 5) + (1 + 2), 3 + 3)
    # Dense attention computes all pairs of a group.
    assert needed.computed_pairs == 5 * 5 + 2 * 2
    apart = Needed.of(rollouts(prompts, groups), batches, merge=False)
    assert [step.counts.tokens for step in apart.decode] == [3, 2]


def test_pairs_that_a_plan_computes():
    long = pack([[5] * 100], [[[7] * 80, [7] * 80, [7] * 71, [7] * 61]])
    assert limit.plan_pairs(long.plan) == 100**2 + 4 * 79 * (100 + 79)
    assert limit.layout(long) == [(100, [80, 80, 71, 61])]


def test_products_are_the_layers_and_the_head():
    found = rates.products(SHAPE, 5, 2, torch.float32, rates.PRODUCTS)
    assert list(found) == ["2 x 8 x 32", "5 x 8 x 8", "5 x 8 x 4", "5 x 8 x 16", "5 x 16 x 8"]
    gflop = sum(by_name["GFLOP"] for by_name in found.values())
    assert gflop * 1e9 == pytest.approx(shapes.forward_flops(SHAPE, Counts(5, 0, 2)))
    names = {f"{kind}, {kernel}" for kind in rates.PRODUCTS for kernel in rates.kernels()}
    assert all(by_name.keys() == {"GFLOP", *names} for by_name in found.values())


def test_more_rows_than_are_timed_are_scaled(monkeypatch):
    monkeypatch.setattr(rates, "MOST_ROWS", 4)
    found = rates.products(SHAPE, 10, 2, torch.float32, ["forward"])
    assert found["10 x 8 x 8"]["forward, F.linear"] == pytest.approx(2.5e-3)
    assert found["2 x 8 x 32"]["forward, F.linear"] == pytest.approx(1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_agree(dtype):
    x, g, w = (torch.randn(*size).to(dtype) for size in ((6, 5), (6, 3), (3, 5)))
    for kernel in rates.kernels().values():
        for made, expected in ((kernel(x, w), x @ w.T), (kernel(g, w.T), g @ w), (kernel(g.T, x.T), g.T @ x)):
            torch.testing.assert_close(made, expected)


def test_the_fastest_kernel_of_each_product_counts():
    seconds = {
        "a": {
            "GFLOP": 1.0,
            "forward, F.linear": 0.5,
            "forward, oneDNN": 0.25,
            "input gradient, F.linear": 9.0,
        },
        "b": {
            "GFLOP": 3.0,
            "forward, F.linear": 0.75,
            "forward, oneDNN": 1.5,
            "input gradient, F.linear": 1.0,
        },
    }
    assert rates.fastest(seconds, ["forward"]) == (1.0, 4e9)
    assert rates.fastest(seconds, ["forward"], "F.linear") == (1.25, 3.2e9)
    assert rates.fastest(seconds, ["forward", "input gradient"]) == (11.0, 8e9 / 11)


def test_limits_of_stages():
    decode = [Step(Counts(2, 8, 2), 9), Step(Counts(2, 10, 2), 11)]
    needed = Needed(Counts(6, 21, 2), decode, Counts(10, 39, 8), 50)
    found = limit.stage_limits(SHAPE, [needed, needed], "fp32")
    stages = found["stages"]
    assert found["counts"]["decode"] == Counts(4, 18, 4)
    assert found["counts"]["decode_steps"] == 2
    flops = {name: stage["flops"] for name, stage in stages.items()}
    assert flops["reference"] * 3 == flops["update"]
    assert flops["generation"] == shapes.forward_flops(SHAPE, Counts(10, 39, 6))
    computed = shapes.forward_flops(SHAPE, Counts(10, 50, 8))
    assert stages["reference"]["computed"] == computed
    assert stages["update"]["computed"] == 3 * computed  # one chunk of logits: not computed again
    # 5 shapes of a millisecond each: in prefill, in 2 decode steps, and in the forward and its two gradients.
    rate = 2e3 * (3 * SHAPE.layer_weights() * 6 + 2 * 8 * 32) / 5
    prefill = 5e-3 + shapes.attention_flops(SHAPE, Counts(6, 21, 2)) / rate
    rate = 2e3 * (3 * SHAPE.layer_weights() * 2 + 2 * 8 * 32) / 5
    decoded = 10e-3 + shapes.attention_flops(SHAPE, Counts(4, 18, 4)) / rate
    assert stages["generation"]["limit"] == pytest.approx(prefill + decoded)
    rate = 2e3 * (3 * SHAPE.layer_weights() * 10 + 8 * 8 * 32) / 5
    attention = shapes.attention_flops(SHAPE, Counts(10, 39, 8)) / rate
    assert stages["reference"]["limit"] == pytest.approx(5e-3 + attention)
    optimizer = 40 * SHAPE.parameters() / found["bandwidth"]["large"]["copy"]
    assert stages["update"]["limit"] == pytest.approx(15e-3 + 3 * attention + optimizer)


def test_a_row_of_the_learner(tmp_path, monkeypatch, capsys):
    model, path = tmp_path / "model", tmp_path / "results" / "toy.json"
    write_tiny_choice(model, hidden_size=16, layers=1, vocab_size=320)
    monkeypatch.setitem(grpo_work.PRESETS, "toy", grpo_work.Work(2, 5, 3))
    command = ["--preset", "toy", "--model", str(model), "--steps", "2", "--json", str(path)]
    for _ in range(2):  # the second rows replace the first
        limit.main(command)
    fp32, bf16 = json.loads(path.read_text())
    assert (fp32["precision"], bf16["precision"]) == ("fp32", "bf16")
    for row in (fp32, bf16):
        tokens, pairs, head = row["counts"]["packed"]
        shape = Shape.read(str(model))
        assert row["stages"]["reference"]["flops"] == shapes.forward_flops(shape, Counts(tokens, pairs, head))
        for stage in row["stages"].values():
            assert stage["measured"] > 0
            assert stage["fraction"] == stage["limit"] / stage["measured"]
            assert stage["limit"] <= stage["limit_linear"]
    out = capsys.readouterr().out
    assert "## toy, bf16, 1 thread(s), 2 steps" in out
    assert "| generation | " in out
