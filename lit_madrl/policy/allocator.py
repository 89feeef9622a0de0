"""Memory that a step frees and the next one needs again."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache

_log = logging.getLogger(__name__)

CHOSEN_BY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
LARGE = 2**30
"""Bytes from which a block is a mapping of its own, which goes back to the system when it is freed."""


@cache
def keep_freed_memory() -> bool:
    """Let glibc's malloc keep what is freed instead of giving it back to the system; whether it does now.

    By default it returns large tensors at once, and each new one costs a fault for every page: up to a quarter of the
    time of sampling on a CPU. Does nothing where the environment sets malloc's thresholds, or there is no glibc.
    """
    if any(name in os.environ for name in CHOSEN_BY):
        _log.debug("malloc: thresholds are those of the environment")
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no such function; no such library; not on Windows
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGE) and mallopt(_TRIM_THRESHOLD, -1))
