"""How a run joins and leaves its process group."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lit_madrl.lost_ranks import one_line_lost_ranks, own_process_group


def join(store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


@pytest.mark.parametrize(
    ("end", "left"), [(None, True), (SystemExit(75), True), (RuntimeError("contact lost"), False)]
)
def test_a_run_leaves_the_group_it_joined(end: BaseException | None, left: bool, tmp_path: Path) -> None:
    """Not after an error: its collectives may still be waiting."""
    with suppress(SystemExit, RuntimeError), own_process_group():
        join(tmp_path / "store")
        if end is not None:
            raise end
    try:
        assert dist.is_initialized() is not left
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_group_of_the_callers_stays(tmp_path: Path) -> None:
    join(tmp_path / "store")
    try:
        with own_process_group():
            pass
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_do_not_meet(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 waits for one that never comes; rank 1 finds nobody."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended, one_line_lost_ranks(1):
        dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    assert ended.value.code == 1
    line = capsys.readouterr().err.strip().split("\n")[-1]
    assert line.startswith(f"error: rank {rank} of 2 did not meet the others at 127.0.0.1:{port} (")


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes$"), one_line_lost_ranks(1):
        raise RuntimeError("shapes")
