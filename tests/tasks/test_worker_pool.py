from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from lit_madrl.tasks import worker_pool
from lit_madrl.tasks.worker_pool import Failure, WorkerPool
from tests.helpers import worker_jobs

JOBS = Path(worker_jobs.__file__)
TIMEOUT = Failure("timeout")
CRASH = Failure("crash")


def make(workers: int = 2, timeout: float = 0.1, **options: object) -> WorkerPool:
    return WorkerPool(JOBS, "work", workers, timeout, **options)


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = make()
    yield pool
    pool.close()


def children() -> set[int]:
    """Processes of this one, zombies included."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_results_come_in_order_and_workers_stay(pool: WorkerPool) -> None:
    before = children()
    assert pool.map([]) == []
    assert children() == before  # nothing starts before it is needed
    values = [1, "x", None, [1.5, {"a": True}], "\ud800 \n ü", "y" * 300_000]
    assert pool.map([("return", value) for value in values]) == values
    first = set(pool.map([("process",)] * 40))
    assert first <= children() - before
    assert set(pool.map([("process",)] * 40)) <= children() - before
    assert len(children() - before) == 2


def test_one_job_starts_one_worker(pool: WorkerPool) -> None:
    before = children()
    pool.map([("process",)])
    assert len(children() - before) == 1


@pytest.mark.parametrize(
    ("job", "failure"),
    [
        (("compute", 60), TIMEOUT),
        (("power",), TIMEOUT),
        (("sleep", 60), TIMEOUT),
        (("exit", 0), CRASH),
        (("exit", 3), CRASH),
        (("segfault",), CRASH),
        (("memory",), Failure("MemoryError()")),
        (("raise", "x"), Failure("KeyError('x')")),
    ],
    ids=str,
)
def test_a_job_that_fails_fails_alone(pool: WorkerPool, job: tuple[object, ...], failure: Failure) -> None:
    before = children()
    jobs = [("return", 1), job, ("return", 2), ("return", 3), job, ("return", 4)]
    assert pool.map(jobs) == [1, failure, 2, 3, failure, 4]
    assert pool.map([("return", 5)] * 4) == [5] * 4
    assert len(children() - before) in (1, 2)
    assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in children() - before)


def test_a_result_that_is_no_json_is_a_failure(pool: WorkerPool) -> None:
    (result,) = pool.map([("object",)])
    assert isinstance(result, Failure)
    assert "not JSON serializable" in result.reason


def test_what_a_job_prints_is_no_result(pool: WorkerPool) -> None:
    assert pool.map([("print", "[true, 7]\n")] * 3) == ["[true, 7]\n"] * 3


def test_waiting_for_a_worker_uses_up_no_time(pool: WorkerPool) -> None:
    """200 jobs on 2 workers: the last waits for five times as long as a job may compute."""
    start = time.monotonic()
    assert pool.map([("compute", 0.005)] * 200) == [0.005] * 200
    assert time.monotonic() - start > 4 * pool.timeout


def test_the_first_call_is_outside_the_limit() -> None:
    pool = make(timeout=0.1, warm_up=("compute", 0.3))
    assert pool.map([("return", 1)] * 4) == [1] * 4
    pool.close()


def test_a_worker_killed_between_calls_is_replaced(pool: WorkerPool) -> None:
    (worker,) = pool.map([("process",)])
    os.kill(worker, signal.SIGKILL)
    (other,) = pool.map([("process",)])
    assert other != worker


def test_threads_take_turns(pool: WorkerPool) -> None:
    before = children()
    with ThreadPoolExecutor(5) as threads:
        results = list(threads.map(lambda value: pool.map([("return", value)] * 9), range(10)))
    assert results == [[value] * 9 for value in range(10)]
    assert len(children() - before) <= 2


def test_a_thread_that_ends_leaves_its_workers(pool: WorkerPool) -> None:
    thread = threading.Thread(target=pool.map, args=[[("return", 1)]])
    thread.start()
    thread.join()
    assert pool.map([("return", 2)]) == [2]


def test_close_ends_all_and_a_later_call_starts_anew() -> None:
    before = children()
    pool = make()
    pool.close()
    pool.map([("process",)] * 4)
    pool.close()
    pool.close()
    assert children() == before
    assert pool.map([("return", 1)]) == [1]
    pool.close()
    assert children() == before


def test_a_forgotten_pool_ends_its_workers() -> None:
    before = children()
    pool = make()
    pool.map([("process",)] * 4)
    assert children() != before
    del pool
    gc.collect()
    assert children() == before


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_copies_have_workers_of_their_own(pool: WorkerPool, clone) -> None:
    (worker,) = pool.map([("process",)])
    copied = clone(pool)
    assert copied.map([("process",)]) != [worker]
    copied.close()
    assert pool.map([("process",)]) == [worker]


def test_the_signals_of_the_caller_do_not_matter(pool: WorkerPool) -> None:
    """They are inherited: ignored and blocked ones would let a worker run forever."""
    ending = [signal.SIGPROF, signal.SIGALRM]
    handlers = [signal.signal(number, signal.SIG_IGN) for number in ending]
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        assert pool.map([("compute", 60), ("sleep", 60)]) == [TIMEOUT, TIMEOUT]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
        for number, handler in zip(ending, handlers, strict=True):
            signal.signal(number, handler)


def test_a_worker_does_not_import_torch(pool: WorkerPool) -> None:
    assert "torch" in sys.modules
    (modules,) = pool.map([("modules",)])
    assert {name.partition(".")[0] for name in modules} & {"torch", "numpy", "lit_madrl", "tests"} == set()


SCRIPT = f"""
import os, runpy, sys, threading, time
from pathlib import Path
pool = runpy.run_path({worker_pool.__file__!r})["WorkerPool"](Path({str(JOBS)!r}), "work", 2, 0.3)
workers = pool.map([("process",)] * 8)
"""


def start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_no_worker_outlives_the_process_that_asked() -> None:
    ends = (
        "",
        "sys.exit(3)",
        "raise ValueError",
        "os._exit(0)",
        "os.kill(os.getpid(), 9)",
        "os.kill(os.getpid(), 15)",
    )
    for process in [start(f"print(*set(workers), flush=True); {end}") for end in ends]:
        output, _ = process.communicate(timeout=60)
        assert gone(output)


def test_a_busy_worker_ends_in_time_when_nobody_waits_for_it() -> None:
    """It computes without ever looking at a closed pipe."""
    process = start(
        """
