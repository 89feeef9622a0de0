"""The GPU benchmark at toy size on a CPU, each thing timed once."""

import json

import pytest
import torch

from benchmarks import h200, rates
from benchmarks.attention_paths import paths
from lit_madrl.policy import Policy

SECTIONS = ["machine", *["attention"] * 6, "head", *["train"] * 4, "generate", "model"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for module in (rates, h200):
        monkeypatch.setattr(module, "best", lambda function, *_: (function(), 1e-3)[1])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # without TRL


def test_all_sections(tmp_path):
    path = tmp_path / "new" / "h200.jsonl"
    results = h200.main(["--tiny", "--json", str(path)])
    assert [result["section"] for result in results] == SECTIONS
    assert [json.loads(line) for line in path.read_text().splitlines()] == results
    assert all("error" not in result and result["model"] == "tiny" for result in results)
    by_path = {result["path"]: result for result in results if result["section"] == "attention"}
    assert all(result["difference"] < 0.02 for result in by_path.values())
    assert "forward_backward_ms" in by_path["rows"]
    trained = [r for r in results if r["section"] == "train"]
    assert {(r["packing"], r["checkpointing"]) for r in trained} == {
        (packing, again) for packing in ("shared_prefix", "padded") for again in (False, True)
    }
    (generated,) = (r for r in results if r["section"] == "generate")
    assert generated["rows"] == 8
    assert 8 <= generated["tokens"] <= 8 * 12
    assert h200.main(["--tiny", "--json", str(path)])  # goes to the end of the file
    assert len(path.read_text().splitlines()) == 2 * len(results)


def test_an_error_is_a_result_and_the_rest_goes_on(monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(h200, "train", fails)
    monkeypatch.setattr(h200, "timed_path", fails)
    results = h200.main(["--tiny"])
    assert [result["section"] for result in results] == SECTIONS
    for result in results:
        failed = result["section"] in ("train", "attention")
        assert ("error" in result) == failed
        assert not failed or result["error"] == "OutOfMemoryError: out of memory"
    assert results[7 + 1]["settings"] == ["shared_prefix", False]

    monkeypatch.setattr(h200.Case, "model", fails)
    results = h200.main(["--tiny"])
    assert results[-1] == {
        "section": "model",
        "model": "tiny",
        "settings": [],
        "error": "OutOfMemoryError: out of memory",
    }


def test_nothing_begins_after_the_time():
    assert [r["skipped"] for r in h200.main(["--tiny", "--minutes", "-1"])] == ["no time left"] * 4


def test_paths_agree_in_values_and_gradients():
    torch.manual_seed(0)
    prompt, fed = 9, [5, 5, 5]
    inputs = [torch.randn(prompt + sum(fed), heads, 8) for heads in (4, 2, 2)]
    made = {}
    for path in paths("cpu", prompt, fed):
        q, k, v = (x.clone().requires_grad_(path.backward) for x in inputs)
        out = path.attend(q, k, v)
        made[path.name] = [out]
        if path.backward:
            out.square().sum().backward()
            made[path.name] += [q.grad, k.grad, v.grad]
            assert path.backend(*inputs)
        else:
            assert path.backend(*inputs) == []
    assert len(made) == 6
    for tensors in made.values():
        for tensor, expected in zip(tensors, made["rows"], strict=False):
            torch.testing.assert_close(tensor, expected)


def test_packed_and_padded_steps_see_the_same_numbers():
    model, batch = h200.TINY.model(), h200.TINY.batch()
    with torch.no_grad():
        packed, padded = (Policy(model.float(), packing)(batch) for packing in ("shared_prefix", "padded"))
    torch.testing.assert_close(packed, padded, atol=1e-4, rtol=1e-4)


def test_trl_makes_a_step(monkeypatch):
    monkeypatch.undo()
    pytest.importorskip("trl")
    result = h200.trl(h200.TINY)
    assert result["generation"] > 0
    assert result["update"] > 0
