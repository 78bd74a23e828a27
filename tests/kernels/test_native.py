"""The C kernels are compiled once, for this machine, and missing them is no error."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from ramet.kernels import native


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache directory, and no library that was loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(native.SWITCH, raising=False)


def why_not(caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.INFO, logger="ramet"):
        assert native.library.__wrapped__() is None
    return caplog.text


def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library.__wrapped__() is not None
    (built,) = (tmp_path / "ramet").iterdir()
    compiled: list[str] = []
    monkeypatch.setattr(native, "_compile", lambda *_: compiled.append("again"))
    assert native.library.__wrapped__() is not None
    assert not compiled and list((tmp_path / "ramet").iterdir()) == [built]


def test_a_damaged_library_is_not_loaded(tmp_path: Path) -> None:
    """One that was cut off would end the process with a bus error."""
    assert native.library.__wrapped__() is not None
    (built,) = (tmp_path / "ramet").iterdir()
    cut = tmp_path / "cut"
    cut.write_bytes(built.read_bytes()[:4000])
    cut.replace(built)  # what is loaded stays whole
    assert native.library.__wrapped__() is not None
    assert max(path.stat().st_size for path in (tmp_path / "ramet").iterdir()) > 4000


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does where there is none
    assert "home" in why_not(caplog)


def test_one_openmp_runtime() -> None:
    """A second runtime would bring a second team of threads."""
    assert native.library.__wrapped__() is not None
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}) == 1


def test_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    assert "RAMET_NATIVE=0" in why_not(caplog)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C compiler found (looked for cc, gcc, clang)" in why_not(caplog)


def test_a_compiler_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no room for cats >&2; exit 1\n')
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    assert "no room for cats" in why_not(caplog)
    assert not any((tmp_path / "ramet").iterdir()), "nothing half made stays"


def test_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "ramet").write_text("a file where the folder would be")
    assert "ramet" in why_not(caplog)
    assert os.path.isfile(tmp_path / "ramet")
