"""Step times of training loops that take turns, so that all of them meet the same machine."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers

WARM_UP = 1  # first steps of each side, not counted
SIDES = ("trl", "ours")
STAGES = ("total", "generation", "reference", "update", "other")


class Relay:
    """Lets one of several threads run at a time, in turn."""

    def __init__(self, names: Sequence[str]) -> None:
        self._turns = {name: threading.Semaphore(0) for name in names}
        self._turns[names[0]].release()

    def wait(self, name: str) -> None:
        """Until it is the turn of ``name``."""
        self._turns[name].acquire()

    def hand_on(self, name: str, leave: bool = False) -> None:
        """End the turn of ``name``, for good with ``leave``."""
        names = list(self._turns)
        after = names[(names.index(name) + 1) % len(names)]
        if leave:
            del self._turns[name]
        if after in self._turns:
            self._turns[after].release()


class Rounds:
    """How many steps each side makes after the warm-up: ``least``, and more until ``seconds`` are over or ``most``."""

    def __init__(self, least: int, most: int, seconds: float) -> None:
        self.least, self.most, self.seconds = least, most, seconds
        self._begun = 0.0
        self._over: dict[int, bool] = {}

    def over(self, counted: int) -> bool:
        """Whether ``counted`` steps of all sides, that are made now, suffice; all sides get one answer."""
        if counted not in self._over:
            wall = float(now()[0])
            self._begun = self._begun or wall
            enough = counted >= self.least and wall - self._begun >= self.seconds
            self._over[counted] = enough or counted >= self.most
        return self._over[counted]


class Steps:
    """Wall and CPU seconds of each stage of each step of one side, and the memory a step needs.

    A step is all that happens between two turns; ``other`` is what no stage covers. Waiting is not counted.
    """

    def __init__(self, name: str, relay: Relay | None = None, rounds: Rounds | None = None) -> None:
        self.name, self.relay, self.rounds = name, relay, rounds
        self.seconds: list[dict[str, np.ndarray]] = []
        self.memory: list[int] = []
        self.tokens: list[float] = []

    def begin(self) -> None:
        """A step begins."""
        if len(self.seconds) <= WARM_UP:  # what its first steps left behind is memory that a step needs
            return_free_memory()
        self._held = reset_peak_memory()
        self._current = {stage: np.zeros(2) for stage in STAGES}
        self._begun = now()

    def end(self) -> bool:
        """The step is over: let the others make one each, then begin the next; true if there shall be none."""
        step = self._current
        step["total"] = now() - self._begun
        step["other"] = step["total"] - step["generation"] - step["reference"] - step["update"]
        over = self.take(step, memory("VmHWM") - self._held)
        if not over:
            self.begin()
        return over

    def take(self, step: dict[str, np.ndarray], added: int) -> bool:
        """Record a step and the KiB it needed, and let the others make one; true if there shall be no more."""
        assert self.relay is not None
        self.seconds.append(step)
        self.memory.append(added)
        self.relay.hand_on(self.name)
        self.relay.wait(self.name)
        counted = len(self.seconds) - WARM_UP
        return self.rounds is not None and counted >= 0 and self.rounds.over(counted)

    def add(self, stage: str, since: np.ndarray) -> None:
        """Count the time from ``since`` to now as the stage's."""
        self._current[stage] += now() - since

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its time counted as the stage's."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begun = now()
            result = function(*args, **kwargs)
            self.add(stage, begun)
            return result

        return wrapper

    def totals(self) -> np.ndarray:
        """``[steps, 2]`` wall and CPU seconds of the counted steps."""
        return np.stack([step["total"] for step in self.seconds[WARM_UP:]])

    def summary(self) -> dict[str, Any]:
        """Medians over the counted steps; memory is the largest of them."""
        medians = {s: np.median([step[s] for step in self.seconds[WARM_UP:]], 0) for s in STAGES}
        return {
            **{
                stage: {"wall": round(float(wall), 5), "cpu": round(float(cpu), 5)}
                for stage, (wall, cpu) in medians.items()
            },
            "memory_mib": max(self.memory[WARM_UP:]) // 1024,
            "tokens_per_completion": round(float(np.mean(self.tokens[WARM_UP:])), 3),
        }


class StepsElsewhere(Steps):
    """Steps of a loop in another process, which :func:`elsewhere` hears of by ``connection``."""

    def __init__(self, name: str, connection: Connection) -> None:
        super().__init__(name)
        self.connection = connection

    def take(self, step: dict[str, np.ndarray], added: int) -> bool:
        """See ``Steps.take``."""
        self.seconds.append(step)
        self.connection.send((step, added, self.tokens))
        return bool(self.connection.recv())


def elsewhere(loop: Callable[[Steps], None], threads: int) -> Callable[[Steps], None]:
    """The loop in a process of its own, so that settings and memory of no other reach it.

    Args:
        loop: it and what it holds can be pickled.
        threads: for its computations.
    """

    def proxy(steps: Steps) -> None:
        _set_environment(threads)
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        process = context.Process(target=_run_elsewhere, args=(loop, steps.name, threads, theirs))
        process.start()
        theirs.close()
        try:
            while (made := connection.recv()) is not None:
                if isinstance(made, BaseException):
                    raise made
                step, added, steps.tokens = made
                connection.send(steps.take(step, added))
        finally:
            connection.close()
            process.join()

    return proxy


def _run_elsewhere(loop: Callable[[Steps], None], name: str, threads: int, connection: Connection) -> None:
    quiet()
    torch.set_num_threads(threads)
    try:
        loop(StepsElsewhere(name, connection))
        connection.send(None)
    except BaseException as error:
        connection.send(error)


def _set_environment(threads: int) -> None:
    """Of processes that are started from now on."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # Loops are run by threads, but a program's memory is that of its main thread.
    os.environ["MALLOC_ARENA_MAX"] = "1"


def alternate(
    loops: dict[str, Callable[[Steps], None]], threads: int, rounds: Rounds | None = None
) -> dict[str, Steps]:
    """Run the loops, a thread each, step by step in turn.

    Each calls ``begin`` once and ``end`` after a step, and returns when that is true or when it has no more steps.
    """
    torch.set_num_threads(threads)
    relay = Relay(list(loops))
    steps = {name: Steps(name, relay, rounds) for name in loops}

    def run(name: str) -> None:
        relay.wait(name)
        try:
            loops[name](steps[name])
        finally:
            relay.hand_on(name, leave=True)

    with ThreadPoolExecutor(len(loops)) as pool:
        for future in [pool.submit(run, name) for name in loops]:
            future.result()
    return steps


def now() -> np.ndarray:
    """Wall clock and CPU seconds of the process."""
    return np.array([time.perf_counter(), time.process_time()])


def memory(field: Literal["VmRSS", "VmHWM"]) -> int:
    """KiB of the process's present or peak memory; 0 where there is no /proc."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)


def reset_peak_memory() -> int:
    """Start a new peak (Linux); KiB held now."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def return_free_memory() -> None:
    """Give what malloc keeps for later back to the system (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def in_own_process(function: Callable[..., Any], *arguments: Any, threads: int = 1) -> Any:
    """What ``function`` returns in a new process, whose memory nothing else has used, with ``threads`` threads."""
    _set_environment(threads)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def quiet() -> None:
    """No warnings and notes of the libraries between our lines."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
