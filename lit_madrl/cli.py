"""The command line: ``python cli.py {fit,validate,test} -c CONFIG.yaml [--model.init_args.… VALUE]``; ``export``."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import transformers
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

# Imported for their names: a YAML file says `class_path: ForwardKL` for any class in them.
from lit_madrl import (
    augmenters,
    callbacks,
    data,
    export,
    learners,
    policy,
    rewards,
    rollouts,
    strategies,
    tasks,
    types,
)
from lit_madrl.callbacks import (
    AtomicCheckpointIO,
    CompletionTable,
    RunLog,
    SaveOnSignal,
    checked_checkpoint,
    newest_checkpoint,
)
from lit_madrl.cli_errors import check_subcommand, one_line_errors, one_line_refusals
from lit_madrl.data import PromptDataModule
from lit_madrl.learners import PolicyLearner
from lit_madrl.lost_ranks import one_line_lost_ranks, own_process_group

_COMPONENTS = (augmenters, learners, policy, rewards, rollouts, tasks, data, callbacks, strategies, types)


class MadrlCLI(LightningCLI):
    """LightningCLI with a run folder, links between data and learner, and errors of one line."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """``fit``, ``validate`` and ``test``."""
        known: dict[str, set[str]] = LightningCLI.subcommands()
        return {name: known[name] for name in ("fit", "validate", "test")}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run folder, and say what the learner and the data take from elsewhere."""
        parser.add_argument(
            "--run_dir", type=str, default="runs/default", help="Folder of everything a run writes."
        )
        parser.link_arguments("seed_everything", "model.init_args.seed", compute_fn=_as_seed)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=_as_seed)
        parser.link_arguments("data.categories", "model.init_args.categories", apply_on="instantiate")
        parser.set_defaults({"seed_everything": 0})

    def parse_arguments(self, *args: Any, **kwargs: Any) -> None:
        """Parse, and explain a mistake in one line."""
        with one_line_errors(_COMPONENTS):
            super().parse_arguments(*args, **kwargs)

    def instantiate_classes(self) -> None:
        """Build data, learner and trainer, find the checkpoint, and explain a wrong argument in one line."""
        with one_line_errors(_COMPONENTS):
            super().instantiate_classes()
            self.config_init[self.subcommand].ckpt_path = self._checkpoint()

    def _run_subcommand(self, subcommand: str) -> None:
        """Run, and say in one line which ranks were lost, if some were."""
        with one_line_lost_ranks(self.trainer.num_devices), own_process_group():
            super()._run_subcommand(subcommand)

    def _checkpoint(self) -> str | None:
        """Which checkpoint ``ckpt_path`` means; none when a run is to begin."""
        given = self.config[self.subcommand].ckpt_path
        if given != "last":
            known = given is None or given in ("best", "hpc") or "://" in str(given)
            return given if known else str(checked_checkpoint(given, to_fit=self.subcommand == "fit"))
        used: list[L.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        places = [callback.dirpath for callback in used if isinstance(callback, ModelCheckpoint)]
        places += [callback.folder for callback in used if isinstance(callback, SaveOnSignal)]
        folders = sorted({str(place) for place in places})
        newest = newest_checkpoint(folders)
        if newest is None and self.subcommand != "fit":
            raise ValueError(f"ckpt_path: expected a checkpoint in {' or '.join(folders)}, found none")
        return None if newest is None else str(newest)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let a checkpoint's arguments silently override the ones given."""

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Send CSV and TensorBoard logs, checkpoints and completion tables to ``run_dir`` unless told otherwise."""
        config = self.config[self.subcommand]
        folder, given = Path(config.run_dir), config.trainer
        if given.logger in (None, True):
            resumed: Literal["none", "before"] = "none" if config.ckpt_path is None else "before"
            kwargs["logger"] = [
                RunLog(folder, earlier=resumed if self.subcommand == "fit" else "all"),
                TensorBoardLogger(folder, name="", version="", sub_dir="tensorboard"),
            ]
        if given.default_root_dir is None:
            kwargs["default_root_dir"] = str(folder)
        trainer: L.Trainer = super().instantiate_trainer(**kwargs)
        used: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, CompletionTable) for callback in used):
            used.insert(0, CompletionTable())
        if not any(isinstance(callback, SaveOnSignal) for callback in used):
            used.append(SaveOnSignal())  # the last: it ends the step when all others are done with it
        for callback in used:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(folder / "checkpoints")
            if isinstance(callback, SaveOnSignal) and callback.folder is None:
                callback.folder = str(folder / "checkpoints")
        strategy = trainer.strategy
        if type(strategy.checkpoint_io) is TorchCheckpointIO:
            strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(("💡 Tip", "TPU available", "GPU available"))


def _as_seed(seed: bool | int) -> int:
    return 0 if seed is True or seed is False else seed


def main(args: Sequence[str] | None = None) -> MadrlCLI | None:
    """Run the command line on ``args`` (default: the program's own)."""
    given = sys.argv[1:] if args is None else list(args)
    check_subcommand(given, (*MadrlCLI.subcommands(), "export"))
    if given[0] == "export":  # needs neither trainer nor data
        with one_line_errors(_COMPONENTS):
            export.main(given[1:])
        return None
    with warnings.catch_warnings(), one_line_refusals():
        _quiet_lightning()
        return MadrlCLI(
            PolicyLearner,
            PromptDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"use_distributed_sampler": False, "num_sanity_val_steps": 0},
            parser_kwargs={
                "exit_on_error": False,
                **{s: {"exit_on_error": False} for s in MadrlCLI.subcommands()},
            },
            args=None if args is None else list(args),
        )


def console() -> None:
    """The command ``lit-madrl``. What it returned would be its exit status."""
    main()


def _quiet_lightning() -> None:
    """Leave out messages that no user of this command line can act on."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_news)
    for message in (
        r".*isinstance\(treespec, LeafSpec\).*",
        r".*your dataloader is not resumable.*",
        r".*It is recommended to use `self.log.*sync_dist=True.*",
        r".*does not have many workers.*",
        r".*LightningCLI's args parameter is intended.*",
        r".*Experiment logs directory .* exists and is not empty.*",
        r".*Using ModelCheckpoint with manual optimization and every_n_train_steps.*",
        r".*Checkpoint directory .* exists and is not empty.*",
    ):
        warnings.filterwarnings("ignore", message=message)
