from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_madrl.data import ChoiceDataModule
from lit_madrl.data.choice import render_prompt, split_pairs
from lit_madrl.data.choice_topics import SHOTS, TEMPLATES, TOPICS
from lit_madrl.types import Problem

OCEAN = TOPICS[0]
positions = st.integers(0, 10**9)
indices = st.integers(0, 479)


def text(problem: Problem) -> str:
    return problem.prompt if isinstance(problem.prompt, str) else problem.prompt[0]["content"]


def test_topics_are_64_different_nouns_with_five_different_options() -> None:
    assert len(TOPICS) == len({topic.singular for topic in TOPICS}) == len({t.plural for t in TOPICS}) == 64
    assert all(len(set(topic.options)) == 5 for topic in TOPICS)
    assert len(set(TEMPLATES)) == 10
    assert not {shot.singular for shot, _ in SHOTS} & {topic.singular for topic in TOPICS}
    assert all(answer in shot.options for shot, answer in SHOTS)


def test_split_is_disjoint_and_covers_every_topic() -> None:
    train, validation, test = split_pairs()
    assert (len(train), len(validation), len(test)) == (480, 80, 80)
    assert set(train) | set(validation) | set(test) == {(t, p) for t in range(64) for p in range(10)}
    for part in (train, validation, test):
        assert {pair.topic for pair in part} == set(range(64))


def test_prompts_of_a_split_never_appear_in_another() -> None:
    for style in ("plain", "chat", "few_shot"):
        data = ChoiceDataModule(form="open", style=style)  # type: ignore[arg-type]
        parts = [data.validation_problems(), data.test_problems()]
        parts.append([data.train_problem(i, i) for i in range(data.num_train_prompts)])
        texts = [{text(problem) for problem in part} for part in parts]
        assert [len(part) for part in texts] == [80, 80, 480]
        assert not texts[0] & texts[1] | texts[0] & texts[2] | texts[1] & texts[2]


def test_prompts_read_as_written() -> None:
    options = OCEAN.options
    assert render_prompt(OCEAN, 0, options, "plain") == (
        "Name one of the five oceans: Pacific, Atlantic, Indian, Southern, and Arctic.\nAnswer:"
    )
    assert render_prompt(OCEAN, 0, (), "plain") == "Name one of the five oceans.\nAnswer:"
    assert render_prompt(OCEAN, 1, (), "plain") == "Which of the five oceans comes to mind?\nAnswer:"
    assert render_prompt(OCEAN, 3, (), "chat") == (
        {"role": "user", "content": "Choose a single ocean. Reply with your answer alone."},
    )
    assert render_prompt(OCEAN, 1, options[::-1], "few_shot") == (
        "Which of the five working days, Wednesday, Monday, Tuesday, Thursday, and Friday, comes to mind?\n"
        "Answer: Friday\n"
        "Which of the five clothing sizes, small, tiny, large, medium, and huge, comes to mind?\n"
        "Answer: medium\n"
        "Which of the five oceans, Arctic, Southern, Indian, Atlantic, and Pacific, comes to mind?\n"
        "Answer:"
    )


@pytest.mark.parametrize("template", range(10))
@pytest.mark.parametrize("style", ["plain", "chat", "few_shot"])
def test_the_closed_form_lists_each_option_once_and_the_open_form_none(template: int, style: Any) -> None:
    for topic in TOPICS:
        order = topic.options[::-1]
        closed = text(Problem("", render_prompt(topic, template, order, style)))
        opened = text(Problem("", render_prompt(topic, template, (), style)))
        listed = f"{', '.join(order[:-1])}, and {order[-1]}"
        assert closed.count(listed) == 1
        assert listed not in opened
        assert not set("[]{}") & set(closed + opened)


@given(indices, positions, st.integers(0, 99))
def test_training_prompt_is_a_function_of_seed_and_position(index: int, position: int, seed: int) -> None:
    first = ChoiceDataModule(form="both", seed=seed, answers_per_prompt=4)
    for other in range(3):
        first.train_problem(other, other)
    second = ChoiceDataModule(form="both", seed=seed, answers_per_prompt=4)
    assert first.train_problem(index, position) == second.train_problem(index, position)


def test_another_position_or_seed_gives_another_order() -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        data = ChoiceDataModule(seed=seed)
        return [tuple(data.train_problem(0, position).metadata["order"]) for position in range(1200)]

    counts = Counter(orders(0))
    assert len(counts) == 120
    assert max(counts.values()) < 30  # 10 expected
    assert orders(0) != orders(1)


