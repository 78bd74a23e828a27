"""What attention has to read in a step, and for whom: shared segments once, private segments row by row.

Plain numpy and no device: each attention path turns a plan into its own work list. Nothing here reads a block
id; a segment names rows and positions in their block tables.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Ints = Sequence[int] | IntArray


class Segment(NamedTuple):
    """Blocks [block0, block1) of the tables of rows [row0, row1), read once for all of these rows.

    All rows hold the same block ids there and all their queries see all the slots, so no mask is needed.
    """

    level: int  # how many segments lie above it on the path: its part index, the same for all its rows
    row0: int
    row1: int
    block0: int
    block1: int


@dataclass(frozen=True)
class AttentionPlan:
    """Covers each (row, block) exactly once.

    Row i attends over the shared segments that contain it, in path order, and then over its private segment:
    positions [private_block0[i] * B, kv_lens[i]), causally. Its queries are tokens
    [query_starts[i], query_starts[i + 1]) of the flat batch and sit at its last query_lens[i] positions.
    """

    block_size: int
    # S rows of block ids, kept as they came. An object may serve many steps and grow: from a step with it to
    # the next it changes from the last block of the first on only: copied, joined by others, or gone.
    block_tables: Sequence[Sequence[int]]
    query_lens: IntArray  # [S]
    kv_lens: IntArray  # [S]
    query_starts: IntArray  # [S + 1]
    private_block0: IntArray  # [S]
    segment_array: IntArray  # [X, 5], the fields of `segments`

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """By level, then by row: a segment stands after those above it."""
        return tuple(map(Segment._make, self.segment_array.tolist()))

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1])

    @property
    def num_tokens_saved(self) -> int:
        """KV tokens that are not read again, a layer, because a segment is read once for its rows."""
        blocks = sum((s.block1 - s.block0) * (s.row1 - s.row0 - 1) for s in self.segments)
        return blocks * self.block_size


class Tree(NamedTuple):
    """What stays of a step's plan for the steps after it, while its rows only grow."""

    query_lens: Sequence[int]  # [S]
    num_shared_blocks: Sequence[int]  # [S]
    least_kv_lens: IntArray | None  # [S], with which each row sees all that it shares; None if lengths matter
    queries: IntArray  # [S], query_lens as an array
    query_starts: IntArray  # [S + 1]
    private_block0: IntArray  # [S]
    segment_array: IntArray  # [X, 5]

    def is_of(self, query_lens: Ints, kv_lens: IntArray, num_shared_blocks: Ints) -> bool:
        """Whether a step has this tree. Lists are compared as they are: much faster than as arrays."""
        return (
            self.least_kv_lens is not None
            and query_lens == self.query_lens
            and num_shared_blocks == self.num_shared_blocks
            and len(kv_lens) == len(self.queries)
            and bool((kv_lens >= self.least_kv_lens).all())
        )


