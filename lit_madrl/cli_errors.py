"""Mistakes on the command line and in YAML as one line that says what to type."""

from __future__ import annotations

import difflib
import dis
import inspect
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

_CLASS = re.compile(
    r"Expected a dot import path string: (\S+)|No module named '([^']+)'|class_path '([^']+)' ?:?.*not"
)
_OPTION = re.compile(r"(?:unrecognized arguments?: --|Option '|Key ')([\w.]+)")
_KEY = re.compile(r'Parser key "([^"]+)"')
_NOISE = re.compile(
    r"^(Does not validate against|Subtypes:|Errors:|Given value|- ?Expected a <class 'NoneType'>|"
    r"- ?Expected a path but|Problem with given class_path|- ?Problem with given class_path|Parser key)"
)

_STEPS = {"training_step", "validation_step", "test_step"}


@contextmanager
def one_line_errors(modules: Sequence[ModuleType]) -> Iterator[None]:
    """End the program with one line on stderr and status 2 where parsing or building components fails.

    Args:
        modules: those whose classes a YAML file may name; they supply the suggestions.
    """
    try:
        yield
    except (ArgumentError, ValueError, TypeError) as error:
        print(f"error: {explain(str(error), modules)}", file=sys.stderr)
        raise SystemExit(2) from error


@contextmanager
def one_line_refusals() -> Iterator[None]:
    """End the program likewise where, before a first step, one of the package's own checks refuses what it was given.

    That is a ValueError made by a ``raise`` statement in the package, outside of the learners' steps. Whatever else
    fails, of itself or elsewhere, keeps its traceback.
    """
    try:
        yield
    except ValueError as error:
        if not _refused_at_start(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _refused_at_start(error: ValueError) -> bool:
    within = []
    place = error.__traceback__
    while place is not None:
        within.append(place)
        place = place.tb_next
    code = within[-1].tb_frame.f_code
    ours = within[-1].tb_frame.f_globals["__name__"].startswith(f"{__package__}.")
    raised = dis.opname[code.co_code[within[-1].tb_lasti]] == "RAISE_VARARGS"
    return ours and raised and not _STEPS & {place.tb_frame.f_code.co_name for place in within}


def check_subcommand(arguments: Sequence[str], subcommands: Sequence[str]) -> None:
    """The first argument must be a subcommand, unless help is asked for.

    Raises:
        SystemExit: it is not; one line on stderr says what to type.
    """
    first = arguments[0] if arguments else ""
    if first in subcommands or first in ("-h", "--help", "--version"):
        return
    known = ", ".join(subcommands)
    later = next((a for a in arguments if a in subcommands), None)
    if later is not None:
        message = f"the subcommand comes first: cli.py {later} {' '.join(a for a in arguments if a != later)}"
    elif first and not first.startswith("-"):
        message = f"unknown subcommand {first!r}: expected one of {known}{_suggest(first, subcommands)}"
    else:
        message = f"expected a subcommand ({known}), as in: cli.py fit -c configs/choice/quickstart.yaml"
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def explain(text: str, modules: Sequence[ModuleType]) -> str:
    """The one line in a parser's error that matters, with the key it concerns and the nearest known names."""
    lines = [line.strip() for line in text.splitlines()]
    keys: list[str] = []
    for line in lines:
        keys += [key for key in _KEY.findall(line) if key not in keys]
    where = ".".join(keys)
    leaves = [line.removeprefix("- ") for line in lines if line and not _NOISE.match(line)]
    for leaf in leaves:
        if found := _CLASS.search(leaf):
            name = next(group for group in found.groups() if group)
            return f"{where}: unknown class {name!r}{_suggest(name, _class_names(modules))}"
        if found := _OPTION.search(leaf):
            name = found[1]
            known = _argument_names(modules)
            part = next((part for part in name.split(".") if part not in known), name.split(".")[-1])
            return f"{where or 'arguments'}: unknown argument {name!r}{_suggest(part, known)}"
    message = leaves[0] if leaves else " ".join(lines)
    message = re.sub(r"^.*?Parser key \"[^\"]+\": ?", "", message)
    return f"{where}: {message}" if where and not message.startswith(where) else message


def _suggest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.split(".")[-1], sorted(set(known)), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _classes(modules: Sequence[ModuleType]) -> list[type]:
    return [value for module in modules for value in vars(module).values() if inspect.isclass(value)]


def _class_names(modules: Sequence[ModuleType]) -> list[str]:
    return [c.__name__ for c in _classes(modules) if not inspect.isabstract(c)]


def _argument_names(modules: Sequence[ModuleType]) -> list[str]:
    names = ["model", "data", "trainer", "run_dir", "seed_everything", "class_path", "init_args", "ckpt_path"]
    for module_class in _classes(modules):
        for ancestor in module_class.__mro__:
            if ancestor.__module__.startswith("lit_madrl") and "__init__" in vars(ancestor):
                names += list(inspect.signature(ancestor).parameters)
    return names
