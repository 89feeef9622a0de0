"""The benchmark against TRL, without TRL: our side at toy size, the form of its JSON, the taking of turns."""

import json

import numpy as np
import pytest
import torch

from benchmarks import alternating, grpo_work, vs_trl
from lit_madrl.prepare import write_tiny_choice

CLOCKS = {"wall", "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_choice(folder, hidden_size=16, layers=1, vocab_size=320)
    return folder


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_our_side_writes_a_row(model, tmp_path, monkeypatch):
    monkeypatch.setitem(grpo_work.PRESETS, "toy", grpo_work.Work(2, 5, 3))
    path = tmp_path / "results" / "toy.json"
    command = [
        "--preset",
        "toy",
        "--side",
        "ours",
        "--model",
        str(model),
        "--steps",
        "3",
        "--json",
        str(path),
    ]
    for _ in range(2):  # the second row replaces the first
        vs_trl.main(command)
    vs_trl.main([*command, "--no-merge"])
    merged, unmerged = json.loads(path.read_text())
    assert (merged["merge"], unmerged["merge"]) == (True, False)
    for row in (merged, unmerged):
        assert (row["work"], row["precision"], row["threads"], row["steps"]) == ("toy", "fp32", 1, 3)
        assert not {"trl", "ratio"} & row.keys()
        assert row["command"].startswith("python benchmarks/vs_trl.py")
        assert {"cpu", "cores"} < row["machine"].keys()
        assert {"torch", "lightning", "lit_madrl"} < row["machine"]["versions"].keys()
        side = row["ours"]
        assert all(side[stage].keys() == CLOCKS for stage in alternating.STAGES)
        parts = [side[stage]["wall"] for stage in ("generation", "reference", "update")]
        assert min(parts) > 0
        assert max(parts) < side["total"]["wall"]
        assert 1 <= side["tokens_per_completion"] <= 3


def test_random_words_are_given_to_both_sides_alike():
    work = grpo_work.Work(3, 2, 4, random_words=5)
    first, second = (next(iter(work.data().train_dataloader())) for _ in range(2))
    assert first == second
    assert [len(problem.prompt.split()) for problem in first] == [5, 5, 5]
    category = work.categorizer()(first, [["a", "b"], ["a", "c"], ["d", "a"]])
    assert category[0, 0] == category[1, 0] == category[2, 1]
    assert category.min() >= 0
    assert category.max() < len(work.data().categories)


def test_loops_take_turns_and_waiting_is_not_counted(monkeypatch):
    clock = np.zeros(2)
    monkeypatch.setattr(alternating, "now", clock.copy)
    log = []

    def loop(name, number, seconds):
        def work():
            clock[:] += seconds

        def run(steps):
            steps.begin()
            for i in range(number):
                work()
                steps.timed("update", work)()
                log.append(f"{name}{i}")
                steps.tokens.append(1.0)
                steps.end()

        return run

    steps = alternating.alternate({"a": loop("a", 3, 10), "b": loop("b", 5, 1)}, threads=1)
    assert log == ["a0", "b0", "a1", "b1", "a2", "b2", "b3", "b4"]
    for name, number, seconds in (("a", 3, 10), ("b", 5, 1)):
        assert np.array_equal([step["total"] for step in steps[name].seconds], [[2 * seconds] * 2] * number)
        summary = steps[name].summary()
        assert summary["update"] == summary["other"] == {"wall": seconds, "cpu": seconds}


def test_an_error_of_one_loop_ends_both():
    def fails(steps):
        steps.begin()
        raise RuntimeError("broken")

    def works(steps):
        steps.begin()
        steps.end()

    with pytest.raises(RuntimeError, match="broken"):
        alternating.alternate({"a": fails, "b": works}, threads=1)


def test_ratio_of_medians():
    def steps(totals):
        made = alternating.Steps("", alternating.Relay([""]))
        made.seconds = [
            dict.fromkeys(alternating.STAGES, np.array([t, t / 2])) for t in [99.0, 99.0, *totals]
        ]
        made.memory, made.tokens = [0], [1.0] * 5
        return made

    ratio = alternating.ratio(steps([6.0, 8.0, 100.0]), steps([2.0, 2.0, 5.0]))
    assert ratio["total"] == ratio["update"] == {"wall": 4.0, "cpu": 4.0}
    # pairs: 3, 4, 20
    assert ratio["total_quartiles"] == {"wall": [3.5, 12.0], "cpu": [3.5, 12.0]}
