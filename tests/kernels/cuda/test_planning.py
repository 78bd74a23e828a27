"""Without a compiler there is no planning on a GPU, and the error says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ramet.kernels import native, openmp
from ramet.kernels.cuda import planning


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="planned in C, which was not to be had: no C compiler found"):
        planning.library.__wrapped__()


def test_what_the_cpu_does_without_is_needed_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The switch is for the kernels of the CPU; and torch need not run with OpenMP."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(native.SWITCH, "0")
    monkeypatch.setattr(openmp, "runtime", lambda: None)
    assert planning.library.__wrapped__().ramet_fold
    (compiled,) = (tmp_path / "ramet").iterdir()
    assert compiled.name.startswith("planning-")
