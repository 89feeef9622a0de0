"""The README's commands run, at toy size, and what it quotes is what is there."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path

import pytest

from tests.helpers.running import ROOT, SMALL_TRAINER, run

README = (ROOT / "README.md").read_text()
COMMANDS = [
    shlex.split(line)[2:]
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("python cli.py ")
]


def test_commands_were_found() -> None:
    assert {command[0] for command in COMMANDS} == {"fit", "test"}


def test_commands_run(tiny_choice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, since some take what others leave; everything they write goes elsewhere."""
    monkeypatch.chdir(ROOT)
    for command in COMMANDS:
        arguments = [re.sub(r"^runs/", f"{tmp_path}/runs/", argument) for argument in command]
        arguments += [*SMALL_TRAINER, "--model.init_args.policy.pretrained", str(tiny_choice)]
        arguments += ["--model.init_args.export_to", "null", "--model.init_args.sampling.max_new_tokens", "4"]
        if "--run_dir" not in arguments:
            arguments += ["--run_dir", str(tmp_path / "runs" / "unnamed")]
        if "configs/choice/base.yaml" in arguments:
            arguments += ["--trainer.callbacks.every_n_train_steps", "1"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if "--print_config" in arguments:
                with pytest.raises(SystemExit) as stopped:
                    run(*arguments)
                assert stopped.value.code in (0, None)
            else:
                run(*arguments)


def test_example_is_quoted_whole() -> None:
    assert (ROOT / "examples" / "hellinger.py").read_text().strip() in README


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
