"""What paging is measured against: allocators that give each request one contiguous range of slots.

Two classic ones, first fit and binary buddy, over a pool of `num_slots` token slots. They are simulations for
the memory benchmark; nothing in the engine uses them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol


class Allocator(Protocol):
    """A pool that hands out contiguous ranges. All sizes and addresses are in slots."""

    num_slots: int

    def allocate(self, size: int) -> int | None:
        """The start of a free range of `size` slots, or None when no hole is large enough."""
        ...

    def free(self, start: int) -> None:
        """Take back the range that starts at `start`."""
        ...

    def taken(self, start: int) -> int:
        """How many slots the range at `start` really holds; a buddy rounds up."""
        ...

    @property
    def num_free(self) -> int: ...

    @property
    def largest_hole(self) -> int:
        """The largest size that `allocate` would serve now; 0 in a full pool."""
        ...


class FirstFit:
    """Takes the lowest hole that is large enough; neighbouring holes merge when a range is freed."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._holes: list[tuple[int, int]] = [(0, num_slots)]  # (start, size) in address order
        self._ranges: dict[int, int] = {}  # start -> size

    def allocate(self, size: int) -> int | None:
        """O(holes)."""
        assert size > 0, "a range holds at least one slot"
        for i, (start, hole) in enumerate(self._holes):
            if hole >= size:
                self._holes[i : i + 1] = [(start + size, hole - size)] if hole > size else []
                self._ranges[start] = size
                return start
        return None

    def free(self, start: int) -> None:
        """O(holes), for the list; the neighbours are found in O(log holes)."""
        size = self._ranges.pop(start)
        i = bisect_left(self._holes, (start, 0))
        if i < len(self._holes) and self._holes[i][0] == start + size:
            size += self._holes.pop(i)[1]
        if i > 0 and sum(self._holes[i - 1]) == start:
            before, before_size = self._holes.pop(i - 1)
            start, size = before, before_size + size
        insort(self._holes, (start, size))

    def taken(self, start: int) -> int:
        return self._ranges[start]

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self._holes)

    @property
    def largest_hole(self) -> int:
        return max((size for _, size in self._holes), default=0)

    def check(self) -> None:
        """Assert that ranges and holes tile the pool and that no two holes touch."""
        pieces = sorted([*self._ranges.items(), *self._holes])
        end = 0
        for start, size in pieces:
            assert start == end, "ranges and holes tile the pool"
            assert size > 0, "no piece is empty"
            end = start + size
        assert end == self.num_slots, "ranges and holes tile the pool"
        for (start, size), (after, _) in zip(self._holes, self._holes[1:], strict=False):
            assert start + size < after, "holes that touch are one hole"


class Buddy:
    """Binary buddy: sizes are rounded up to a power of two, and a freed range merges with its free twin.

    A pool that is no power of two starts as one free range for each bit of its size, the largest first. Each
    then lies at a multiple of its own size, and no range as large starts at its twin's address: they never
    merge with each other.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free: list[set[int]] = [
            set() for _ in range(num_slots.bit_length())
        ]  # by order, log2 of the size
        self._orders: dict[int, int] = {}  # start of a range that is in use -> its order
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def allocate(self, size: int) -> int | None:
        """Split the smallest sufficient range, lowest address first. O(log(pool) + ranges of one size)."""
        assert size > 0, "a range holds at least one slot"
        wanted = (size - 1).bit_length()
        order = next((o for o in range(wanted, len(self._free)) if self._free[o]), None)
        if order is None:
            return None
        start = min(self._free[order])
        self._free[order].remove(start)
        while order > wanted:
            order -= 1
            self._free[order].add(start + (1 << order))
        self._orders[start] = wanted
        return start

    def free(self, start: int) -> None:
        """Merge with the twin while it is free. O(log(pool))."""
        order = self._orders.pop(start)
        while (twin := start ^ 1 << order) in self._free[order]:
            self._free[order].remove(twin)
            start = min(start, twin)
            order += 1
        self._free[order].add(start)

    def taken(self, start: int) -> int:
        return 1 << self._orders[start]

    @property
    def num_free(self) -> int:
        return sum(len(starts) << order for order, starts in enumerate(self._free))

    @property
    def largest_hole(self) -> int:
        return max((1 << order for order, starts in enumerate(self._free) if starts), default=0)

    def check(self) -> None:
        """Assert that ranges tile the pool and lie at multiples of their size, and that free twins merged."""
        pieces = sorted(
            [(start, order) for start, order in self._orders.items()]
            + [(start, order) for order, starts in enumerate(self._free) for start in starts]
        )
        end = 0
        for start, order in pieces:
            assert start == end, "ranges tile the pool"
            assert start % (1 << order) == 0, "a range lies at a multiple of its size"
            end = start + (1 << order)
        assert end == self.num_slots, "ranges tile the pool"
        for order, starts in enumerate(self._free):
            assert not any(start ^ 1 << order in starts for start in starts), "free twins are merged"
