"""Runs of the command line in processes that may get a signal at a chosen moment, and what such runs leave."""

from __future__ import annotations

import csv
import importlib
import multiprocessing
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import torch
import yaml
from torch import Tensor
from transformers import AutoConfig

from lit_madrl.callbacks import newest_checkpoint
from lit_madrl.prepare import write_tiny_chain
from lit_madrl.rewards import Correctness
from lit_madrl.tasks import Completions
from lit_madrl.types import Problem, Scores
from tests.helpers.processes import free_port
from tests.helpers.running import ROOT, HashVerifier

# Everything is imported once, by a server that then forks for each run.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["pytest", "pandas", "torch.utils.tensorboard", "transformers.models.qwen3.modeling_qwen3", __name__]
)


@dataclass(frozen=True)
class Signal:
    """A process's signal to itself ``when`` it calls a function, ``module:Class.function``, for the n-th time.

    ``within`` is for ``torch.save``: after half of the bytes.
    """

    function: str
    nth: int
    when: Literal["before", "within", "after"] = "before"
    number: int = signal.SIGKILL
    delay: float = 0.0
    times: int = 1

    def install(self) -> None:
        module, path = self.function.split(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, name, self.around(getattr(owner, name)))

    def send(self) -> None:
        for _ in range(self.times):
            os.kill(os.getpid(), self.number)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != self.nth:
                return function(*args, **kwargs)
            time.sleep(self.delay)
            if self.when == "before":
                self.send()
            result = function(*args, **kwargs)
            if self.when == "within":
                args[1].truncate(args[1].tell() // 2)
            if self.when != "before":
                self.send()
            return result

        return called


def _live(arguments: list[str], output: Path, signals: Sequence[Signal], environment: dict[str, str]) -> None:
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    from lit_madrl.cli import main

    for one in signals:
        one.install()
    sys.argv = ["cli.py", *arguments]
    main(arguments)


SETTINGS = {
    "trainer": {
        "enable_checkpointing": True,
        "enable_progress_bar": False,
        "max_steps": 8,
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 1,
        "callbacks": [
            {"class_path": "StepCheckpoint", "init_args": {"every_n_train_steps": 2, "save_last": True}},
            {"class_path": "CompletionTable", "init_args": {"every_n_steps": 1}},
        ],
    },
    "model": {
        "class_path": "GRPOLearner",
        "init_args": {
            "sampling": {"group_size": 4, "max_new_tokens": 12},
            "rewards": {"class_path": "tests.helpers.crashing.Noisy"},
            "verifier": {"class_path": "tests.helpers.crashing.Rarely"},
            "score_truncated": True,
        },
    },
    "data": {
        "class_path": "ChainDataModule",
        "init_args": {"lengths": [2, 3], "hard_pairs": [1, 2], "batch_size": 2, "eval_batch_size": 4},
    },
}


class Command:
    """One command for a run, whether it begins or goes on; each run has a folder in ``folder``.

    Args:
        settings: laid over those of the ARG task.
        size: of the random model, whose dropout is not 0.
    """

    def __init__(self, folder: Path, settings: dict[str, Any] = SETTINGS, **size: int) -> None:
        self.folder = folder
        self.model = folder / "start"
        write_tiny_chain(self.model, **{"hidden_size": 32, "layers": 1, **size})
        config = AutoConfig.from_pretrained(self.model)
        config.attention_dropout = 0.1
        config.save_pretrained(self.model)
        (folder / "settings.yaml").write_text(yaml.safe_dump(settings))

    def arguments(self, name: str) -> list[str]:
        arg, run_dir = ROOT / "configs" / "arg", self.folder / name
        arguments = [
            *("fit", "-c", arg / "chain_grpo.yaml", "-c", arg / "chain_arg.yaml"),
            *("-c", self.folder / "settings.yaml", "--model.init_args.policy.pretrained", self.model),
            *("--run_dir", run_dir, "--model.init_args.export_to", run_dir / "model", "--ckpt_path", "last"),
        ]
        return [str(argument) for argument in arguments]

    def start(
        self,
        name: str,
        *signals: Signal,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> BaseProcess:
        """A process that runs it."""
        life = ([*self.arguments(name), *arguments], self.folder / f"{name}.txt", signals, environment or {})
        process = _PROCESSES.Process(target=_live, args=life)
        process.start()
        return process

    def status(self, name: str, process: BaseProcess) -> int:
        """The exit status when the process has ended; -9 after SIGKILL."""
        process.join(100)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(self.said(name))
        return process.exitcode

    def live(self, name: str, *signals: Signal) -> int:
        """From the start to the exit status."""
        return self.status(name, self.start(name, *signals))

    def on_two_ranks(self, name: str, strategy: Sequence[str], *signals: tuple[int, Signal]) -> list[int]:
        """The exit statuses of two processes, some of which get signals; four steps."""
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "NODE_RANK": "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        arguments = [*strategy, "--trainer.devices", "2", "--trainer.max_steps", "4"]
        processes = [
            self.start(
                name,
                *(signal for to, signal in signals if to == rank),
                arguments=arguments,
                environment=environment | {"LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        return [self.status(name, process) for process in processes]

    def said(self, name: str) -> str:
        """What its processes printed."""
        return (self.folder / f"{name}.txt").read_text()[-4000:]

    def step(self, name: str) -> int | None:
        """That of the checkpoint from which the run would go on."""
        newest = newest_checkpoint([self.folder / name / "checkpoints"])
        return None if newest is None else int(content(newest)["global_step"])


class Rarely(HashVerifier):
    """Right are the reference and every sixth text, by its checksum: most groups fail, some continuations do not."""

    def __call__(self, problems: Sequence[Problem], completions: Completions) -> Tensor:
        right = [
            [text == problem.reference or zlib.crc32(text.encode()) % 6 == 0 for text in group]
            for problem, group in zip(problems, completions, strict=True)
        ]
        return torch.tensor(right, dtype=torch.float32)


class Noisy(Correctness):
    """Correctness and noise from every random stream that a process has."""

    def forward(self, scores: Scores, targets: Tensor) -> Tensor:
        noise = random.random() + np.random.rand() + torch.rand(scores.correct.shape)
        return super().forward(scores, targets) + 0.1 * noise


def rows(run_dir: Path) -> list[dict[str, str]]:
    """``metrics.csv`` but for the seconds that steps took."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [
            {k: v for k, v in row.items() if v and "seconds" not in k and "per_second" not in k}
            for row in csv.DictReader(file)
        ]


def tables(run_dir: Path) -> dict[str, Any]:
    """The completion tables by file name."""
    return {path.name: pq.read_table(path).to_pydict() for path in (run_dir / "completions").iterdir()}


def state(checkpoint: Path | None) -> dict[str, Any]:
    """What a checkpoint says of the run, as plain values: all but the callbacks, which name the run's folder."""
    assert checkpoint is not None
    return {name: plain(value) for name, value in content(checkpoint).items() if name != "callbacks"}


def content(checkpoint: Path) -> dict[str, Any]:
    """What is in a checkpoint; of one in shares all but weights and optimizer."""
    file = checkpoint / "meta.pt" if checkpoint.is_dir() else checkpoint
    return dict(torch.load(file, weights_only=True))


def plain(value: Any) -> Any:
    """Tensors as their bytes, so that ``==`` compares bit for bit."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.cpu().contiguous().view(-1).numpy().tobytes())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def assert_same_run(got: Path, expected: Path) -> None:
    """Weights, optimizer, prompts, random streams, log and completions of two finished runs."""
    assert rows(got) == rows(expected)
    assert tables(got) == tables(expected)
    own, other = (state(newest_checkpoint([run / "checkpoints"])) for run in (got, expected))
    assert own.keys() == other.keys()
    for name in own:
        assert own[name] == other[name], name
