"""What to do when a package of an optional part is missing."""

from __future__ import annotations


def remedy(extra: str) -> str:
    """How to install it, in a clone and where ramet came as a wheel."""
    return f"`pip install '.[{extra}]'` in a clone, `pip install 'ramet[{extra}]'` elsewhere"
