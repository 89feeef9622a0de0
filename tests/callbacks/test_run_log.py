"""``metrics.csv``: every row is there once, whatever happened to the process that wrote it."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_madrl.callbacks import RunLog
from lit_madrl.report import read_series


def content(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_a_row_is_on_disk_at_once_and_columns_may_come_later(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    log.log_metrics({"train/b": 0.5, "train/a": 2.0}, step=1)
    assert content(tmp_path / "run") == [{"step": "1", "train/a": "2.0", "train/b": "0.5"}]
    log.log_metrics({"train/a": 1e-7}, step=2)
    log.log_metrics({"val/jsd": math.pi}, step=2)
    log.log_metrics({"train/a": 4.0, "train/b": 5.0}, step=3)
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == (
        b"step,train/a,train/b,val/jsd\r\n1,2.0,0.5,\r\n2,1e-07,,\r\n2,,,3.141592653589793\r\n3,4.0,5.0,\r\n"
    )
    assert read_series(tmp_path / "run", "val/jsd") == ([2], [math.pi])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.csv"]


def test_which_rows_stay(tmp_path: Path) -> None:
    for earlier, steps in (("none", [3]), ("before", [1, 2, 3]), ("all", [1, 2, 3, 4, 3])):
        folder = tmp_path / earlier
        first = RunLog(folder)
        for step in (1, 2, 3, 4):
            first.log_metrics({"train/a": float(step)}, step)
        RunLog(folder, earlier).log_metrics({"train/a": 9.0}, 3)  # type: ignore[arg-type]
        assert read_series(folder, "train/a")[0] == steps
        assert content(folder)[-1]["train/a"] == "9.0"


@pytest.mark.parametrize("earlier", ["none", "before", "all"])
def test_nothing_is_lost_before_the_first_row(tmp_path: Path, earlier: Any) -> None:
    """A process may die, or find that the run was over, before it logs."""
    RunLog(tmp_path).log_metrics({"train/a": 1.0}, 1)
    RunLog(tmp_path, earlier).log_hyperparams({})
    assert content(tmp_path) == [{"step": "1", "train/a": "1.0"}]


def logged(log: RunLog, steps: range) -> None:
    for step in steps:
        log.log_metrics({"train/a": step / 3}, step)
        if step % 2 == 0:
            log.log_metrics({"val/b": step / 7}, step)


@given(resume_at=st.integers(0, 8), share=st.floats(0, 1))
def test_a_cut_file_is_made_whole(
    resume_at: int, share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever became of the rows after the checkpoint: gone, cut in the middle, or all there."""
    folder = tmp_path_factory.mktemp("run")
    logged(RunLog(folder), range(1, 10))
    file = folder / "metrics.csv"
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    kept = [line for line in lines[1:] if int(line.split(b",")[0]) <= resume_at]
    safe = len(b"".join([lines[0], *kept])) if resume_at else 0
    file.write_bytes(whole[: safe + round(share * (len(whole) - safe))])
    logged(RunLog(folder, "before"), range(resume_at + 1, 10))
    assert file.read_bytes() == whole
