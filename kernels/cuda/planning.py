"""The C in which a GPU's steps are planned (`csrc`).

In a tree search nearly every step has another tree than the one before, and the card waits for its lists.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from ramet.kernels.native import Sources, Unavailable, built

SOURCES = Sources("planning", Path(__file__).parent / "csrc", is_parallel=False)


@functools.cache
def library() -> ctypes.PyDLL:
    """The compiled functions, which read Python's lists: so they hold its lock, and raise its exceptions."""
    try:
        return ctypes.PyDLL(str(built(SOURCES)))
    except (Unavailable, OSError, RuntimeError) as error:
        raise RuntimeError(f"a GPU's steps are planned in C, which was not to be had: {error}") from error
