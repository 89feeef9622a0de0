"""A checkpoint is whole or not there, and the right one is found."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_madrl.callbacks import AtomicCheckpointIO, checked_checkpoint, newest_checkpoint
from lit_madrl.strategies import FullySharded, put_in_place, tidy


def checkpoint(value: int) -> dict[str, Any]:
    return {"x": torch.full((1000,), value), "optimizer_states": []}


def value(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["x"][0])


def test_a_checkpoint_replaces_the_former(tmp_path: Path) -> None:
    path = tmp_path / "new" / "last.ckpt"
    for number in range(2):
        AtomicCheckpointIO().save_checkpoint(checkpoint(number), path)
        assert value(path) == number
    assert [left.name for left in path.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("moment", ["save", "replace"])
def test_a_failed_save_leaves_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As on a full disk: nothing remains of what was written."""
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint(0), path)

    def full(*arguments: Any) -> None:
        assert (tmp_path / "last.ckpt.part").is_file()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((torch, "save") if moment == "save" else (Path, "replace")), full)
    with pytest.raises(OSError, match="No space"):
        AtomicCheckpointIO().save_checkpoint(checkpoint(1), path)
    monkeypatch.undo()
    assert value(path) == 0
    assert [left.name for left in tmp_path.iterdir()] == ["last.ckpt"]


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's bytes, then the name, then the folder that holds it."""
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        done.append("name")
        assert value(path) == 3
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    AtomicCheckpointIO().save_checkpoint(checkpoint(3), tmp_path / "last.ckpt")
    if os.path.isdir("/proc/self/fd"):
        assert done == ["file", "name", "folder"]


