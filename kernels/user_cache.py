"""Where what is made once for a user lies: converted weights, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/ramet``, or ``~/.cache/ramet``. Raises RuntimeError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "ramet"