threading.Thread(target=pool.map, args=[[("power",)] * 2], daemon=True).start()
time.sleep(0.1)
print(*set(workers), flush=True)
os.kill(os.getpid(), 9)
"""
    )
    assert gone(process.communicate(timeout=60)[0])


def gone(output: str) -> bool:
    """Whether the processes with the printed ids are gone, or will be in a moment."""
    pids = {int(pid) for pid in output.split()}
    assert pids
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(alive, timeout=30)[1]


def test_a_forked_process_has_workers_of_its_own() -> None:
    """As in a data loader's worker process; the parent's lock may be held while it forks."""
    process = start(
        """
pool._lock.acquire()
child = os.fork()
if child == 0:
    print(set(pool.map([("process",)] * 8)).isdisjoint(workers), flush=True)
    sys.exit()
pool._lock.release()
assert os.waitpid(child, 0)[1] == 0
print(set(pool.map([("process",)] * 8)) <= set(workers), flush=True)
"""
    )
    output, errors = process.communicate(timeout=60)
    assert output.split() == ["True", "True"], errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers: expected an integer >= 1, got 0"),
        ({"timeout": 0}, "timeout: expected a finite number of seconds > 0, got 0"),
        ({"timeout": float("inf")}, "timeout: .* got inf"),
        ({"timeout": float("nan")}, "timeout: .* got nan"),
    ],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("file", "function", "message"),
    [
        (JOBS, "nothing", "worker_jobs.py: a worker could not load 'nothing': .*KeyError: 'nothing'"),
        (JOBS.with_name("none.py"), "work", "none.py: a worker could not load 'work': .*FileNotFoundError"),
    ],
)
def test_a_function_that_is_not_there(file: Path, function: str, message: str) -> None:
    before = children()
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        WorkerPool(file, function).map([()])
    assert children() == before


def test_a_worker_that_dies_before_its_first_job() -> None:
    before = children()
    with pytest.raises(
        RuntimeError, match=r"worker_jobs.py: the worker ended with exit code 5 before its first job"
    ):
        make(warm_up=("exit", 5)).map([("return", 1)])
    assert children() == before
