"""Where a completion says its answer, and one spelling for answers that are typeset in several ways."""

from __future__ import annotations

import re
import unicodedata

from lit_madrl.text import matching_braces

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?:\s*\{|[ \t]*(?P<number>[-+]?\d+(?:[.,/]\d+)*))")
_HASHES = re.compile(r"(?<!#)####(?!#)([^\n]*)")
# Thousands set apart, 1,000 or 1 000; also lakhs, 1,00,000.
_GROUPS = r"\d{1,3}(?:(?:,\d\d\d?)*,\d{3}|(?: \d{3})+)(?![\d,])"
_SEPARATOR = re.compile(r"[, ]")
_CURRENCY = r"\s$€£¥₹₩\\"
_MARKED_NUMBER = re.compile(
    rf"[{_CURRENCY}*_:=]*+(?P<sign>[-+]?)[{_CURRENCY}]*+"
    rf"(?P<number>(?>(?:{_GROUPS}|\d+|(?=\.\d))(?:\.\d+)?(?:/\d+)?))(?![.,:/^]?\d)"
)

# Commas between brackets part the elements of a list.
_GROUPED_NUMBER = re.compile(rf"(?<![\d.,({{\[])(?<!, ){_GROUPS}(?!\s?[)\]}}])")
_THIN_SEPARATOR = re.compile(r"(?<=\d)(?:,\\!|\{,\}|\\[,!;: ]|~)(?=\d{3})")
_TYPESETTING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|q?quad)(?![A-Za-z])\.?"
    r"|(?<!\\)\\[,;:! ()\[\]$%]|[$%~°]|\^\{?\\circ(?![A-Za-z])\}?|\\degree"
)
_UNIT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|math(?:rm|bf|it|sf)|operatorname)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_BARE_NUMERATOR = re.compile(r"\\frac(\d)")
_BARE_DENOMINATOR = re.compile(r"(\\frac\{[^{}]*\})(\d)")
_ENCLOSED = re.compile(r"^\(([^(),]*)\)$")
_QUOTIENT = re.compile(r"^(-?)(\d+)/(\d+)$")
# 000 in (1,000) is no number.
_NUMBER = re.compile(r"(?<![\d.])(?!(?<=\d,)0\d)(?=\.?\d)(?P<integer>\d*)(?:\.(?P<decimals>\d+))?(?!\.?\d)")
_PLAIN = {
    **dict.fromkeys("\u00a0\u2009\u202f\u3000", " "),
    **{"−": "-", "٫": ".", "٬": ",", "٪": "%", "。": ".", "।": "."},
}


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; empty while a ``<think>`` is open.

    A template may have opened the block in the prompt: ``x</think>y`` is ``y``.
    """
    answer = text.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


def last_boxed_answer(text: str) -> str | None:
    r"""What the last balanced ``\boxed{...}`` holds, the innermost of nested ones; None without one.

    ``\fbox``, ``\framebox`` and a number without braces (``\boxed 5``) count too; an empty box does not.
    """
    braces = matching_braces(text)
    for box in reversed(list(_BOX.finditer(text))):
        end = braces.get(box.end())
        answer = box["number"] or (text[box.end() : end - 1].strip() if end else "")
        if answer:
            return answer
    return None


def after_hashes(text: str) -> str | None:
    """The number after the last ``####`` that has one on its line, as GSM8K marks it; None without one.

    ``#### $1,000 a week`` is ``1000``: what follows the number does not count, unless it continues it, as in
    ``#### 10:30`` or ``#### 1.2.3``, which are no numbers.
    """
    for line in reversed(_HASHES.findall(text)):
        if found := _MARKED_NUMBER.match(plain_characters(line)):
            return found["sign"].removeprefix("+") + _SEPARATOR.sub("", found["number"])
    return None


def plain_characters(text: str) -> str:
    """Decimal digits of any script, full-width characters, minus signs and no-break spaces in ASCII."""
    return text if text.isascii() else "".join(map(_plain_character, text))


def normalize_answer(answer: str) -> str:
    r"""One spelling for answers that differ in typesetting alone; empty when there is nothing else.

    White space, delimiters, ``\left``, ``\text``, currency, percent and degree signs, a unit in ``\text`` after a
    number, and parentheses around a single element are left out; ``\dfrac12`` and ``1/2`` are ``\frac{1}{2}``,
    ``1,000`` is ``1000``, ``+.50`` is ``0.5``.
    """
    text = _THIN_SEPARATOR.sub(" ", plain_characters(answer)).strip().rstrip(".")
    text = _TYPESETTING.sub("", text).strip()
    unit = _UNIT.search(text)
    if unit and any(map(str.isdigit, text[: unit.start()])):
        text = text[: unit.start()]
    text = _GROUPED_NUMBER.sub(lambda found: _SEPARATOR.sub("", found[0]), _TEXT.sub(r"\1", text))
    text = "".join(text.split()).rstrip(".")
    text = _ENCLOSED.sub(r"\1", text).removeprefix("+")
    text = _BARE_NUMERATOR.sub(r"\\frac{\1}", _FRACTION.sub(r"\\frac", text))
    text = _BARE_DENOMINATOR.sub(r"\1{\2}", text)
    text = _QUOTIENT.sub(r"\1\\frac{\2}{\3}", text)
    return _NUMBER.sub(_plain_number, text)


def _plain_character(character: str) -> str:
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if "！" <= character <= "～":  # full-width forms, in the order of ASCII
        return chr(ord(character) - ord("！") + ord("!"))
    return _PLAIN.get(character, character)


def _plain_number(found: re.Match[str]) -> str:
    integer = found["integer"].lstrip("0") or "0"
    decimals = (found["decimals"] or "").rstrip("0")
    return f"{integer}.{decimals}" if decimals else integer
