"""What the repository promises of itself: commands, sizes, versions."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "lit_madrl").rglob("*.py"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), ROOT / ".ci" / "run"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MACHINE_PATH = re.compile(r"(?<![\w.~*-])/(?:tmp|root|home/\w+|Users/\w+)/")


def tracked_files() -> list[Path]:
    """Files that git tracks or would track."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in names.split("\0") if name and (path := ROOT / name).is_file()]


def documented_targets(text: str) -> set[str]:
    """Targets of the ``make`` commands in inline code and code blocks, or in a whole shell script."""
    code = [text] if text.startswith("#!") else re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
    commands = (re.findall(r"(?:^|[`;&$]) *make (?:\w+=\S+ )*([a-z]+)", part, re.MULTILINE) for part in code)
    return {target for found in commands for target in found}


def pinned_versions() -> dict[str, str]:
    """Version by canonical name, of every line of constraints.txt that is no comment."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def test_documented_targets_are_found():
    text = "`make test ARGS=x`, make sure\n```sh\n$ make lint\nPYTHON=python3 make\nmake PYTHON=p bench\n```"
    assert documented_targets(text) == {"test", "lint", "bench"}
    assert documented_targets("#!/bin/sh\nmake quickstart && make lint\n") == {"quickstart", "lint"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documented_make_targets_exist(document: Path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"help", "quickstart", "test", "lint", "bench"} <= targets
    assert documented_targets(document.read_text()) <= targets


def test_ci_ends_with_the_tests():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_are_small(module: Path):
    source = module.read_text()
    assert len(source.splitlines()) <= 320
    functions = [
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {function.name: function.end_lineno - function.lineno + 1 for function in functions}
    assert {name: length for name, length in lengths.items() if length > 60} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see /root/x", True),
        ('"/tmp/a"', True),
        ("network/tmp/a", False),
        ("a/root/b", False),
        ("/tmpfs/", False),
    ],
)
def test_machine_paths_are_found(text: str, found: bool):
    assert bool(MACHINE_PATH.search(text)) == found


def test_no_file_names_a_path_of_one_machine():
    files = [path for path in tracked_files() if "tests" not in path.relative_to(ROOT).parts]
    texts = {str(path.relative_to(ROOT)): path.read_text(errors="ignore") for path in files}
    assert [name for name, text in texts.items() if MACHINE_PATH.search(text)] == []


def test_citation_has_the_version_and_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["title"] == PROJECT["name"]


def test_constraints_pin_what_is_installed_within_the_declared_ranges():
    extras = PROJECT["optional-dependencies"]
    groups = [PROJECT["dependencies"], *(extras[name] for name in ("lora", "gguf", "test", "dev"))]
    declared = [Requirement(line) for group in groups for line in group]
    pins = pinned_versions()
    for requirement in declared:
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)


def test_constraints_fit_any_build_of_a_version():
    """``2.13.0+cpu`` would refuse a CUDA build, and a path or URL works on one machine alone."""
    assert all(re.fullmatch(r"[\w.]+", version) for version in pinned_versions().values())
