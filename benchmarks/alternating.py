"""Step times of training loops that take turns in one process, so that all of them meet the same machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

WARM_UP = 2  # first steps of each side, not counted
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


class Steps:
    """Wall and CPU seconds of each stage of each step of one side, and the memory a step needs.

    A step is all that happens between two turns; ``other`` is what no stage covers. Waiting is not counted.
    """

    def __init__(self, name: str, relay: Relay) -> None:
        self.name, self.relay = name, relay
        self.seconds: list[dict[str, np.ndarray]] = []
        self.memory: list[int] = []
        self.tokens: list[float] = []

    def begin(self) -> None:
        """A step begins."""
        self._held = reset_peak_memory()
        self._current = {stage: np.zeros(2) for stage in STAGES}
        self._begun = now()

    def end(self) -> None:
        """The step is over: let the others make one each, then begin the next."""
        step = self._current
        step["total"] = now() - self._begun
        step["other"] = step["total"] - step["generation"] - step["reference"] - step["update"]
        self.seconds.append(step)
        self.memory.append(memory("VmHWM") - self._held)
        self.relay.hand_on(self.name)
        self.relay.wait(self.name)
        self.begin()

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
        """Medians over the counted steps; memory is the largest of all steps."""
        medians = {s: np.median([step[s] for step in self.seconds[WARM_UP:]], 0) for s in STAGES}
        return {
            **{
                stage: {"wall": round(float(wall), 5), "cpu": round(float(cpu), 5)}
                for stage, (wall, cpu) in medians.items()
            },
            "memory_mib": max(self.memory) // 1024,
            "tokens_per_completion": round(float(np.mean(self.tokens[WARM_UP:])), 3),
        }


def alternate(loops: dict[str, Callable[[Steps], None]], threads: int) -> dict[str, Steps]:
    """Run the loops, a thread each, step by step in turn; each calls ``begin`` once and ``end`` after a step."""
    torch.set_num_threads(threads)
    relay = Relay(list(loops))
    steps = {name: Steps(name, relay) for name in loops}

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


def ratio(theirs: Steps, ours: Steps) -> dict[str, Any]:
    """Their medians divided by ours, and the quartiles of that ratio over pairs of steps."""
    a, b = theirs.summary(), ours.summary()
    ratios: dict[str, Any] = {
        stage: {clock: round(a[stage][clock] / b[stage][clock], 2) for clock in ("wall", "cpu")}
        for stage in STAGES
    }
    quartiles = np.quantile(theirs.totals() / ours.totals(), (0.25, 0.75), axis=0).round(2)
    ratios["total_quartiles"] = {"wall": quartiles[:, 0].tolist(), "cpu": quartiles[:, 1].tolist()}
    return ratios


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
