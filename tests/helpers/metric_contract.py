"""What every metric must hold: subclass ``MetricContract`` with ``cases`` and its tests run on each."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torchmetrics import Metric

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class MetricCase:
    """A metric with batches that can be concatenated; ``build`` must pickle for the tests on two ranks."""

    name: str
    build: Callable[[], Metric]
    batches: Sequence[Batch]

    def after(self, batches: Sequence[Batch]) -> Metric:
        """A new metric that has seen ``batches``."""
        metric = self.build()
        for batch in batches:
            metric.update(**batch)
        return metric

    def value(self) -> Tensor:
        """The value after all batches."""
        result: Tensor = self.after(self.batches).compute()
        return result


def same(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the order of float64 additions; NaN equals NaN."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14, equal_nan=True)


def concatenate(batches: Sequence[Batch]) -> Batch:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


class MetricContract:
    cases: ClassVar[Sequence[MetricCase]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=[case.name for case in self.cases])

    def test_the_case_is_worth_testing(self, case: MetricCase) -> None:
        """Its batches have a value, and differ, or the tests below could not fail."""
        assert len(case.batches) >= 3
        assert not case.value().isnan().any()
        singles = [case.after([batch]).compute() for batch in case.batches]
        assert any(not torch.allclose(single, singles[0], equal_nan=True) for single in singles)

    def test_batches_equal_one_update(self, case: MetricCase) -> None:
        same(case.after([concatenate(case.batches)]).compute(), case.value())

    def test_order_is_irrelevant(self, case: MetricCase) -> None:
        same(case.after(list(reversed(case.batches))).compute(), case.value())

    def test_an_empty_batch_changes_nothing(self, case: MetricCase) -> None:
        empty = {key: value[:0] for key, value in case.batches[0].items()}
        same(case.after([empty, *case.batches, empty]).compute(), case.value())

    def test_survives_pickling_and_cloning_half_way(self, case: MetricCase) -> None:
        for duplicate in (lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.clone(), copy.deepcopy):
            metric = case.after(case.batches[:1])
            copied = duplicate(metric)
            for batch in case.batches[1:]:
                copied.update(**batch)
            same(copied.compute(), case.value())
            same(metric.compute(), case.after(case.batches[:1]).compute())

    def test_reset_forgets(self, case: MetricCase) -> None:
        metric = case.after(case.batches)
        metric.reset()
        metric.update(**case.batches[0])
        same(metric.compute(), case.after(case.batches[:1]).compute())

    def test_forward_returns_the_batch_and_accumulates(self, case: MetricCase) -> None:
        metric = case.build()
        for batch in case.batches:
            same(metric(**batch), case.after([batch]).compute())
        same(metric.compute(), case.value())

    def test_inputs_are_not_mutated(self, case: MetricCase) -> None:
        batch = {key: value.clone() for key, value in case.batches[0].items()}
        case.after([batch]).compute()
        for key, value in case.batches[0].items():
            assert torch.equal(batch[key], value)

    def test_states_are_sums_of_fixed_shape(self, case: MetricCase) -> None:
        metric = case.after(case.batches)
        for name, default in metric._defaults.items():
            assert isinstance(default, Tensor)
            assert default.dtype in (torch.float64, torch.long)
            assert not default.any()
            state = getattr(metric, name)
            assert (state.shape, state.dtype) == (default.shape, default.dtype)
            reduced = metric._reductions[name](torch.stack([state, state]))
            torch.testing.assert_close(reduced, 2 * state)

    @pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
    def test_unseen_is_nan(self, case: MetricCase) -> None:
        assert case.build().compute().isnan().all()

    def test_a_module_in_bfloat16_does_not_round_the_states(self, case: MetricCase) -> None:
        for convert in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.float()):
            module = nn.ModuleDict({"metric": case.after(case.batches[:1])})
            metric = convert(module)["metric"]
            for batch in case.batches[1:]:
                metric.update(**batch)
            same(metric.compute(), case.value())
            metric.reset()
            metric.update(**concatenate(case.batches))
            same(metric.compute(), case.value())

    def test_inference_mode_inside_and_out(self, case: MetricCase) -> None:
        metric = case.build()
        with torch.inference_mode():
            metric.reset()
            metric.update(**case.batches[0])
        for batch in case.batches[1:]:
            metric.update(**batch)
        with torch.inference_mode():
            same(metric.compute(), case.value())

    def test_it_is_one_value_per_module(self, case: MetricCase) -> None:
        """Lightning moves metrics with the module they are attributes of."""
        module = nn.ModuleDict({"metric": case.after(case.batches)})
        assert not module.state_dict()
        assert module.to("cpu") is module


def gather_on_two_ranks(cases: Sequence[MetricCase], folder: Path) -> list[dict[str, Any]]:
    """Values of all cases after each split over two processes, ``[rank][case name][split]``.

    Splits: rank 1 never updates; rank 0 never updates; rank 0 has the first batch, rank 1 the rest.
    """
    mp.spawn(_rank, args=(list(cases), str(folder)), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def _rank(rank: int, cases: list[MetricCase], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        values = {case.name: [_value_on(rank, case, split) for split in _splits(case)] for case in cases}
        torch.save(values, f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def _splits(case: MetricCase) -> list[tuple[Sequence[Batch], Sequence[Batch]]]:
    return [(case.batches, ()), ((), case.batches), (case.batches[:1], case.batches[1:])]


def _value_on(
    rank: int, case: MetricCase, split: tuple[Sequence[Batch], Sequence[Batch]]
) -> dict[str, Tensor]:
    metric = case.after(split[rank])
    before = {name: getattr(metric, name).clone() for name in metric._defaults}
    value = {"compute": metric.compute()}
    if hasattr(metric, "floor") and not metric.per_prompt:
        value["floor"] = metric.floor()
    for name, state in before.items():  # ranks get their own sums back
        assert torch.equal(getattr(metric, name), state)
    return value
