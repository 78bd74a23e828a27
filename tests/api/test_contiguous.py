"""The contiguous allocators against a naive model: a list with one flag a slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, strategies as st

from ramet.api.contiguous import Buddy, FirstFit

# Above 0: a size to allocate. Otherwise: the number of a range to free, modulo how many there are.
Actions = st.lists(st.integers(-8, 20), max_size=60)


class Hole(NamedTuple):
    start: int
    size: int


def runs(taken: Sequence[bool]) -> list[Hole]:
    """The maximal runs of free slots."""
    found, begin = [], None
    for slot, flag in enumerate([*taken, True]):
        if not flag and begin is None:
            begin = slot
        elif flag and begin is not None:
            found.append(Hole(begin, slot - begin))
            begin = None
    return found


def aligned_holes(taken: Sequence[bool], start: int, size: int) -> list[Hole]:
    """The free slots of one power-of-two range as the largest possible aligned ranges."""
    if not any(taken[start : start + size]):
        return [Hole(start, size)]
    if size == 1:
        return []
    half = size // 2
    return aligned_holes(taken, start, half) + aligned_holes(taken, start + half, half)


def buddy_holes(taken: Sequence[bool]) -> list[Hole]:
    """A pool of any size is one aligned range a bit of its size, the largest first."""
    found, start = [], 0
    for order in reversed(range(len(taken).bit_length())):
        if len(taken) >> order & 1:
            found += aligned_holes(taken, start, 1 << order)
            start += 1 << order
    return found


def lowest_fitting(holes: Sequence[Hole], size: int) -> int | None:
    return min((hole.start for hole in holes if hole.size >= size), default=None)


def smallest_fitting(holes: Sequence[Hole], size: int) -> int | None:
    fitting = [(hole.size, hole.start) for hole in holes if hole.size >= size]
    return min(fitting)[1] if fitting else None


def play(allocator: FirstFit | Buddy, actions: Sequence[int]) -> None:
    """Do the actions on the allocator and on the model, and compare all that can be seen after each."""
    buddy = isinstance(allocator, Buddy)
    taken = [False] * allocator.num_slots
    live: list[Hole] = []
    for action in actions:
        if action > 0:
            size = 1 << (action - 1).bit_length() if buddy else action
            expected = (
                smallest_fitting(buddy_holes(taken), size) if buddy else lowest_fitting(runs(taken), size)
            )
            start = allocator.allocate(action)
            assert start == expected
            if start is not None:
                assert allocator.taken(start) == size
                live.append(Hole(start, size))
                taken[start : start + size] = [True] * size
        elif live:
            start, size = live.pop(-action % len(live))
            allocator.free(start)
            taken[start : start + size] = [False] * size
        allocator.check()
        holes = buddy_holes(taken) if buddy else runs(taken)
        assert allocator.num_free == taken.count(False)
        assert allocator.largest_hole == max((hole.size for hole in holes), default=0)


@given(num_slots=st.integers(1, 70), actions=Actions)
def test_first_fit_is_the_naive_model(num_slots: int, actions: list[int]) -> None:
    play(FirstFit(num_slots), actions)


@given(num_slots=st.integers(1, 70), actions=Actions)
def test_buddy_is_the_naive_model(num_slots: int, actions: list[int]) -> None:
    play(Buddy(num_slots), actions)


@pytest.mark.parametrize("kind", [FirstFit, Buddy])
@given(sizes=st.lists(st.integers(1, 20), max_size=20))
def test_a_pool_is_whole_again_when_all_are_freed(kind: type[FirstFit | Buddy], sizes: list[int]) -> None:
    allocator, fresh = kind(70), kind(70)
    starts = [start for size in sizes if (start := allocator.allocate(size)) is not None]
    for start in starts:
        allocator.free(start)
    assert (allocator.num_free, allocator.largest_hole) == (70, fresh.largest_hole)


def test_free_slots_in_holes_serve_nobody() -> None:
    pool = FirstFit(40)
    starts = [pool.allocate(10) for _ in range(4)]
    assert starts == [0, 10, 20, 30]
    pool.free(0)
    pool.free(20)
    assert (pool.num_free, pool.largest_hole) == (20, 10)
    assert pool.allocate(11) is None
    pool.free(10)  # joins its neighbours
    assert pool.largest_hole == 30


def test_a_buddy_rounds_up_and_cannot_join_what_are_not_twins() -> None:
    pool = Buddy(32)
    starts = [pool.allocate(5) for _ in range(4)]
    assert starts == [0, 8, 16, 24]
    pool.free(8)
    pool.free(16)  # neighbours, not twins
    assert (pool.num_free, pool.largest_hole) == (16, 8)
    pool.free(0)
    assert pool.largest_hole == 16


@pytest.mark.parametrize("kind", [FirstFit, Buddy])
def test_freeing_twice_is_an_error(kind: type[FirstFit | Buddy]) -> None:
    pool = kind(8)
    assert pool.allocate(4) == 0
    pool.free(0)
    with pytest.raises(KeyError):
        pool.free(0)
