from __future__ import annotations

import pytest

from lit_madrl.learners import Schedule


@pytest.mark.parametrize(
    ("schedule", "total", "expected"),
    [
        (Schedule(warmup_steps=4), 8, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]),
        (Schedule(warmup_steps=0), -1, [1, 1, 1]),
        (Schedule("linear", warmup_steps=0), 4, [1, 0.75, 0.5, 0.25, 0, 0]),
        (Schedule("linear", warmup_steps=1), 4, [1, 0.75, 0.5, 0.25, 0, 0]),
        (Schedule("linear", warmup_steps=0, final=0.1), 4, [1, 0.775, 0.55, 0.325, 0.1, 0.1]),
        (Schedule("linear", warmup_steps=2), 4, [0.5, 0.75, 0.5, 0.25, 0]),
        (Schedule("cosine", warmup_steps=0), 4, [1, 0.8535534, 0.5, 0.1464466, 0, 0]),
        (Schedule("cosine", warmup_steps=0, final=0.5), 2, [1, 0.75, 0.5]),
        (Schedule("cosine", warmup_steps=2), 2, [0.5, 0.5, 0]),
        (Schedule(), 100, [0.1, 0.2, 0.3]),
    ],
)
def test_factors(schedule: Schedule, total: int, expected: list[float]) -> None:
    factors = [schedule.factor(step, total) for step in range(len(expected))]
    assert factors == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("field", "value"), [("warmup_steps", -1), ("final", 1.5), ("final", -0.1), ("kind", "exponential")]
)
def test_arguments_are_checked(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"schedule.{field}: expected .*, got {value!r}"):
        Schedule(**{field: value})  # type: ignore[arg-type]
