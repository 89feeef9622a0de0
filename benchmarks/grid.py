"""Grids of runs: in parallel, and taken up again where they were interrupted."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.machine import describe

ROOT = Path(__file__).resolve().parents[1]
QUIET = ("--trainer.enable_progress_bar", "false")
Row = dict[str, Any]


def grid_options(description: str | None, results: Path) -> argparse.Namespace:
    """The arguments of a grid's script: ``results``, ``runs``, ``processes`` and ``table`` (only write the table)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / results.stem)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="make no run, only write what the results show")
    return parser.parse_args()


def read_rows(path: Path) -> list[Row]:
    """The finished runs of a results file."""
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def run_grid(
    cells: Iterable[Row],
    run: Callable[[Row, Path], Row],
    results: Path,
    runs: Path,
    command: str,
    processes: int = 2,
    prepare: Callable[[Path, int], Any] | None = None,
) -> list[Row]:
    """Run every cell that ``results`` lacks; a finished run is written at once, an interrupted one begins anew.

    Args:
        cells: what identifies each run, ``seed`` among it.
        run: makes one run in a folder and returns its cell with what was measured.
        results: JSON file with command, machine, versions and rows.
        runs: folder of the runs.
        command: what reproduces the file.
        processes: runs at a time, one thread each.
        prepare: called once for each seed before its runs.
    """
    cells = list(cells)
    keys = list(cells[0])
    rows = read_rows(results)
    done = {tuple(row[key] for key in keys) for row in rows}
    todo = [cell for cell in cells if tuple(cell.values()) not in done]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker) as pool:
        if prepare is not None:
            for future in [
                pool.submit(prepare, runs, seed) for seed in sorted({cell["seed"] for cell in todo})
            ]:
                future.result()
        futures = [pool.submit(run, cell, runs) for cell in todo]
        failures: list[BaseException] = []
        for number, future in enumerate(as_completed(futures), 1):
            if (failure := future.exception()) is not None:
                failures.append(failure)
                print(f"[{number}/{len(todo)}] failed: {failure}", flush=True)
                continue
            rows.append(future.result())
            _save(rows, keys, results, command)
            print(f"[{number}/{len(todo)}] {' '.join(str(rows[-1][key]) for key in keys)}", flush=True)
    if failures:  # what has finished is saved
        raise failures[0]
    return rows


def _start_worker() -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(ROOT)


def _save(rows: list[Row], keys: Sequence[str], path: Path, command: str) -> None:
    document = {
        "command": command,
        "machine": describe("torch", "lightning", "transformers", "torchmetrics"),
        "rows": sorted(rows, key=lambda row: [row[key] for key in keys]),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)
