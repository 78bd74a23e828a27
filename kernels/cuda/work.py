"""Turns a plan into the work of a decode step: which lists it needs, and what changes with every token."""

from __future__ import annotations

import struct

import numpy as np

from ramet.kernels.cuda.work_list import Shape, WorkList
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.plan import AttentionPlan, IntArray, Planner

# Shared segments cost a further launch, 2 to 2.6 us a layer however small they are, and L2 serves some of
# what is read twice. They pay from so many bytes a layer that are not read again; more if few rows share.
GATE_BYTES, GATE_BYTES_FEW_ROWS = 36e6, 54e6
MIN_SHARED_TOKENS_SAVED = 256  # by one segment, once there are some


def planner(pool: KVPool) -> Planner:
    """The planner for a pool on a GPU. Whether its segments pay together is decided by DecodeWork."""
    return Planner(pool.block_size, MIN_SHARED_TOKENS_SAVED)


class DecodeWork:
    """One step's work for the rows `rows` [R] of a plan, which have one query each.

    Lengths and block ids are sent every step, as a block may have been replaced by a copy. The lists are made
    again only when the tree has another shape. All lie in the workspace until the next step's are made.
    """

    def __init__(self, plan: AttentionPlan, rows: IntArray, workspace: Workspace) -> None:
        assert len(rows) > 0, "there are rows to decode"
        assert (plan.query_lens[rows] == 1).all(), "a decoding row has one query"
        self.plan, self.rows, self.workspace = plan, rows, workspace
        shape = Shape(*self._shared(), plan.query_starts[rows], plan.kv_lens[rows])
        workspace.begin()
        known = workspace.work_list
        if known is None or not known.suits(shape):
            known = workspace.work_list = WorkList(shape, workspace)
        self.list = known
        workspace.kv_lens.send(shape.kv_lens)
        self._send_block_ids(shape.kv_lens)
        workspace.end()

    def _shared(self) -> tuple[IntArray, IntArray]:
        """The shared segments [X, 5] of the decoding rows, as in the plan, and where private ones start [R].

        Without any of them, if what they spare is too little.
        """
        plan, rows = self.plan, self.rows
        shared = np.array(plan.segments, dtype=np.int64).reshape(-1, 5)
        if len(rows) < plan.num_rows:  # rows with several queries are not here
            shared[:, 1:3] = np.searchsorted(rows, shared[:, 1:3])
            shared = shared[shared[:, 2] > shared[:, 1]]
        num_rows, num_blocks = shared[:, 2] - shared[:, 1], shared[:, 4] - shared[:, 3]
        read = int(num_blocks.sum())
        saved = int((num_blocks * num_rows).sum()) - read
        pool = self.workspace.pool
        block_bytes = pool.bytes_per_block // pool.num_layers
        if saved * block_bytes < GATE_BYTES + GATE_BYTES_FEW_ROWS * 2 * read / max(saved + read, 1):
            return shared[:0], np.zeros(len(rows), dtype=np.int64)
        return shared, plan.private_block0[rows]

    def _send_block_ids(self, kv_lens: IntArray) -> None:
        """Send the block ids of each segment, side by side, each in the room that its list gave it."""
        size, tables, segments = self.plan.block_size, self.plan.block_tables, self.list.segments
        block0 = segments.start // size
        ends = block0 + self.list.num_blocks
        ends[segments.is_private] = -(-kv_lens[segments.row0[segments.is_private]] // size)
        room = (block0 + self.list.num_blocks - ends).tolist()
        rows = self.rows[segments.row0].tolist()
        ids: list[int] = []
        for row, first, end, spare in zip(rows, block0.tolist(), ends.tolist(), room, strict=True):
            ids += tables[row][first:end]
            ids += (0,) * spare
        # Three times as fast as numpy's own conversion of a list.
        self.workspace.block_ids.send(np.frombuffer(struct.pack(f"{len(ids)}i", *ids), dtype=np.int32))
