"""How a policy's answers are distributed: as numbers, a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table
from torch import Tensor

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from lit_madrl.report.runs import read_series

Summary = dict[str, Any]


def summarize(metrics: Mapping[str, Tensor | float], split: str, categories: Sequence[str]) -> Summary:
    """The numbers that describe a distribution, from a trainer's ``callback_metrics``.

    Returns:
        ``jsd`` (sampled, pooled over the split), ``jsd_floor`` (what a perfect policy would score with as many
        samples), ``jsd_per_prompt`` (from exact option probabilities where the options can be enumerated, else
        sampled), ``off_support_rate`` and ``frequencies`` by category; divergences in nats.
    """
    values = {name.removeprefix(f"{split}/"): float(value) for name, value in metrics.items()}
    per_prompt = values.get("exact/jsd_per_prompt", values["jsd_per_prompt"])
    return {
        "jsd": values["jsd"],
        "jsd_floor": values["jsd_floor"],
        "jsd_per_prompt": per_prompt,
        "off_support_rate": values["off_support_rate"],
        "frequencies": {name: values[f"share/{name}"] for name in categories},
    }


def print_table(summaries: Mapping[str, Summary], title: str) -> None:
    """One row a summary on the terminal."""
    table = Table(title=title)
    categories = next(iter(summaries.values()))["frequencies"]
    table.add_column("policy")
    for column in ("JSD", "floor", "per prompt", "off-support", "shares of " + ", ".join(categories)):
        table.add_column(column, justify="right")
    for name, summary in summaries.items():
        table.add_row(
            name,
            *(f"{summary[key]:.4f}" for key in ("jsd", "jsd_floor", "jsd_per_prompt")),
            f"{summary['off_support_rate']:.1%}",
            " ".join(f"{share:.3f}" for share in summary["frequencies"].values()),
        )
    console = Console()
    # Where no terminal says its width, the table has the one it needs.
    Console(width=None if console.is_terminal else 120).print(table)


def plot_curve(run_dir: str | Path, path: str | Path) -> None:
    """JSD and off-support rate of the training batches over the steps, as PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(*read_series(run_dir, "train/jsd"), color="tab:blue")
    left.set(xlabel="step", ylabel="JSD to the target (nats)", yscale="log", title="distribution")
    right.plot(*read_series(run_dir, "train/off_support_rate"), color="tab:red")
    right.set(xlabel="step", ylabel="off-support rate", title="validity")
    right.set_ylim(bottom=0)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_bars(summaries: Mapping[str, Summary], target: Sequence[float], path: str | Path) -> None:
    """Category shares of each summary beside the target, as PNG."""
    names = list(next(iter(summaries.values()))["frequencies"])
    shares = {name: list(s["frequencies"].values()) for name, s in summaries.items()} | {
        "target": list(target)
    }
    width = 0.8 / len(shares)
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for i, (label, values) in enumerate(shares.items()):
        color = "lightgrey" if label == "target" else None
        axes.bar(
            np.arange(len(names)) + (i - (len(shares) - 1) / 2) * width,
            values,
            width,
            label=label,
            color=color,
        )
    axes.set(xticks=range(len(names)), xticklabels=names, ylabel="share of valid answers")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
