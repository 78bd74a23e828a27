"""The layers of the package, checked on the syntax trees: imports go down only, and by their full name.

An import linter cannot do this: the four folders have no ``__init__.py`` and are reached through links.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("api", "engine", "kernels", "radix")
MAY_IMPORT = {
    "api": {"api", "engine", "kernels", "radix"},
    "engine": {"engine", "kernels", "radix"},
    "kernels": {"kernels"},
    "radix": {"radix"},
}
HEAVY = {"torch", "numpy", "transformers"}
SCANNED = [*FOLDERS, "ramet", "tests", "examples", "benchmarks"]


class Import(NamedTuple):
    """One imported module, and where: `level` is the number of leading dots."""

    module: str
    level: int
    place: str


def sources(folder: str) -> list[Path]:
    """The files of one top-level folder; links are not followed, so each file is seen once."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [p for p in paths if p.resolve() == p]


def imports_of(source: str, place: str) -> Iterator[Import]:
    """Every import, at any depth; ``from ramet import radix`` counts as ``ramet.radix``."""
    for node in ast.walk(ast.parse(source)):
        here = f"{place}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, 0, here)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == "ramet":
                for alias in node.names:
                    yield Import(f"ramet.{alias.name}", node.level, here)
            else:
                yield Import(module, node.level, here)


def violations(folder: str, source: str, place: str = "<test>") -> list[str]:
    """What one file of `folder` does against the rules, one sentence each."""
    found = []
    for module, level, where in imports_of(source, place):
        top, _, rest = module.partition(".")
        layer = rest.split(".")[0]
        if level:
            found.append(f"{where}: relative import of {module or '.'}; write the full name")
        elif top in FOLDERS:
            found.append(f"{where}: bare import of {module}; write ramet.{module}")
        elif folder == "radix" and top in HEAVY:
            found.append(f"{where}: radix imports {top}; it is pure Python")
        elif folder in MAY_IMPORT and top == "ramet" and layer not in MAY_IMPORT[folder]:
            found.append(f"{where}: {folder} imports {module}; imports go down only")
    return found


@pytest.mark.parametrize("folder", SCANNED)
def test_imports_go_down_only_and_by_full_name(folder: str) -> None:
    found = [
        sentence
        for path in sources(folder)
        for sentence in violations(folder, path.read_text(), str(path.relative_to(ROOT)))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_there_is_something_to_check(folder: str) -> None:
    assert sources(folder), f"no source in {folder}/: the check above would pass on nothing"


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_no_regular_packages(folder: str) -> None:
    # With an __init__.py, a checkout on sys.path would hide other packages of the same name from their users.
    assert not list((ROOT / folder).rglob("__init__.py"))


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("radix", "import torch"),
        ("radix", "def f():\n    from numpy import array"),
        ("radix", "from ramet.kernels.plan import Plan"),
        ("radix", "from ramet import engine"),
        ("kernels", "import ramet.radix.tree"),
        ("kernels", "from ramet.engine.llm import LLM"),
        ("engine", "from ramet.api.cli import main"),
        ("engine", "from radix.tree import Tree"),
        ("api", "import kernels"),
        ("tests", "from api.bench import Report"),
        ("engine", "from .llm import LLM"),
        ("kernels", "from ramet import LLM"),
    ],
)
def test_the_check_sees(folder: str, line: str) -> None:
    assert len(violations(folder, line)) == 1


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("api", "from ramet.engine.llm import LLM"),
        ("engine", "from ramet.radix.tree import Tree\nfrom ramet.kernels.plan import Plan\nimport torch"),
        ("kernels", "import torch"),
        ("radix", "from sortedcontainers import SortedList"),
        ("ramet", "from ramet.engine.testing import *"),
    ],
)
def test_the_check_allows(folder: str, line: str) -> None:
    assert violations(folder, line) == []


def test_the_face_only_hands_on() -> None:
    """No classes, and no functions but the two that resolve names lazily."""
    for path in sources("ramet"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.ClassDef), f"{path.name} defines {node.name}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.name in {"__getattr__", "__dir__"}, f"{path.name} defines {node.name}()"


@pytest.mark.parametrize("module", ["ramet", "ramet.radix.tree", "ramet.radix.prefix_cache"])
def test_import_stays_light(module: str) -> None:
    code = f"import sys, {module}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", f"import {module} pulls in {done.stdout.strip()}"
