from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_madrl.augmenters import PrefixBoundaries, SentenceBoundaries, SeparatorBoundaries
from lit_madrl.augmenters.boundaries import token_boundaries

BOX = r"So \boxed{7}."


def characters(text: str) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(len(text))]


def split(pieces: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """A text and the offsets of its tokens."""
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    return "".join(pieces), list(zip([0, *ends], ends, strict=False))


def marked(rule: PrefixBoundaries, text: str) -> str:
    """``text`` with a bar at each boundary, for tokens of one character."""
    for cut in reversed(rule(text, characters(text))):
        text = f"{text[:cut]}|{text[cut:]}"
    return text


def check(rule: PrefixBoundaries, expected: str) -> None:
    assert marked(rule, expected.replace("|", "")) == expected


@pytest.mark.parametrize(
    "expected",
    [
        # English
        f"One.| Two!| Three?!| Four... five.| Six...| {BOX}",
        f"It is 3.14 or 1,000.5.| Then e.g. this, i.e. That, at 5 p.m. Today.| {BOX}",
        f"Dr. Smith and J. Doe et al. say so.| See Fig. 3 vs. Eq. 4 of No. 5.| {BOX}",
        f'He said "yes."| (She did not.)| **Bold.**| {BOX}',
        f"5! = 120 and n! is big.| Now 3 + 4.| {BOX}",
        f"1. First we add.|\n2. Then stop.|\n\n## 3. Last\nStep 4. Add.| {BOX}",
        f"x is 5.| Then y.\nlower case goes on.| {BOX}",
        f"We have:\n\nSome text|\n\nMore text,\n\nand the end.| {BOX}",
        f"Items|\n- one|\n- two|\n\n{BOX}",
        # Chinese
        "设数为三。|对吗？|对！|他说：“好。”|（完。）|因此，它是3.14。|所以是\\boxed{7}。",
        "1. 首先计算。|\n2．然后，值是３．１４。|x=3.|因此\\boxed{7}。",
        # Hindi
        "मान लें x = 3.5 है।| डॉ. राम ने कहा।| क्या यह सही है?| हाँ॥| अतः उत्तर \\boxed{7} है।",
        # Spanish
        "¿Cuánto es?| ¡Es mucho!| ¡¿Qué?!| El Sr. Paz tiene 3,5 kg, p. ej. manzanas.| La Dra. Gil no.| Es \\boxed{7}.",
        # French
        "« Oui ! »| Alors M. Petit a 2,5 m, c.-à-d. peu.| Est-ce vrai ?| Mme. Roux dit « non. »| C'est \\boxed{7}.",
    ],
)
def test_sentences(expected):
    check(SentenceBoundaries(), expected)


@pytest.mark.parametrize(
    ("formulas", "expected"),
    [
        ("all", f"Let $x = 1. Y$| be $y$,| and \\(z. W\\)| too.| The $n$th one.| {BOX}"),
        ("display", f"Let $x = 1. Y$ be $y$, and \\(z. W\\) too.| The $n$th one.| {BOX}"),
        ("display", f"Then $$a. B$$| and \\[c. D\\]|Thus \\begin{{align}} e. F \\end{{align}}.| {BOX}"),
        (
            "display",
            f"It costs $5. They pay $6. $x. Y$ is $7.| {BOX}".replace("$5.", "$5.|").replace("$6.", "$6.|"),
        ),
        ("all", f"First \\boxed{{1. A}}| then.| {BOX}"),
        ("all", f"Open \\( and never. Closed. {BOX}"),
        ("all", f"Run `a. B` now.| Then.| {BOX}"),
    ],
)
def test_formulas(formulas, expected):
    check(SentenceBoundaries(formulas=formulas), expected)


def test_code_is_one_unit():
    check(SentenceBoundaries(), f"Run this:\n```python\nx = 1. # A. B\n\ny = '$'\n```|\nIt works.| {BOX}")
    check(SentenceBoundaries(lines=True), f"Run:|\n```\na\nb\n```|\n{BOX}")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("boxed", r"A.| \boxed{1}| b.| C. \boxed{2} D. E."),  # several: the last
        ("boxed", r"A.| {\text{B \boxed{\frac{1}{2}}}} C."),
        ("boxed", r"A.| B. \boxed{\boxed{1}}."),
        ("boxed", r"A.| B. \boxed{1}. C. \boxed{2"),  # the last balanced one
        ("boxed", r"A.| Thus $x$| is $\boxed{1}$."),
        ("boxed", r"A.| Thus. $$\boxed{1}$$"),  # the bare answer is no continuation
        ("boxed", r"A.| Thus.| $$x = \boxed{1}$$"),
        ("boxed", r"\boxed{1} is right. A. B."),  # it appears at once: nothing may be given
        ("boxed", "A. B. C."),  # no answer
        ("none", "A.| B.| C."),
        ("#### .*", "One.| Two.| Three #### 1.| Four is five\n#### 6. Seven."),
        ("#### .*", "One. Two."),
    ],
)
def test_the_answer_stays_in_the_suffix(answer, expected):
    # Words of one capital could be initials.
    words = {"A.": "Aa.", "B.": "Bb.", "C.": "Cc.", "D.": "Dd.", "E.": "Ee."}
    check(SentenceBoundaries(answer), re.sub(r"[A-E]\.", lambda m: words[m[0]], expected))


