"""The warm start against a negative log-likelihood by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lit_madrl.data import ChoiceDataModule
from lit_madrl.learners import Schedule, SFTLearner
from lit_madrl.policy import Policy, PolicyConfig
from lit_madrl.types import Problem, Sampling
from tests.helpers.learning import (
    EOS,
    Gradients,
    ListData,
    arguments,
    assert_same,
    choice_problems,
    fit,
    gradients_of,
    start_model,
    tokenizer_of,
    weights,
)
from tests.helpers.tiny_models import row_logprobs

COMPLETIONS = [[" one", " one", " two words", ""], [" three"]]
PROBLEMS = [
    replace(problem, metadata={"completions": completions})
    for problem, completions in zip(choice_problems(2), COMPLETIONS, strict=True)
]


class Losses(Gradients):
    """Also the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(trainer.logger.steps[-1]["train/loss"])


def mean_nll(folder: Path, model: Any, problems: Sequence[Problem], stop: int = EOS) -> Tensor:
    tokenizer = tokenizer_of(folder)
    rows = [
        row_logprobs(
            model,
            tokenizer.encode(problem.prompt),
            [*tokenizer.encode(text, add_special_tokens=False), stop],
        )
        for problem in problems
        for text in problem.metadata["completions"]
    ]
    return -torch.cat(rows).mean()


@pytest.mark.parametrize("micro_batch_tokens", [None, 1, 80])
def test_the_loss_is_the_mean_negative_log_likelihood(
    tiny_choice: Path, micro_batch_tokens: int | None
) -> None:
    learner = SFTLearner(**arguments(tiny_choice, micro_batch_tokens=micro_batch_tokens))
    losses = Losses()
    fit(learner, ListData(PROBLEMS), 1, callbacks=[losses])
    model = start_model(tiny_choice)
    expected = mean_nll(tiny_choice, model, PROBLEMS)
    assert losses.losses == [pytest.approx(float(expected.detach()), abs=1e-5)]
    assert_same(losses.steps[0], gradients_of(expected, model))
    assert learner.prompt_cursor == 2


def test_duplicates_are_computed_once_and_count_as_often_as_they_occur(
    tiny_choice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    original = Policy.forward

    def watched(self: Policy, batch: Any, *rest: Any) -> Tensor:
        counts.append(batch.num_rows)
        return original(self, batch, *rest)

    monkeypatch.setattr(Policy, "forward", watched)
    repeated = [replace(p, metadata={"completions": p.metadata["completions"] * 3}) for p in PROBLEMS]
    losses = Losses()
    fit(SFTLearner(**arguments(tiny_choice)), ListData(repeated), 1, callbacks=[losses])
    assert counts == [4]
    model = start_model(tiny_choice)
    assert_same(losses.steps[0], gradients_of(mean_nll(tiny_choice, model, PROBLEMS), model))


def test_the_last_stop_string_ends_completions(tiny_choice: Path) -> None:
    """So that a policy which is sampled with a stop string learns to write it."""
    (stop,) = tokenizer_of(tiny_choice).encode("\n", add_special_tokens=False)
    losses = Losses()
    learner = SFTLearner(**arguments(tiny_choice, sampling=Sampling(stop=("\n",))))
    fit(learner, ListData(PROBLEMS), 1, callbacks=[losses])
    expected = mean_nll(tiny_choice, start_model(tiny_choice), PROBLEMS, stop)
    assert losses.losses == [pytest.approx(float(expected.detach()), abs=1e-5)]


def test_a_reference_solution_is_learned_where_no_completions_are_given(tiny_choice: Path) -> None:
    problem = replace(PROBLEMS[0], metadata={}, reference=" one")
    losses = Losses()
    fit(SFTLearner(**arguments(tiny_choice)), ListData([problem]), 1, callbacks=[losses])
    given = replace(PROBLEMS[0], metadata={"completions": [" one"]})
    expected = mean_nll(tiny_choice, start_model(tiny_choice), [given])
    assert losses.losses == [pytest.approx(float(expected.detach()), abs=1e-5)]


def test_nothing_to_learn_from_is_an_error(tiny_choice: Path) -> None:
    problem = replace(PROBLEMS[0], id="lonely", metadata={})
    with pytest.raises(
        ValueError, match=r"problem lonely: expected metadata\['completions'\] or a reference"
    ):
        fit(SFTLearner(**arguments(tiny_choice)), ListData([PROBLEMS[0], problem]), 1)


def test_a_warm_start_raises_the_likelihood_and_is_exported(tiny_choice: Path, tmp_path: Path) -> None:
    learner = SFTLearner(
        **arguments(
            tiny_choice,
            optimizer=partial(torch.optim.AdamW, lr=1e-2),
            schedule=Schedule("linear", warmup_steps=3),
            export_to=str(tmp_path / "model"),
        )
    )
    losses = Losses()
    fit(learner, ChoiceDataModule(answers_per_prompt=4, batch_size=8), 12, callbacks=[losses])
    first, last = losses.losses[0], losses.losses[-1]
    assert last < first - 0.8
    assert learner.prompt_cursor == 96
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, weights(learner)[name])
    assert PolicyConfig(str(tmp_path / "model")).tokenizer().eos_token == "<eos>"
