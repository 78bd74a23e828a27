"""Admission, reservation, and the number of blocks that each of them counts with."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from ramet.radix.cursor import Cursor
from ramet.radix.prefix_cache import OutOfBlocks, PrefixCache
from ramet.radix.tokens import pack, unpack

if TYPE_CHECKING:
    from tests.radix.conftest import Sim

MakeSim = Callable[..., "Sim"]


# -- how many blocks -------------------------------------------------------------------------------


def taken_one_by_one(writes: list[tuple[Cursor, int]], block_size: int) -> int:
    """What the writes take, by playing them slot by slot on a count of owners."""
    owners = {id(c.tail): c.tail.owners for c, _ in writes if c.tail is not None}
    taken = 0
    for cursor, num_tokens in writes:
        for position in range(cursor.length, cursor.length + num_tokens):
            if position % block_size == 0:
                taken += 1  # a new block
            elif position == cursor.length and cursor.tail is None:
                taken += 1  # a copy of the borrowed block
            elif position == cursor.length and owners[id(cursor.tail)] > 1:
                owners[id(cursor.tail)] -= 1
                taken += 1  # a copy of the shared tail
    return taken


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_the_number_of_blocks_needed_is_the_number_taken(make_sim: MakeSim, block_size: int) -> None:
    rng = random.Random(block_size)
    for _ in range(60):
        sim = make_sim(400, block_size)
        branches = [sim.prompt(range(rng.randint(1, 3 * block_size)))]
        for _ in range(rng.randint(1, 8)):
            parent = rng.choice(branches)
            branches.append(sim.fork(parent, rng.choice([None, rng.randint(0, parent.length)])))
            if rng.random() < 0.3:
                sim.write((rng.choice(branches), [rng.randint(100, 102)]))
        rows = rng.sample(branches, rng.randint(1, len(branches)))
        writes = [(branch, rng.randint(1, 2 * block_size + 1)) for branch in rows]
        needed = sim.cache.num_needed(writes)
        assert needed == taken_one_by_one(writes, block_size)
        free = sim.free
        sim.launch(*((branch, range(count)) for branch, count in writes))
        assert free - sim.free == needed


@pytest.mark.parametrize(("rows", "needed"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_a_tail_shared_by_four(make_sim: MakeSim, rows: int, needed: int) -> None:
    """k rows of o owners cost k copies, or o - 1 if the last owner can stay in place."""
    sim = make_sim(8)
    parent = sim.prompt(range(5))
    branches = [parent, *(sim.fork(parent) for _ in range(3))]
    assert sim.cache.num_needed([(branch, 1) for branch in branches[:rows]]) == needed


def test_nothing_to_write_needs_nothing(make_sim: MakeSim) -> None:
    sim = make_sim(2)
    assert sim.cache.num_needed([]) == 0
    assert sim.cache.reserve([]) == []
    with pytest.raises(AssertionError, match="at least one token"):
        sim.cache.reserve([(sim.attach([]), 0)])


def test_refused_before_any_change(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    sim.cached(range(50, 54))
    branch = sim.prompt(range(6))
    before = sim.snapshot()
    with pytest.raises(OutOfBlocks) as refused:
        sim.cache.reserve([(branch, 2 + 2 * 4 + 1)])
    assert (refused.value.needed, refused.value.available) == (3, 2)
    assert sim.snapshot() == before
    sim.write((branch, range(6, 16)))
    assert sim.cached_length(range(50, 54)) == 0, "evicted, as it was enough"


def test_no_more_is_evicted_than_is_needed(make_sim: MakeSim) -> None:
    sim = make_sim(6)
    sim.cached(range(50, 66))
    sim.prompt(range(12))
    assert sim.cache.tree.num_evicted == 1
    assert sim.cached_length(range(50, 66)) == 12


def test_the_source_of_a_queued_copy_is_no_room(make_sim: MakeSim) -> None:
    """Its block is idle and can leave the tree, but it is free only when the copy has run."""
    sim = make_sim(4)
    sim.cached(range(4))
    borrower = sim.attach(range(2))
    (reservation,) = sim.cache.reserve([(borrower, 1)])
    assert (sim.free, sim.evictable, sim.cache.num_available) == (2, 1, 2)
    other = sim.attach([])
    with pytest.raises(OutOfBlocks):
        sim.cache.reserve([(other, 12)])
    assert sim.cache.tree.evict(1) == 1
    assert sim.free == 2, "held by the copy"
    sim.cache.cancel(reservation)
    sim.run_copies()
    assert sim.free == 3
    sim.check()


def test_eviction_goes_on_past_the_source_of_a_queued_copy(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    sim.cached(range(4))
    borrower = sim.attach(range(2))
    sim.cached(range(50, 54))
    (first,) = sim.cache.reserve([(borrower, 1)])  # [0:4] is idle, the oldest, and a source
    other = sim.attach([])
    (second,) = sim.cache.reserve([(other, 8)])
    assert sim.cache.tree.num_evicted == 2
    assert sim.cache.num_cached == 0
    sim.run_copies()
    for reservation in (first, second):
        sim.cache.cancel(reservation)
    sim.check()
    sim.close()


# -- admission -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", range(1, 26))
def test_admitted_exactly_if_it_can_be_written(make_sim: MakeSim, num_tokens: int) -> None:
    """Pool of 6, one block held: 20 tokens have room, whatever is idle."""
    for num_idle in range(0, 21, 4):
        sim = make_sim(6)
        sim.prompt([99])
        sim.cached(range(num_idle))
        before = sim.snapshot()
        cursor = sim.admit(range(num_tokens))
        if num_tokens > 20:
            assert cursor is None
            assert sim.snapshot() == before
            continue
        assert cursor is not None
        if cursor.length < num_tokens:
            sim.write((cursor, range(cursor.length, num_tokens)))
        assert unpack(cursor.tokens()) == list(range(num_tokens))


def test_what_the_hit_occupies_is_not_room(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    sim.cached(range(16))
    assert sim.admit([*range(16), 50]) is None
    assert sim.admit([*range(12), 50, 51, 52]) is not None, "the last cached block makes room"


def test_a_shared_borrowed_block_needs_a_block_to_be_copied_to(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    sim.prompt(range(12))
    copier = sim.admit([*range(10), 50])
    assert copier is not None
    assert copier.length == 10
    copier.release()
    last = sim.prompt([99])
    assert sim.admit([*range(10), 50]) is None
    last.release()
    assert sim.admit([*range(10), 50]) is not None


def test_the_fall_back_to_whole_blocks(make_sim: MakeSim) -> None:
    """The borrowed block has an idle child, so it cannot be taken over while it is hit."""
    sim = make_sim(3)
    sim.cached(range(8))
    sim.prompt(range(4)).release()
    sim.prompt([99])
    before = sim.cached_length([0, 1, 2, 50])
    assert before == 3
    cursor = sim.admit([0, 1, 2, *range(50, 55)])
    assert cursor is not None
    assert cursor.length == 0
    sim.write((cursor, [0, 1, 2, *range(50, 55)]))
    assert sim.cached_length(range(8)) == 3


def test_a_fall_back_inside_a_node(make_sim: MakeSim) -> None:
    sim = make_sim(3)
    sim.cached(range(12))
    cursor = sim.admit([*range(6), *range(50, 56)])
    assert cursor is not None
    assert cursor.length == 4, "block 1 is evicted, although two of its tokens agree"
    sim.write((cursor, [4, 5, *range(50, 56)]))
    assert unpack(cursor.tokens()) == [*range(6), *range(50, 56)]


def test_a_whole_hit_needs_nothing_even_in_a_full_pool(make_sim: MakeSim) -> None:
    sim = make_sim(2)
    sim.prompt(range(8))
    again = sim.admit(range(8))
    assert again is not None
    assert again.length == 8


def test_a_parked_branch_is_admitted_with_new_tokens(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    branch = sim.prompt(range(6))
    branch.park()
    more = [*range(6), 50, 51, 52]
    other = sim.prompt(range(60, 68))
    before = sim.snapshot()
    assert sim.cache.admit(0, pack(more), branch) is None
    assert sim.snapshot() == before
    other.release()
    assert sim.cache.admit(0, pack(more), branch) is branch
    assert branch.length == 4
    sim.write((branch, more[4:]))


def test_a_resumed_branch_goes_as_far_as_the_prompt_is_cached(make_sim: MakeSim) -> None:
    """Others may have computed more of its tokens than it had when it was parked."""
    sim = make_sim(8)
    branch = sim.prompt(range(6))
    branch.park()
    sim.cached(range(12))
    assert sim.cache.admit(0, pack(range(12)), branch) is branch
    assert branch.length == 12
    sim.check()


# -- commit ----------------------------------------------------------------------------------------


def test_commit_wants_what_was_reserved(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    branch = sim.attach([])
    (reservation,) = sim.cache.reserve([(branch, 2)])
    with pytest.raises(AssertionError, match="what was reserved"):
        sim.cache.commit(reservation, pack([1]))


def test_commit_wants_the_copies_done(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    branch = sim.prompt(range(2))
    sim.fork(branch)
    (reservation,) = sim.cache.reserve([(branch, 1)])
    with pytest.raises(AssertionError, match="copies run before"):
        sim.cache.commit(reservation, pack([1]))


def test_a_reservation_ends_once(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    (flying,) = sim.launch((sim.attach([]), range(5)))
    sim.land([flying])
    with pytest.raises(KeyError):
        sim.cache.cancel(flying.reservation)
    sim.check()


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(AssertionError, match="at least one token"):
        PrefixCache(4, 0)
    with pytest.raises(AssertionError, match="at least one block"):
        PrefixCache(0)
