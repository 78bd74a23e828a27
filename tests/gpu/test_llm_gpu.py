"""Engines on a GPU: what is the same as on the CPU, what is sized and refused, and a real model's shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ramet import LLM, SamplingParams
from ramet.engine import build
from ramet.engine.errors import InvalidInput, UnsupportedModel
from ramet.engine.model_runner import ModelRunner
from ramet.testing import check_idle, tiny_llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPT = list(range(3, 60))


def runner_of(llm: LLM) -> ModelRunner:
    assert isinstance(llm.engine.runner, ModelRunner)
    return llm.engine.runner


def test_the_same_tokens_as_on_the_cpu(tiny_module: Any) -> None:
    def run(llm: LLM) -> list[list[int]]:
        root = llm.branch(PROMPT)
        kids = root.expand(params=[SamplingParams(temperature=0.8, seed=s, max_tokens=30) for s in range(9)])
        return [kid.token_ids for kid in kids]

    gpu = LLM(tiny_llama(), device="cuda", num_blocks=64)
    assert runner_of(gpu).pool.storage.is_cuda
    assert run(gpu) == run(LLM(tiny_module, device="cpu", num_blocks=64))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near(dtype: str) -> None:
    """Log-probabilities of the same tokens, beside fp32; half precision has 3 to 4 digits."""
    exact = LLM(tiny_llama(weight_std=0.1), device="cuda", num_blocks=64)
    half = LLM(tiny_llama(weight_std=0.1), device="cuda", dtype=dtype, num_blocks=64)
    assert runner_of(half).pool.dtype == getattr(torch, dtype)
    continuations = [[5, 6, 7], [100, 200, 300]]
    want, got = (llm.branch(PROMPT).score(continuations) for llm in (exact, half))
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.token_logprobs), torch.tensor(b.token_logprobs), atol=0.1, rtol=0.05
        )


def test_the_dtype_of_its_own_is_bfloat16() -> None:
    from ramet.engine.device import pick_device, pick_dtype

    assert pick_device("auto") == torch.device("cuda")
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16


def test_the_pool_is_sized_from_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "free_bytes", lambda device: 100 << 20)
    llm = LLM(tiny_llama(), device="cuda")
    pool = runner_of(llm).pool
    assert 0.89 * (100 << 20) < pool.nbytes <= 0.9 * (100 << 20)


@pytest.mark.parametrize("block_size", [1, 2, 8, 64, 128, 256])
def test_block_sizes(block_size: int, tiny_module: Any) -> None:
    llm = LLM(tiny_llama(), device="cuda", num_blocks=4096 // block_size, block_size=block_size)
    same = LLM(tiny_module, device="cpu", num_blocks=4096 // block_size, block_size=block_size)
    prompt = PROMPT * 3
    params = SamplingParams(temperature=0.0, max_tokens=8, n=3)
    outputs = [one.generate(prompt, params)[0] for one in (llm, same)]
    assert [c.token_ids for c in outputs[0].choices] == [c.token_ids for c in outputs[1].choices]
    check_idle(llm)


@pytest.mark.parametrize("block_size", [3, 48])
def test_block_sizes_that_are_refused(block_size: int) -> None:
    with pytest.raises(InvalidInput, match="block_size must be a power of two"):
        LLM(tiny_llama(), device="cuda", num_blocks=8, block_size=block_size)


def test_heads_that_are_too_large_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="up to 256 numbers"):
        LLM(tiny_llama(head_dim=320), device="cuda", num_blocks=8)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInput, match="must be one that is there"):
        LLM(tiny_llama(), device="cuda:63", num_blocks=8)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu(tiny_module: Any) -> None:
    """All of it is there, copy-on-write as well, while torch's current device is the first."""

    def run(llm: LLM) -> list[list[int]]:
        kids = llm.branch(PROMPT).fork(3)
        llm.step(kids, [SamplingParams(temperature=0.8, seed=s, max_tokens=20) for s in range(3)])
        return [kid.token_ids for kid in kids]

    llm = LLM(tiny_llama(), device="cuda:1", num_blocks=64)
    assert run(llm) == run(LLM(tiny_module, device="cpu", num_blocks=64))
    assert llm.stats().pages.num_copies > 0
    assert runner_of(llm).pool.storage.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0


def test_pools_that_do_not_fit_are_refused() -> None:
    for num_blocks in (2**30, 2**60):
        with pytest.raises(InvalidInput, match="num_blocks must fit into memory"):
            LLM(tiny_llama(), device="cuda", num_blocks=num_blocks)


def test_dropped_engines_give_their_memory_back() -> None:
    """More pools one after another than the memory holds at once."""
    total = torch.cuda.get_device_properties(0).total_memory
    for _ in range(4):
        llm = LLM(tiny_llama(), device="cuda")
        assert runner_of(llm).pool.nbytes > 0.4 * total, "others hold the memory"
        llm.generate(PROMPT, max_tokens=2)
        del llm
