"""The worked examples of the article that the project implements, with its own block numbers.

A scripted free list hands out the article's blocks; everything else is the real pool and tree.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from statistics import fmean

import pytest

from ramet.radix.accounting import check, num_sharers, page_stats
from ramet.radix.cursor import Cursor
from ramet.radix.prefix_cache import Copy, PrefixCache, Reservation
from ramet.radix.tokens import pack

BLOCK = 16  # the article's B
POOL = 100
PROMPT = range(500, 538)  # the request of 38 tokens


def cache_with(*first: int) -> PrefixCache:
    """A pool whose free list starts with these blocks."""
    rest = [block for block in range(POOL) if block not in first]
    return PrefixCache(POOL, BLOCK, block_order=[*first, *rest])


def write(cursor: Cursor, token_ids: Iterable[int]) -> None:
    """One step of one branch, without a device."""
    tokens = pack(token_ids)
    (reservation,) = cursor.cache.reserve([(cursor, len(tokens) // 4)])
    cursor.cache.copies_done()
    cursor.cache.commit(reservation, tokens)


def slot_of_next_token(cursor: Cursor) -> tuple[int, int]:
    """Block and offset that the next token of a branch is written to; nothing is written."""
    (reservation,) = cursor.cache.reserve([(cursor, 1)])
    where = [*cursor.block_ids(), *reservation.blocks][cursor.length // BLOCK], cursor.length % BLOCK
    cursor.cache.cancel(reservation)
    return where


def test_the_life_of_a_request_of_38_tokens() -> None:
    cache = cache_with(7, 3, 12, 25)
    request = cache.attach("tenant", pack(PROMPT))
    assert cache.num_needed([(request, 38)]) == 3, "38 / 16"
    write(request, PROMPT)
    assert request.block_table == ([7, 3, 12], 6), "slot #12 holds 6 tokens"
    assert cache.pool.num_free == POOL - 3

    for filled in range(6, 16):
        assert slot_of_next_token(request) == (12, filled), "the active block has room"
        write(request, [900 + filled])
    assert request.block_table == ([7, 3, 12], 16)
    assert slot_of_next_token(request) == (25, 0), "the active block is full"
    write(request, [990])
    assert request.block_table == ([7, 3, 12, 25], 1)

    request.release()
    check(cache, [request])
    assert cache.pool.ref_counts[25] == 0, "the open block is free at once"
    assert [cache.pool.ref_counts[block] for block in (7, 3, 12)] == [1, 1, 1], "held by the cache alone"
    assert cache.num_available == POOL, "full blocks stay for reuse until somebody needs the room"
    cache.tree.evict(POOL)
    assert sorted(cache.pool._free) == list(range(POOL))
    assert cache.pool.ref_counts == [0] * POOL


def test_a_request_that_is_not_cached_returns_all_blocks_at_once() -> None:
    cache = cache_with(7, 3, 12, 25)
    request = cache.attach(object(), pack(PROMPT))
    write(request, range(500, 549))
    assert request.block_table == ([7, 3, 12, 25], 1)
    assert request.prune() == 4
    assert cache.pool.num_free == POOL
    assert cache.pool.ref_counts == [0] * POOL


def test_two_branches_on_a_prompt_of_two_blocks() -> None:
    cache = cache_with(10, 11, 45, 88)
    a = cache.attach("tenant", pack(PROMPT[:32]))
    write(a, PROMPT[:32])
    b = a.fork()
    assert a.block_table == b.block_table == ([10, 11], 16), "shared without a copy"
    assert num_sharers(a) == [2, 2], "the article's reference count"
    assert [cache.pool.ref_counts[block] for block in (10, 11)] == [1, 1], (
        "their one direct owner is the tree"
    )

    write(a, [1])
    write(b, [2])
    assert a.block_table.blocks == [10, 11, 45]
    assert b.block_table.blocks == [10, 11, 88]
    assert num_sharers(a) == num_sharers(b) == [2, 2, 1]
    assert cache.num_copies == 0, "no block was partly filled"
    stats = page_stats(cache, [a, b])
    assert (stats.logical_tokens, stats.physical_tokens, stats.num_in_use) == (66, 34, 4)


def test_copy_on_write_of_a_partly_filled_block() -> None:
    """The article's workflow: allocate, copy the contents, repoint, decrement."""
    cache = cache_with(10, 11, 45)
    device: dict[int, list[str]] = {block: ["-"] * BLOCK for block in range(POOL)}
    a = cache.attach("tenant", pack(PROMPT[:22]))
    write(a, PROMPT[:22])
    device[11][:6] = "abcdef"
    b = a.fork()
    assert cache.pool.ref_counts[11] == 2

    (reservation,) = cache.reserve([(a, 1)])
    assert cache.take_copies() == [Copy(source=11, target=45, num_slots=6)]
    assert a.block_ids() == [10, 45], "repointed"
    assert (cache.pool.ref_counts[11], cache.pool.ref_counts[45]) == (2, 2), (
        "the copy holds both until it is done"
    )
    _run_copies(cache, device)
    assert (cache.pool.ref_counts[11], cache.pool.ref_counts[45]) == (1, 1), "2 -> 1 on the original"
    device[45][6] = "A"
    cache.commit(reservation, pack([1]))

    (reservation,) = cache.reserve([(b, 1)])
    assert cache.take_copies() == [], "its last owner writes in place"
    device[11][6] = "B"
    cache.commit(reservation, pack([2]))
    assert "".join(device[45]).rstrip("-") == "abcdefA"
    assert "".join(device[11]).rstrip("-") == "abcdefB"
    assert (a.block_table, b.block_table) == (([10, 45], 7), ([10, 11], 7))
    assert cache.num_copies == 1
    check(cache, [a, b])


