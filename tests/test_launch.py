"""The launch files: what they start, with what, and what they make of its exit status."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory import GIB, Setup, parts, static
from benchmarks.shapes import Shape
from lit_madrl.callbacks import INTERRUPTED
from lit_madrl.report import read_series
from tests.helpers.running import ROOT, small

LAUNCH = ROOT / "launch"
FILES = [LAUNCH / "torchrun.sh", LAUNCH / "slurm.sbatch"]
# What the machine's own settings would change.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not re.match(r"SLURM|NNODES|NODE_RANK|NPROC|MASTER_|IFNAME|GLOO_|NCCL_|OMP_|PYTHON$|HF_", name)
}


def launched(file: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", file, *map(str, arguments)],
        env=ENVIRONMENT | {"PYTHON": sys.executable} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def executable(path: Path, script: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{script}")
    path.chmod(0o755)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_is_a_script(file: Path) -> None:
    assert subprocess.run(["bash", "-n", file]).returncode == 0


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(file: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    checked = subprocess.run(["shellcheck", file], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_two_processes_on_a_node(tiny_choice: Path, tmp_path: Path) -> None:
    """One step of two prompts a process, on CPU."""
    assert os.access(FILES[0], os.X_OK)
    run_dir = tmp_path / "run"
    layers = ("-c", ROOT / "configs" / "choice" / "base.yaml", "-c", ROOT / "configs" / "scale" / "ddp.yaml")
    categorizer = (
        *("--model.init_args.categorizer", "tests.helpers.running.HashCategorizer"),
        *("--model.init_args.score_truncated", "true"),
    )
    done = launched(
        *(FILES[0], "fit", *layers, *small(tiny_choice, run_dir), *categorizer, "--ckpt_path", "last"),
        NPROC_PER_NODE="2",
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Starting with 2 processes" in done.stdout
    assert read_series(run_dir, "train/prompts")[1] == [4.0]
    assert (run_dir / "model" / "model.safetensors").is_file()


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """An interpreter that only says how it was called."""
    executable(tmp_path / "recorder", 'env; echo "called: $*"\n')
    return tmp_path / "recorder"


def test_a_node_of_sixteen(recorder: Path) -> None:
    done = launched(
        *(FILES[0], "fit", "-c", "some.yaml"),
        **{"NNODES": "16", "NODE_RANK": "3", "NPROC_PER_NODE": "8", "MASTER_ADDR": "node0", "IFNAME": "eth7"},
        **{"PYTHON": str(recorder), "STOP_SECONDS": "90"},
    )
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    called = next(line for line in lines if line.startswith("called: "))
    for words in (
        "--nnodes 16 --nproc-per-node 8 --rdzv-backend static --node-rank 3 --master-addr node0",
        "--shutdown-timeout 90",
        "cli.py fit -c some.yaml --trainer.num_nodes 16 --trainer.devices 8",
    ):
        assert words in called
    assert {"GLOO_SOCKET_IFNAME=eth7", "NCCL_SOCKET_IFNAME=eth7", "HF_HUB_OFFLINE=1"} <= set(lines)
    assert any(re.fullmatch(r"OMP_NUM_THREADS=[1-9]\d*", line) for line in lines)


def test_nodes_that_do_not_know_where_to_meet(recorder: Path) -> None:
    done = launched(FILES[0], "fit", NNODES="2", NPROC_PER_NODE="1", PYTHON=str(recorder))
    assert done.returncode == 2
    assert done.stdout.startswith("error: MASTER_ADDR:")


@pytest.mark.parametrize(("status", "queued"), [(0, ""), (1, ""), (137, ""), (INTERRUPTED, "requeue 4711\n")])
def test_slurm_queues_what_was_interrupted_again(status: int, queued: str, tmp_path: Path) -> None:
    """With stand-ins for SLURM's commands."""
    executable(
        tmp_path / "srun", f'env >"{tmp_path}/environment"; echo "$*" >"{tmp_path}/srun.txt"; exit {status}\n'
    )
    executable(tmp_path / "scontrol", f'echo "$*" >>"{tmp_path}/scontrol.txt"\n')
    job = {
        "JOB_ID": "4711",
        "SUBMIT_DIR": str(ROOT),
        "NNODES": "2",
        "NTASKS_PER_NODE": "8",
        "CPUS_PER_TASK": "6",
    }
    done = launched(
        *(FILES[1], "fit", "-c", "some.yaml"),
        **{f"SLURM_{name}": value for name, value in job.items()},
        **{"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "py", "IFNAME": "ib0"},
    )
    assert done.returncode == status, done.stdout
    asked = tmp_path / "scontrol.txt"
    assert (asked.read_text() if asked.exists() else "") == queued
    given = "py cli.py fit -c some.yaml --ckpt_path last --trainer.num_nodes 2 --trainer.devices 8"
    assert (tmp_path / "srun.txt").read_text().strip().endswith(given)
    environment = (tmp_path / "environment").read_text().splitlines()
    assert {"OMP_NUM_THREADS=6", "SRUN_CPUS_PER_TASK=6", "NCCL_SOCKET_IFNAME=ib0"} <= set(environment)


def test_memory_that_the_document_states() -> None:
    """docs/scale.md has what benchmarks/memory.py computes."""
    lines = (ROOT / "docs" / "scale.md").read_text().splitlines()
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| qwen3")
    ]
    assert len(table) == 9
    for model, strategy, gpus, gathered, *stated in table:
        setup = Setup(
            shape=Shape.read(model),
            strategy="ddp" if strategy == "ddp" else "fsdp2",
            ranks=int(gpus),
            gather=gathered != "no",
            checkpointing=True,
            prompts=2,
            micro_batch_tokens=512 + 16 * 1024,
        )
        sizes = parts(setup)
        training = sum(sizes[name] for name in ("computed weights", "activations", "head"))
        computed = [sum(static(setup).values()), training, sizes["rollouts"], sizes["total"]]
        assert stated == [f"{size / GIB:.1f}" for size in computed], (model, strategy, gpus)


def test_slurm_starts_a_process_for_each_gpu() -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", FILES[1].read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"].startswith("USR1@")
    assert {"requeue", "cpus-per-task", "time"} <= options.keys()
