"""Tables and figures from what a run left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_madrl.report import plot_bars, plot_curve, print_table, read_series, summarize

METRICS = {
    "test/jsd": torch.tensor(0.01),
    "test/jsd_floor": torch.tensor(0.0002),
    "test/jsd_per_prompt": torch.tensor(0.3),
    "test/exact/jsd_per_prompt": torch.tensor(0.02),
    "test/off_support_rate": torch.tensor(0.25),
    "test/share/a": torch.tensor(0.75),
    "test/share/b": torch.tensor(0.25),
}


def test_summary_prefers_exact_probabilities() -> None:
    summary = summarize(METRICS, "test", ("a", "b"))
    assert summary["jsd_per_prompt"] == pytest.approx(0.02)
    assert summary["frequencies"] == {"a": 0.75, "b": 0.25}
    sampled = {name: value for name, value in METRICS.items() if "exact" not in name}
    assert summarize(sampled, "test", ("a", "b"))["jsd_per_prompt"] == pytest.approx(0.3)


def test_table_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_table({"start": summarize(METRICS, "test", ("a", "b"))}, "title")
    printed = capsys.readouterr().out
    for expected in ("start", "0.0100", "0.0002", "0.0200", "25.0%", "0.750 0.250", "title"):
        assert expected in printed


def test_series_skips_rows_without_the_number(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/jsd,val/jsd\n1,0.5,\n2,,0.25\n3,0.125,\n")
    assert read_series(tmp_path, "train/jsd") == ([1, 3], [0.5, 0.125])
    with pytest.raises(ValueError, match=r"expected a number that .* has, got 'train/nothing'"):
        read_series(tmp_path, "train/nothing")
    with pytest.raises(ValueError, match=r"expected a run folder with metrics\.csv"):
        read_series(tmp_path / "nowhere", "train/jsd")


def test_figures_are_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/jsd,train/off_support_rate\n1,0.5,0.1\n2,0.25,0.2\n")
    plot_curve(tmp_path, tmp_path / "curve.png")
    plot_bars({"start": summarize(METRICS, "test", ("a", "b"))}, (0.5, 0.5), tmp_path / "bars.png")
    for name in ("curve.png", "bars.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
