"""What measured steps amount to: ratios, tables, files of rows, and the command line of a script that measures rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.alternating import SIDES, STAGES, Steps
from benchmarks.machine import describe


def ratio(theirs: Steps, ours: Steps) -> dict[str, Any]:
    """Their medians divided by ours, and the quartiles of that ratio over pairs of steps."""
    a, b = theirs.summary(), ours.summary()
    ratios: dict[str, Any] = {
        stage: {clock: round(a[stage][clock] / b[stage][clock], 2) for clock in ("wall", "cpu")}
        for stage in STAGES
    }
    if b["memory_mib"]:
        ratios["memory"] = round(a["memory_mib"] / b["memory_mib"], 1)
    quartiles = np.quantile(theirs.totals() / ours.totals(), (0.25, 0.75), axis=0).round(2)
    ratios["total_quartiles"] = {"wall": quartiles[:, 0].tolist(), "cpu": quartiles[:, 1].tolist()}
    return ratios


def print_row(row: dict[str, Any]) -> None:
    """The row as a few lines."""
    print(f"{row['work']} {row['precision']}, {row['threads']} thread(s), {row['steps']} steps: wall (CPU)")
    for side in (*SIDES, "ratio"):
        if side in row:
            values = [f"{s} {row[side][s]['wall']:.4g} ({row[side][s]['cpu']:.4g})" for s in STAGES]
            print(f"{side:>5}: {'  '.join(values)}", flush=True)


def table(rows: Sequence[dict[str, Any]], order: Sequence[str]) -> str:
    """The rows that have a ratio, works in ``order``, as markdown: CPU seconds if of one thread, else wall."""
    names = ("total", "generation", "reference", "update")
    heads = ("P x G", "prompt", "completion", "precision", "steps", "TRL, s", "ours, s", "ratio", "quartiles")
    heads = ("work", *heads, *names[1:], "memory, MiB", "ratio")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in sorted((row for row in rows if "ratio" in row), key=lambda row: order.index(row["work"])):
        clock = "cpu" if row["threads"] == 1 else "wall"
        theirs, own, ratios = row["trl"], row["ours"], row["ratio"]
        cells = [row["work"], f"{row['prompts']} x {row['group_size']}", f"{row['prompt_tokens']:.0f}"]
        cells += [f"{own['tokens_per_completion']:.1f}", row["precision"], row["steps"]]
        cells += [f"{side['total'][clock]:.3g}" for side in (theirs, own)]
        cells += [f"**{ratios['total'][clock]:.3g}**"]
        cells += [" - ".join(f"{quartile:.3g}" for quartile in ratios["total_quartiles"][clock])]
        cells += [f"{ratios[stage][clock]:.3g}" for stage in names[1:]]
        cells += [
            f"{theirs['memory_mib']} / {own['memory_mib']}",
            f"{ratios.get('memory', float('nan')):.3g}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


class Results:
    """A JSON file ``{command, machine, versions, rows}`` to which rows are added one by one.

    Args:
        path: the file; None keeps nothing.
        about: command, machine and versions.
        keys: what tells rows apart; a new row takes the place of the one that is equal in them.

    Raises:
        ValueError: the file holds rows of another machine or of other versions.
    """

    def __init__(self, path: Path | None, about: dict[str, Any], keys: Sequence[str]) -> None:
        self.path, self.about, self.keys = path, about, keys
        old = self._read()
        for name in ("machine", "versions"):
            if old and old[name] != about[name]:
                raise ValueError(f"{path}: expected rows of {name} {about[name]}, got those of {old[name]}")

    def add(self, row: dict[str, Any]) -> None:
        """Write the file with ``row`` in it."""
        if self.path is None:
            return
        key = [row[name] for name in self.keys]
        others = [other for other in self.rows() if [other[name] for name in self.keys] != key]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({**self.about, "rows": [*others, row]}, indent=1) + "\n")
        partial.replace(self.path)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the file."""
        return self._read().get("rows", [])

    def _read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path and self.path.exists() else {}


def about(script: str, path: Path | None, *packages: str) -> dict[str, Any]:
    """What a results file says of itself: command, machine, and the versions of ``packages``."""
    machine = describe(*packages)
    versions = machine.pop("versions")
    return {
        "command": f"python benchmarks/{script} --json {path}",
        "machine": machine,
        "versions": versions,
    }


def rows_parser(
    description: str | None, rows: Sequence[str], precisions: Sequence[str], budget: float
) -> argparse.ArgumentParser:
    """The command line of a benchmark that measures rows, each in steps that alternate."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    parser.add_argument("--rows", default=",".join(rows), help="of %(default)s")
    parser.add_argument("--precision", default=",".join(precisions), help="of %(default)s")
    parser.add_argument("--budget", type=float, default=budget, help="seconds a row, its first steps aside")
    parser.add_argument(
        "--least", type=int, default=3, help="counted steps of a row even if they take longer"
    )
    parser.add_argument("--most", type=int, default=20, help="counted steps of a row even if time is left")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file of rows to add the results to")
    return parser


def chosen(option: str, names: str, known: Sequence[str]) -> list[str]:
    """The names of a list with commas.

    Raises:
        ValueError: one of them is not known.
    """
    found = names.split(",")
    if unknown := set(found) - set(known):
        raise ValueError(f"--{option}: expected some of {','.join(known)}, got {','.join(sorted(unknown))}")
    return found
