"""Watch a language model's answers move from a skewed to the uniform distribution, in minutes on a CPU.

Makes a tiny random model, teaches it to answer with a skew (SFT), trains it to the uniform target (forward-KL
MaD-RL) and evaluates both on held-out prompts. Writes everything to ``runs/quickstart``. Arguments are handed on to
both trainings, as in ``python examples/quickstart.py --trainer.max_steps 10``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # read when torch is imported; a model this small only waits for more

from lit_madrl import prepare
from lit_madrl.cli import main
from lit_madrl.report import plot_bars, plot_curve, print_table, summarize

RUN = Path("runs/quickstart")
CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "choice"
WARM_START, MADRL = str(CONFIGS / "quickstart_warm_start.yaml"), str(CONFIGS / "quickstart.yaml")


def evaluate(config: str, model: Path, run_dir: Path) -> dict:
    """Distribution of a model's answers to the 80 held-out prompts of a configuration."""
    arguments = ["test", "-c", config, "--verbose", "false", "--run_dir", str(run_dir)]
    cli = main([*arguments, "--model.init_args.policy.pretrained", str(model)])
    return summarize(cli.trainer.callback_metrics, "test", cli.datamodule.categories)


def quickstart(arguments: list[str]) -> dict:
    """Run everything; returns what ``metrics.json`` holds."""
    if prepare.main(["tiny-choice", "--output", str(RUN / "tiny")]):
        raise SystemExit(1)
    begun = time.perf_counter()
    main(["fit", "-c", WARM_START, *arguments])
    warmed = time.perf_counter()
    trained = main(["fit", "-c", MADRL, *arguments])
    ended = time.perf_counter()
    summaries = {
        "warm_start": evaluate(MADRL, RUN / "warm_start" / "model", RUN / "holdout" / "warm_start"),
        "final": evaluate(MADRL, RUN / "madrl" / "model", RUN / "holdout" / "final"),
    }
    seconds = {"warm_start": warmed - begun, "madrl": ended - warmed}
    metrics = summaries | {"seconds": seconds}
    (RUN / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    plot_curve(RUN / "madrl", RUN / "curve.png")
    plot_bars(summaries, trained.datamodule.target, RUN / "bars.png")
    print_table(summaries, "80 held-out prompts, 32 answers each; divergences in nats")
    print(f"trained in {ended - begun:.0f} s; metrics.json, curve.png and bars.png are in {RUN}")
    return metrics


if __name__ == "__main__":
    quickstart(sys.argv[1:])
