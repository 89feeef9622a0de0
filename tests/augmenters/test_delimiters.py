from __future__ import annotations

import pytest

from lit_madrl.augmenters.delimiters import opaque_spans
from lit_madrl.text import last_boxed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a $x$ b", [("$x$", "inline")]),
        ("由 $x $可得 $ y $ ok", [("$x $", "inline"), ("$ y $", "inline")]),
        ("$x$$y$", [("$x$", "inline"), ("$y$", "inline")]),
        ("$$x$$ y", [("$$x$$", "display")]),
        (r"a \(x\) \[y\]", [(r"\(x\)", "inline"), (r"\[y\]", "display")]),
        (r"\[a \\[2pt] b\] c", [(r"\[a \\[2pt] b\]", "display")]),
        (r"\begin{a}\begin{a}x\end{a}\end{a} y", [(r"\begin{a}\begin{a}x\end{a}\end{a}", "display")]),
        (r"\[\begin{p} 1 \end{p}\] x", [(r"\[\begin{p} 1 \end{p}\]", "display")]),
        (r"$a \$ b$ c", [(r"$a \$ b$", "inline")]),
        (r"\$5 and \$6", []),
        ("$5 and $6 and $x$", [("$x$", "inline")]),
        ("$5-$6", []),
        ("$5$ and $6$", [("$5$", "inline"), ("$6$", "inline")]),
        ("= $<<1+1=2>>2\n= $<<3>>3", []),
        ("$a\n\nb$", []),  # a formula does not cross a blank line
        ("`a` ``b ` c`` `d", [("`a`", "code"), ("``b ` c``", "code")]),
        ("```py\n$x\n```\n$y$", [("```py\n$x\n```", "fence"), ("$y$", "inline")]),
        ("~~~~\n~~~\n~~~~ \nx", [("~~~~\n~~~\n~~~~ ", "fence")]),
        (r"{\boxed{\frac{1}{2}}}", [(r"\boxed{\frac{1}{2}}", "box")]),
        (r"\boxed{a", []),
        # Never closed: open to the end.
        (r"a \[b. C", [(r"\[b. C", "display")]),
        ("a $$b. C", [("$$b. C", "display")]),
        (r"\begin{a} b. C \end{b}", [(r"\begin{a} b. C \end{b}", "display")]),
        ("```\nb. C", [("```\nb. C", "fence")]),
        ("", []),
    ],
)
def test_spans(text, expected):
    assert [(text[start:end], kind) for start, end, kind in opaque_spans(text)] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1} then \boxed{2}.", r"\boxed{2}"),
        (r"\boxed{\boxed{5}}", r"\boxed{\boxed{5}}"),
        (r"\text{so \boxed{\frac{1}{\sqrt{2}}}}", r"\boxed{\frac{1}{\sqrt{2}}}"),
        (r"\boxed{\left\{ 1 \right.} x", r"\boxed{\left\{ 1 \right.}"),
        (r"\boxed{1} and \boxed{2", r"\boxed{1}"),
        (r"\boxed{1 and \boxed{2}", r"\boxed{2}"),
        (r"\boxed {3}", r"\boxed {3}"),
        (r"\boxed 3", None),
        ("no answer", None),
    ],
)
def test_last_balanced_box(text, expected):
    found = last_boxed(text)
    assert (found and text[slice(*found)]) == expected
