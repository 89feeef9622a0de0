"""Two network namespaces as two nodes: what a run on them gives, and what is left when one of them is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_madrl.lost_ranks import explain, lost_contact
from lit_madrl.prepare import write_tiny_choice
from tests.helpers.crashing import Command, assert_same_run, rows
from tests.helpers.processes import free_port
from tests.helpers.running import ROOT, HashCategorizer

SECONDS = "LIT_MADRL_TEST_SECONDS"
TIMEOUT = 30
STEPS = 12
SETTINGS = {
    "trainer": {
        "max_steps": STEPS,
        "enable_progress_bar": False,
        "val_check_interval": 5,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 1,
        "strategy": {
            "class_path": "lightning.pytorch.strategies.DDPStrategy",
            "init_args": {"timeout": f"0:00:{TIMEOUT}"},
        },
        "callbacks": [
            {"class_path": "StepCheckpoint", "init_args": {"every_n_train_steps": 2, "save_last": True}},
            {"class_path": "CompletionTable", "init_args": {"every_n_steps": 1}},
        ],
    },
    "model": {
        "class_path": "GRPOLearner",
        "init_args": {
            "categorizer": {"class_path": "tests.test_two_nodes.Slow"},
            "sampling": {"group_size": 8, "max_new_tokens": 4},
            "score_truncated": True,
        },
    },
    "data": {"class_path": "ChoiceDataModule", "init_args": {"batch_size": 2, "eval_batch_size": 4}},
}


class Slow(HashCategorizer):
    """Takes its time when asked to, so that a run can be stopped at a chosen step."""

    def __call__(self, *arguments: Any) -> Any:
        time.sleep(float(os.environ.get(SECONDS, "0")))
        return super().__call__(*arguments)


class Choice(Command):
    """MaD-RL on the choice task, as in the quick start, with a random model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "start"
        write_tiny_choice(self.model, hidden_size=32, layers=1, vocab_size=512)
        (folder / "settings.yaml").write_text(yaml.safe_dump(SETTINGS))

    def arguments(self, name: str) -> list[str]:
        configs, run_dir = ROOT / "configs", self.folder / name
        arguments = [
            *("fit", "-c", configs / "choice" / "base.yaml", "-c", configs / "scale" / "ddp.yaml"),
            *("-c", self.folder / "settings.yaml", "--model.init_args.policy.pretrained", self.model),
            *("--run_dir", run_dir, "--model.init_args.export_to", run_dir / "model", "--ckpt_path", "last"),
        ]
        return [str(argument) for argument in arguments]


def ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)
    return done.stdout


