"""One allocation that never moves, exact sizes, and copies that touch nothing but their destination."""

from __future__ import annotations

import pytest
import torch

from ramet.kernels.kv_pool import KVPool


def make_pool(dtype: torch.dtype = torch.float32) -> KVPool:
    pool = KVPool(3, 6, 2, 8, 4, dtype)
    pool.storage.copy_(torch.randn(pool.storage.shape))
    return pool


def test_a_new_pool_is_zero() -> None:
    assert not KVPool(2, 3, 2, 8, 4, torch.float32).storage.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes(dtype: torch.dtype) -> None:
    pool = make_pool(dtype)
    assert pool.nbytes == pool.storage.untyped_storage().nbytes()
    assert pool.bytes_per_block == KVPool.block_nbytes(3, 2, 8, 4, dtype) == pool.nbytes // 6


def test_views_share_the_one_allocation() -> None:
    pool = make_pool()
    pool.key(1)[1, 2, 3] = 7
    pool.value(1)[1, 2, 3] = 9
    assert (pool.slots(1)[1, 2 * 4 + 3] == 7).all()
    assert (pool.slots(1)[2 + 1, 2 * 4 + 3] == 9).all()
    pool.check()


def test_a_pool_that_moved_is_noticed() -> None:
    pool = make_pool()
    pool.storage = pool.storage.clone()
    with pytest.raises(AssertionError, match="moved"):
        pool.check()


def test_write_touches_its_slots_only() -> None:
    pool = make_pool()
    before = pool.storage.clone()
    slots = torch.tensor([23, 0, 9])
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    pool.write(1, slots, k, v)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(pool.key(1)[:, slot // 4, slot % 4], k[i])
        assert torch.equal(pool.value(1)[:, slot // 4, slot % 4], v[i])
        before[1, :, :, slot // 4, slot % 4] = pool.storage[1, :, :, slot // 4, slot % 4]
    assert torch.equal(pool.storage, before)


def test_copies_reach_all_layers_and_nothing_else() -> None:
    pool = make_pool()
    expected = pool.storage.clone()
    expected[:, :, :, 5] = expected[:, :, :, 0]
    expected[:, :, :, 2] = expected[:, :, :, 0]
    expected[:, :, :, 3, :1] = expected[:, :, :, 1, :1]
    pool.copy_blocks([(0, 5, 4), (0, 2, 4), (1, 3, 1)])
    assert torch.equal(pool.storage[:, :, :, [0, 1, 2, 4, 5]], expected[:, :, :, [0, 1, 2, 4, 5]])
    assert torch.equal(pool.storage[:, :, :, 3, :1], expected[:, :, :, 3, :1])
    pool.check()


def test_no_copies_are_nothing() -> None:
    pool = make_pool()
    before = pool.storage.clone()
    pool.copy_blocks([])
    assert torch.equal(pool.storage, before)


@pytest.mark.parametrize("copies", [[(0, 1, 2), (1, 2, 2)], [(0, 1, 2), (2, 1, 2)], [(0, 0, 1)], [(0, 1, 5)]])
def test_copies_that_depend_on_their_order_are_a_bug(copies: list[tuple[int, int, int]]) -> None:
    with pytest.raises(AssertionError):
        make_pool().copy_blocks(copies)
