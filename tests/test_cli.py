"""The command line: what it writes, and one clear line for each kind of mistake."""

from __future__ import annotations

import csv
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from lit_madrl.cli_errors import one_line_refusals
from lit_madrl.learners import GRPOLearner
from lit_madrl.report import read_series
from tests.helpers.running import CONFIGS, ROOT, run, small

BASE = CONFIGS / "choice" / "base.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    warnings.simplefilter("ignore")


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a wrong command line ends with."""
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


MISTAKES = [
    (("-c", BASE, "fit"), "the subcommand comes first: cli.py fit -c"),
    ((), "expected a subcommand (fit, validate, test, export)"),
    (("-c", BASE), "expected a subcommand (fit, validate, test, export)"),
    (("fitt", "-c", BASE), "unknown subcommand 'fitt'"),
    (("fit", "-c", "nowhere.yaml"), "nowhere.yaml"),
    (("fit", "-c", BASE, "--model.init_args.rewards", "ForwrdKL"), "'ForwrdKL' (did you mean ForwardKL?)"),
    (
        ("fit", "-c", BASE, "--model.init_args.rewards.class_path", "ForwardKLL"),
        "model.rewards: unknown class 'ForwardKLL' (did you mean ForwardKL?)",
    ),
    (("fit", "-c", BASE, "--model.class_path", "GRPOLerner"), "'GRPOLerner' (did you mean GRPOLearner"),
    (("fit", "-c", BASE, "--model.init_args.objective.betta", "3"), "'objective.betta' (did you mean beta"),
    (("fit", "-c", BASE, "--data.init_args.batchsize", "3"), "'batchsize' (did you mean batch_size"),
    (("fit", "-c", BASE, "--modle.class_path", "x"), "'modle.class_path' (did you mean model"),
    (("fit", "-c", BASE, "--data.init_args.form", "closd"), "data.form:"),
    (("fit", "-c", BASE, "--model.init_args.sampling.group_size", "0"), "expected an integer >= 1, got 0"),
    (
        ("fit", "-c", BASE, "--model.init_args.policy.pretrained", "runs/nowhere"),
        "policy.pretrained: expected a hub name or a folder",
    ),
]


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_gets_one_line(
    arguments: tuple[str | Path, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in complaint(capsys, *arguments)


def test_a_yaml_mistake_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(BASE.read_text())
    config["model"]["init_args"]["samplign"] = {"group_size": 3}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))
    assert "'samplign.group_size' (did you mean sampling" in complaint(
        capsys, "fit", "-c", tmp_path / "wrong.yaml"
    )


def test_a_target_that_is_no_distribution(
    tiny_choice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = complaint(
        capsys, "fit", "-c", BASE, *small(tiny_choice, tmp_path), "--data.init_args.target", "[.5,.5,.5,0,0]"
    )
    assert "target" in line
    assert "1.5" in line


def test_print_config(tiny_choice: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("fit", "-c", BASE, "--print_config")
    assert stopped.value.code in (0, None)
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["rewards"]["class_path"].endswith("ForwardKL")


def test_switching_a_class_keeps_no_argument_of_the_former(
    tiny_choice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A switched class takes the new class's defaults; asking it for an old argument is an error, not silence."""
    reverse = CONFIGS / "choice" / "reverse_kl.yaml"
    wrong = complaint(
        capsys,
        *("fit", "-c", BASE, "-c", reverse, "--model.init_args.rewards", "L2"),
        *("--model.init_args.rewards.init_args.epsilon", "0.1"),
    )
    assert "unknown argument 'epsilon'" in wrong


