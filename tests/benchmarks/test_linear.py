"""The measurement of linear layers."""

from __future__ import annotations

import json

import torch

from benchmarks import linear


def test_ways_agree():
    for functions in linear.ways(64, 48, 80).values():
        first, *others = (function() for function in functions.values())
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-4)


def test_rows_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(linear.SHAPES, "tiny", [(8, 8), (8, 2**26)])
    path = tmp_path / "results" / "linear.json"
    few = ["--models", "tiny", "--rows", "4", "--seconds", "0.001", "--repeats", "1", "--json", str(path)]
    linear.main(few)
    (row,) = json.loads(path.read_text())["gflops"]
    assert (row["rows"], row["in"], row["out"]) == (4, 8, 8)
    assert row["train"].keys() == {"F.linear", "ours"}
    assert all(rate > 0 for kind in ("forward", "train") for rate in row[kind].values())