@dataclass
class Planner:
    """Makes plans. A shared segment that does not pay for itself is left to its rows.

    It pays if the tokens that are not read again, a layer, are at least `min_shared_tokens_saved` and at
    least `min_shared_fraction` of what its rows would read from there on. What suits a pool is the path's to
    say: see ramet.kernels.attention.planner.
    """

    block_size: int
    min_shared_tokens_saved: int = 128
    min_shared_fraction: float = 0.0
    _last: Tree | None = field(default=None, init=False, repr=False, compare=False)

    def plan(
        self,
        block_tables: Sequence[Sequence[int]],
        query_lens: Ints,
        kv_lens: Ints,
        num_shared_blocks: Ints,
    ) -> AttentionPlan:
        """Plan a step for S rows in depth-first order of the tree.

        `kv_lens` counts what the last query of a row sees, itself included. `num_shared_blocks[i]` is the
        number of leading blocks that row i has in common with row i - 1 (0 for the first): all that is needed
        to know the tree.
        """
        query_lens, num_shared_blocks = _list(query_lens), _list(num_shared_blocks)
        lens = _array(kv_lens)
        tree = self._last
        if tree is None or not tree.is_of(query_lens, lens, num_shared_blocks):
            tree = self._last = self._tree(query_lens, lens, num_shared_blocks)
        assert len(block_tables) == len(lens), "the inputs differ in rows"
        return AttentionPlan(
            self.block_size,
            block_tables,
            tree.queries,
            lens,
            tree.query_starts,
            tree.private_block0,
            tree.segment_array,
        )

    def _tree(self, query_lens: list[int], lens: IntArray, num_shared_blocks: list[int]) -> Tree:
        queries, common = _array(query_lens), _array(num_shared_blocks)
        assert len(queries) == len(lens) == len(common), "the inputs differ in rows"
        assert len(lens) > 0, "a step has at least one row"
        assert num_shared_blocks[0] == 0, "the first row has no row before it"
        assert min(query_lens) >= 1, "a row has at least one query"
        before_first = queries - 1
        first_sees = lens - before_first
        assert first_sees.min() >= 1, "a row has more queries than KV"
        # A block is shared at most as far as every query of the row sees all of it.
        least = np.maximum(common * self.block_size, 1)
        least[:-1] = np.maximum(least[:-1], least[1:])
        depths, sees_all = num_shared_blocks, bool((first_sees >= least).all())
        if not sees_all:
            visible = first_sees // self.block_size
            depths = [0, *np.minimum(common[1:], np.minimum(visible[1:], visible[:-1])).tolist()]
        segments, private = self._fold(_intervals(depths), lens)
        starts = np.zeros(len(lens) + 1, dtype=np.int64)
        np.cumsum(queries, out=starts[1:])
        for shared in (queries, starts, private, segments):  # by the plans of this tree
            shared.setflags(write=False)
        stays = sees_all and not self.min_shared_fraction
        return Tree(
            list(query_lens),
            list(num_shared_blocks),
            least + before_first if stays else None,
            queries,
            starts,
            private,
            segments,
        )

    def _fold(self, intervals: list[tuple[int, int, int]], lens: IntArray) -> tuple[IntArray, IntArray]:
        """The intervals that pay, as segments [X, 5], and where each row's private one starts [S].

        The blocks of the other intervals go to what lies below them.

        Sorted by depth, an interval comes after those around it, so `covered` of its first row is what they
        have taken already.
        """
        covered, levels = [0] * len(lens), [0] * len(lens)
        kept: list[tuple[int, int, int, int, int]] = []
        least = max(self.min_shared_tokens_saved, 1)
        for block1, row0, row1 in sorted(intervals):
            block0, num_rows = covered[row0], row1 - row0
            saved = (block1 - block0) * (num_rows - 1) * self.block_size
            if saved < least:
                continue
            if self.min_shared_fraction:
                unread = lens[row0:row1].sum().item() - block0 * num_rows * self.block_size
                if saved < self.min_shared_fraction * unread:
                    continue
            level = levels[row0]
            kept.append((level, row0, row1, block0, block1))
            covered[row0:row1] = [block1] * num_rows
            levels[row0:row1] = [level + 1] * num_rows
        return np.array(sorted(kept), dtype=np.int64).reshape(-1, 5), _array(covered)


def _list(values: Ints) -> list[int]:
    return values if isinstance(values, list) else list(map(int, values))


def _array(values: Ints) -> IntArray:
    """The values as an array of the plan's own. Of a list, three times as fast as numpy's own conversion."""
    if isinstance(values, np.ndarray):
        return values.astype(np.int64)
    return np.frombuffer(struct.pack(f"{len(values)}q", *values), dtype=np.int64)


def _intervals(depths: list[int]) -> list[tuple[int, int, int]]:
    """The inner nodes of the tree, as (block1, row0, row1), from the depths [S] that neighbours share.

    depths[i] is what rows i - 1 and i share; depths[0] is 0. An interval is a longest run of rows that share
    block1 blocks. Only places where the depth changes can open or close one.
    """
    found: list[tuple[int, int, int]] = []
    open_rows: list[int] = []
    open_depths: list[int] = [0]
    last = 0
    for i, depth in enumerate((*depths, 0)):
        if depth == last:
            continue
        last, row0 = depth, i - 1
        while open_depths[-1] > depth:
            row0 = open_rows.pop()
            found.append((open_depths.pop(), row0, i))
        if depth > open_depths[-1]:
            open_rows.append(row0)
            open_depths.append(depth)
    return found


def shared_with_previous(block_tables: Sequence[Sequence[int]]) -> list[int]:
    """How many leading blocks each row has in common with the row before it, found by comparing ids."""
    shared = [0]
    for before, row in pairwise(block_tables):
        depth = min(len(before), len(row))
        differs = (i for i in range(depth) if before[i] != row[i])
        shared.append(next(differs, depth))
    return shared
