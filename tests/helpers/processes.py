"""Tests of several processes: starting them, and undoing what a process group of one leaves behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(module: str, *arguments: str | Path, ranks: int = 2, timeout: float = 200) -> None:
    """``python -m module arguments`` as each of several ranks; fails with a rank's log, or when one hangs."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=environment | {"LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        logs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, log in zip(processes, logs, strict=True):
        assert process.returncode == 0, log[-4000:]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def process_group_of_its_own() -> Iterator[None]:
    """What runs in here may start a process group; afterwards there is none, and none that children would inherit."""
    before = dict(os.environ)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)
