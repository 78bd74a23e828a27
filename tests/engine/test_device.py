"""The device and the dtype are picked and checked before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ramet import LLM
from ramet.engine import build, device
from ramet.engine.errors import InvalidInput, UnsupportedModel
from ramet.engine.models import load_model
from ramet.testing import tiny_llama


@pytest.mark.parametrize("bad", ["toaster", "mps", "meta", "cuda:99"])
def test_a_device_without_a_path_is_refused(bad: str) -> None:
    with pytest.raises(InvalidInput, match="device must be"):
        device.pick_device(bad)


def test_auto_is_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.pick_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.pick_device("auto") == torch.device("cuda")
    assert device.pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InvalidInput, match="torch sees 2 GPUs"):
        device.pick_device("cuda:2")


@pytest.mark.parametrize("has_bf16", [True, False])
def test_auto_is_bfloat16_where_it_is_fast(monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    monkeypatch.setattr(device, "_gpu_has_bf16", lambda asked: has_bf16)
    monkeypatch.setattr(device, "_cpu_has_bf16", lambda: not has_bf16)
    on_gpu, on_cpu = (torch.bfloat16, torch.float32) if has_bf16 else (torch.float32, torch.bfloat16)
    assert device.pick_dtype("auto", torch.device("cuda")) == on_gpu
    assert device.pick_dtype("auto", torch.device("cpu")) == on_cpu
    assert device.pick_dtype("float16", torch.device("cuda")) == torch.float16


@pytest.fixture
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, on which loading a model fails the test."""

    def load(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("it was loaded before it was checked")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda asked: (9, 0))
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    monkeypatch.setattr(build, "load_model", load)


@pytest.mark.usefixtures("loads_nothing")
def test_a_gpu_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda asked: (7, 0))
    with pytest.raises(InvalidInput, match=r"device must be a GPU of compute capability 7\.5 .* has 7\.0"):
        LLM("any", device="cuda")
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match="device must be the CPU where Triton is not installed"):
        LLM("any", device="cuda")


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("block_size", [3, 24, 100])
def test_a_gpu_takes_blocks_of_a_power_of_two(block_size: int) -> None:
    with pytest.raises(InvalidInput, match="block_size must be a power of two on a GPU"):
        LLM("any", device="cuda", block_size=block_size)
    with pytest.raises(InvalidInput, match="block_size must be between 1 and 256"):
        LLM("any", device="cuda", block_size=512)


@pytest.mark.usefixtures("loads_nothing")
def test_a_gpu_takes_so_many_tokens_a_step() -> None:
    with pytest.raises(InvalidInput, match="max_batch_tokens must be at most 32768 on a GPU, got 32769"):
        LLM("any", device="cuda", max_batch_tokens=32769)


def test_heads_that_the_gpu_has_no_tile_for() -> None:
    build._check_heads(load_model(tiny_llama(num_heads=128, num_kv_heads=1, head_dim=4)))
    for sizes in ({"num_heads": 129, "num_kv_heads": 1, "head_dim": 2}, {"head_dim": 258}):
        with pytest.raises(UnsupportedModel, match="on a GPU a head has up to 256 numbers"):
            build._check_heads(load_model(tiny_llama(**sizes)))


@pytest.mark.parametrize(
    ("kind", "free", "share"),
    [
        ("cpu", 8 << 30, 2 << 30),
        ("cpu", 64 << 30, 4 << 30),
        ("cpu", None, 4 << 30),
        ("cuda", 100 << 30, 90 << 30),
    ],
)
def test_a_pool_takes_its_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, kind: str, free: int | None, share: int
) -> None:
    monkeypatch.setattr(build, "free_bytes", lambda asked: free)
    assert build._fitting_blocks(1 << 20, torch.device(kind)) == share >> 20
    with pytest.raises(InvalidInput, match="num_blocks must be given"):
        build._fitting_blocks(1 << 40, torch.device(kind))


def test_a_pool_beyond_the_memory_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the product has more than 64 bits, which torch.zeros would stumble over."""
    monkeypatch.setattr(build, "free_bytes", lambda asked: 10 << 20)
    build._check_fits(10, 1 << 20, torch.device("cuda"))
    for num_blocks in (11, 2**60):
        with pytest.raises(InvalidInput, match=f"num_blocks must fit.*10485760.*got {num_blocks}"):
            build._check_fits(num_blocks, 1 << 20, torch.device("cuda"))


def test_weights_without_room_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_llama()

    def full(where: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "to", full)
    with pytest.raises(InvalidInput, match="device must have room for the model's weights, got 'cpu'"):
        LLM(module, device="cpu", num_blocks=8)


def test_weights_on_several_devices_are_refused() -> None:
    module = tiny_llama()
    module.lm_head.to("meta")
    with pytest.raises(UnsupportedModel, match="weights lie on cpu, meta; device= moves them"):
        LLM(module, num_blocks=8)


def test_weights_in_other_numbers_are_refused_unless_they_are_converted() -> None:
    with pytest.raises(UnsupportedModel, match=r"weights are torch\.float64; dtype= makes"):
        LLM(tiny_llama().double(), device="cpu", num_blocks=8)
    llm = LLM(tiny_llama().double(), device="cpu", dtype="float32", num_blocks=8)
    assert llm.generate([1, 2], max_tokens=1)[0].choices[0].finish_reason == "length"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rotary_frequencies_stay_exact(dtype: str) -> None:
    """As transformers' own loading leaves them: position 900 is turned by the angles that it should be."""
    module, exact = tiny_llama(head_dim=64), tiny_llama(head_dim=64).model.rotary_emb
    LLM(module, device="cpu", dtype=dtype, num_blocks=8)
    positions = torch.tensor([[900]])
    found = module.model.rotary_emb(torch.zeros(1, dtype=getattr(torch, dtype)), positions)
    for got, want in zip(found, exact(torch.zeros(1), positions), strict=True):
        assert (got.float() - want).abs().max() <= 2**-9  # half an ulp of bfloat16 below 1
