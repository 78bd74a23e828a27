"""ramet: the inference backend for agents that think in trees.

The public names are resolved on first use, so that ``import ramet.radix.tree`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramet.engine.errors import (
        BranchReleased as BranchReleased,
        OutOfCapacity as OutOfCapacity,
        RametError as RametError,
        UnsupportedModel as UnsupportedModel,
    )
    from ramet.engine.llm import LLM as LLM, Branch as Branch
    from ramet.engine.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOME_OF = {
    "LLM": "ramet.engine.llm",
    "Branch": "ramet.engine.llm",
    "SamplingParams": "ramet.engine.sampling_params",
    "RametError": "ramet.engine.errors",
    "OutOfCapacity": "ramet.engine.errors",
    "BranchReleased": "ramet.engine.errors",
    "UnsupportedModel": "ramet.engine.errors",
}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ramet' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
