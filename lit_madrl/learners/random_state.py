"""Seeds, and the random streams of a process that belong to no one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def hash_seed(*parts: int) -> int:
    """One seed from several numbers; different tuples practically never share one."""
    value = 0
    for part in parts:
        value = (value * 6364136223846793005 + part + 1442695040888963407) % 2**63
    return value


def random_state(device: torch.device) -> dict[str, Any]:
    """Python's, numpy's, torch's and the device's streams, as ``torch.load(weights_only=True)`` reads them.

    Nothing in the framework draws from them, but a component may (a reward with noise, a model with dropout).
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue the streams of :func:`random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
