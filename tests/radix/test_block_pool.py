"""The free list and the counts of direct owners."""

from __future__ import annotations

import pytest

from ramet.radix.block_pool import BlockPool, OutOfBlocks


def test_blocks_come_in_the_order_that_was_asked_for() -> None:
    pool = BlockPool(3, order=[2, 0, 1])
    assert [pool.take() for _ in range(3)] == [2, 0, 1]
    assert pool.num_free == 0


def test_the_block_freed_last_is_handed_out_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    for block in blocks:
        pool.drop(block)
    assert pool.take() == blocks[-1]


def test_a_block_is_free_when_its_last_owner_has_let_go() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    pool.drop(block)
    assert (pool.num_free, pool.ref_counts) == (0, [1])
    pool.drop(block)
    assert (pool.num_free, pool.ref_counts) == (1, [0])


def test_a_second_release_is_a_bug_and_changes_nothing() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.drop(block)
    with pytest.raises(AssertionError, match="released twice"):
        pool.drop(block)
    pool.check([0, 0])
    with pytest.raises(AssertionError, match="free block cannot be shared"):
        pool.share(block)


@pytest.mark.parametrize("order", [[0, 0], [0], [1, 2]])
def test_the_order_is_a_permutation(order: list[int]) -> None:
    with pytest.raises(AssertionError, match="permutation"):
        BlockPool(2, order=order)


def test_check_finds_a_wrong_count_and_a_wrong_free_list() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.check([1, 0])
    with pytest.raises(AssertionError, match="differ from a recount"):
        pool.check([2, 0])
    pool._free.append(block)
    with pytest.raises(AssertionError, match="free list"):
        pool.check([1, 0])


def test_out_of_blocks_carries_its_numbers() -> None:
    error = OutOfBlocks(5, 2)
    assert (error.needed, error.available) == (5, 2)
    assert str(error) == "5 blocks are needed, 2 are free or can be evicted"