def test_leftovers_of_a_crash_go_with_the_next_save(tmp_path: Path) -> None:
    for name in ("last.ckpt.part", "epoch=0-step=7.ckpt.part"):
        (tmp_path / name).write_bytes(b"half of a check")
    (tmp_path / "sharded.ckpt.part" / "shard").mkdir(parents=True)
    AtomicCheckpointIO().save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_link_is_replaced_and_not_what_it_names(tmp_path: Path) -> None:
    """``save_last: link`` of a former run."""
    AtomicCheckpointIO().save_checkpoint(checkpoint(1), tmp_path / "step=1.ckpt")
    (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
    AtomicCheckpointIO().save_checkpoint(checkpoint(2), tmp_path / "last.ckpt")
    assert (value(tmp_path / "step=1.ckpt"), value(tmp_path / "last.ckpt")) == (1, 2)


def test_other_file_systems_are_left_to_lightning() -> None:
    AtomicCheckpointIO().save_checkpoint(checkpoint(5), "memory://folder/last.ckpt")
    assert int(AtomicCheckpointIO().load_checkpoint("memory://folder/last.ckpt")["x"][0]) == 5


def written(path: Path, at: int, content: dict[str, Any] | None = None) -> Path:
    path.parent.mkdir(exist_ok=True)
    torch.save(content or checkpoint(at), path)
    os.utime(path, (at, at))
    return path


def test_the_newest_is_found_whatever_its_name(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "nowhere"]
    assert newest_checkpoint(folders) is None
    last = written(tmp_path / "a" / "last.ckpt", at=3)
    written(tmp_path / "a" / "step=1.ckpt", at=1)
    assert newest_checkpoint(folders) == last
    other = written(tmp_path / "b" / "interrupted.ckpt", at=4)
    assert newest_checkpoint(folders) == other


def test_what_no_run_can_go_on_from_is_passed_over(tmp_path: Path) -> None:
    """Weights alone, half a file, a link to what is gone, a folder without a checkpoint."""
    whole = written(tmp_path / "step=1.ckpt", at=1)
    written(tmp_path / "best.ckpt", at=9, content={"state_dict": {}})
    (tmp_path / "last.ckpt.part").write_bytes(b"half")
    (tmp_path / "last.ckpt").symlink_to("step=0.ckpt")
    (tmp_path / "sharded.ckpt").mkdir()
    assert newest_checkpoint([tmp_path]) == whole
    (tmp_path / "sharded.ckpt" / "meta.pt").touch()
    assert newest_checkpoint([tmp_path]) == tmp_path / "sharded.ckpt"


def shares(path: Path, at: int) -> Path:
    """A checkpoint in shares, whose only content is when it was made."""
    path.mkdir()
    (path / "meta.pt").write_text(str(at))
    os.utime(path, (at, at))
    return path


def kinds(folder: Path) -> dict[str, str]:
    return {
        path.name: (path / "meta.pt").read_text() if path.is_dir() else str(value(path))
        for path in folder.iterdir()
    }


@pytest.mark.parametrize("former", ["shares", "file", "none"])
@pytest.mark.parametrize("latter", ["shares", "file"])
def test_any_kind_replaces_any_other(former: str, latter: str, tmp_path: Path) -> None:
    make = {"shares": shares, "file": lambda path, at: written(path, at, checkpoint(at))}
    if former != "none":
        make[former](tmp_path / "last.ckpt", 1)
    put_in_place(make[latter](tmp_path / "last.ckpt.part", 2), tmp_path / "last.ckpt")
    assert kinds(tmp_path) == {"last.ckpt": "2"}


@pytest.mark.parametrize("moment", ["rename", "replace", "rmtree"])
def test_a_folder_is_replaced_without_a_moment_of_none(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its three operations does not happen, a checkpoint is found, and the next save tidies up."""
    shares(tmp_path / "last.ckpt", 1)
    shares(tmp_path / "last.ckpt.part", 2)

    def dying(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil if moment == "rmtree" else Path, moment, dying)
    with pytest.raises(KeyboardInterrupt):
        put_in_place(tmp_path / "last.ckpt.part", tmp_path / "last.ckpt")
    monkeypatch.undo()
    newest = newest_checkpoint([tmp_path])
    assert newest is not None
    assert newest.name == ("last.ckpt.old" if moment == "replace" else "last.ckpt")
    expected = (newest / "meta.pt").read_text()
    tidy(tmp_path)
    assert kinds(tmp_path) == {"last.ckpt": expected} == {"last.ckpt": "2" if moment == "rmtree" else "1"}


def test_what_is_being_removed_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its shares may be gone already."""
    strategy = FullySharded()
    monkeypatch.setattr(FullySharded, "is_global_zero", True)
    kept = shares(tmp_path / "step=1.ckpt", 1)
    gone = shares(tmp_path / "step=2.ckpt", 2)
    removed: list[Path] = []
    monkeypatch.setattr(strategy, "_checkpoint_io", AtomicCheckpointIO())
    monkeypatch.setattr(strategy.checkpoint_io, "remove_checkpoint", removed.append)
    strategy.remove_checkpoint(gone)
    assert newest_checkpoint([tmp_path]) == kept
    assert removed == [tmp_path / "step=2.ckpt.part"]


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 half of one"])
def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.ckpt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"ckpt_path: expected a checkpoint, got '.*some.ckpt': .+"):
        checked_checkpoint(path, to_fit=False)


def test_a_path_is_checked(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.ckpt", at=1)
    weights = written(tmp_path / "weights.ckpt", at=2, content={"state_dict": {}})
    assert checked_checkpoint(str(whole), to_fit=True) == whole
    assert checked_checkpoint(weights, to_fit=False) == weights
    with pytest.raises(
        ValueError, match=r"expected the checkpoint of a run, got '.*weights.ckpt', which has no opt"
    ):
        checked_checkpoint(weights, to_fit=True)
    with pytest.raises(
        ValueError, match=r"expected 'last' or a checkpoint, got '.*gone.ckpt', which does not exist"
    ):
        checked_checkpoint(tmp_path / "gone.ckpt", to_fit=True)
