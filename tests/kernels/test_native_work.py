"""The tasks of the C kernels: what a token sees is read once, and its results are found again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st

from ramet.kernels.native_work import MAX_TASK_QUERIES, make_tasks, stretches_of
from ramet.kernels.plan import AttentionPlan


def last_positions(plan: AttentionPlan) -> Any:
    """The position of each token, straight from what the plan says of it."""
    return np.concatenate(
        [np.arange(kv - n, kv) for n, kv in zip(plan.query_lens, plan.kv_lens, strict=True)]
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from((1, 4)),
    longest=st.sampled_from((3, 70)),  # more than a piece: 280 slots
    group=st.sampled_from((1, 3, 70)),
    window=st.none() | st.integers(1, 60),
)
def test_tasks_cover_what_is_seen_once(
    rows_of: Callable[..., Any],
    seed: int,
    block_size: int,
    longest: int,
    group: int,
    window: int | None,
) -> None:
    plan = rows_of(random.Random(seed), block_size, 3, longest).plan()
    ends = last_positions(plan) + 1
    lows = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    made = make_tasks(plan, stretches_of(plan, lows), group)
    seen = [np.zeros((group, end), dtype=np.int64) for end in ends]
    part_of: dict[int, tuple[int, int]] = {}  # part: token, head
    for block, offset, num_slots, position, token0, query0, query1, part0 in made.tasks.tolist():
        num_queries = query1 - query0
        assert 0 < num_queries <= MAX_TASK_QUERIES
        assert num_slots > 0
        for query in range(query0, query1):
            token, head = token0 + query // group, query % group
            assert part0 + query not in part_of, "two tasks write one part"
            part_of[part0 + query] = token, head
            seen[token][head, position : position + num_slots] += 1
        row = int(np.searchsorted(plan.query_starts, token0, side="right")) - 1
        for i in range(num_slots):
            block_id = plan.block_tables[row][(position + i) // block_size]
            assert made.blocks[block + (offset + i) // block_size] == block_id
            assert (offset + i) % block_size == (position + i) % block_size
    for low, counts in zip(lows.tolist(), seen, strict=True):
        assert (counts[:, low:] == 1).all()
    assert sorted(part_of) == list(range(made.num_parts))
    for token in range(plan.num_tokens):
        parts = made.parts[made.part_starts[token] : made.part_starts[token + 1]]
        assert {part_of[part + head] for part in parts.tolist() for head in range(group)} == {
            (token, head) for head in range(group)
        }
    assert len(made.parts) * group == made.num_parts


def test_what_no_window_reaches_is_not_read(no_rows: type[Any]) -> None:
    rows = no_rows(4)
    path = rows.take(100)
    for _ in range(8):
        rows.add(path + rows.take(2), 1, 407)
    plan = rows.plan()

    def num_slots(window: int) -> list[int]:
        lows = np.maximum(last_positions(plan) + 1 - window, 0)
        read = stretches_of(plan, lows)
        return [stop - start for start, stop in zip(read.start.tolist(), read.stop.tolist(), strict=True)]

    assert num_slots(500) == [7] * 8 + [400]
    assert num_slots(47) == [7] * 8 + [40]  # once for all eight rows
    assert num_slots(7) == [7] * 8
    assert num_slots(5) == [5] * 8
