"""A tree of branches as a cascade reads it: level by level, each level one launch over all branches."""

from __future__ import annotations

from dataclasses import dataclass, field

from ramet.api.bench_attention_cases import Case
from ramet.kernels.plan import AttentionPlan, Planner, Segment


@dataclass
class Level:
    """What one launch reads: all branches in order, in groups of neighbours, and the blocks of each group."""

    group_sizes: list[int] = field(default_factory=list)  # [G] branches
    block_ids: list[list[int]] = field(default_factory=list)  # [G], none where a group reads nothing here
    last_block_lens: list[int] = field(default_factory=list)  # [G] tokens in the last block

    def add(self, group_size: int, block_ids: list[int], last_block_len: int) -> None:
        self.group_sizes.append(group_size)
        self.block_ids.append(block_ids)
        self.last_block_lens.append(last_block_len)


def cascade_levels(case: Case, max_shared: int | None = None) -> list[Level]:
    """At most `max_shared` shared levels of a case, from the root on, then one of what branches have left."""
    plan = case.plan(Planner(case.block_size, min_shared_tokens_saved=1))
    segments = [s for s in plan.segments if max_shared is None or s.level < max_shared]
    depth = 1 + max((s.level for s in segments), default=-1)
    levels = [_shared(plan, [s for s in segments if s.level == level]) for level in range(depth)]
    return [*levels, _rest(plan, segments)]


def _shared(plan: AttentionPlan, segments: list[Segment]) -> Level:
    """Branches outside of all segments form groups that read nothing."""
    level, row = Level(), 0
    for segment in segments:
        if segment.row0 > row:
            level.add(segment.row0 - row, [], 0)
        ids = plan.block_tables[segment.row0][segment.block0 : segment.block1]
        level.add(segment.row1 - segment.row0, list(ids), plan.block_size)
        row = segment.row1
    if row < plan.num_rows:
        level.add(plan.num_rows - row, [], 0)
    return level


def _rest(plan: AttentionPlan, segments: list[Segment]) -> Level:
    block0 = [0] * plan.num_rows
    for segment in segments:  # by level, so that the last on a branch's path counts
        block0[segment.row0 : segment.row1] = [segment.block1] * (segment.row1 - segment.row0)
    level = Level()
    for table, start, kv_len in zip(plan.block_tables, block0, plan.kv_lens.tolist(), strict=True):
        level.add(1, list(table[start:]), (kv_len - 1) % plan.block_size + 1)
    return level
