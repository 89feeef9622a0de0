"""Where text and tokens meet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_madrl.learners.collector import Collector, stack_targets
from lit_madrl.policy import Policy, PolicyConfig
from lit_madrl.rollouts import TorchEngine
from lit_madrl.tasks import ChoiceCategorizer
from lit_madrl.types import Problem, Sampling
from tests.helpers.learning import EOS, ScriptedEngine, choice_problems, tokenizer_of
from tests.helpers.tiny_models import row_logprobs

PROBLEMS = choice_problems(2)


@pytest.fixture(scope="module")
def policy(tiny_choice: Path) -> Policy:
    return PolicyConfig(str(tiny_choice)).build()


@pytest.fixture
def collector(policy: Policy, tiny_choice: Path) -> Collector:
    return Collector(policy, tokenizer_of(tiny_choice), TorchEngine(), ChoiceCategorizer())


def test_stop_ids_are_the_end_of_sequence_and_the_stop_strings(collector: Collector) -> None:
    line_break = collector.tokenizer.encode("\n", add_special_tokens=False)
    assert collector.stop_ids(Sampling()) == [EOS]
    assert collector.stop_ids(Sampling(stop=("\n",))) == [EOS, *line_break]


def test_a_stop_string_is_one_token(collector: Collector) -> None:
    with pytest.raises(ValueError, match=r"sampling.stop: expected strings of one token, got 'zq' with 2"):
        collector.stop_ids(Sampling(stop=("zq",)))


def test_there_must_be_something_to_stop_at(collector: Collector) -> None:
    collector.tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"sampling.stop: expected at least one string"):
        collector.stop_ids(Sampling())
    assert len(collector.stop_ids(Sampling(stop=("\n",)))) == 1


def test_chat_prompts_go_through_the_template(collector: Collector) -> None:
    collector.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% if enable_thinking is false %} no thoughts{% endif %}{% endif %}"
    )
    messages = [{"role": "user", "content": "one, two"}]
    plain, chat = collector.encode_prompts(
        [Problem("a", "user: one, two\nassistant: no thoughts"), Problem("b", messages)]
    )
    assert plain == chat


def test_completions_are_encoded_without_special_tokens_but_the_stop(collector: Collector) -> None:
    ids = collector.encode_completion(" one", 7)
    assert ids[-1] == 7
    assert collector.tokenizer.decode(ids[:-1]) == " one"


def test_decoding_drops_the_stop_token_alone(collector: Collector) -> None:
    """Also where the stop token is text, and not where the completion was cut."""
    line_break = collector.tokenizer.encode("\n", add_special_tokens=False)[0]
    word = collector.tokenizer.encode("one", add_special_tokens=False)
    groups = [[[*word, line_break], [*word, EOS], word, [line_break], [*word, EOS]]]
    engine = ScriptedEngine(lambda prompt: groups[0])
    rollouts = engine.generate([[5]], Sampling(group_size=5), [EOS, line_break])
    assert collector.decode(rollouts) == [["one", "one", "one", "", "one"]]
    unfinished = replace(rollouts, finished=torch.zeros(1, 5, dtype=torch.bool))
    assert collector.decode(unfinished) == [["one\n", "one", "one", "\n", "one"]]


def test_generation_uses_the_current_weights(collector: Collector, policy: Policy) -> None:
    sampling = Sampling(group_size=3, max_new_tokens=4)
    rollouts = collector.generate(PROBLEMS, sampling)
    assert rollouts.prompt_ids == collector.encode_prompts(PROBLEMS)
    values, totals = collector.logprobs(rollouts.prompt_ids, rollouts.completions())
    expected = rollouts.sampler_logprobs.flatten(0, 1)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(totals, expected.sum(-1), rtol=0, atol=1e-5)


def test_logprobs_of_given_completions(collector: Collector, policy: Policy) -> None:
    prompts, groups = [[5, 6], [7]], [[[8, 9, EOS], [8]], [[10, EOS]]]
    values, totals = collector.logprobs(prompts, groups)
    assert values.shape == (3, 3)
    assert not values.requires_grad
    flat = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
    for row, (prompt, completion) in enumerate(flat):
        expected = row_logprobs(policy.model, prompt, completion).detach()
        torch.testing.assert_close(values[row, : len(completion)], expected, rtol=0, atol=1e-5)
        assert not values[row, len(completion) :].any()
        assert float(totals[row]) == pytest.approx(float(expected.sum()), abs=1e-5)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"categorizer: expected a tensor of shape \(2, 2\), got NoneType"),
        (torch.zeros(2, 3), r"categorizer: expected a tensor of shape \(2, 2\), got \(2, 3\)"),
        (torch.full((2, 2), torch.nan), r"categorizer: expected finite numbers, got 4"),
    ],
)
def test_a_categorizer_that_fails_is_named(collector: Collector, returned: Any, message: str) -> None:
    collector.categorizer = lambda problems, completions: returned  # type: ignore[assignment]
    engine = ScriptedEngine(lambda prompt: [[5, EOS], [6, EOS]])
    rollouts = engine.generate([[5], [6]], Sampling(group_size=2), [EOS])
    with pytest.raises(ValueError, match=message):
        collector.score(PROBLEMS, rollouts, [["", ""]] * 2)


def test_without_judges_nothing_is_known(policy: Policy, tiny_choice: Path) -> None:
    engine = ScriptedEngine(lambda prompt: [[5, EOS], [6, 7]])
    rollouts = engine.generate([[5], [6]], Sampling(group_size=2), [EOS])
    scores = Collector(policy, tokenizer_of(tiny_choice), engine).score(PROBLEMS, rollouts, [["", ""]] * 2)
    assert scores.category.tolist() == [[-1, -1]] * 2
    assert not scores.correct.any()
    assert not scores.format.any()
    assert scores.on_policy.all()


def test_targets() -> None:
    problems = [Problem("a", "", target=(0.5, 0.5)), Problem("b", "", target=(1.0, 0.0))]
    assert stack_targets(problems).tolist() == [[0.5, 0.5], [1.0, 0.0]]
    assert stack_targets([Problem("a", ""), Problem("b", "")]).shape == (2, 0)
    with pytest.raises(ValueError, match=r"problem.target: expected one length in a batch, got \[0, 2\]"):
        stack_targets([problems[0], Problem("c", "")])
    with pytest.raises(ValueError, match=r"problem.target: expected probabilities that sum to 1"):
        stack_targets([Problem("d", "", (0.5, 0.6))])
    with pytest.raises(
        ValueError, match=r"problem.target: expected 3 probabilities \(one a category\), got 2"
    ):
        stack_targets(problems, num_categories=3)
