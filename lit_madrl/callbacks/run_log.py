"""``metrics.csv`` of a run, kept whole when the run is taken up again."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only


class RunLog(CSVLogger):
    """A CSV logger that goes on where an interrupted run stopped; Lightning's own deletes the earlier file.

    Rows at or after the first step that is logged again are dropped: they were made after the checkpoint.

    Args:
        run_dir: folder of ``metrics.csv``.
        resumed: whether an earlier file belongs to this run.
    """

    def __init__(self, run_dir: str | Path, resumed: bool = False) -> None:
        super().__init__(run_dir, name="", version="")
        path = Path(run_dir) / "metrics.csv"
        self._earlier: list[dict[str, str]] = []
        if resumed and path.is_file():
            with path.open(newline="") as file:
                self._earlier = list(csv.DictReader(file))

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Add a row; the first one brings back those of the run so far."""
        if self._earlier and step is not None:
            kept = [row for row in self._earlier if int(row["step"]) < step]
            self._earlier = []
            for row in kept:
                values: dict[str, Any] = {
                    name: float(value) for name, value in row.items() if value and name != "step"
                }
                super().log_metrics(values, int(row["step"]))
        super().log_metrics(metrics, step)
