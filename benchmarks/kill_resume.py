"""Kills a run at random moments with SIGKILL and compares what the same command then makes of it with a whole run.

    python benchmarks/kill_resume.py --kills 20

The run is ARG on the chain task with a random model, noisy rewards, validations and a checkpoint at every step, so
that many kills hit a save. Weights, optimizer, random streams, log, completions and exported model must be equal bit
for bit. The status is 1 when one is not.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.crashing import SETTINGS, Command, assert_same_run, rows

STEPS = 40
EQUAL = "equal"


def command_in(folder: Path) -> Command:
    settings = copy.deepcopy(SETTINGS)
    settings["trainer"] |= {"max_steps": STEPS, "val_check_interval": 7}
    settings["trainer"]["callbacks"][0]["init_args"]["every_n_train_steps"] = 1
    return Command(folder, settings, hidden_size=128, layers=4)


def wait_for_step(log: Path, step: int, process: BaseProcess) -> None:
    """Until the log has the step, whatever the machine's load."""
    while process.is_alive() and step and not (log.exists() and int(rows(log.parent)[-1]["step"]) >= step):
        time.sleep(0.005)


def killed_run(command: Command, name: str, after_step: int, delay: float) -> list[object]:
    """A row of the report: when it was killed, what had been saved, whether the resumed run is the whole one."""
    run_dir, whole = command.folder / name, command.folder / "whole"
    process = command.start(name)
    wait_for_step(run_dir / "metrics.csv", after_step, process)
    time.sleep(delay)
    process.kill()
    killed = command.status(name, process) == -signal.SIGKILL
    saving = any((run_dir / "checkpoints").glob("*.part"))
    step = command.step(name)
    try:
        if command.live(name):
            raise AssertionError(command.said(name))
        assert_same_run(run_dir, whole)
        own, other = (run / "model" / "model.safetensors" for run in (run_dir, whole))
        assert own.read_bytes() == other.read_bytes()
    except AssertionError as error:
        return [after_step, f"{delay:.3f}", killed, saving, step, f"DIFFERENT: {str(error)[:200]}"]
    return [after_step, f"{delay:.3f}", killed, saving, step, EQUAL]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        command = command_in(Path(folder))
        if command.live("whole"):
            raise RuntimeError(command.said("whole"))
        print("| after step | and seconds | killed | within a save | goes on from step | result |")
        print("| - | - | - | - | - | - |")
        for kill in range(options.kills):
            moment = moments.randrange(STEPS), moments.uniform(0, 0.15)
            row = killed_run(command, f"kill_{kill}", *moment)
            different += row[-1] != EQUAL
            print(f"| {' | '.join(map(str, row))} |", flush=True)
    print(f"\n{options.kills - different} of {options.kills} equal")
    raise SystemExit(different > 0)


if __name__ == "__main__":
    main()
