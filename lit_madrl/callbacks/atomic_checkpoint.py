"""Checkpoints that are whole or not there, at whatever moment a process dies."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from lit_madrl.strategies import OLD, PART, put_in_place, tidy


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes ``NAME.part`` beside the checkpoint, waits until it is on the disk, and renames it.

    Lightning's own writes into the system's temporary folder and moves the file from there; between two file systems
    that is a copy onto the former checkpoint, which a crash leaves half written. It also makes the file in memory
    first. Paths with a protocol (``s3://``) are left to it.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Replace the checkpoint at ``path``, if any, at once and as a whole."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        tidy(final.parent)
        part = final.with_name(final.name + PART)
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            put_in_place(part, final)
        except BaseException:
            part.unlink(missing_ok=True)  # a full disk should not stay full
            raise


def newest_checkpoint(folders: Iterable[str | Path]) -> Path | None:
    """The checkpoint last written to ``folders`` that a run can go on from; None if there is none.

    Whatever its name: ``last.ckpt`` may be a link whose file was just replaced, or may not be kept at all; and where
    a process died while it replaced a checkpoint, that is ``NAME.ckpt.old``.
    """
    found: list[Path] = []
    for folder in map(Path, folders):
        found += [path for path in folder.glob("*.ckpt") if path.exists()]
        found += [old for old in folder.glob(f"*.ckpt{OLD}") if not os.path.lexists(old.with_suffix(""))]
    newest_first = sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return next((path for path in newest_first if _has_optimizer(path)), None)


def checked_checkpoint(path: str | Path, to_fit: bool) -> Path:
    """A path to which a checkpoint was written, with the state of a run beside the weights if it is ``to_fit``.

    Raises:
        ValueError: it is none.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(
            f"ckpt_path: expected 'last' or a checkpoint, got {str(path)!r}, which does not exist"
        )
    if not _has_optimizer(path) and to_fit:
        raise ValueError(
            f"ckpt_path: expected the checkpoint of a run, got {str(path)!r}, which has no optimizer"
        )
    return path


def _has_optimizer(path: Path) -> bool:
    if path.is_dir():  # a sharded checkpoint, of which this file is written last
        return (path / "meta.pt").is_file()
    try:
        content = torch.load(path, map_location="cpu", mmap=True)  # does not read the tensors
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"ckpt_path: expected a checkpoint, got {str(path)!r}: {reason}") from error
    return isinstance(content, dict) and "optimizer_states" in content
