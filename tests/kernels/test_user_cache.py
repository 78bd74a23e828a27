"""Where a user's cache lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from ramet.kernels.user_cache import user_cache_dir


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "ramet"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/to/be/ignored")
    assert user_cache_dir() == Path.home() / ".cache" / "ramet"
