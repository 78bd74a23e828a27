"""Engines for tests: a tiny random llama, the embedded model, and scripted ones, with invariants checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

# Without a GPU the Triton kernels run in Triton's interpreter, which has to know before it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from ramet import LLM
from ramet.testing import check_invariants, tiny_llama

MakeLLM = Callable[..., LLM]

# The models are small: on shared cores a second thread costs more in waiting than it computes.
torch.set_num_threads(1)


def checked(llm: LLM) -> LLM:
    """Assert every invariant after each step of this engine."""
    llm.on_step(lambda: check_invariants(llm))
    return llm


@pytest.fixture(scope="session")
def tiny_module() -> Any:
    return tiny_llama()


@pytest.fixture(scope="session", params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """What has to hold on every device that is there."""
    return str(request.param)


@pytest.fixture(scope="session")
def make_tiny(tiny_module: Any) -> MakeLLM:
    """Engines over one tiny random llama: 2 layers, 3 query heads on 1 KV head, 512 tokens, fp32."""
    modules = {"cpu": tiny_module}

    def make(device: str = "cpu", **settings: Any) -> LLM:
        if device not in modules:
            modules[device] = tiny_llama()
        return checked(LLM(modules[device], device=device, **{"num_blocks": 64, **settings}))

    return make


@pytest.fixture(scope="session")
def smollm2() -> LLM:
    """The embedded model in fp32."""
    return LLM("smollm2", dtype="float32", num_blocks=512)


@pytest.fixture(scope="session")
def make_smollm2(smollm2: LLM) -> MakeLLM:
    """Further engines over the embedded model's weights, which are loaded once."""
    runner: Any = smollm2.engine.runner

    def make(**settings: Any) -> LLM:
        return checked(LLM(runner.model.module, runner.model.tokenizer, **{"num_blocks": 256, **settings}))

    return make