def test_the_list_is_in_the_recorded_order_and_the_options_in_canonical_order() -> None:
    data = ChoiceDataModule(target=[0.1, 0.2, 0.3, 0.4, 0.0])
    for position in range(50):
        problem = data.train_problem(position, position)
        topic = next(topic for topic in TOPICS if topic.singular == problem.metadata["topic"])
        assert problem.options == tuple(f" {option}" for option in topic.options)
        listed = [text(problem).index(topic.options[k]) for k in problem.metadata["order"]]
        assert listed == sorted(listed)
        assert problem.target == (0.1, 0.2, 0.3, 0.4, 0.0)


def test_only_chat_completions_start_without_a_space() -> None:
    for style, space in (("plain", " "), ("few_shot", " "), ("chat", "")):
        problem = ChoiceDataModule(style=style).test_problems()[0]  # type: ignore[arg-type]
        assert [option[: len(space)] for option in problem.options] == [space] * 5
        assert not any(option.strip() != option[len(space) :] for option in problem.options)


def test_evaluation_prompts_are_the_same_in_every_run() -> None:
    first, second = ChoiceDataModule(seed=0), ChoiceDataModule(seed=1, batch_size=2)
    assert first.validation_problems() == second.validation_problems()
    assert first.test_problems() == second.test_problems()


def test_both_forms_alternate_in_evaluation_and_mix_in_training() -> None:
    data = ChoiceDataModule(form="both")
    for problems in (data.validation_problems(), data.test_problems()):
        assert [problem.metadata["form"] for problem in problems] == ["closed", "open"] * 40
        assert len({problem.id for problem in problems}) == 80
    forms = Counter(data.train_problem(0, position).metadata["form"] for position in range(1000))
    assert abs(forms["open"] - 500) < 5 * 250**0.5


def test_targets_and_categories() -> None:
    assert ChoiceDataModule().target == (0.2,) * 5
    assert ChoiceDataModule(target="peaked").target == (0.6, 0.3, 0.1, 0.0, 0.0)
    assert ChoiceDataModule().categories == ("first", "second", "third", "fourth", "fifth")
    assert ChoiceDataModule().num_categories == 5


def test_answers_follow_the_skew() -> None:
    data = ChoiceDataModule(answers_per_prompt=50)
    counts = [0] * 5
    for position in range(200):
        problem = data.train_problem(position, position)
        assert len(problem.metadata["completions"]) == 50
        for answer in problem.metadata["completions"]:
            counts[problem.options.index(answer)] += 1
    for count, share in zip(counts, (0.6, 0.2, 0.1, 0.07, 0.03), strict=True):
        assert abs(count - 10_000 * share) < 5 * (10_000 * share * (1 - share)) ** 0.5


def test_answers_change_nothing_else() -> None:
    plain, warm = ChoiceDataModule(form="both"), ChoiceDataModule(form="both", answers_per_prompt=3)
    assert "completions" not in plain.train_problem(5, 6).metadata
    assert plain.train_problem(5, 6).prompt == warm.train_problem(5, 6).prompt
    assert all("completions" not in problem.metadata for problem in warm.validation_problems())


def test_data_loaders_show_the_task() -> None:
    data = ChoiceDataModule(batch_size=6, eval_batch_size=30)
    assert len(next(iter(data.train_dataloader()))) == 6
    assert [len(batch) for batch in data.val_dataloader()] == [26, 27, 27]
    assert [problem for batch in data.test_dataloader() for problem in batch] == data.test_problems()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"form": "half"}, "form: expected one of closed, open, both, got 'half'"),
        ({"style": "poem"}, "style: expected one of plain, chat, few_shot, got 'poem'"),
        ({"target": "steep"}, "target: expected uniform, peaked or 5 probabilities, got 'steep'"),
        ({"target": [0.5, 0.5]}, "target: expected 5 probabilities"),
        ({"target": [0.6, 0.6, -0.2, 0.0, 0.0]}, "target: expected finite probabilities >= 0"),
        ({"target": [0.6, 0.6, 0.2, 0.0, 0.0]}, "target: expected probabilities that sum to 1"),
        ({"skew": [float("nan")] * 5}, "skew: expected finite probabilities"),
        ({"answers_per_prompt": -1}, "answers_per_prompt: expected an integer >= 0, got -1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChoiceDataModule(**arguments)
