"""What the workers of test pools do; the first argument says which."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def work(kind: str, value: Any = None) -> Any:
    """Compute for ``value`` seconds, or misbehave."""
    if kind == "compute":
        end = time.process_time() + value
        while time.process_time() < end:
            pass
    elif kind == "sleep":
        time.sleep(value)
    elif kind == "power":
        return 2003 ** (2002**2001)  # never leaves C
    elif kind == "memory":
        return len(b"x" * (2 << 30))
    elif kind == "exit":
        os._exit(value)
    elif kind == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "print":
        print(value, flush=True)
    elif kind == "raise":
        raise KeyError(value)
    elif kind == "object":
        return object()
    elif kind == "process":
        return os.getpid()
    elif kind == "modules":
        return sorted(sys.modules)
    return value
