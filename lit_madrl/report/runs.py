"""Reading what a run left in its folder."""

from __future__ import annotations

import csv
from pathlib import Path


def read_series(run_dir: str | Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one logged number, from the run's ``metrics.csv``.

    Raises:
        ValueError: the run has no such file, or never logged ``name``.
    """
    path = Path(run_dir) / "metrics.csv"
    if not path.is_file():
        raise ValueError(f"run_dir: expected a run folder with metrics.csv, got {str(run_dir)!r}")
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(name)]
    if not rows:
        raise ValueError(f"name: expected a number that {path} has, got {name!r}")
    return [int(row["step"]) for row in rows], [float(row[name]) for row in rows]
