"""Running the command line in a test: tiny model, few samples, no progress bar."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lit_madrl.cli import MadrlCLI, main
from lit_madrl.tasks import Categorizer, Completions, Verifier
from lit_madrl.types import Problem

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"

SMALL_TRAINER = (
    *("--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.max_steps", "1"),
    *("--trainer.precision", "32-true", "--trainer.enable_progress_bar", "false"),
    *(
        "--trainer.limit_val_batches",
        "1",
        "--trainer.log_every_n_steps",
        "1",
        "--data.init_args.batch_size",
        "2",
    ),
    *("--data.init_args.eval_batch_size", "3"),
)


def small(model: Path, run_dir: Path) -> tuple[str, ...]:
    """Arguments that make any shipped configuration a run of one step on a tiny model."""
    sampling = "--model.init_args.sampling"
    return (
        *SMALL_TRAINER,
        *("--run_dir", str(run_dir), "--model.init_args.policy.pretrained", str(model)),
        *("--model.init_args.export_to", str(run_dir / "model")),
        *(
            f"{sampling}.group_size",
            "4",
            f"{sampling}.max_new_tokens",
            "4",
            f"{sampling}.min_new_tokens",
            "0",
        ),
    )


def run(*arguments: str | Path) -> MadrlCLI:
    """``python cli.py`` with these arguments, in this process."""
    return main([str(argument) for argument in arguments])


class HashCategorizer(Categorizer):
    """One of five categories or off-support, by a checksum of the text."""

    def __call__(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        return torch.tensor([[zlib.crc32(text.encode()) % 6 - 1 for text in group] for group in completions])


class HashVerifier(Verifier):
    """Right or wrong by a checksum of the text."""

    def __call__(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        return torch.tensor(
            [[float(zlib.crc32(text.encode()) % 2) for text in group] for group in completions]
        )

    def well_formed(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        return self(problems, completions)
