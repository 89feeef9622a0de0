"""Peak memory of a step at toy size, of our side."""

import json

import pytest
import torch

from benchmarks import grpo_work, peak_memory
from benchmarks.shapes import Shape


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_work, "BENCH", tmp_path)
    # An embedding of more than 32 MiB: malloc gives and takes it back by itself, so that its copies can be counted.
    monkeypatch.setitem(grpo_work.RANDOM, "toy", Shape(1, 72, 2, 1, 32, 64, 131_072, tied=True))
    monkeypatch.setattr(peak_memory, "quiet", lambda: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


WORK = grpo_work.Work(1, 2, 4, random_words=5, random="toy")


def test_a_step_adds_at_least_gradients_and_the_optimizers_state(monkeypatch):
    call = lambda function, *arguments, threads: function(*arguments)  # noqa: E731
    monkeypatch.setattr(peak_memory, "in_own_process", call)
    row = peak_memory.measured("reference", WORK, threads=1, sides=["ours"])
    assert (row["settings"], row["beta"], "ratio" in row) == ("reference", 0.04, False)
    embedding = 4 * 72 * 131_072 / 2**20
    assert 3 * embedding - 1 <= row["ours"]["step_mib"] <= 10 * embedding
    assert row["ours"]["run_mib"] >= 5 * embedding - 1  # weights, reference, and the step
    assert row["ours"]["cpu_seconds"] > 0


def test_the_ratio_of_both_sides(tmp_path, monkeypatch, capsys):
    peaks = {"trl": {"step_mib": 90, "run_mib": 100}, "ours": {"step_mib": 30, "run_mib": 40}}
    monkeypatch.setattr(peak_memory, "in_own_process", lambda _, side, *__, threads: peaks[side])
    monkeypatch.setattr(peak_memory, "require_trl", lambda: None)
    monkeypatch.setattr(peak_memory, "PACKAGES", {"trl": ["torch"], "ours": ["transformers"]})
    monkeypatch.setattr(peak_memory, "WORK", WORK)
    path = tmp_path / "rows.json"
    peak_memory.main(["--json", str(path)])
    document = json.loads(path.read_text())
    (row,) = document["rows"]
    assert row["ratio"] == {"step_mib": 3.0, "run_mib": 2.5}
    assert (row["precision"], row["beta"], row["checkpointing"]) == ("bf16", 0.0, True)
    assert document["versions"].keys() == {"torch", "transformers"}
    assert "defaults ratio: {'step_mib': 3.0, 'run_mib': 2.5}" in capsys.readouterr().out
