"""A run that dies, whenever it does, and is started again by the same command is the run that never died."""

from __future__ import annotations

import signal
import socket

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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])

    def both(name: str, *signals: Signal) -> list[int]:
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NODE_RANK": "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        arguments = ["--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.max_steps", "4"]
        processes = [
            command.start(
                name,
                *(signals if rank else ()),
                arguments=arguments,
                environment=environment | {"LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        return [command.status(name, process) for process in processes]

    assert both("ranks") == [0, 0], command.said("ranks")
    stopped = both("stopped", Signal(GENERATE, 3, number=signal.SIGTERM))
    assert stopped == [INTERRUPTED, 0], command.said("stopped")
    assert both("stopped") == [0, 0]
    assert_same_run(command.folder / "stopped", command.folder / "ranks")
