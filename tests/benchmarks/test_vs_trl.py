"""The benchmark against TRL: our side at toy size, both where TRL is installed, the form of its files."""

import json
import os
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks import alternating, grpo_work, reporting, vs_trl
from lit_madrl.prepare import write_tiny_choice

CLOCKS = {"wall", "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_choice(folder, hidden_size=16, layers=1, vocab_size=320)
    return folder


@pytest.fixture(autouse=True)
def toy(model, monkeypatch):
    """A toy row, measured in this process."""
    monkeypatch.setattr(grpo_work, "WARM_START", model)
    monkeypatch.setitem(grpo_work.PRESETS, "toy", grpo_work.Work(2, 5, 3))
    monkeypatch.setattr(vs_trl, "ROWS", ("toy", "toy-no-merge", "smollm2"))
    monkeypatch.setattr(vs_trl, "elsewhere", lambda loop, threads: loop)
    monkeypatch.setattr(vs_trl, "quiet", lambda: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_our_side_writes_rows(tmp_path, capsys):
    path = tmp_path / "results" / "toy.json"
    command = ["--side", "ours", "--budget", "0", "--least", "2", "--json", str(path)]
    vs_trl.main([*command, "--rows", "toy,toy-no-merge", "--precision", "fp32"])
    first = json.loads(path.read_text())
    vs_trl.main([*command, "--rows", "toy", "--least", "3"])
    document = json.loads(path.read_text())
    assert first["rows"][1] == document["rows"][0]  # the others stay as they are
    assert document["command"].startswith("python benchmarks/vs_trl.py")
    assert {"cpu", "cores"} < document["machine"].keys()
    assert {"torch", "lightning", "lit_madrl"} < document["versions"].keys()
    rows = {(row["work"], row["precision"]): row for row in document["rows"]}
    assert {key: row["steps"] for key, row in rows.items()} == {
        ("toy-no-merge", "fp32"): 2,
        ("toy", "fp32"): 3,
        ("toy", "bf16"): 3,
    }
    for row in rows.values():
        assert not {"trl", "ratio"} & row.keys()
        assert (row["prompts"], row["group_size"], row["threads"]) == (2, 5, 1)
        side = row["ours"]
        assert all(side[stage].keys() == CLOCKS for stage in alternating.STAGES)
        parts = [side[stage]["wall"] for stage in ("generation", "reference", "update")]
        assert min(parts) > 0
        assert max(parts) < side["total"]["wall"]
        assert 1 <= side["tokens_per_completion"] <= 3
    assert "toy bf16, 1 thread(s), 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_sides_take_equally_many_steps(precision):
    pytest.importorskip("trl", reason="needs TRL, which has an environment of its own")
    work = grpo_work.PRESETS["toy"]
    run = vs_trl.Run(work, work.model(), 9, precision)
    row = vs_trl.measure(run, alternating.Rounds(2, 9, 0.0))
    assert row["steps"] == 2
    for stage in ("generation", "reference", "update"):
        assert row["ratio"][stage]["cpu"] > 1


def test_a_model_that_is_missing_is_no_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grpo_work, "SMOLLM2", grpo_work.ROOT / "runs" / "models" / "none")
    path = tmp_path / "rows.json"
    vs_trl.main(["--side", "ours", "--rows", "smollm2", "--precision", "fp32", "--json", str(path)])
    expected = "smollm2 fp32: skipped, expected the model that `python -m lit_madrl.prepare smollm2"
    assert capsys.readouterr().out.startswith(expected)
    assert not path.exists()


def test_unknown_rows_are_refused():
    with pytest.raises(ValueError, match="--rows: expected some of toy,toy-no-merge,smollm2, got tony"):
        vs_trl.main(["--rows", "toy,tony"])


def test_smollm2_has_the_work_of_its_configuration():
    work = grpo_work.PRESETS["smollm2"]
    assert work.stop == ("\n",)
    (problem, *_) = batch = next(iter(work.data().train_dataloader()))
    assert len(batch) == work.prompts == 2
    assert problem.prompt.count("\n") > 2  # worked examples
    assert problem.options[0].startswith(" ")


def test_table(tmp_path):
    side = {stage: {"wall": 9.0, "cpu": 6.0} for stage in alternating.STAGES}
    side |= {"memory_mib": 100, "tokens_per_completion": 2.0}
    ratio = {stage: {"wall": 9.0, "cpu": 3.0} for stage in alternating.STAGES} | {"memory": 2.5}
    ratio["total_quartiles"] = {"wall": [8.0, 9.0], "cpu": [2.5, 3.5]}
    settings = {"precision": "fp32", "threads": 1, "prompts": 2, "group_size": 5, "prompt_tokens": 7.0}
    row = {"work": "toy", **settings, "steps": 4, "trl": side, "ours": side, "ratio": ratio}
    path = tmp_path / "rows.json"
    alone = {"work": "toy", "precision": "bf16", "ours": side}
    path.write_text(json.dumps({"rows": [{**row, "work": "toy-no-merge"}, row, alone]}))
    vs_trl.main(["--json", str(path), "--table", str(tmp_path / "rows.md")])
    heads, _, *lines = (tmp_path / "rows.md").read_text().splitlines()
    assert heads.startswith(
        "| work | P x G | prompt | completion | precision | steps | TRL, s | ours, s | ratio |"
    )
    cells = "| 2 x 5 | 7 | 2.0 | fp32 | 4 | 6 | 6 | **3** | 2.5 - 3.5 | 3 | 3 | 3 | 100 / 100 | 2.5 |"
    assert lines == [f"| toy {cells}", f"| toy-no-merge {cells}"]


def test_results_are_of_one_machine_and_one_set_of_versions(tmp_path):
    path = tmp_path / "rows.json"
    about = {"command": "c", "machine": {"cpu": "a"}, "versions": {"torch": "1"}}
    results = reporting.Results(path, about, ["work"])
    for row in ({"work": "a", "n": 1}, {"work": "b", "n": 2}, {"work": "a", "n": 3}):
        results.add(row)
    assert json.loads(path.read_text()) == {**about, "rows": [{"work": "b", "n": 2}, {"work": "a", "n": 3}]}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match=r"expected rows of versions .*'2'.*, got those of .*'1'"):
        reporting.Results(path, {**about, "versions": {"torch": "2"}}, ["work"])


