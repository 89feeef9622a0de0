"""Every shipped YAML file is parsed and makes one step on a tiny model."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from lit_madrl.learners import GRPOLearner
from lit_madrl.report import read_series
from tests.helpers.processes import process_group_of_its_own
from tests.helpers.running import CONFIGS, ROOT, run, small

BASE = CONFIGS / "choice" / "base.yaml"
# A random model gives no valid or right answer. By these any text is one, by its checksum, so that there is something
# to learn.
ALIVE = (
    *("--model.init_args.categorizer", "tests.helpers.running.HashCategorizer"),
    *("--model.init_args.verifier", "tests.helpers.running.HashVerifier"),
    *("--model.init_args.score_truncated", "true"),
)
SHIPPED = sorted([*CONFIGS.rglob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])
TRAINED = [
    path for path in SHIPPED if path.parent.name != "evaluation"
]  # which test_evaluate and test_screen run


def layers(config: Path) -> list[str]:
    """A file that names no data to train on is laid over the first file that its header names, else the choice base."""
    if {"trainer", "model", "data"} <= yaml.safe_load(config.read_text()).keys():
        return ["-c", str(config)]
    command = re.search(r"-c (\S+\.yaml)", config.read_text())
    return ["-c", command[1] if command else str(BASE.relative_to(ROOT)), "-c", str(config)]


def local(config: Path, folder: Path) -> list[str]:
    """Arguments that put a file of this machine in the place of data sets on the hub."""
    if "ReferenceMathDataModule" not in "".join((ROOT / name).read_text() for name in layers(config)[1::2]):
        return []
    row = {"question": "1 + 1?", "answer": "2", "reference": r"One and one. It is \boxed{2}."}
    (folder / "math.jsonl").write_text(
        json.dumps(row | {"difficulty": 6.0, "topic": "t", "id": "x/0"}) + "\n"
    )
    source = {"class_path": "Screened", "init_args": {"path": str(folder / "math.jsonl")}}
    return ["--data.init_args.train", json.dumps([source]), "--data.init_args.test", "[]"]


@pytest.mark.parametrize("config", TRAINED, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_step(config: Path, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with warnings.catch_warnings(), process_group_of_its_own():
        warnings.simplefilter("ignore")
        cli = run("fit", *layers(config), *small(chat_model, tmp_path), *local(config, tmp_path), *ALIVE)
    assert cli.trainer.global_step == 1
    assert (tmp_path / "config.yaml").is_file()
    # Weight decay alone would move the weights too.
    assert read_series(tmp_path, "train/grad_norm")[1][0] > 0
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    start = AutoModelForCausalLM.from_pretrained(chat_model)
    moved = [bool((a != b).any()) for a, b in zip(trained.parameters(), start.parameters(), strict=True)]
    assert any(moved)


@pytest.mark.parametrize("config", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_header_says_what_it_is(config: Path) -> None:
    assert config.read_text().startswith("# ")


def test_paper_settings(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MaD-RL section 3.2: 6000 steps, G = 32, learning rate 5e-6, temperature 1, KL coefficient 0.04."""
    config = yaml.safe_load((CONFIGS / "choice" / "paper.yaml").read_text())
    learner = config["model"]["init_args"]
    assert config["trainer"]["max_steps"] == 6000
    assert learner["sampling"] == {"group_size": 32, "max_new_tokens": 32, "temperature": 1.0}
    assert learner["optimizer"]["init_args"]["lr"] == 5e-6
    assert learner["objective"]["beta"] == 0.04
    assert learner["policy"]["pretrained"] == "Qwen/Qwen3-4B-Instruct-2507"


def test_layers_choose_form_target_and_divergence(
    tiny_choice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    over = [part for name in ("open", "peaked", "l2") for part in ("-c", CONFIGS / "choice" / f"{name}.yaml")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli = run("fit", "-c", BASE, *over, *small(tiny_choice, tmp_path))
    assert isinstance(cli.model, GRPOLearner)
    assert type(cli.model.rewards).__name__ == "L2"
    assert cli.datamodule.form == "open"
    assert cli.model.experience is not None
    assert cli.model.experience.targets[0].tolist() == pytest.approx([0.6, 0.3, 0.1, 0.0, 0.0])