def test_run_folder(tiny_choice: Path, tmp_path: Path) -> None:
    """Config, CSV and TensorBoard logs, checkpoints and the completions table."""
    table = "--trainer.callbacks+=lit_madrl.callbacks.CompletionTable"
    run(
        *("fit", "-c", BASE, *small(tiny_choice, tmp_path), "--trainer.max_steps", "2"),
        *(table, "--trainer.callbacks.every_n_steps", "1", "--trainer.callbacks.max_prompts", "1"),
        *("--trainer.val_check_interval", "1"),
    )
    assert {"config.yaml", "metrics.csv", "tensorboard", "completions", "checkpoints", "model"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()
    with (tmp_path / "metrics.csv").open() as file:
        logged = set().union(*({k for k, v in row.items() if v} for row in csv.DictReader(file)))
    assert {"train/jsd", "train/off_support_rate", "train/kl", "val/jsd", "val/jsd_floor"} <= logged
    assert {"val/jsd_per_prompt", "val/exact/jsd_per_prompt", "val/share/first", "val/coverage"} <= logged
    rows = pq.read_table(tmp_path / "completions" / "step_000002.parquet").to_pylist()
    assert len(rows) == 4
    assert {"prompt", "completion", "category", "reward", "advantage"} <= rows[0].keys()
    assert sum(row["advantage"] for row in rows) == pytest.approx(0.0, abs=1e-6)


def test_categories_come_from_the_data(tiny_choice: Path, tmp_path: Path) -> None:
    cli = run("fit", "-c", BASE, *small(tiny_choice, tmp_path))
    assert (
        cli.model.categories == cli.datamodule.categories == ("first", "second", "third", "fourth", "fifth")
    )


def test_one_seed_for_all(tiny_choice: Path, tmp_path: Path) -> None:
    cli = run("fit", "-c", BASE, *small(tiny_choice, tmp_path), "--seed_everything", "7")
    assert (cli.model.seed, cli.datamodule.seed) == (7, 7)


def test_validate_and_test_print_numbers(tiny_choice: Path, tmp_path: Path) -> None:
    for command, split in (("validate", "val"), ("test", "test")):
        arguments = small(tiny_choice, tmp_path)
        cli = run(command, "-c", BASE, *arguments)
        assert f"{split}/exact/jsd_per_prompt" in cli.trainer.callback_metrics


def test_a_checkpoint_does_not_override_given_arguments(tiny_choice: Path, tmp_path: Path) -> None:
    """Lightning alone would take the checkpoint's hyperparameters over the command line's, in silence."""
    first = tmp_path / "first"
    run("fit", "-c", BASE, *small(tiny_choice, first), "--trainer.callbacks.every_n_train_steps", "1")
    checkpoint = first / "checkpoints" / "last.ckpt"
    torch.load(checkpoint, weights_only=True)
    cli = run(
        *("fit", "-c", BASE, *small(tiny_choice, tmp_path / "second"), "--trainer.max_steps", "2"),
        *("--model.init_args.objective.clip_high", "0.5", "--ckpt_path", checkpoint),
    )
    assert isinstance(cli.model, GRPOLearner)
    assert cli.model.objective.clip_high == 0.5
    assert cli.trainer.global_step == 2


def test_a_wrong_checkpoint_gets_one_line(
    tiny_choice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("-c", BASE, *small(tiny_choice, tmp_path), "--ckpt_path")
    (tmp_path / "broken.ckpt").write_bytes(b"half a checkpoint")
    torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    for command, given, expected in (
        ("fit", tmp_path / "nowhere.ckpt", "expected 'last' or a checkpoint, got"),
        ("fit", tmp_path / "broken.ckpt", "expected a checkpoint, got"),
        ("fit", tmp_path / "weights.ckpt", "expected the checkpoint of a run, got"),
        ("test", "last", f"expected a checkpoint in {tmp_path / 'checkpoints'}, found none"),
    ):
        line = complaint(capsys, command, *arguments, given)
        assert line.startswith(f"error: ckpt_path: {expected}")
        assert str(tmp_path) in line


def test_what_is_refused_at_the_start_gets_one_line(
    tiny_choice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When all arguments are well-formed, and what is wrong shows only when the run begins."""
    run(
        "fit", "-c", BASE, *small(tiny_choice, tmp_path / "a"), "--trainer.callbacks.every_n_train_steps", "1"
    )
    checkpoint = tmp_path / "a" / "checkpoints" / "last.ckpt"
    content = torch.load(checkpoint)
    del content["lit_madrl"]
    torch.save(content, tmp_path / "other.ckpt")
    arguments = ("-c", BASE, *small(tiny_choice, tmp_path / "b"))
    lora = ("--model.init_args.policy.lora", "{r: 2, target_modules: [q_proj]}")
    stop = ("--model.init_args.sampling.stop", "[two words]")
    for command, given, expected in (
        ("fit", ("--trainer.precision", "bf16-true"), "trainer.precision: expected 32-true or bf16-mixed"),
        ("test", ("--trainer.precision", "bf16-true"), "trainer.precision: expected 32-true or bf16-mixed"),
        (
            "fit",
            ("--ckpt_path", tmp_path / "other.ckpt"),
            "ckpt_path: expected a checkpoint of a lit_madrl",
        ),
        (
            "test",
            ("--ckpt_path", checkpoint, *lora),
            "ckpt_path: expected weights of this policy, got others",
        ),
        ("fit", ("--ckpt_path", checkpoint, *lora), "ckpt_path: expected weights of this policy, got others"),
        ("fit", ("--trainer.max_steps", "-1"), "trainer.max_steps: expected a number >= 1"),
        ("fit", stop, "sampling.stop: expected strings of one token, got 'two words'"),
    ):
        assert complaint(capsys, command, *arguments, *given).startswith(f"error: {expected}")


@pytest.mark.parametrize(
    ("line", "function", "module"),
    [
        ("int('x')", "on_fit_start", "lit_madrl.learners.base"),  # which no check of ours raised
        ("for a, b in zip([1], [], strict=True): pass", "on_fit_start", "lit_madrl.learners.base"),
        ("raise ValueError('a: expected b, got c')", "training_step", "lit_madrl.learners.base"),
        ("raise ValueError('a: expected b, got c')", "on_fit_start", "somebody.else"),
        ("raise RuntimeError('a: expected b, got c')", "on_fit_start", "lit_madrl.learners.base"),
    ],
)
def test_other_errors_keep_their_traceback(line: str, function: str, module: str) -> None:
    with pytest.raises((ValueError, RuntimeError)), one_line_refusals():
        failing(line, function, module)()


def test_a_refusal_of_ours_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, one_line_refusals():
        failing("raise ValueError('a: expected b, got c')", "on_fit_start", "lit_madrl.learners.base")()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: a: expected b, got c\n"


def failing(line: str, function: str, module: str) -> Any:
    """A function of that name and module whose body is ``line``."""
    names: dict[str, Any] = {"__name__": module}
    exec(f"def {function}():\n    {line}", names)
    return names[function]


def test_the_installed_command_succeeds(tiny_choice: Path, tmp_path: Path) -> None:
    """As the script does that pip makes of the entry point."""
    module, function = PROJECT["scripts"]["lit-madrl"].split(":")
    script = f"import sys\nfrom {module} import {function}\nsys.exit({function}())"
    command = [sys.executable, "-c", script, "fit", "-c", str(BASE), *small(tiny_choice, tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "model" / "config.json").is_file()


def test_the_last_checkpoint(tiny_choice: Path, tmp_path: Path) -> None:
    """One command begins a run and goes on with it; evaluations add to the log and take the trained weights."""
    arguments = ("-c", BASE, *small(tiny_choice, tmp_path), "--ckpt_path", "last")
    save = ("--trainer.callbacks.every_n_train_steps", "1")
    for steps in (1, 3):
        cli = run("fit", *arguments, *save, "--trainer.max_steps", str(steps))
        assert cli.trainer.global_step == steps
    assert read_series(tmp_path, "train/prompts") == ([1, 2, 3], [2.0, 4.0, 6.0])
    trained = cli.model.trained_policy.state_dict()
    cli = run("test", *arguments)
    assert all(
        torch.equal(weight, trained[name]) for name, weight in cli.model.trained_policy.state_dict().items()
    )
    assert read_series(tmp_path, "train/prompts")[0] == [1, 2, 3]
    assert len(read_series(tmp_path, "test/jsd")[1]) == 1


def test_validation_is_logged_at_the_step_of_training(tiny_choice: Path, tmp_path: Path) -> None:
    """With two optimizer steps a batch the number of batches is another one."""
    run(
        *("fit", "-c", BASE, *small(tiny_choice, tmp_path), "--trainer.max_steps", "4"),
        *("--model.init_args.objective.inner_epochs", "2", "--trainer.val_check_interval", "1"),
    )
    assert read_series(tmp_path, "train/loss")[0] == read_series(tmp_path, "val/jsd")[0] == [2, 4]


def assert_exports(run_dir: Path) -> None:
    """The last checkpoint, without being told the configuration, gives the model that the run exported at its end."""
    run("export", "--ckpt_path", run_dir / "checkpoints" / "last.ckpt", "--output", run_dir / "exported")
    exported, at_end = (
        AutoModelForCausalLM.from_pretrained(run_dir / name).state_dict() for name in ("exported", "model")
    )
    assert exported.keys() == at_end.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in at_end.items())


def test_export(tiny_choice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("fit", "-c", BASE, *small(tiny_choice, tmp_path), "--trainer.callbacks.every_n_train_steps", "1")
    assert_exports(tmp_path)
    assert f"{tmp_path / 'exported'}: written" in capsys.readouterr().out
    missing = tmp_path / "nowhere.ckpt"
    line = complaint(capsys, "export", "--ckpt_path", missing, "--output", tmp_path / "none")
    assert line == f"error: ckpt_path: expected a checkpoint, got {str(missing)!r}, which is none"


def test_two_processes_shard_a_whole_run(tiny_choice: Path, tmp_path: Path) -> None:
    """FSDP2 with validation, a checkpoint in shares, taken up again, and an export at the end."""
    for steps in (1, 2):
        command = [
            *(sys.executable, str(ROOT / "cli.py"), "fit", "-c", str(BASE)),
            *("-c", str(CONFIGS / "scale" / "fsdp.yaml"), *small(tiny_choice, tmp_path)),
            *("--trainer.devices", "2", "--trainer.max_steps", str(steps), "--ckpt_path", "last"),
            *("--trainer.val_check_interval", "1", "--trainer.precision", "bf16-mixed"),
            *("--trainer.strategy.init_args.save_distributed_checkpoint", "true"),
            *("--trainer.callbacks.every_n_train_steps", "1"),
        ]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert finished.returncode == 0, finished.stderr[-2000:]
    assert (tmp_path / "checkpoints" / "last.ckpt").is_dir()
    assert read_series(tmp_path, "train/prompts") == ([1, 2], [4.0, 8.0])
    assert len(read_series(tmp_path, "val/jsd")[1]) == 2
    assert_exports(tmp_path)


def test_two_processes_make_a_whole_run(tiny_choice: Path, tmp_path: Path) -> None:
    """DDP with everything a run writes: a collective that one rank alone enters would wait forever."""
    table = "--trainer.callbacks+=lit_madrl.callbacks.CompletionTable"
    command = [
        *(sys.executable, str(ROOT / "cli.py"), "fit", "-c", str(BASE), *small(tiny_choice, tmp_path)),
        *("--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.max_steps", "2"),
        *("--trainer.val_check_interval", "1", "--trainer.callbacks.every_n_train_steps", "1"),
        *(table, "--trainer.callbacks.every_n_steps", "1"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"config.yaml", "metrics.csv", "tensorboard", "completions", "checkpoints", "model"} <= {
        path.name for path in tmp_path.iterdir()
    }
    with (tmp_path / "metrics.csv").open() as file:
        prompts = [float(row["train/prompts"]) for row in csv.DictReader(file) if row.get("train/prompts")]
    assert prompts == [4.0, 8.0]


def test_a_resumed_run_keeps_its_log(tiny_choice: Path, tmp_path: Path) -> None:
    """Rows of before the checkpoint stay, those of after it are made again, and a fresh run starts a fresh file."""

    def steps() -> list[int]:
        with (tmp_path / "metrics.csv").open() as file:
            return [int(row["step"]) for row in csv.DictReader(file) if row.get("train/loss")]

    common = ("fit", "-c", BASE, *small(tiny_choice, tmp_path), "--trainer.limit_val_batches", "0")
    run(*common, "--trainer.max_steps", "3", "--trainer.callbacks.every_n_train_steps", "2")
    assert steps() == [1, 2, 3]
    checkpoint = next((tmp_path / "checkpoints").glob("*step=2*.ckpt"))
    run(*common, "--trainer.max_steps", "4", "--ckpt_path", checkpoint)
    assert steps() == [1, 2, 3, 4]
    run(*common, "--trainer.max_steps", "1")
    assert steps() == [1]
