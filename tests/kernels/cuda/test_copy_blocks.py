"""Copy-on-write copies what is filled, over all layers, and touches nothing else."""

from __future__ import annotations

import pytest
import torch

from ramet.kernels.kv_pool import KVPool


@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "block_size", "head_dim"),
    [(1, 1, 1, 64), (2, 3, 16, 64), (3, 2, 5, 80), (2, 2, 32, 128), (5, 8, 16, 16)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_copies_reach_all_layers_and_nothing_else(
    num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    pool = KVPool(num_layers, 9, num_kv_heads, head_dim, block_size, dtype, device, "block-major")
    pool.storage.normal_()
    expected = pool.storage.clone()
    copies = [(0, 5, block_size), (0, 2, 1), (8, 3, (block_size + 1) // 2), (4, 6, 0)]
    for source, destination, filled in copies:
        expected[:, :, :, destination, :filled] = expected[:, :, :, source, :filled]
    pool.copy_blocks(copies)
    assert torch.equal(pool.storage, expected)
    pool.check()


def test_offsets_pass_32_bits(device: str) -> None:
    num_blocks = 2**31 // (2 * 16 * 64) + 2
    pool = KVPool(1, num_blocks, 1, 64, 16, torch.float16, device, "block-major")
    pool.key(0)[0, 0], pool.value(0)[0, 0] = 1.0, 2.0
    pool.copy_blocks([(0, num_blocks - 1, 16)])
    assert (pool.key(0)[0, -1] == 1.0).all()
    assert (pool.value(0)[0, -1] == 2.0).all()