def steps_that_tell_their_process(number, steps):
    steps.begin()
    for _ in range(number):
        steps.tokens.append(os.getpid())
        if steps.end():
            return


def fails_at_once(steps):
    raise ValueError(f"no {steps.name}")


def test_loops_elsewhere_alternate_as_here():
    loops = {
        name: alternating.elsewhere(partial(steps_that_tell_their_process, number), 1)
        for name, number in (("a", 9), ("b", 9))
    }
    steps = alternating.alternate(loops, 1, alternating.Rounds(2, 3, 0.0))
    assert {name: len(made.seconds) for name, made in steps.items()} == {"a": 3, "b": 3}
    processes = [set(made.tokens) for made in steps.values()]
    assert len(processes[0] | processes[1] | {os.getpid()}) == 3
    assert all(made.totals().min() > 0 for made in steps.values())


def test_a_loop_that_fails_elsewhere_fails_here():
    loops = {"a": alternating.elsewhere(fails_at_once, 1)}
    with pytest.raises(ValueError, match="no a"):
        alternating.alternate(loops, 1)


def test_a_process_of_its_own():
    assert alternating.in_own_process(os.getpid) != os.getpid()


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


def test_rounds_end_by_time_within_bounds(monkeypatch):
    clock = np.zeros(2)
    monkeypatch.setattr(alternating, "now", clock.copy)

    def made(least, most, seconds_a_round):
        clock[:] = 1.0
        rounds, log = alternating.Rounds(least, most, 10.0), {"a": 0, "b": 0}

        def loop(name, seconds):
            def run(steps):
                steps.begin()
                steps.tokens.append(1.0)
                while True:
                    clock[:] += seconds
                    log[name] += 1
                    if steps.end():
                        return

            return run

        alternating.alternate({"a": loop("a", seconds_a_round - 1), "b": loop("b", 1)}, 1, rounds)
        assert log["a"] == log["b"]
        return log["a"] - alternating.WARM_UP

    assert made(3, 20, 100) == 3
    assert made(3, 20, 4) == 3
    assert made(1, 20, 4) == 3
    assert made(1, 20, 2) == 5
    assert made(1, 4, 2) == 4


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
        made.seconds = [dict.fromkeys(alternating.STAGES, np.array([t, t / 2])) for t in [99.0, *totals]]
        made.memory, made.tokens = [9 << 20, 4096, 2048, 1024], [1.0] * 4
        return made

    ratio = reporting.ratio(steps([6.0, 8.0, 100.0]), steps([2.0, 2.0, 5.0]))
    assert ratio["total"] == ratio["update"] == {"wall": 4.0, "cpu": 4.0}
    assert ratio["memory"] == 1.0
    # pairs: 3, 4, 20
    assert ratio["total_quartiles"] == {"wall": [3.5, 12.0], "cpu": [3.5, 12.0]}
