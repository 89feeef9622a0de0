"""SmolLM2-135M-Instruct before and after 60 steps of MaD-RL, on the 80 held-out prompts of the choice task.

    python benchmarks/choice_smollm2.py

Makes the model if it is missing, trains ``configs/choice/smollm2.yaml`` and writes ``results/choice_smollm2.json``
with its curve and bars as PNG.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads must not keep others from working

from benchmarks.machine import describe
from examples.quickstart import evaluate
from lit_madrl import prepare
from lit_madrl.cli import main
from lit_madrl.report import plot_bars, plot_curve, print_table, read_series

CONFIG = "configs/choice/smollm2.yaml"
RUN = Path("runs/choice/smollm2")
MODEL = Path("runs/models/smollm2")
RESULTS = ROOT / "benchmarks" / "results"


def benchmark() -> None:
    os.chdir(ROOT)
    if prepare.main(["smollm2", "--output", str(MODEL)]):
        raise SystemExit(1)
    summaries = {"start": evaluate(CONFIG, MODEL, RUN / "holdout" / "start")}
    trained = main(["fit", "-c", CONFIG])
    summaries["final"] = evaluate(CONFIG, RUN / "model", RUN / "holdout" / "final")
    seconds = {part: median(read_series(RUN, f"train/seconds/{part}")[1]) for part in ("rollout", "update")}
    off_support = read_series(RUN, "train/off_support_rate")[1]
    result = {
        "command": "python benchmarks/choice_smollm2.py",
        "machine": describe("torch", "lightning", "transformers", "torchmetrics"),
        "steps": trained.trainer.global_step,
        "median_seconds_a_step": seconds,
        "train_off_support_rate": {
            "first_10_steps": mean(off_support[:10]),
            "last_10_steps": mean(off_support[-10:]),
        },
        **summaries,
    }
    (RESULTS / "choice_smollm2.json").write_text(json.dumps(result, indent=2) + "\n")
    plot_curve(RUN, RESULTS / "choice_smollm2_curve.png")
    plot_bars(summaries, trained.datamodule.target, RESULTS / "choice_smollm2_bars.png")
    print_table(summaries, "SmolLM2-135M-Instruct, 80 held-out prompts, 32 answers each; divergences in nats")


if __name__ == "__main__":
    benchmark()
