"""The work of a decode step: a plan's rows with one query."""

from __future__ import annotations

from ramet.kernels.cuda import planning
from ramet.kernels.cuda.planner import GPUPlanner
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.plan import AttentionPlan, IntArray, Planner

MIN_SHARED_TOKENS_SAVED = 256  # by one segment, once some pay


def planner(pool: KVPool) -> Planner:
    """The planner for a pool on a GPU. Whether its segments pay together is decided with the lists.

    Raises RuntimeError where there is no C compiler: now, not in the first step.
    """
    planning.library()
    return GPUPlanner(pool.block_size, MIN_SHARED_TOKENS_SAVED)


class DecodeWork:
    """One step's work for the rows `rows` [R] of a plan, which have one query each.

    It lies in the workspace until the next step's is made.
    """

    def __init__(self, plan: AttentionPlan, rows: IntArray, workspace: Workspace) -> None:
        assert len(rows) > 0, "there are rows to decode"
        self.workspace = workspace
        self.list = workspace.lists.prepare(plan, rows)
