"""The Triton kernels, on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Triton's own device: there is no second one to hold it against."""
    return "cuda" if torch.cuda.is_available() else "cpu"
