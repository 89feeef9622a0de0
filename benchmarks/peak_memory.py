"""Peak memory of one GRPO step at a large vocabulary: TRL's GRPOTrainer against GRPOLearner, a process each.

    python benchmarks/peak_memory.py --json benchmarks/results/peak_memory.json

A model of 2 layers of width 256 with Qwen3's vocabulary of 151,936 (random weights, 40M parameters), one prompt of 256
tokens, 16 completions of 256: a step at TRL's defaults, which are bf16 autocast, gradient checkpointing, beta = 0, here
with the whole group at once; ``--settings`` has others. The step is the first one, so it makes the optimizer's state
too. ``step_mib`` is the most that it adds to what the process holds before it, ``run_mib`` the most that the process
holds in the whole run beyond the libraries (Linux).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.alternating import (
    alternate,
    in_own_process,
    memory,
    quiet,
    reset_peak_memory,
    return_free_memory,
)
from benchmarks.grpo_work import Work
from benchmarks.reporting import Results, about, chosen
from benchmarks.vs_trl import PACKAGES, SIDES, Run, ours, require_trl, trl

WORK = Work(1, 16, 256, random_words=256, random="wide")
SETTINGS = {
    "defaults": {"precision": "bf16", "beta": 0.0, "checkpointing": True},
    "fp32": {"precision": "fp32", "beta": 0.0, "checkpointing": True},
    "no-checkpointing": {"precision": "bf16", "beta": 0.0, "checkpointing": False},
    "reference": {"precision": "bf16", "beta": 0.04, "checkpointing": True},
}


def measure(side: str, run: Run, threads: int) -> dict[str, Any]:
    """MiB and CPU seconds of one step in this process."""
    quiet()
    if side == "trl":
        importlib.import_module("trl.trainer.grpo_trainer")  # libraries do not count
    return_free_memory()
    held = reset_peak_memory()
    loops = {"trl": trl, "ours": ours}
    peaks: list[int] = []

    def loop(steps: Any) -> None:
        begin = steps.begin
        steps.begin = lambda: (peaks.append(memory("VmHWM")), begin())  # beginning a step starts a new peak
        loops[side](run, steps)

    steps = alternate({side: loop}, threads)[side]
    peak = max(*peaks, memory("VmHWM"))
    seconds = round(float(steps.seconds[0]["total"][1]), 2)
    return {"step_mib": steps.memory[0] // 1024, "run_mib": (peak - held) // 1024, "cpu_seconds": seconds}


def measured(settings: str, work: Work, threads: int, sides: Sequence[str] = SIDES) -> dict[str, Any]:
    """The row of ``settings``."""
    run = replace(Run(work, work.model(), steps=0), **SETTINGS[settings])
    row: dict[str, Any] = {"settings": settings, **SETTINGS[settings], "threads": threads}
    for side in sides:
        row[side] = in_own_process(measure, side, run, threads, threads=threads)
    if set(sides) == set(SIDES):
        row["ratio"] = {
            name: round(row["trl"][name] / row["ours"][name], 2) for name in ("step_mib", "run_mib")
        }
    return row


def parser() -> argparse.ArgumentParser:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--settings", default="defaults", help=f"of {','.join(SETTINGS)}; default %(default)s"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file of rows to add the results to")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parser().parse_args(arguments)
    names = chosen("settings", options.settings, tuple(SETTINGS))
    require_trl()
    packages = [package for side in SIDES for package in PACKAGES[side]]
    results = Results(options.json, about("peak_memory.py", options.json, *packages), ("settings", "threads"))
    for name in names:
        row = measured(name, WORK, options.threads)
        for side in (*SIDES, "ratio"):
            print(f"{name} {side}: {row[side]}", flush=True)
        results.add(row)


if __name__ == "__main__":
    quiet()
    main()
