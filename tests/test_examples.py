"""The examples run: the quick start at toy size, and the divergence of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.quickstart import quickstart
from tests.helpers.running import SMALL_TRAINER


def test_quickstart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    quickstart([*SMALL_TRAINER, "--trainer.max_steps", "2"])
    folder = tmp_path / "runs" / "quickstart"
    metrics = json.loads((folder / "metrics.json").read_text())
    for name in ("warm_start", "final"):
        summary = metrics[name]
        assert {"jsd", "jsd_per_prompt", "off_support_rate", "frequencies"} <= summary.keys()
        assert list(summary["frequencies"]) == ["first", "second", "third", "fourth", "fifth"]
    for picture in ("curve.png", "bars.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "off-support" in printed
    assert "warm_start" in printed
