"""What malloc does with freed memory, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from lit_madrl.policy.allocator import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
for number in range(8):
    if number == 3:  # by then blocks lie where they stay
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**24) for _ in range(2)]  # 64 MiB each
    del blocks
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(how: str, **environment: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


def test_freed_memory_costs_no_faults_again() -> None:
    kept, faults = run("keep")
    if kept == "False":
        pytest.skip("needs glibc")
    assert faults < run("give back")[1] / 10


def test_the_environment_has_the_last_word() -> None:
    assert run("keep", MALLOC_TRIM_THRESHOLD_="1000000")[0] == "False"
