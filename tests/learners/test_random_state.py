"""The random streams of a process."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from lit_madrl.learners.random_state import random_state, set_random_state

CPU = torch.device("cpu")


def draws() -> list[float]:
    """One of each kind; normal deviates come in pairs, so a half of one may be part of the state."""
    normal = [random.gauss(0, 1), np.random.randn(), float(torch.randn(()))]
    return [random.random(), np.random.rand(), float(torch.rand(())), *normal]


def test_every_stream_goes_on(tmp_path: Path) -> None:
    """Also from a file, which runs no code when it is loaded."""
    draws()
    torch.save(random_state(CPU), tmp_path / "state.pt")
    expected = [draws(), draws()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert draws() != expected[0]
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True), CPU)
    assert [draws(), draws()] == expected


def test_a_state_is_no_view_of_the_stream() -> None:
    state = random_state(CPU)
    expected = draws()
    draws()
    set_random_state(state, CPU)
    assert draws() == expected
