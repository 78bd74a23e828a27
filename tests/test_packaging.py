"""The wheel holds every source file and works without the checkout.

An editable install hides what is missing from a wheel, so this builds one and imports from it alone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("api", "engine", "kernels", "radix")
NEEDED_TO_BUILD = [*FOLDERS, "ramet", "pyproject.toml", "README.md", "LICENSE"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that the checkout stays clean."""
    work = tmp_path_factory.mktemp("wheel")
    for name in NEEDED_TO_BUILD:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, work / "src" / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, work / "src" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", work / "dist", work / "src"], check=True)
    (built,) = (work / "dist").glob("ramet-*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    target = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_every_source_file_is_in_the_wheel(unpacked: Path) -> None:
    for folder in FOLDERS:
        for pattern in ("*.py", "*.[ch]"):
            here = {p.relative_to(ROOT / folder) for p in (ROOT / folder).rglob(pattern)}
            there = {
                p.relative_to(unpacked / "ramet" / folder)
                for p in (unpacked / "ramet" / folder).rglob(pattern)
            }
            assert here == there


def test_only_one_package_is_installed_at_the_top(unpacked: Path) -> None:
    tops = {p.name for p in unpacked.iterdir() if not p.name.endswith(".dist-info")}
    assert tops == {"ramet"}


def test_typing_marker_and_license_are_in_the_wheel(unpacked: Path) -> None:
    assert (unpacked / "ramet" / "py.typed").is_file()
    (info,) = unpacked.glob("*.dist-info")
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    assert "ramet = ramet.api.cli:main" in (info / "entry_points.txt").read_text()


def test_every_module_imports_from_the_wheel_alone(unpacked: Path, tmp_path: Path) -> None:
    """-P and an isolated path: neither the checkout nor its editable install can lend a missing file."""
    paths = [p.relative_to(ROOT).with_suffix("") for f in FOLDERS for p in sorted((ROOT / f).rglob("*.py"))]
    needed = {"cuda": "triton", "inspect_ai": "inspect_ai"}  # by a part of the path, and who has not got it
    paths = [p for p in paths if all(find_spec(needed[part]) for part in needed.keys() & set(p.parts))]
    modules = ["ramet", *(".".join(("ramet", *path.parts)) for path in paths)]
    code = (
        "import importlib, json, sys\n"
        f"sys.meta_path = [f for f in sys.meta_path if '__editable__' not in str(f)]\n"
        f"sys.path[:] = [{str(unpacked)!r}] + [p for p in sys.path if p != {str(ROOT)!r}]\n"
        f"print(json.dumps([importlib.import_module(m).__file__ for m in {modules!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout.splitlines()[-1])
    assert all(Path(file).is_relative_to(unpacked) for file in files)
