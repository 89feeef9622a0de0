"""A run that dies, whenever it does, and is started again by the same command is the run that never died."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from lit_madrl.callbacks import INTERRUPTED
from tests.helpers.crashing import Command, Signal, assert_same_run, rows, state


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """With a run that never died."""
    command = Command(tmp_path_factory.mktemp("crash"))
    assert command.live("whole") == 0, command.said("whole")
    return command


def test_the_run_has_a_state(command: Command) -> None:
    """Otherwise nothing could be lost: the selector has learned, validation has its rows, rewards are noisy."""
    whole = command.folder / "whole"
    weights = torch.load(whole / "checkpoints" / "last.ckpt")["state_dict"]
    phi = next(tensor for name, tensor in weights.items() if name.endswith("selector.phi"))
    assert phi.unique().numel() > 1
    assert [int(row["step"]) for row in rows(whole)] == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8]
    assert len(state(whole / "checkpoints" / "last.ckpt")["lit_madrl"]["rank_states"]) == 1


GENERATE = "lit_madrl.rollouts:TorchEngine.generate"
STEP = "torch.optim:AdamW.step"
EVALUATE = "lit_madrl.learners.evaluation:Evaluation.compute"
SAVER = "lightning.pytorch.callbacks:ModelCheckpoint"
# What kills each life, and the step from which the next one goes on.
DEATHS = [
    (Signal("torch:save", 1, "within"), None),  # the very first checkpoint
    (Signal("torch:save", 2, "within"), 2),  # last.ckpt, when the one of the step is there
    (Signal("os:fsync", 1), 2),  # step 4, all written but not yet renamed
    (Signal(f"{SAVER}._save_last_checkpoint", 1), 4),
    (Signal(STEP, 2, "after"), 4),
    (Signal(EVALUATE, 1), 4),  # step 6, which waits for it
    (Signal("lit_madrl.callbacks.run_log:RunLog._lines", 3, "after"), 4),  # step 6, logged but not written
    (Signal("pyarrow.parquet:write_table", 3), 6),
    (Signal(f"{SAVER}._remove_checkpoint", 1), 8),  # the last one, when last.ckpt is still the former
    (Signal("lit_madrl.learners.base:export", 1), 8),  # trained, but the model is not yet there
]


def test_killed_at_every_turn(command: Command) -> None:
    for death, step in DEATHS:
        assert command.live("killed", death) == -signal.SIGKILL, command.said("killed")
        assert command.step("killed") == step, death
    assert command.live("killed") == 0
    assert_same_run(command.folder / "killed", command.folder / "whole")
    model = "model/model.safetensors"
    killed, whole = (command.folder / name / model for name in ("killed", "whole"))
    assert killed.read_bytes() == whole.read_bytes()
    left = {path.name for path in (command.folder / "killed" / "checkpoints").iterdir()}
    assert not any(name.endswith(".part") for name in left)


def test_asked_to_stop_by_signals(command: Command) -> None:
    """While sampling, in a validation, by Ctrl-C: a step is finished and saved, whether or not one was due."""
    checkpoint = command.folder / "asked" / "checkpoints" / "interrupted.ckpt"
    for asked, step in (
        (Signal(GENERATE, 1, number=signal.SIGTERM), 1),
        (Signal(STEP, 2, number=signal.SIGTERM), 3),  # which a validation follows
        (Signal(EVALUATE, 1, number=signal.SIGUSR1), 6),
        # What a launcher repeats within a second is no second request.
        (Signal(STEP, 1, number=signal.SIGINT, times=2), 7),
    ):
        assert command.live("asked", asked) == INTERRUPTED, command.said("asked")
        assert torch.load(checkpoint)["global_step"] == command.step("asked") == step
        said = command.said("asked").splitlines()[-1]
        assert said.startswith(f"interrupted after optimizer step {step}")
        assert "--ckpt_path last" in said
    assert command.live("asked") == 0
    assert_same_run(command.folder / "asked", command.folder / "whole")
    assert not checkpoint.exists()


def test_a_second_request_is_obeyed_at_once(command: Command) -> None:
    first, second = (
        Signal(GENERATE, 1, number=signal.SIGINT),
        Signal(GENERATE, 2, number=signal.SIGINT, delay=1.1),
    )
    assert command.live("twice", first, second) == -signal.SIGINT
    assert command.step("twice") is None


def test_a_signal_to_one_rank_stops_all(command: Command) -> None:
    """And a run on two ranks, stopped and killed, is the one that was not."""
    ddp = ("--trainer.strategy", "ddp")
    assert command.on_two_ranks("ranks", ddp) == [0, 0], command.said("ranks")
    asked = Signal(GENERATE, 3, number=signal.SIGTERM)
    assert command.on_two_ranks("stopped", ddp, (1, asked)) == [INTERRUPTED, 0], command.said("stopped")
    assert command.on_two_ranks("stopped", ddp) == [0, 0]
    assert_same_run(command.folder / "stopped", command.folder / "ranks")


FSDP = ["-c", "configs/scale/fsdp.yaml", "--trainer.strategy.init_args.save_distributed_checkpoint", "true"]
WRITER = "torch.distributed.checkpoint.filesystem:FileSystemWriter"
# In the saves of one checkpoint in shares, each over the former: which rank dies of what, and the step that is left.
SHARED_DEATHS = [
    (0, Signal(f"{WRITER}.finish", 2), 1),  # the shares are there, what is in them is not
    (1, Signal(f"{WRITER}.write_data", 2), 2),
    (
        0,
        Signal("pathlib:Path.rename", 1, "after"),
        2,
    ),  # the former has another name, the new one has none yet
    (0, Signal("shutil:rmtree", 2), 3),  # the former is still there
]


def test_killed_while_ranks_write_their_shares(command: Command) -> None:
    saver = {"every_n_train_steps": 1, "save_last": True, "save_top_k": 0}
    callbacks = [
        {"class_path": "StepCheckpoint", "init_args": saver},
        {"class_path": "CompletionTable", "init_args": {"every_n_steps": 1}},
    ]
    strategy = [*FSDP, "--trainer.callbacks", json.dumps(callbacks)]
    assert command.on_two_ranks("shares", strategy) == [0, 0], command.said("shares")
    for rank, death, step in SHARED_DEATHS:
        statuses = command.on_two_ranks("lost shares", strategy, (rank, death))
        assert statuses[rank] == -signal.SIGKILL, command.said("lost shares")
        assert statuses[1 - rank] > 0, command.said("lost shares")
        assert command.step("lost shares") == step, death
    assert command.on_two_ranks("lost shares", strategy) == [0, 0], command.said("lost shares")
    lost, whole = (command.folder / name for name in ("lost shares", "shares"))
    assert_same_run(lost, whole)
    model = "model/model.safetensors"
    assert (lost / model).read_bytes() == (whole / model).read_bytes()
    assert [path.name for path in (lost / "checkpoints").iterdir()] == ["last.ckpt"]
