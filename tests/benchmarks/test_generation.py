"""Both samplers at toy size, and what they count."""

import json

import pytest
import torch

from benchmarks import generation, grpo_work
from lit_madrl.prepare import write_tiny_choice


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    write_tiny_choice(tmp_path / "model", hidden_size=16, layers=1, vocab_size=320)
    monkeypatch.setattr(grpo_work, "WARM_START", tmp_path / "model")
    monkeypatch.setitem(grpo_work.PRESETS, "toy", grpo_work.Work(2, 5, 3))
    monkeypatch.setattr(generation, "ROWS", ("toy", "toy-no-merge"))
    monkeypatch.setattr(
        generation, "in_own_process", lambda function, *arguments, threads: function(*arguments)
    )
    monkeypatch.setattr(generation, "quiet", lambda: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_tokens_are_counted_through_the_stop_token():
    completions = torch.tensor([[5, 6, 7], [5, 1, 0], [2, 1, 5], [1, 1, 1]])
    assert generation.sampled_tokens(completions, [1, 2]) == 3 + 2 + 1 + 1


def test_rows_of_both_sides(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generation, "probe", lambda sample, batch: sample(batch) / sample(batch))
    path = tmp_path / "rows.json"
    generation.main(["--rows", "toy,toy-no-merge", "--budget", "0", "--least", "2", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["work"], row["precision"]) for row in rows] == [
        ("toy", "fp32"),
        ("toy", "bf16"),
        ("toy-no-merge", "fp32"),
        ("toy-no-merge", "bf16"),
    ]
    for row in rows:
        assert row["steps"] == 2
        assert row["transformers"]["cache"] in generation.CACHES
        assert row["transformers"]["first_calls"].keys() == set(generation.CACHES)
        for side in ("transformers", "ours"):
            assert 10 <= row[side]["tokens"] <= 30
            assert min(row[side]["tokens_per_s"].values()) > 0
        rates = [row[side]["tokens_per_s"]["cpu"] for side in ("ours", "transformers")]
        assert row["ratio"]["cpu"] == pytest.approx(rates[0] / rates[1], abs=0.01)
    assert "toy bf16, 2 calls: tokens a CPU second transformers" in capsys.readouterr().out


def test_both_sides_sample_from_the_same_distribution():
    work = grpo_work.Work(1, 4000, 1)
    run = generation.Run(work, "fp32")
    assert run.stop_ids()[0] != 0
    prompts = work.prompt_ids()
    sample = generation.theirs(run, "dynamic")
    assert sample(prompts) == generation.ours(run)(prompts) == 4000
