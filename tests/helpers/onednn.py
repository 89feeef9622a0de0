"""oneDNN's linear for products of any size, on any CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_madrl.functional import linear as module


@contextmanager
def forced_onednn() -> Iterator[list[Any]]:
    """Inside, whatever may go to oneDNN does; the shapes of the operands of each call."""
    kernel, reason = module.checked_operator()
    if kernel is None:
        pytest.skip(reason)
    calls: list[Any] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        calls.append((tuple(x.shape), tuple(weight.shape)))
        assert not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad)
        return kernel(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "onednn", lambda: counted)
        patch.setattr("lit_madrl.policy.linear.onednn", lambda: counted)
        patch.setattr(module, "LEAST_WORK", 1)
        patch.setattr(module, "LEAST_TRAINED", 1)
        patch.setattr(module, "LEAST_SIDE", 1)
        yield calls
