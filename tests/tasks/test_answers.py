from __future__ import annotations

import re
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lit_madrl.tasks.answers import (
    after_hashes,
    after_thinking,
    last_boxed_answer,
    normalize_answer,
    plain_characters,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x</think>y", "y"),  # the template opened it
        ("<think>x</think>y", "y"),
        ("<think>x</think>y<think>z</think> w", " w"),
        ("x</think>y</think>", ""),
        ("<think>x", ""),
        ("<think>x</think>y<think>z", ""),
        ("y", "y"),
        ("", ""),
    ],
)
def test_after_thinking(text: str, expected: str) -> None:
    assert after_thinking(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}} holds", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        (r"\boxed{\left\{ 1, 2 \right\}}", r"\left\{ 1, 2 \right\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ("\\boxed{\n 7 \n}", "7"),
        (r"\boxed {3}", "3"),
        (r"\fbox{3}", "3"),
        (r"$\framebox{204}$ minutes", "204"),
        (r"\boxed 5", "5"),
        (r"$\boxed5$", "5"),
        (r"\boxed -3/4.", "-3/4"),
        (r"\boxed{4} or rather \boxed 5.", "5"),
        (r"\boxed 5 or rather \boxed{4}", "4"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{1 and \boxed{2}", "2"),
        (r"\boxed{7}. Your answer goes inside \boxed{}.", "7"),
        (r"\boxed{7}. It is in the \boxed as told", "7"),
        (r"\boxed{5", None),
        (r"\boxed{\{5}", "\\{5"),
        (r"\boxed{5\}", None),
        (r"\boxed{ }", None),
        (r"\boxed", None),
        (r"\boxedness{5}", None),
        ("boxed{5}", None),
        ("42", None),
        ("", None),
    ],
)
def test_last_boxed_answer(text: str, expected: str | None) -> None:
    assert last_boxed_answer(text) == expected


def reference_last_boxed(text: str) -> str | None:
    """Counts braces after each opener, the last first."""
    for opener in reversed([found.end() for found in re.finditer(r"\\boxed\{", text)]):
        depth, position = 1, opener
        while position < len(text) and depth:
            if text[position] == "\\":
                position += 1
            else:
                depth += (text[position] == "{") - (text[position] == "}")
            position += 1
        if depth == 0 and text[opener : position - 1].strip():
            return text[opener : position - 1].strip()
    return None


@given(
    st.lists(st.sampled_from(["\\boxed{", "{", "}", "}", "\\{", "\\}", "\\\\", "a", " ", "\n"]), max_size=25)
)
def test_boxes_are_found_as_by_counting_braces(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert last_boxed_answer(text) == reference_last_boxed(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5 - 8 = -3\n#### -3", "-3"),
        ("#### 42", "42"),
        ("####42", "42"),
        ("#### 42\n" + "x" * 480, "42"),
        ("#### 42 " + "x" * 480, "42"),
        ("#### 42 " + "and so on, 7 times, " * 24, "42"),
        ("#### 42. Then 7", "42"),
        ("#### 42, not 7", "42"),
        ("#### 42km", "42"),
        ("#### 1\n#### 2", "2"),
        ("#### 7\n#### Note", "7"),
        ("#### 7\n####", "7"),
        ("### 7\n##### 8", None),
        ("####\n42", None),
        ("#### none", None),
        ("#### -", None),
        ("7", None),
        ("", None),
        ("#### 1,000", "1000"),
        ("#### 1,450,000", "1450000"),
        ("#### 1,00,000", "100000"),
        ("#### 1 000", "1000"),
        ("#### 1\u202f000 euros", "1000"),
        ("#### 1,00", None),
        ("#### 1,0000", None),
        ("#### 12,345.50", "12345.50"),
        ("#### $18", "18"),
        ("#### $18$", "18"),
        (r"#### \$1,000 a week", "1000"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### +5", "5"),
        ("#### **18**", "18"),
        ("#### = 18", "18"),
        ("#### 20%", "20"),
        ("#### 3/4 of it", "3/4"),
        ("#### 0.75", "0.75"),
        ("#### .75", ".75"),
        ("#### 10:30", None),
        ("#### 1.2.3", None),
        ("#### 2^10", None),
        ("#### \uff11\uff12", "12"),
        ("#### \u0967\u0968", "12"),
        ("#### \u2212\u0663", "-3"),
    ],
)
def test_after_hashes(text: str, expected: str | None) -> None:
    assert after_hashes(text) == expected


@given(st.integers(), st.text(), st.text(st.characters(exclude_characters="#"), max_size=20))
def test_the_number_after_hashes_is_read_whatever_the_lines_around_it_say(
    number: int, before: str, after: str
) -> None:
    assert after_hashes(f"{before}\n#### {number}\n{after}") == str(number)
    assert after_hashes(f"{before}\n#### {number:,}\n{after}") == str(number)


def test_plain_characters() -> None:
    assert plain_characters("\uff11\u0967\u0661\u09e7\U0001d7d9") == "11111"
    assert plain_characters("\uff08\uff0d\uff11\uff0e\uff15\uff05\uff09") == "(-1.5%)"
    assert plain_characters("\u2212\u0661\u066b\u0665\u3002") == "-1.5."
    assert plain_characters("x² ½ π 一") == "x² ½ π 一"


@pytest.mark.parametrize(
    "spellings",
    [
        [
            "1000",
            "1,000",
            "1{,}000",
            r"1,\!000",
            r"1\,000",
            "1 000",
            "1~000",
            "1\u202f000",
            r"\$1,000",
            "1,000.",
        ],
        ["1234567", "1,234,567", "12,34,567", "1 234 567"],
        ["-1000.5", "-1,000.50", "\u22121000.5"],
        [
            r"\frac{1}{2}",
            r"\frac12",
            r"\dfrac12",
            r"\tfrac{1}{2}",
            r"\cfrac{1}2",
            r"\frac1{2}",
            "1/2",
            r"\frac 1 2",
        ],
        [r"-\frac{1}{2}", "-1/2", r"- \dfrac {1} {2}"],
        [r"(3,\frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)", r"\bigl(3,\;\frac{\pi}2\bigr)"],
        ["Evelyn", r"\text{Evelyn}", r"\mbox{Evelyn}", r"\textbf{ Evelyn }", r"\mathrm{Evelyn}"],
        [r"\text{(C)}", "C", "(C)", r"\textbf{(C) }"],
        [
            "42",
            r"42\text{ cm}",
            r"42 \text{ cm}^2",
            r"42\mathrm{cm}^{3}",
            r"42\,\mbox{inches}.",
            "42.0",
            "+42",
            "042",
        ],
        ["50", r"50\%", "50%", r"50 \%", "\uff15\uff10\uff05"],
        ["90", r"90^\circ", r"90^{\circ}", "90°", r"90\degree"],
        [
            "5",
            "$5$",
            r"\$5",
            r"\(5\)",
            r"\[5\]",
            "5.",
            "\uff15",
            "\u096b",
            "\u0665",
            "5\u0964",
            r"\displaystyle 5",
            "\n5 ",
        ],
        ["0.5", ".5", ".50", "00.5", "0.500"],
        ["0", "00", "0.0", ".0"],
        ["(0.5,3)", "(.50, 3.0)"],
        [r"\sqrt{2}+x_{10}", r"\sqrt{2} + x_{10}", r"\sqrt{2}\,+\,x_{10}"],
        [r"\leftarrow", r"\leftarrow "],
    ],
    ids=lambda spellings: spellings[0],
)
def test_spellings_of_one_answer(spellings: list[str]) -> None:
    assert {normalize_answer(spelling) for spelling in spellings} == {normalize_answer(spellings[0])}
    assert normalize_answer(spellings[0]) == spellings[0] or spellings[0].startswith(r"\text")


@pytest.mark.parametrize(
    "answers",
    [
        ["1", "10", "-1", "1.1", "1_2", "01.10.1", "1/1/1", "x1", "1x"],
        ["1,2", "12", "(1,2)", "[1,2]", r"\{1,2\}"],
        ["(1,234)", "1234", "(1,2,34)"],
        ["(1,000)", "(1,0)", "1000"],
        ["1,2345", "12345", "1,23,45"],
        ["x^2", "x²", "x2"],
        [r"\frac{1}{2}3", r"\frac{1}{23}", r"\frac{12}{3}", "123"],
        ["A", "B", "AB", r"\text{A}\text{C}"],
        [r"\pi", "pi", r"2\pi"],
        ["", "0"],
    ],
    ids=lambda answers: answers[0],
)
def test_different_answers_stay_different(answers: list[str]) -> None:
    assert len({normalize_answer(answer) for answer in answers}) == len(answers)


@given(
    st.decimals(-(10**9), 10**9, places=3), st.sampled_from(["{}", "${}$", r"\text{{{}}}", r"{}\%", " {} . "])
)
@example(Decimal("-0.000"), "{}")
def test_a_number_has_one_spelling(number: Decimal, wrapper: str) -> None:
    plain = f"{number:f}".rstrip("0").rstrip(".")
    for spelling in (f"{number:f}", f"{number:,f}", f"{number:f}000", plain):
        assert normalize_answer(wrapper.format(spelling)) == plain


@given(st.text(st.sampled_from("\\{}$0123456789.,/ x-+^()textfracboxed#"), max_size=40) | st.text())
def test_any_text_can_be_read(text: str) -> None:
    for extract in (after_thinking, last_boxed_answer, after_hashes):
        assert extract(text) is None or isinstance(extract(text), str)
    answer = normalize_answer(text)
    assert answer == "".join(answer.split())