def test_lines_with_a_step_each():
    rule = SentenceBoundaries("#### .*", lines=True)
    check(rule, "It is 2/2=$<<2/2=1>>1 each|\nSo 2+1=$<<2+1=3>>3|\nThen 3*1=<<3*1=3>>3\n#### 3")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([" One", ".", " Two", ".\n\n", "So", r" \boxed{7}"], [2, 4]),  # tokens that hold the space after
        ([" One", ".", "\n\n", " So", r" \boxed{7}"], [2]),  # the first of the possible cuts
        ([" One", ". Two", ".", " So", r" \boxed{7}"], [3]),  # an end inside a token is none
        (["One $x", "$. Two", " b. So", r" \boxed{7}"], []),
        (["$a", "$$", "b$", " is. ", r"So \boxed{7}"], [3, 4]),  # $a$|$b$: an end within a token
        (["One. So ", r"\boxed", "{7}"], []),
        (["One.", " So", r" \boxed{7}", ""], [1]),  # a termination token without text
    ],
)
def test_tokens_of_several_characters(pieces, expected):
    assert SentenceBoundaries()(*split(pieces)) == expected


def test_a_character_of_several_tokens_is_not_parted():
    text = "है। So \\boxed{7}"
    offsets = [(0, 1), (0, 1), (1, 2), (2, 3), (2, 3), (2, 3), (3, 6), (6, len(text)), (0, 0)]
    assert SentenceBoundaries()(text, offsets) == [6]
    # Offsets that leave out the space, as some tokenizers give them.
    assert SentenceBoundaries()("Aa. So \\boxed{7}", [(0, 2), (2, 3), (4, 6), (7, 16)]) == [2]


@pytest.mark.parametrize("offsets", [[(0, 1), (2, 1)], [(0, 9)], [(-1, 1)]])
def test_bad_offsets(offsets):
    with pytest.raises(ValueError, match="offsets: expected 0 <= start <= end <= 3, got"):
        token_boundaries([(1, 1)], "abc", offsets)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"separator": ";", "after": r"\d"}, "+ 3 ~ ; - 4 5 ;| + 3 6 ; [ 6 ]"),
        ({"separator": ";", "after": r"\d+", "keep": 0}, "+ 3 ~ ; - 4 5 ;| + 3 6 ;| [ 6 ]"),
        ({"separator": ";"}, "+ 3 ~ ;| - 4 5 ;| + 3 6 ; [ 6 ]"),
        ({"separator": "\n"}, "a = 1\n|b = 2\n|\n|c = 3\nprint(c)"),
        ({"separator": ";", "keep": 5}, "a; b; c"),
        ({"separator": "."}, "no separator"),
    ],
)
def test_separators(arguments, expected):
    check(SeparatorBoundaries(**arguments), expected)