def _run_copies(cache: PrefixCache, device: dict[int, list[str]]) -> None:
    for source, target, num_slots in cache.take_copies():
        device[target][:num_slots] = device[source][:num_slots]
    cache.copies_done()


def test_a_full_pool_refuses_whole_and_a_release_makes_room() -> None:
    """The article's out-of-memory question: what remains is capacity, and preemption frees it."""
    cache = PrefixCache(4, BLOCK)
    rows = [cache.attach(name, pack(PROMPT)) for name in ("first", "second")]
    write(rows[0], PROMPT)
    assert cache.admit("second", pack(PROMPT)) is None, "three blocks are needed, one is there"
    rows[0].park()
    admitted = cache.admit("second", pack(PROMPT))
    assert admitted is not None
    write(admitted, PROMPT)
    assert len(admitted.block_ids()) == 3


@pytest.mark.parametrize("block_size", [16, 32])
def test_waste_is_confined_to_the_last_block(block_size: int) -> None:
    """At most B - 1 slots a sequence; (B - 1) / 2 on average over lengths that fall anywhere in a block."""
    waste = []
    for length in range(1, 20 * block_size + 1):
        cache = PrefixCache(21, block_size)
        branch = cache.attach("tenant", b"")
        write(branch, range(length))
        stats = page_stats(cache, [branch])
        wasted = stats.num_in_use * block_size - length
        assert stats.waste == pytest.approx(wasted / (stats.num_in_use * block_size))
        waste.append(wasted)
    assert max(waste) == block_size - 1
    assert fmean(waste) == (block_size - 1) / 2


def test_no_hole_is_too_small() -> None:
    """Requests of mixed lengths come and go; a request fits exactly if enough blocks are free anywhere."""
    rng = random.Random(0)
    cache = PrefixCache(64, BLOCK)
    held: list[Cursor] = []
    for _ in range(500):
        length = rng.randint(1, 40 * BLOCK)
        branch = cache.attach(object(), b"")
        free = cache.pool.num_free
        reservation = _try_to_reserve(cache, branch, length)
        assert (reservation is not None) == (-(-length // BLOCK) <= free)
        if reservation is None:
            branch.release()
            held.pop(rng.randrange(len(held))).prune()
            continue
        cache.commit(reservation, pack(range(length)))
        held.append(branch)
    check(cache, held)


def _try_to_reserve(cache: PrefixCache, branch: Cursor, length: int) -> Reservation | None:
    if cache.num_needed([(branch, length)]) > cache.num_available:
        return None
    return cache.reserve([(branch, length)])[0]
