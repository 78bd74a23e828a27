"""The Triton kernels, on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

# Triton is there for Linux only.
collect_ignore_glob = [] if find_spec("triton") else ["test_*"]


@pytest.fixture(scope="session")
def device() -> str:
    """Triton's own device: there is no second one to hold it against."""
    return "cuda" if torch.cuda.is_available() else "cpu"
