"""The forms of packed attention, to be forced whatever is cheaper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lit_madrl.policy import attention
from lit_madrl.policy.attention import DenseGroups, GroupRows

FORMS = {"dense": DenseGroups, "rows": GroupRows, "blocks": GroupRows}


@contextmanager
def attention_form(name: str) -> Iterator[None]:
    """Plans built inside have this form."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_CALL_OVERHEAD_PAIRS", 10**9 if name == "dense" else -(10**9))
        if name == "blocks":
            patch.setattr(attention, "_QUERY_BLOCK", 2)
        yield
