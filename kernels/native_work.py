"""Turns an attention plan into the tasks of the C kernels (`csrc/attention.h`), once a step. Plain numpy."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ramet.kernels.plan import AttentionPlan, IntArray

Int32s = npt.NDArray[np.int32]

MAX_TASK_QUERIES = 128  # MAX_MANY of csrc/attention.h
# A stretch of KV is cut so that cores can share its work: into pieces of so many slots for up to 64 queries,
# longer ones for more of them, which are cut by queries as well. Nothing else in the step matters, so a row's
# result does not depend on its neighbours.
PIECE_SLOTS = 256
PIECE_QUERIES = 64
_LANES = 16  # of csrc/vector.h


class Stretches(NamedTuple):
    """Positions [start, stop) of rows, for tokens [token0, token0 + num_tokens). Each [n]."""

    row: IntArray
    start: IntArray
    stop: IntArray
    token0: IntArray
    num_tokens: IntArray

    def select(self, index: npt.NDArray[np.bool_] | IntArray) -> Stretches:
        return Stretches(*(column[index] for column in self))


class Tasks(NamedTuple):
    """What the C kernels are told to do in each layer."""

    tasks: Int32s  # [n, 8], `Task` of csrc/attention.h
    blocks: Int32s  # the ids of the blocks that they read
    part_starts: Int32s  # [T + 1] token t has the partial results parts[part_starts[t]:part_starts[t + 1]]
    parts: Int32s  # each by the number of the first of its `group` query heads
    num_parts: int  # P, of one KV head

    @property
    def num_products(self) -> int:
        """Query times slot, for one KV head."""
        return int((self.tasks[:, 2] * (self.tasks[:, 6] - self.tasks[:, 5])).sum())


def stretches_of(plan: AttentionPlan, lows: IntArray) -> Stretches:
    """What a step reads: each row's own KV, and what rows share. lows [T]: where each window begins."""
    size, starts = plan.block_size, plan.query_starts
    _, row0, row1, block0, block1 = plan.segment_array.T
    row = np.concatenate([np.arange(plan.num_rows), row0])
    token0 = np.concatenate([starts[:-1], starts[row0]])
    token1 = np.concatenate([starts[1:], starts[row1]])
    start = np.concatenate([plan.private_block0, block0]) * size
    stop = np.concatenate([plan.kv_lens, block1 * size])
    # What no token sees is not read. An end must be an index, hence the last number.
    first_seen = np.minimum.reduceat(np.append(lows, 0), np.array([token0, token1]).T.ravel())[::2]
    start = np.maximum(start, first_seen)
    return Stretches(row, start, stop, token0, token1 - token0).select(start < stop)


def make_tasks(plan: AttentionPlan, stretches: Stretches, group: int) -> Tasks:
    """Cut stretches into tasks, for `group` query heads a KV head."""
    size = plan.block_size
    block0, block1 = stretches.start // size, -(-stretches.stop // size)
    ids = (
        plan.block_tables[row][a:b]
        for row, a, b in zip(stretches.row.tolist(), block0.tolist(), block1.tolist(), strict=True)
    )
    num_blocks = block1 - block0
    blocks = np.fromiter(chain.from_iterable(ids), np.int32, count=int(num_blocks.sum()))
    # Where the id of position 0 would stand if all were there.
    table0 = num_blocks.cumsum() - num_blocks - block0

    longest = PIECE_SLOTS * -(-stretches.num_tokens * group // PIECE_QUERIES)
    owner, i = _parts_of(-(-(stretches.stop - stretches.start) // longest))
    pieces, longest, table0 = stretches.select(owner), longest[owner], table0[owner]
    start = pieces.start + i * longest
    stop = np.minimum(start + longest, pieces.stop)
    num_queries = pieces.num_tokens * group
    part0 = num_queries.cumsum() - num_queries
    columns = np.array([table0 + start // size, start % size, stop - start, start, pieces.token0, part0])

    num_cuts = -(-num_queries // MAX_TASK_QUERIES)
    per_task = -(-num_queries // (num_cuts * _LANES)) * _LANES
    owner, i = _parts_of(num_cuts)
    query0 = i * per_task[owner]
    query1 = np.minimum(query0 + per_task[owner], num_queries[owner])
    *before, part0 = columns[:, owner]
    tasks = np.array([*before, query0, query1, part0], dtype=np.int32).T
    # The largest first: no thread is left alone with one.
    largest_first = np.argsort(tasks[:, 2] * (query0 - query1), kind="stable")
    return Tasks(np.ascontiguousarray(tasks[largest_first]), blocks, *_merges(pieces, group, plan.num_tokens))


def _merges(pieces: Stretches, group: int, num_tokens: int) -> tuple[Int32s, Int32s, int]:
    """Where the partial results of each token are: one for each piece that it is a token of, in order."""
    owner, i = _parts_of(pieces.num_tokens)
    tokens = pieces.token0[owner] + i
    starts = np.zeros(num_tokens + 1, dtype=np.int32)
    np.bincount(tokens, minlength=num_tokens).cumsum(out=starts[1:])
    parts = np.argsort(tokens, kind="stable") * group
    return starts, parts.astype(np.int32), len(parts) * group


def _parts_of(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Of things with so many parts each: for every part, the thing that it is of, and its number in it."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
