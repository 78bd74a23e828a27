"""The plan covers each (row, block) exactly once, shares what can be shared, and costs little."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ramet.kernels.plan import AttentionPlan, Planner, shared_with_previous

fixtures_are_functions = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_cover(plan: AttentionPlan) -> None:
    size = plan.block_size
    count: Counter[tuple[int, int]] = Counter()
    for level, row0, row1, block0, block1 in plan.segments:
        assert row1 - row0 >= 2 and block1 > block0, "a segment is shared and not empty"
        ids = list(plan.block_tables[row0][block0:block1])
        for row in range(row0, row1):
            assert list(plan.block_tables[row][block0:block1]) == ids
            first_query_sees = plan.kv_lens[row] - plan.query_lens[row] + 1
            assert block1 * size <= first_query_sees, "every query sees all of a shared segment"
            above = [s for s in plan.segments if s.row0 <= row < s.row1 and s.block1 <= block0]
            assert len(above) == level, "the level is the part index for every row"
            count.update((row, block) for block in range(block0, block1))
    for row, kv_len in enumerate(plan.kv_lens.tolist()):
        count.update((row, block) for block in range(int(plan.private_block0[row]), -(-kv_len // size)))
    expected = {(r, b) for r, n in enumerate(plan.kv_lens.tolist()) for b in range(-(-n // size))}
    assert set(count) == expected
    assert set(count.values()) == {1}


@fixtures_are_functions
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 8),
    block_size=st.sampled_from((1, 2, 4, 16)),
    min_saved=st.sampled_from((0, 8, 64, 10**9)),
)
def test_each_block_of_each_row_once(
    rows_of: Callable[..., Any], seed: int, depth: int, block_size: int, min_saved: int
) -> None:
    plan = rows_of(random.Random(seed), block_size, min(depth, 5) if depth % 2 else depth).plan(min_saved)
    check_cover(plan)
    assert plan.query_starts[-1] == plan.num_tokens == plan.query_lens.sum()
    if min_saved == 10**9:
        assert not plan.segments


def test_without_a_threshold_all_that_can_be_shared_is(no_rows: type[Any]) -> None:
    rows = no_rows(4)
    trunk = rows.take(3)
    left = trunk + rows.take(2)
    for path in (left, left, trunk):
        rows.add(path + rows.take(1), 1, len(path) * 4 + 2)
    plan = rows.plan()
    assert [s[1:] for s in plan.segments] == [(0, 3, 0, 3), (0, 2, 3, 5)]
    assert [s.level for s in plan.segments] == [0, 1]
    assert plan.private_block0.tolist() == [5, 5, 3]
    assert plan.num_tokens_saved == 3 * 4 * 2 + 2 * 4


def test_a_small_segment_goes_to_what_lies_below_it(no_rows: type[Any]) -> None:
    rows = no_rows(4)
    trunk = rows.take(1)  # saves 4 tokens for each further row: 12
    left = trunk + rows.take(9)
    right = trunk + rows.take(1)
    for path in (left, left, right, right):
        rows.add(path + rows.take(1), 1, len(path) * 4 + 1)
    plan = rows.plan(min_saved=20)
    assert [s[1:] for s in plan.segments] == [(0, 2, 0, 10)]
    assert plan.private_block0.tolist() == [10, 10, 0, 0]
    check_cover(plan)


def test_a_block_that_a_query_sees_in_part_is_private(no_rows: type[Any]) -> None:
    rows = no_rows(4)
    path = rows.take(2)
    rows.add(path, 1, 8, writes=False)
    rows.add(path, 1, 7, writes=False)  # the borrowed block is not full
    rows.add(path, 3, 8, writes=False)  # its first query sees 6 positions
    plan = rows.plan()
    assert [s[1:] for s in plan.segments] == [(0, 3, 0, 1)]
    check_cover(plan)


def test_query_only_siblings_share_even_the_last_block(no_rows: type[Any]) -> None:
    rows = no_rows(4)
    path = rows.take(2)
    for _ in range(3):
        rows.add(path, 1, 8, writes=False)
    plan = rows.plan()
    assert [s[1:] for s in plan.segments] == [(0, 3, 0, 2)]
    assert plan.private_block0.tolist() == [2, 2, 2]


def test_shared_with_previous_compares_ids() -> None:
    assert shared_with_previous([[1, 2, 3], [1, 2], [1, 2, 4], [2, 2, 4], [2, 2, 4]]) == [0, 2, 2, 0, 3]
    assert shared_with_previous([[7]]) == [0]


def test_arrays_are_taken_like_lists() -> None:
    tables = [[0, 1, 2], [0, 1, 3]]
    plan = Planner(2, 0).plan(tables, np.array([1, 1]), np.array([5, 6]), np.array([0, 2]))
    assert [s[1:] for s in plan.segments] == [(0, 2, 0, 2)]


def test_a_plan_keeps_arrays_of_its_own() -> None:
    """A caller may count its lengths up in place; the last step's are compared with the next one's."""
    lens = np.array([5, 9])
    plan = Planner(4).plan([[0, 1], [2, 3, 4]], np.array([1, 1]), lens, [0, 0])
    lens += 1
    assert plan.kv_lens.tolist() == [5, 9]


def test_a_tree_is_folded_once_while_it_stays() -> None:
    """Rows that grow leave it as it is; lengths that cut off what is shared do not."""
    planner, tables = Planner(2, 0), [[0, 1, 2], [0, 1, 3]]
    first, grown, shorter = (planner.plan(tables, [1, 1], [n, n], [0, 2]) for n in (5, 6, 3))
    assert grown.segment_array is first.segment_array and grown.private_block0 is first.private_block0
    assert [s[1:] for s in shorter.segments] == [(0, 2, 0, 1)]
    assert shorter.private_block0.tolist() == [1, 1]
    for shared in (first.private_block0, first.query_lens, first.query_starts, first.segment_array):
        with pytest.raises(ValueError, match="read-only"):
            shared[0] = 0


@settings(deadline=None)
@given(st.data(), st.sampled_from((0, 4, 20)), st.sampled_from((0.0, 0.3)))
def test_what_a_planner_remembers_changes_no_plan(data: st.DataObject, saved: int, fraction: float) -> None:
    """Steps that differ a little, or not at all, from the last one: as a planner without a past has them."""
    remembers, num_rows = Planner(2, saved, fraction), data.draw(st.integers(1, 4))
    shared = [0, *data.draw(st.lists(st.integers(0, 6), min_size=num_rows - 1, max_size=num_rows - 1))]
    lens = [17] * num_rows
    for _ in range(6):
        queries = data.draw(st.sampled_from(([1] * num_rows, [2] * num_rows, [1, 3, 2, 1][:num_rows])))
        lens = [max(n + data.draw(st.sampled_from((1, 1, 1, 0, -4, 5))), 4) for n in lens]
        if num_rows > 1 and data.draw(st.integers(0, 3)) == 0:
            shared[data.draw(st.integers(1, num_rows - 1))] = data.draw(st.integers(0, 6))
        args = [[0] * 20] * num_rows, queries, lens, shared
        known, fresh = remembers.plan(*args), Planner(2, saved, fraction).plan(*args)
        assert known.segments == fresh.segments
        for name in ("query_lens", "kv_lens", "query_starts", "private_block0"):
            assert getattr(known, name).tolist() == getattr(fresh, name).tolist(), name


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "shared"),
    [([0, 1], [1, 1], [0, 0]), ([2, 1], [1, 1], [0, 0]), ([1, 1], [1, 1], [1, 0]), ([1], [1, 1], [0, 0])],
)
def test_nonsense_is_a_bug(query_lens: list[int], kv_lens: list[int], shared: list[int]) -> None:
    with pytest.raises(AssertionError):
        Planner(4).plan([[0], [1]], query_lens, kv_lens, shared)


def test_nonsense_is_a_bug_in_a_tree_that_is_known() -> None:
    planner = Planner(4)
    planner.plan([[0], [1]], [2, 1], [2, 1], [0, 0])
    for kv_lens in ([1, 1], [2, 0]):
        with pytest.raises(AssertionError, match="more queries than KV"):
            planner.plan([[0], [1]], [2, 1], kv_lens, [0, 0])
