"""Reshape-and-cache writes its slots and nothing else, and rotates as transformers does."""

from __future__ import annotations

import random

import pytest
import torch

from ramet.kernels.cuda.store import rotate_and_store, store
from ramet.kernels.kv_pool import KVPool, Layout

SHAPES = [(1, 64, 16), (3, 80, 1), (2, 96, 5), (8, 128, 16), (1, 256, 32)]  # Hkv, D, B


def poisoned(
    num_kv_heads: int, head_dim: int, block_size: int, device: str, layout: Layout = "block-major"
) -> KVPool:
    dtype = torch.float16
    pool = KVPool(2, 7, num_kv_heads, head_dim, block_size, dtype, device, layout)
    pool.storage.fill_(torch.nan)
    return pool


def written(pool: KVPool, layer: int, slots: list[int], k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The storage after the writes, made with plain indexing."""
    storage, size = pool.storage.clone(), pool.block_size
    for token, slot in enumerate(slots):
        if slot >= 0:
            storage[layer, 0, :, slot // size, slot % size] = k[token]
            storage[layer, 1, :, slot // size, slot % size] = v[token]
    return storage


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def some_slots(pool: KVPool, num_tokens: int) -> list[int]:
    """Slots in any order, each at most once, every third token without one."""
    free = random.Random(0).sample(range(pool.num_blocks * pool.block_size), num_tokens)
    return [-1 if token % 3 == 2 else slot for token, slot in enumerate(free)]


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("layout", ["block-major", "head-major"])
def test_tokens_go_to_their_slots(
    num_kv_heads: int, head_dim: int, block_size: int, layout: Layout, device: str
) -> None:
    pool = poisoned(num_kv_heads, head_dim, block_size, device, layout)
    slots = some_slots(pool, 7)
    qkv = torch.randn(7, 2 * num_kv_heads + 1, head_dim, device=device).to(pool.dtype)
    k, v = qkv[:, 1 : num_kv_heads + 1], qkv[:, num_kv_heads + 1 :]  # views, as a joined projection gives
    expected = written(pool, 1, slots, k, v)
    store(pool.key(1), pool.value(1), torch.tensor(slots, device=device), k, v)
    assert same(pool.storage, expected)


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("group", [1, 3])
def test_rotation_on_the_way(
    num_kv_heads: int, head_dim: int, block_size: int, group: int, device: str
) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    pool = poisoned(num_kv_heads, head_dim, block_size, device)
    slots, num_heads = some_slots(pool, 6), group * num_kv_heads
    q, k, v = (
        torch.randn(heads, 6, head_dim, device=device).to(pool.dtype).transpose(0, 1)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    angles = torch.rand(6, head_dim // 2, device=device) * 6
    cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
    want_q, want_k = (
        x[0].transpose(0, 1)
        for x in apply_rotary_pos_emb(
            q.transpose(0, 1)[None].float(), k.transpose(0, 1)[None].float(), cos[None], sin[None]
        )
    )
    expected = written(pool, 0, slots, want_k.to(pool.dtype), v)
    got = rotate_and_store(pool.key(0), pool.value(0), torch.tensor(slots, device=device), q, k, v, cos, sin)
    torch.testing.assert_close(got.float(), want_q, rtol=1e-3, atol=1e-3)  # an fp16 ulp
    torch.testing.assert_close(pool.storage, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_offsets_pass_32_bits(device: str) -> None:
    """A slot beyond 2**31 numbers. On the CPU only the page that is written ever takes memory."""
    num_blocks = 2**31 // (2 * 16 * 64) + 2
    pool = KVPool(1, num_blocks, 1, 64, 16, torch.float16, device, "block-major")
    slot = (num_blocks - 1) * 16 + 5
    k, v = torch.randn(2, 1, 1, 64, device=device).half()
    store(pool.key(0), pool.value(0), torch.tensor([slot], device=device), k, v)
    assert torch.equal(pool.key(0)[0, -1, 5], k[0, 0])
    assert torch.equal(pool.value(0)[0, -1, 5], v[0, 0])
    assert not pool.storage[..., :2, :, :].any()