@dataclass(frozen=True)
class Node:
    """A network namespace with one interface, of the same name."""

    rank: int
    name: str

    def start(self, command: Choice, name: str, **environment: str) -> subprocess.Popen[bytes]:
        """``launch/torchrun.sh`` with the command's arguments."""
        settings = {
            "NNODES": "2",
            "NODE_RANK": str(self.rank),
            "NPROC_PER_NODE": "1",
            "MASTER_ADDR": "10.77.0.1",
            "IFNAME": self.name,
            "OMP_NUM_THREADS": "1",
            "PYTHON": sys.executable,
        }
        launch = ["ip", "netns", "exec", self.name, "bash", str(ROOT / "launch" / "torchrun.sh")]
        with self.log(command, name).open("wb") as file:
            return subprocess.Popen(
                [*launch, *command.arguments(name)],
                env=os.environ | settings | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def log(self, command: Choice, name: str) -> Path:
        return command.folder / f"{name}_{self.rank}.txt"

    def complaint(self, command: Choice, name: str) -> str:
        """The line that says what happened; no traceback of ours may hide it."""
        text = self.log(command, name).read_text()
        assert "lit_madrl/cli.py" not in text, text
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, text
        return lines[0]

    def unplug(self) -> None:
        """Nothing from here arrives any more, not even that a connection is closed."""
        ip("-n", self.name, "link", "set", self.name, "down")

    def plug(self) -> None:
        ip("-n", self.name, "addr", "replace", f"10.77.0.{self.rank + 1}/24", "dev", self.name)
        for interface in ("lo", self.name):
            ip("-n", self.name, "link", "set", interface, "up")

    def kill(self) -> None:
        """All its processes at once."""
        for process in ip("netns", "pids", self.name, check=False).split():
            os.kill(int(process), signal.SIGKILL)


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the command ip (iproute2) to make network namespaces")
    pair = Node(0, f"madrl{os.getpid()}a"[-15:]), Node(1, f"madrl{os.getpid()}b"[-15:])
    try:
        try:
            for node in pair:
                ip("netns", "add", node.name)
            ends = [("name", node.name, "netns", node.name) for node in pair]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for node in pair:
                node.plug()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs network namespaces: {error.stderr.strip()}")
        yield pair
    finally:
        for node in pair:
            node.kill()
            ip("netns", "del", node.name, check=False)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Choice:
    return Choice(tmp_path_factory.mktemp("two_nodes"))


def on_one_node(command: Choice, name: str) -> None:
    """Two processes on this machine."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    environment = meeting | {"GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        command.start(
            name, arguments=["--trainer.devices", "2"], environment=environment | {"LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    assert [command.status(name, process) for process in processes] == [0, 0], command.said(name)


def until_step(command: Choice, name: str, step: int, processes: list[subprocess.Popen[bytes]]) -> None:
    log = command.folder / name / "metrics.csv"
    end = time.monotonic() + 200
    while not (log.exists() and (logged := rows(command.folder / name)) and int(logged[-1]["step"]) >= step):
        assert all(process.poll() is None for process in processes), "ended before it could be killed"
        assert time.monotonic() < end, "too slow"
        time.sleep(0.1)


def test_nodes_are_lost_and_the_run_goes_on(nodes: tuple[Node, Node], command: Choice) -> None:
    """It ends as the run on two processes of one machine that lost none."""
    first, second = nodes
    on_one_node(command, "whole")
    assert any(float(row.get("train/grad_norm", 0)) > 0 for row in rows(command.folder / "whole"))

    # A node whose processes are killed closes its connections.
    processes = [node.start(command, "lost", **{SECONDS: "0.3"}) for node in nodes]
    until_step(command, "lost", 3, processes)
    second.kill()
    assert processes[0].wait(TIMEOUT + 60) == 1
    line = first.complaint(command, "lost")
    assert line.startswith("error: rank 0 of 2 lost contact (")
    assert "[10.77.0.2]" in line
    assert "no sign of rank 1 (node 1)" in line
    assert "--ckpt_path last" in line
    step = command.step("lost")
    assert step is not None
    assert 2 <= step < STEPS

    # One that is switched off does not; and this one keeps the store.
    processes = [node.start(command, "lost", **{SECONDS: "0.3"}) for node in nodes]
    until_step(command, "lost", step + 3, processes)
    first.unplug()
    first.kill()
    assert processes[1].wait(TIMEOUT + 60) == 1
    line = second.complaint(command, "lost")
    assert line.startswith("error: rank 1 of 2 lost contact (Timed out waiting")
    assert "the node of rank 0 does not answer" in line
    assert step < (command.step("lost") or 0) < STEPS
    first.plug()

    processes = [node.start(command, "lost") for node in nodes]
    assert [process.wait(200) for process in processes] == [0, 0], first.log(command, "lost").read_text()
    assert_same_run(command.folder / "lost", command.folder / "whole")
    models = [command.folder / name / "model" / "model.safetensors" for name in ("lost", "whole")]
    assert models[0].read_bytes() == models[1].read_bytes()


GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (
            f"{GLOO}/pair.cc:553] Connection closed by peer [10.77.0.2]:5840. This is typically caused by a remote",
            "Connection closed by peer [10.77.0.2]:5840",
        ),
        (
            f"{GLOO}/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete",
            "Timed out waiting 10000ms for recv operation to complete",
        ),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error\nLast error:",
            "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error",
        ),
        ("CUDA out of memory", None),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", None),
    ],
)
def test_what_a_lost_connection_is(error: str, what: str | None) -> None:
    assert lost_contact(RuntimeError(error)) == what


def test_lost_ranks_are_named_with_their_nodes() -> None:
    assert "; no sign of rank 7 (node 0), rank 8 (node 1). Start" in explain(0, 16, "closed", [7, 8], 8)
    assert "; rank 0 says with whom. Start" in explain(3, 16, "closed", [7, 8], 8)
    assert "; the node of rank 0 does not answer. Start" in explain(3, 16, "closed", None, 8)
    assert "; all ranks are there" in explain(0, 16, "closed", [], 8)