def test_a_chain_with_one_token_a_word():
    # The last separator is excluded: a continuation has at least one whole step to write.
    pieces = [
        "+ ",
        "3 ",
        "~ ",
        "; ",
        "+ ",
        "2 ",
        "9 ",
        "; ",
        "- ",
        "4 ",
        "5 ",
        "; ",
        "[ ",
        "5 ",
        "] ",
        "<eos>",
    ]
    assert SeparatorBoundaries(";", after=r"\d")(*split(pieces)) == [8]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SentenceBoundaries(answer="("), r"answer: expected a regular expression, got '\('"),
        (lambda: SentenceBoundaries(formulas="some"), "formulas: expected 'all' or 'display', got 'some'"),
        (lambda: SeparatorBoundaries(""), "separator: expected a non-empty string"),
        (lambda: SeparatorBoundaries(";", after="["), "after: expected a regular expression"),
        (lambda: SeparatorBoundaries(";", keep=-1), "keep: expected an integer >= 0, got -1"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


CLOSED = ["$x. Y$", r"\(a. B\)", "$$c. D$$", r"\[e. F\]", r"\begin{a}g. H\end{a}", r"\boxed{\frac{1}{2}. I}"]
CLOSED += ["\n```\nj. K\n\nl\n```\n", "`m. N`"]
OPEN = [
    "Alpha beta.",
    "第一步。",
    "यह है।",
    "¿Qué tal?",
    "Bravo !",
    "value 3.14 and",
    "e.g. this",
    "Line\n\nLine",
    "2.",
]


def places(pieces: list[str]) -> list[tuple[int, int]]:
    """Start and end of each delimited piece in the pieces joined by spaces."""
    found, position = [], 0
    for piece in pieces:
        if piece in CLOSED or "boxed" in piece:
            start = position + len(piece) - len(piece.lstrip())
            found.append((start, start + len(piece.strip())))
        position += len(piece) + 1
    return found


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sampled_from(OPEN + CLOSED), max_size=8), st.randoms(use_true_random=False))
def test_invariants(pieces, random):
    pieces = [*pieces, "Finally", r"$\boxed{7}$", "."]
    text = " ".join(pieces)
    cuts = sorted(random.sample(range(1, len(text)), random.randrange(1, len(text))))
    offsets = list(zip([0, *cuts], [*cuts, len(text)], strict=True))
    boundaries = SentenceBoundaries()(text, offsets)
    assert boundaries == sorted(set(boundaries))
    for t in boundaries:
        assert 1 <= t < len(offsets)
        prefix, suffix = text[: offsets[t - 1][1]], text[offsets[t][0] :]
        assert prefix + suffix == text
        assert re.search(r"\w.*\$\\boxed\{7\}\$ \.$", suffix, re.DOTALL)
        assert not any(start < len(prefix) < end for start, end in places(pieces))
        assert re.search(r"([.।?!。})\]$`]|Line)$", prefix.rstrip())
    # With finer tokens there are at least as many places to cut.
    assert len(SentenceBoundaries()(text, characters(text))) >= len(boundaries)


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="aB1.。! \n$`\\()[]{}#", max_size=60))
def test_any_text_has_an_answer_to_leave(text):
    text += r" and \boxed{7}"
    for t in SentenceBoundaries()(text, characters(text)):
        assert re.search(r"\w.*\\boxed\{7\}", text[t:], re.DOTALL)


def test_inputs_are_not_mutated_and_tokens_may_be_absent():
    offsets = characters("Aa. Bb \\boxed{1}")
    before = list(offsets)
    SentenceBoundaries()("Aa. Bb \\boxed{1}", offsets)
    assert offsets == before
    assert SentenceBoundaries()("", []) == []
    assert SeparatorBoundaries(";")("", []) == []
