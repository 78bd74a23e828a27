"""The physical blocks: which are free, and how many owners each of the others has.

A block's owners are the tree, each branch whose tail it is, each open reservation, and each copy in flight.
It returns to the free list exactly when the last of them lets go, and nowhere else but in `drop`.
"""

from __future__ import annotations

from collections.abc import Sequence


class OutOfBlocks(Exception):
    """Not enough free and evictable blocks. Raised before anything has changed.

    Attributes: needed and available, in blocks.
    """

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} blocks are needed, {available} are free or can be evicted")
        self.needed = needed
        self.available = available


class BlockPool:
    """A fixed set of block ids with reference counts. Every method is O(1)."""

    __slots__ = ("_free", "num_blocks", "ref_counts")

    def __init__(self, num_blocks: int, order: Sequence[int] | None = None) -> None:
        """`order` is the order in which ids are handed out at first; by default 0, 1, 2, ..."""
        assert num_blocks > 0, "a pool has at least one block"
        ids = list(range(num_blocks)) if order is None else list(order)
        assert sorted(ids) == list(range(num_blocks)), "order is a permutation of the block ids"
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free = ids[::-1]  # a stack: the block freed last is the warmest in the caches

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Hand out a free block with one owner. The caller has made sure that there is one."""
        block = self._free.pop()
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add an owner to a block that has at least one."""
        assert self.ref_counts[block] > 0, "a free block cannot be shared"
        self.ref_counts[block] += 1

    def drop(self, block: int) -> None:
        """Remove an owner; the block is free when it was the last one."""
        count = self.ref_counts[block] - 1
        assert count >= 0, "a block was released twice"
        self.ref_counts[block] = count
        if count == 0:
            self._free.append(block)

    def check(self, owners: Sequence[int]) -> None:
        """Assert the counts against `owners`, a recount of each block's owners. O(number of blocks)."""
        wrong = [(b, o, c) for b, (o, c) in enumerate(zip(owners, self.ref_counts, strict=True)) if o != c]
        assert not wrong, f"reference counts differ from a recount (block, recount, count): {wrong}"
        # Each block is free or owned, never both, and is listed free only once.
        assert sorted(self._free) == [b for b, count in enumerate(self.ref_counts) if count == 0], (
            "the free list is not exactly the blocks without owners"
        )
