"""Turns a plan into the work of a decode step: which lists it needs, and what changes with every token."""

from __future__ import annotations

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

    Lengths and new block ids are sent every step, lists only when the tree has another shape. All lie in the
    workspace until the next step's are made.
    """

    def __init__(self, plan: AttentionPlan, rows: IntArray, workspace: Workspace) -> None:
        assert len(rows) > 0, "there are rows to decode"
        self.plan, self.rows, self.workspace = plan, rows, workspace
        tokens, kv_lens, tables = plan.query_starts[:-1], plan.kv_lens, plan.block_tables
        if len(rows) < plan.num_rows:
            tokens, kv_lens = tokens[rows], kv_lens[rows]
            tables = [tables[row] for row in rows.tolist()]
        tree = plan.segments, rows.tobytes(), tokens.tobytes()
        known, workspace.work_list = workspace.work_list, None  # an interrupt would leave parts of two
        if known is None or not known.suits(tree, kv_lens):
            known = WorkList(Shape(tree, *self._shared(), tokens, kv_lens), workspace)
        workspace.step.send(known, tables, kv_lens)
        self.list = workspace.work_list = known

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
