"""ARG and the other ways to use a reference on the chain task: 8 methods, 3 students, and where ARG gains nothing.

    python benchmarks/arg_chain.py                 # runs what results/arg_chain.json lacks, then table and figure
    python benchmarks/arg_chain.py --table         # only results/arg_chain.md and arg_chain.png

Each run is the shipped ``configs/arg`` files through the command line, evaluated on the 198 test questions with 8
samples each. A student is a warm start of its own, weights and data; students are numbered by seed, and those are used
that have learned arithmetic, which is decided before any method is tried: the mean loss of the last 50 steps of their
clean training is at most .01 nats a token. Students 0 to 5 chose the task's settings, those from 6 on are reported.
Every method starts from the same students. That the main comparison has 150 updates was decided when theirs were known
after 100, which are the standard setting.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count, product
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
    "LUFFY": ("chain_luffy",),
    "BREAD": ("chain_bread",),
    "FixedLevel(1/4)": ("chain_fixed_level",),
    "ARG": ("chain_arg",),
    "ARG, unweighted": ("chain_arg_unweighted",),
}
SETTINGS: dict[str, tuple[str, ...]] = {
    "standard": (),
    "longer": ("chain_longer",),
    "hard": ("chain_hard",),
    "close": ("chain_close",),
    "own_style": ("chain_own_style",),
    "contagious": ("chain_contagious",),
}
WHAT = {
    "standard": "references skip 70 % of their blocks, two values each",
    "longer": "likewise, 150 updates",
    "hard": "as standard, on 9 hard pairs in chains of 9 or 10",
    "close": "references skip 40 % of their blocks, one value each",
    "own_style": "references skip nothing: the student's own style",
    "contagious": "references skip every block",
}
COMPARED = {
    "hard": ("GRPO", "Resample", "ReferenceInsertion", "ARG"),
    **dict.fromkeys(("close", "own_style", "contagious"), ("ReferenceInsertion", "ARG")),
}
"""The methods of the settings that have not all: harder ones, and those in which guidance gains nothing, or fails."""
MAIN = "longer"
LEARNED = 0.01
FIRST, STUDENTS = 6, 3
KEYS = ("setting", "method", "seed")
COMMAND = "python benchmarks/arg_chain.py"
LEVELS = ("1", "0.5", "0.25")
HALFWAY = slice(45, 55)


def grid(seeds: list[int]) -> Iterator[Row]:
    """All runs, the settings in order."""
    for setting, seed, method in product(SETTINGS, seeds, METHODS):
        if method in COMPARED.get(setting, METHODS):
            yield dict(zip(KEYS, (setting, method, seed), strict=True))


def students(folder: Path) -> dict[int, float]:
    """Loss of the clean training by seed, from ``FIRST`` on, until as many as are wanted have learned arithmetic."""
    losses: dict[int, float] = {}
    for seed in count(FIRST):
        if sum(loss <= LEARNED for loss in losses.values()) == STUDENTS:
            return losses
        losses[seed] = clean_loss(folder, seed)
        print(f"student {seed}: clean loss {losses[seed]:.4f}", flush=True)
    raise AssertionError


def clean_loss(folder: Path, seed: int) -> float:
    """Train the student of a seed on clean arithmetic, once."""
    from lit_madrl import prepare

    run = folder / f"student_{seed}"
    prepare.main(["tiny-chain", "--output", str(run / "tiny"), "--seed", str(seed)])
    _train("chain_clean", run, run / "tiny", 2 * seed)
    return mean(read_series(run / "chain_clean", "train/loss")[1][-5:])


def warm_start(folder: Path, seed: int) -> None:
    """The student of a seed learns its errors."""
    run = folder / f"student_{seed}"
    _train("chain_warm_start", run, run / "chain_clean" / "model", 2 * seed + 1)


def _train(name: str, run: Path, start: Path, seed: int) -> None:
    from lit_madrl.cli import main

    model = run / name / "model"
    if not (model / "config.json").is_file():
        arguments = ["fit", "-c", f"configs/arg/{name}.yaml", *QUIET, "--run_dir", str(run / name)]
        arguments += ["--seed_everything", str(seed), "--model.init_args.export_to", str(model)]
        main([*arguments, "--model.init_args.policy.pretrained", str(start)])


def run(row: Row, folder: Path) -> Row:
    """Train and evaluate one cell of the grid, unless its folder has the results already."""
    here = folder / "_".join(str(row[key]) for key in KEYS).replace("/", "-").replace(", ", "-")
    if not (here / "test" / "metrics.csv").is_file():
        _fit_and_test(row, here, folder / f"student_{row['seed']}" / "chain_warm_start" / "model")
    series = {name: _series(here, name) for name in ("correct", "pass_at_8", "length", "generated_tokens")}
    series |= {
        name: _series(here, f"guidance/{name}") for name in ("all_failed", "accepted", "source_fallback")
    }
    series |= {level: _series(here, f"guidance/probability_{level}") for level in LEVELS}
    return row | {
        "pass_at_8": read_series(here / "test", "test/pass_at_8")[1][-1],
        "avg_at_8": read_series(here / "test", "test/avg_at_k")[1][-1],
        "halfway": mean(series["pass_at_8"][HALFWAY]),
        "generated_tokens": sum(series["generated_tokens"]),
        "accepted_share": _weighted(series["accepted"], series["all_failed"]),
        "fallback_share": _weighted(series["source_fallback"], series["all_failed"]),
        "series": {name: [round(value, 4) for value in values] for name, values in series.items() if values},
    }


def _fit_and_test(row: Row, here: Path, start: Path) -> None:
    from lit_madrl.cli import main

    names = ("chain_grpo", *SETTINGS[row["setting"]], *METHODS[row["method"]])
    common = [part for name in names for part in ("-c", f"configs/arg/{name}.yaml")]
    common += [*QUIET, "--seed_everything", str(row["seed"])]
    fit = ["fit", *common, "--run_dir", str(here), "--model.init_args.export_to", str(here / "model")]
    main([*fit, "--model.init_args.policy.pretrained", str(start)])
    test = ["test", *common, "--run_dir", str(here / "test"), "--verbose", "false"]
    main([*test, "--model.init_args.policy.pretrained", str(here / "model")])


def _series(run_dir: Path, name: str) -> list[float]:
    try:
        return read_series(run_dir, f"train/{name}")[1]
    except ValueError:  # a method without guidance never logs it
        return []


def _weighted(values: list[float], weights: list[float]) -> float | None:
    total = sum(weights) if values else 0.0
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else None


def summary(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """By setting and method: each number by seed, and its mean."""
    numbers = {"pass_at_k": "pass_at_8", "avg_at_k": "avg_at_8", "halfway_pass_at_k": "halfway"}
    numbers |= {name: name for name in ("accepted_share", "fallback_share", "generated_tokens")}
    out: dict[str, dict[str, Row]] = {}
    for setting, method in product(SETTINGS, METHODS):
        chosen = [row for row in rows if (row["setting"], row["method"]) == (setting, method)]
        if chosen:
            by_seed = {name: [row[key] for row in chosen] for name, key in numbers.items()}
            means = {name: mean(v) if None not in v else None for name, v in by_seed.items()}
            out.setdefault(setting, {})[method] = {"per_seed": by_seed, "mean": means}
    return out


def table(rows: list[Row], losses: dict[int, float]) -> str:
    """The grid as markdown."""
    named = ", ".join(
        f"{seed} ({loss:.3f}{'' if loss <= LEARNED else ', not used'})" for seed, loss in losses.items()
    )
    lines = [
        "# Chain task: ways to use a reference",
        "",
        f"Means over {STUDENTS} students, each in brackets; 198 test questions x 8; 100 updates unless told.",
        f"Made by `{COMMAND}`.",
        f"Students by seed, with the loss of their clean training: {named}.",
        "`at 50`: pass@8 on the training questions, mean of updates 46 to 55. `tokens`: generated, in millions.",
        "",
    ]
    for setting, methods in summary(rows).items():
        lines += [f"## {setting}: {WHAT[setting]}", ""]
        lines += ["| method | pass@8 | at 50 | avg@8 | accepted | fallback | tokens | final rho(1/2) |"]
        lines += ["| --- |" + " --- |" * 7]
        for method, values in methods.items():
            chosen = [row for row in rows if (row["setting"], row["method"]) == (setting, method)]
            names = ("pass_at_k", "halfway_pass_at_k", "avg_at_k", "accepted_share", "fallback_share")
            cells = [_cell(values, name) for name in names]
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
    """By update in the main setting: pass@8 in training, all-failure groups with accepted candidates, selector."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    shown = [row for row in rows if row["setting"] == MAIN]
    for color, method in enumerate(METHODS):
        chosen = [row["series"] for row in shown if row["method"] == method]
        for panel, name in ((axes[0], "pass_at_8"), (axes[1], "accepted")):
            curves = [_smooth(series[name]) for series in chosen if name in series]
            if curves:
                panel.plot([mean(values) for values in zip(*curves, strict=True)], f"C{color}", label=method)
    for level in LEVELS:
        curves = [row["series"][level] for row in shown if row["method"] == "ARG"]
        axes[2].plot([mean(values) for values in zip(*curves, strict=True)], label=f"level {level}")
    titles = ("pass@8 on training questions", "all-failure groups helped", "ARG's selector")
    for panel, title in zip(axes, titles, strict=True):
        panel.set(xlabel="update", title=title, ylim=(0, 1.02))
    axes[1].legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="upper right")
    axes[2].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def _smooth(values: list[float], width: int = 5) -> list[float]:
    return [mean(values[max(0, i - width) : i + width + 1]) for i in range(len(values))]


def main() -> None:
    options = grid_options(__doc__, RESULTS)
    if not options.table:
        losses = students(options.runs)
        seeds = [seed for seed, loss in losses.items() if loss <= LEARNED]
        run_grid(grid(seeds), run, options.results, options.runs, COMMAND, options.processes, warm_start)
    rows = read_rows(options.results)
    document = json.loads(options.results.read_text())
    if not options.table:
        document["students"] = {str(seed): loss for seed, loss in losses.items()}
    document["methods"] = summary(rows)[MAIN]
    document["settings"] = summary(rows)
    options.results.write_text(json.dumps(document, indent=1) + "\n")
    known = {int(seed): loss for seed, loss in document["students"].items()}
    options.results.with_suffix(".md").write_text(table(rows, known))
    plot(rows, options.results.with_suffix(".png"))
    print(table(rows, known))


if __name__ == "__main__":
    main()
