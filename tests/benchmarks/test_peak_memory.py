"""Peak memory of a step at toy size, of our side."""

import json

import pytest
import torch

from benchmarks import grpo_work, peak_memory
from benchmarks.shapes import Shape


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_work, "BENCH", tmp_path)
    monkeypatch.setitem(grpo_work.RANDOM, "toy", Shape(1, 64, 2, 1, 32, 64, 16_384, tied=True))
    monkeypatch.setattr(peak_memory, "quiet", lambda: None)
    call = lambda function, *arguments, threads: function(*arguments)  # noqa: E731
    monkeypatch.setattr(peak_memory, "in_own_process", call)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("settings", peak_memory.SETTINGS)
def test_a_step_adds_at_least_gradients_and_optimizer(settings):
    work = grpo_work.Work(1, 2, 4, random_words=5, random="toy")
    row = peak_memory.measured(settings, work, threads=1, sides=["ours"])
    assert row["settings"] == settings
    parameters = grpo_work.RANDOM["toy"].parameters()
    assert 3 * 4 * parameters / 2**20 <= row["ours"]["step_mib"] + 1
    assert row["ours"]["step_mib"] <= row["ours"]["run_mib"] + 1


def test_the_ratio_of_both_sides(tmp_path, monkeypatch, capsys):
    peaks = {"trl": {"step_mib": 90, "run_mib": 100}, "ours": {"step_mib": 30, "run_mib": 40}}
    monkeypatch.setattr(peak_memory, "measure", lambda side, run, threads: peaks[side])
    monkeypatch.setattr(peak_memory, "require_trl", lambda: None)
    monkeypatch.setattr(peak_memory, "PACKAGES", {"trl": ["torch"], "ours": ["transformers"]})
    monkeypatch.setattr(peak_memory, "WORK", grpo_work.Work(1, 2, 4, random_words=5, random="toy"))
    path = tmp_path / "rows.json"
    peak_memory.main(["--json", str(path)])
    document = json.loads(path.read_text())
    (row,) = document["rows"]
    assert row["ratio"] == {"step_mib": 3.0, "run_mib": 2.5}
    assert (row["precision"], row["beta"], row["checkpointing"]) == ("bf16", 0.0, True)
    assert document["versions"].keys() == {"torch", "transformers"}
    assert "defaults ratio: {'step_mib': 3.0, 'run_mib': 2.5}" in capsys.readouterr().out
