"""The contract suite on every shaper, and on a user's own."""

from __future__ import annotations

from functools import partial

import pytest

from examples.hellinger import Hellinger
from lit_madrl.rewards import (
    GAPO,
    L2,
    Additive,
    Correctness,
    ForwardKL,
    Gated,
    JensenShannon,
    ReverseKL,
    RewardShaper,
    WithFormat,
)
from tests.helpers.reward_contract import RewardShaperContract

SHAPERS = {
    "L2": L2,
    "L2-all": partial(L2, frequencies="all"),
    "L2-leave-one-out": partial(L2, leave_one_out=True),
    "ForwardKL": ForwardKL,
    "ForwardKL-leave-one-out": partial(ForwardKL, leave_one_out=True, min_frequency=0.125),
    "ReverseKL": ReverseKL,
    "JensenShannon": JensenShannon,
    "Hellinger": Hellinger,
    "Hellinger-leave-one-out": partial(Hellinger, frequencies="all", leave_one_out=True, min_frequency=0.125),
    "GAPO": GAPO,
    "Correctness": Correctness,
    "Additive": lambda: Additive(ForwardKL(), alpha=0.7),
    "Gated": lambda: Gated(JensenShannon(), lambda_g=0.5),
    "WithFormat": lambda: WithFormat(Correctness()),
    "WithFormat-Additive": lambda: WithFormat(Additive(L2(), alpha=0.5), weight=0.1),
}


class TestContract(RewardShaperContract):
    @pytest.fixture(params=SHAPERS.values(), ids=SHAPERS.keys())
    def shaper(self, request: pytest.FixtureRequest) -> RewardShaper:
        return request.param()
