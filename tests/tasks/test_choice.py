from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_madrl.data.choice_topics import TOPICS, Topic
from lit_madrl.tasks import Categorizer, ChoiceCategorizer
from lit_madrl.types import Problem
from tests.helpers.categorizer_contract import CategorizerContract
from tests.helpers.judge_contract import Examples

OCEANS = ("Pacific", "Atlantic", "Indian", "Southern", "Arctic")
METALS = (" iron", " gold", " silver", " copper", " tin")
BOROUGHS = ("Manhattan", "Brooklyn", "Queens", "the Bronx", "Staten Island")
SAUCES = ("hollandaise", "tomato", "béchamel", "velouté", "espagnole")
ROOMS = ("kitchen", "bedroom", "bathroom", "living room", "dining room")


def category(options: tuple[str, ...], text: str) -> int:
    return int(ChoiceCategorizer()([Problem("p", "", options=options)], [[text]]))


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        (OCEANS, "Pacific", 0),
        (OCEANS, " Arctic\n", 4),
        (OCEANS, "INDIAN", 2),
        (OCEANS, "sOuThErN", 3),
        (OCEANS, "the Pacific", 0),
        (OCEANS, "An Atlantic", 1),
        (OCEANS, "I'd pick the Pacific Ocean.", 0),
        (OCEANS, "Atlantic, of course! Atlantic it is.", 1),
        (OCEANS, '"Pacific"', 0),
        (OCEANS, "“Pacific”", 0),
        (OCEANS, "**Pacific**", 0),
        (OCEANS, "_Pacific_", 0),
        (OCEANS, "`Arctic`", 4),
        (OCEANS, "- Arctic", 4),
        (OCEANS, "1. Arctic", 4),
        (OCEANS, "\\boxed{Arctic}", 4),
        (OCEANS, "<b>Arctic</b>", 4),
        (OCEANS, "Pacific's", 0),
        (OCEANS, "Pacífic", 0),
        (OCEANS, "\uff30acific", 0),
        (OCEANS, "Pacific or Atlantic", -1),
        (OCEANS, "not the Pacific but the Arctic", -1),
        (OCEANS, "Baltic", -1),
        (OCEANS, "Pacifics", -1),
        (OCEANS, "transatlantic", -1),
        (OCEANS, "PacificAtlantic", -1),
        (OCEANS, "", -1),
        (OCEANS, " \n\t", -1),
        (OCEANS, "?!", -1),
        (METALS, "tin", 4),
        (METALS, "a tingle", -1),
        (METALS, "It has a tin-like look", 4),
        (METALS, "irony", -1),
        (METALS, "golden", -1),
        (BOROUGHS, "Bronx", 3),
        (BOROUGHS, "The Bronx!", 3),
        (BOROUGHS, "staten\nisland", 4),
        (BOROUGHS, "Staten-Island", 4),
        (BOROUGHS, "Staten", -1),
        (BOROUGHS, "Island Staten", -1),
        (SAUCES, "bechamel", 2),
        (SAUCES, "BÉCHAMEL", 2),
        (SAUCES, "be\u0301chamel", 2),
        (SAUCES, "veloute sauce", 3),
        (ROOMS, "living room", 3),
        (ROOMS, "room", -1),
        (ROOMS, "living, then dining room", 4),
        (("A", "B"), "A", 0),
        (("7", "17"), "17", 1),
    ],
)
def test_matching(options: tuple[str, ...], text: str, expected: int) -> None:
    assert category(options, text) == expected


TAKEN = {word.casefold() for topic in TOPICS for option in topic.options for word in re.split(r"\W", option)}
FILLER = (
    "I",
    "would",
    "pick",
    "say",
    "well",
    "so",
    "my",
    "choice",
    "is",
    "please",
    "thanks",
    "tingle",
    "irony",
)
words = st.lists(st.sampled_from([word for word in FILLER if word.casefold() not in TAKEN]), max_size=6)
wrappers = st.sampled_from(
    ["{}", "'{}'", '"{}"', "**{}**", "_{}_", "the {}", "A {}", "{}.", "({})", "\n{}\n", "{}?!"]
)
cases = st.sampled_from([str, str.lower, str.upper, str.title])


@given(st.sampled_from(TOPICS), st.integers(0, 4), words, words, wrappers, cases)
def test_every_option_is_recognised_in_a_sentence(
    topic: Topic, k: int, before: list[str], after: list[str], wrapper: str, case: type[str]
) -> None:
    text = " ".join([*before, wrapper.format(case(topic.options[k])), *after])
    assert category(topic.options, text) == k
    assert category(topic.options, f"{text}, {topic.options[(k + 1) % 5]}") == -1
    assert category(topic.options, " ".join(before + after)) == -1


@given(st.sampled_from(TOPICS), st.text())
def test_any_text_has_a_category_or_none(topic: Topic, text: str) -> None:
    assert -1 <= category(topic.options, text) <= 4


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.singular)
def test_options_of_a_topic_are_unambiguous(topic: Topic) -> None:
    assert [category(topic.options, option) for option in topic.options] == [0, 1, 2, 3, 4]


def test_each_group_is_judged_by_its_own_problem() -> None:
    problems = [Problem("a", "", options=OCEANS), Problem("b", "", options=METALS)]
    categories = ChoiceCategorizer()(problems, [["Arctic", "tin", "Indian"], ["Arctic", "tin", "iron"]])
    assert categories.dtype == torch.long
    assert categories.tolist() == [[4, -1, 2], [-1, 4, 0]]


@pytest.mark.parametrize(
    ("options", "completions", "message"),
    [
        ((), [["x"]], r"Problem\.options: expected at least one option, got none in 'p'"),
        (("tin", "a tin can"), [["x"]], "none contains another, got 'tin' and 'a tin can'"),
        (("Tin", "the tin"), [["x"]], "none contains another"),
        (("tin", "!"), [["x"]], "at least one word, got '!'"),
    ],
)
def test_bad_input(options: tuple[str, ...], completions: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChoiceCategorizer()([Problem("p", "", options=options)], completions)


class TestContract(CategorizerContract):
    @pytest.fixture
    def categorizer(self) -> Categorizer:
        return ChoiceCategorizer()

    @pytest.fixture
    def num_categories(self) -> int:
        return 5

    @pytest.fixture
    def examples(self) -> Examples:
        problems = [Problem("a", "", options=OCEANS), Problem("b", "", options=METALS)]
        return problems, [[*OCEANS, "tin", ""], ["tin", "copper", *METALS[:3], "Arctic", "gold or tin"]]
