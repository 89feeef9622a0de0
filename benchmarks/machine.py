"""What a result must say about where it was measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe(*packages: str) -> dict[str, Any]:
    """CPU, cores, Python and the versions of ``packages``."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    cpu = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    versions = {name: version(name) for name in packages}
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}
