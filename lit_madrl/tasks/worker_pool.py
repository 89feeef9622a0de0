"""Functions that may hang or crash, called in processes that may die.

This file is also the program of a worker: run by its path, with nothing but the standard library, so that a worker
starts without torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

_START_LIMIT = 120.0
_WALL_CLOCK_FACTOR = 20
_MEMORY_LIMIT = 1 << 30


class Failure(NamedTuple):
    """Why a job has no result: ``timeout``, ``crash`` (its worker ended), or the exception that the function raised."""

    reason: str


class WorkerPool:
    """Calls a function in worker processes; a call that hangs or crashes costs its worker alone.

    Workers start with the first job and stay until :meth:`close` or the end of the pool. Each has the kernel limit its
    time and memory, which holds while Python is deep in C and when the process that asked is gone: nothing is left
    behind. A copied or unpickled pool and a forked process start workers of their own. POSIX only.

    Args:
        file: a Python file that each worker loads by itself, not as part of its package.
        function: the function in it. Arguments and results travel as JSON; SIGALRM and SIGPROF are not its to use.
        workers: processes at most.
        timeout: seconds of computing that a job may take, counted in its worker's CPU time from when it begins: neither
            waiting for a worker nor a busy machine uses them up. Twenty times as many by the clock end a job as well.
        warm_up: arguments of a call that a new worker makes first, outside the limit.
    """

    def __init__(
        self,
        file: Path,
        function: str,
        workers: int = 2,
        timeout: float = 5.0,
        warm_up: Sequence[Any] | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers: expected an integer >= 1, got {workers}")
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout: expected a finite number of seconds > 0, got {timeout}")
        self.file = file
        self.function = function
        self.workers = workers
        self.timeout = timeout
        self.warm_up = warm_up
        self._start_empty()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.file, self.function, self.workers, self.timeout, self.warm_up)

    def map(self, jobs: Sequence[Sequence[Any]]) -> list[Any]:
        """The function's result for the arguments in each job, in order; a :class:`Failure` where there is none.

        Any thread may call; calls at the same time take turns.

        Raises:
            RuntimeError: a worker could not load the function.
        """
        self._leave_to_parent()
        if not jobs:
            return []
        with self._lock, ThreadPoolExecutor(min(self.workers, len(jobs))) as threads:
            return list(threads.map(self._run, jobs))

    def close(self) -> None:
        """End all workers; a later call starts new ones."""
        self._leave_to_parent()
        with self._lock:
            _end(self._places, os.getpid())

    def _start_empty(self) -> None:
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._places: list[_Worker | None] = [None] * self.workers
        weakref.finalize(self, _end, self._places, self._process_id)

    def _leave_to_parent(self) -> None:
        """In a forked process, forget the workers and the lock: both are the parent's."""
        if self._process_id != os.getpid():
            self._start_empty()

    def _run(self, job: Sequence[Any]) -> Any:
        worker = self._places.pop()  # there is one for each thread
        try:
            if worker is None or not worker.is_alive():
                worker = _Worker(self.file, self.function, self.timeout, self.warm_up)
            return worker.call(job)
        except _WorkerEndedError as ended:
            return Failure("timeout" if ended.timed_out else "crash")
        finally:
            self._places.append(worker)


class _WorkerEndedError(Exception):
    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the worker ended with exit code {exit_code}")
        self.timed_out = exit_code in (-signal.SIGPROF, -signal.SIGALRM)


class _Worker:
    """The near side of a process that answers one line with one line."""

    def __init__(self, file: Path, function: str, timeout: float, warm_up: Sequence[Any] | None) -> None:
        # -P: the folder of this file would hide the standard library's `math`.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, json.dumps([str(file), function, timeout, warm_up])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's interrupt is for the run to handle
        )
        try:
            failure = self._read()
        except _WorkerEndedError as ended:
            raise RuntimeError(f"{file}: {ended} before its first job") from None
        if failure is not None:
            self.end()
            raise RuntimeError(f"{file}: a worker could not load {function!r}: {failure.reason}")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, arguments: Sequence[Any]) -> Any:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
            self._process.stdin.flush()
        return self._read()

    def end(self) -> int:
        """Kill the process and return its exit code."""
        self._process.kill()
        exit_code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # both are pipes
        return exit_code

    def _read(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise _WorkerEndedError(self.end())
        succeeded, value = json.loads(line)
        return value if succeeded else Failure(value)


def _end(places: list[_Worker | None], process_id: int) -> None:
    """End the workers of a pool, unless they belong to the process that this one was forked from."""
    for index, worker in enumerate(places):
        if worker is not None and process_id == os.getpid():
            worker.end()
        places[index] = None


# Below: the far side, in the worker.


def _serve(file: str, function: str, timeout: float, warm_up: Sequence[Any] | None) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints is no answer
    _limit_memory()
    _limit_time(_START_LIMIT, _START_LIMIT)
    try:
        call = runpy.run_path(file)[function]
        if warm_up is not None:
            call(*warm_up)
        answer = json.dumps([True, None])
    except Exception:
        answer = json.dumps([False, traceback.format_exc()])
    _limit_time(0, 0)
    print(answer, file=answers, flush=True)
    for line in sys.stdin:
        _limit_time(timeout, timeout * _WALL_CLOCK_FACTOR)
        try:
            answer = json.dumps([True, call(*json.loads(line))])
        except Exception as error:
            answer = json.dumps([False, repr(error)])
        _limit_time(0, 0)
        print(answer, file=answers, flush=True)


def _limit_time(computing: float, clock: float) -> None:
    """Let the kernel end this process after so many seconds of either; 0 for never."""
    for timer, ending, seconds in (
        (signal.ITIMER_PROF, signal.SIGPROF, computing),
        (signal.ITIMER_REAL, signal.SIGALRM, clock),
    ):
        signal.signal(ending, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [ending])
        signal.setitimer(timer, seconds)


def _limit_memory() -> None:
    import resource  # not on every system on which the package can be imported

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = _MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(_MEMORY_LIMIT, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
