"""``metrics.csv`` of a run, kept whole when the run is taken up again."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

Row = dict[str, Any]


class RunLog(Logger):
    """One row a call, on disk before the call returns: no checkpoint is ever ahead of its log.

    A process that dies leaves rows that a resumed run makes again; those are dropped as soon as it logs the first one.
    New columns rewrite the file, which is replaced as a whole.

    Args:
        run_dir: folder of ``metrics.csv``.
        earlier: which rows of an earlier process stay: ``none``, those ``before`` the first step logged, or ``all``.
    """

    name = version = ""

    def __init__(self, run_dir: str | Path, earlier: Literal["none", "before", "all"] = "none") -> None:
        super().__init__()
        self.path = Path(run_dir) / "metrics.csv"
        self.earlier = earlier
        self._columns: list[str] = []  # of the file, once this process has written to it

    @property
    def save_dir(self) -> str:
        """The run folder, where Lightning puts what it saves beside the log."""
        return str(self.path.parent)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``config.yaml`` has them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Add a row."""
        row: Row = {**metrics, "step": 0 if step is None else step}
        if row.keys() <= set(self._columns):
            with self.path.open("ab", buffering=0) as file:
                file.write(self._lines([row]))
            return
        rows = [*(self._rows() if self._columns else self._kept(row["step"])), row]
        self._columns = sorted({name for row in rows for name in row})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        part.write_bytes(self._lines([dict(zip(self._columns, self._columns, strict=True)), *rows]))
        part.replace(self.path)

    def _kept(self, step: int) -> list[Row]:
        if self.earlier == "none" or not self.path.is_file():
            return []
        return [row for row in self._rows() if self.earlier == "all" or int(row["step"]) < step]

    def _rows(self) -> list[Row]:
        with self.path.open(newline="") as file:
            text = file.read()
        whole = text[: text.rfind("\n") + 1]  # a row may have been cut while it was written
        return list(csv.DictReader(io.StringIO(whole, newline="")))

    def _lines(self, rows: Sequence[Row]) -> bytes:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns).writerows(rows)
        return text.getvalue().encode()
