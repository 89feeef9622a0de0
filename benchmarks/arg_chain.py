"""ARG and the other ways to use a reference on the chain task: 6 methods x 2 settings x 3 seeds, own warm starts.

    python benchmarks/arg_chain.py                 # runs what results/arg_chain.json lacks, then table and figure
    python benchmarks/arg_chain.py --table         # only results/arg_chain.md and arg_chain.png

Each run is the shipped ``configs/arg`` files through the command line, evaluated on the 198 test questions with 8
samples each. Every seed trains its own warm start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.grid import QUIET, Row, grid_options, read_rows, run_grid
from lit_madrl.report import read_series

RESULTS = ROOT / "results" / "arg_chain.json"
METHODS = {
    "GRPO": (),
    "Resample": ("chain_resample",),
    "ReferenceInsertion": ("chain_reference",),
    "FixedLevel(1/4)": ("chain_fixed_level",),
    "ARG": ("chain_arg",),
    "ARG, unweighted": ("chain_arg_unweighted",),
}
SETTINGS: dict[str, tuple[str, ...]] = {"hard": ("chain_hard",), "standard": ()}
KEYS = ("setting", "method", "seed")
COMMAND = "python benchmarks/arg_chain.py"
LEVELS = ("1", "0.5", "0.25")


def grid() -> Iterator[Row]:
    """All runs, the hard setting first."""
    for setting, seed, method in product(SETTINGS, (0, 1, 2), METHODS):
        yield dict(zip(KEYS, (setting, method, seed), strict=True))


def warm_start(folder: Path, seed: int) -> None:
    """The careless student of one seed: own weights, clean arithmetic first, then its errors."""
    from lit_madrl import prepare
    from lit_madrl.cli import main

    run = folder / f"student_{seed}"
    prepare.main(["tiny-chain", "--output", str(run / "tiny"), "--seed", str(seed)])
    start = run / "tiny"
    for name, offset in (("chain_clean", 0), ("chain_warm_start", 1)):
        model = run / name / "model"
        if not (model / "config.json").is_file():
            arguments = ["fit", "-c", f"configs/arg/{name}.yaml", *QUIET, "--run_dir", str(run / name)]
            arguments += [
                "--seed_everything",
                str(2 * seed + offset),
                "--model.init_args.export_to",
                str(model),
            ]
            main([*arguments, "--model.init_args.policy.pretrained", str(start)])
        start = model


def run(row: Row, folder: Path) -> Row:
    """Train and evaluate one cell of the grid."""
    from lit_madrl.cli import main

    here = folder / "_".join(str(row[key]) for key in KEYS).replace("/", "-").replace(", ", "-")
    names = ("chain_grpo", *SETTINGS[row["setting"]], *METHODS[row["method"]])
    common = [part for name in names for part in ("-c", f"configs/arg/{name}.yaml")]
    common += [*QUIET, "--seed_everything", str(row["seed"])]
    start = folder / f"student_{row['seed']}" / "chain_warm_start" / "model"
    fit = ["fit", *common, "--run_dir", str(here), "--model.init_args.export_to", str(here / "model")]
    main([*fit, "--model.init_args.policy.pretrained", str(start)])
    test = ["test", *common, "--run_dir", str(here / "test"), "--verbose", "false"]
    tested = main([*test, "--model.init_args.policy.pretrained", str(here / "model")])
    measured = tested.trainer.callback_metrics
    series = {name: _series(here, name) for name in ("correct", "length", "generated_tokens")}
    series |= {
        name: _series(here, f"guidance/{name}") for name in ("all_failed", "accepted", "source_fallback")
    }
    series |= {level: _series(here, f"guidance/probability_{level}") for level in LEVELS}
    return row | {
        "pass_at_8": float(measured["test/pass_at_8"]),
        "avg_at_8": float(measured["test/avg_at_k"]),
        "generated_tokens": sum(series["generated_tokens"]),
        "accepted_share": _weighted(series["accepted"], series["all_failed"]),
        "fallback_share": _weighted(series["source_fallback"], series["all_failed"]),
        "series": {name: [round(value, 4) for value in values] for name, values in series.items() if values},
    }


def _series(run_dir: Path, name: str) -> list[float]:
    try:
        return read_series(run_dir, f"train/{name}")[1]
    except ValueError:  # a method without guidance never logs it
        return []


def _weighted(values: list[float], weights: list[float]) -> float | None:
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else None


def summary(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """By setting and method: each number by seed, and its mean."""
    numbers = {"pass_at_k": "pass_at_8", "avg_at_k": "avg_at_8"}
    numbers |= {name: name for name in ("accepted_share", "fallback_share", "generated_tokens")}
    out: dict[str, dict[str, Row]] = {}
    for setting, method in product(SETTINGS, METHODS):
        chosen = [row for row in rows if (row["setting"], row["method"]) == (setting, method)]
        if chosen:
            by_seed = {name: [row[key] for row in chosen] for name, key in numbers.items()}
            means = {name: mean(v) if None not in v else None for name, v in by_seed.items()}
            out.setdefault(setting, {})[method] = {"per_seed": by_seed, "mean": means}
    return out


def table(rows: list[Row]) -> str:
    """The grid as markdown."""
    lines = ["# Chain task: ways to use a reference", ""]
    lines += [
        f"Means over seeds with the seeds in brackets; 198 test questions x 8. Made by `{COMMAND}`.",
        "",
    ]
    for setting, methods in summary(rows).items():
        lines += [
            f"## {setting}",
            "",
            "| method | pass@8 | avg@8 | accepted | fallback | M tokens | final rho(1/2) |",
        ]
        lines += ["| --- |" + " --- |" * 6]
        for method, values in methods.items():
            chosen = [row for row in rows if (row["setting"], row["method"]) == (setting, method)]
            cells = [
                _cell(values, name) for name in ("pass_at_k", "avg_at_k", "accepted_share", "fallback_share")
            ]
            tokens = f"{values['mean']['generated_tokens'] / 1e6:.2f}"
            halves = [row["series"]["0.5"][-1] for row in chosen if row["series"].get("0.5")]
            lines.append(f"| {method} | {' | '.join(cells)} | {tokens} | {_list(halves) if halves else ''} |")
        lines.append("")
    return "\n".join(lines)


def _cell(values: Row, name: str) -> str:
    if values["mean"][name] is None:
        return ""
    return f"{values['mean'][name]:.3f} ({_list(values['per_seed'][name])})"


def _list(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def plot(rows: list[Row], path: Path) -> None:
    """By update in the hard setting: correct rollouts, all-failure groups with accepted candidates, selector."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    hard = [row for row in rows if row["setting"] == "hard"]
    for method in METHODS:
        chosen = [row["series"] for row in hard if row["method"] == method]
        for panel, name in ((axes[0], "correct"), (axes[1], "accepted")):
            curves = [series[name] for series in chosen if name in series]
            if curves:
                panel.plot([mean(values) for values in zip(*curves, strict=True)], label=method)
    for level in LEVELS:
        curves = [row["series"][level] for row in hard if row["method"] == "ARG"]
        axes[2].plot([mean(values) for values in zip(*curves, strict=True)], label=f"level {level}")
    for panel, title in zip(
        axes, ("correct rollouts", "all-failure groups helped", "ARG's selector"), strict=True
    ):
        panel.set(xlabel="update", title=title, ylim=(0, 1))
    axes[0].legend(frameon=False, fontsize=8)
    axes[2].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    options = grid_options(__doc__, RESULTS)
    rows = read_rows(options.results)
    if not options.table:
        rows = run_grid(grid(), run, options.results, options.runs, COMMAND, options.processes, warm_start)
    document = json.loads(options.results.read_text())
    document["methods"] = summary(rows)
    options.results.write_text(json.dumps(document, indent=1) + "\n")
    options.results.with_suffix(".md").write_text(table(rows))
    plot(rows, options.results.with_suffix(".png"))
    print(table(rows))


if __name__ == "__main__":
    main()
