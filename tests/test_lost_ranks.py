"""How a run leaves the process group that it joined."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from lit_madrl.lost_ranks import own_process_group


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
