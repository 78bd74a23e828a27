"""ramet: the inference backend for agents that think in trees.

The public names are resolved on first use, so that ``import ramet.radix.tree`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramet.api.async_client import AsyncClient as AsyncClient
    from ramet.api.client import Client as Client
    from ramet.api.client_calls import ApiError as ApiError
    from ramet.engine.async_llm import AsyncBranch as AsyncBranch, AsyncLLM as AsyncLLM
    from ramet.engine.beam_params import BeamSearchParams as BeamSearchParams
    from ramet.engine.branch import Branch as Branch
    from ramet.engine.errors import (
        BranchReleased as BranchReleased,
        InvalidInput as InvalidInput,
        ModelNotFound as ModelNotFound,
        OutOfCapacity as OutOfCapacity,
        RametError as RametError,
        StepFailed as StepFailed,
        UnsupportedModel as UnsupportedModel,
    )
    from ramet.engine.llm import LLM as LLM
    from ramet.engine.outputs import (
        BeamProgress as BeamProgress,
        Choice as Choice,
        Delta as Delta,
        NextToken as NextToken,
        Output as Output,
        Score as Score,
    )
    from ramet.engine.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_ERRORS = "ramet.engine.errors"
_HOME_OF = {
    "LLM": "ramet.engine.llm",
    "Branch": "ramet.engine.branch",
    "BeamSearchParams": "ramet.engine.beam_params",
    "BeamProgress": "ramet.engine.outputs",
    "AsyncLLM": "ramet.engine.async_llm",
    "AsyncBranch": "ramet.engine.async_llm",
    "Client": "ramet.api.client",
    "AsyncClient": "ramet.api.async_client",
    "ApiError": "ramet.api.client_calls",
    "Choice": "ramet.engine.outputs",
    "Delta": "ramet.engine.outputs",
    "NextToken": "ramet.engine.outputs",
    "Output": "ramet.engine.outputs",
    "Score": "ramet.engine.outputs",
    "SamplingParams": "ramet.engine.sampling_params",
    "RametError": _ERRORS,
    "BranchReleased": _ERRORS,
    "InvalidInput": _ERRORS,
    "ModelNotFound": _ERRORS,
    "OutOfCapacity": _ERRORS,
    "StepFailed": _ERRORS,
    "UnsupportedModel": _ERRORS,
}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ramet' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
