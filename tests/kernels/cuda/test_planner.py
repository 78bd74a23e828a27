"""Trees folded in C: the same plans as those that Planner defines."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ramet.kernels.cuda.planner import GPUPlanner
from ramet.kernels.plan import AttentionPlan, Planner, shared_with_previous

FIELDS = ("query_lens", "kv_lens", "query_starts", "private_block0")
fixtures_are_functions = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def same(plan: AttentionPlan, defined: AttentionPlan) -> bool:
    arrays = [(getattr(plan, name), getattr(defined, name)) for name in FIELDS]
    assert all(a.dtype == b.dtype for a, b in arrays)
    return plan.segments == defined.segments and all(a.tolist() == b.tolist() for a, b in arrays)


@fixtures_are_functions
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 6),
    block_size=st.sampled_from((1, 2, 16)),
    saved=st.sampled_from((-1, 0, 8, 15, 17, 64, sys.maxsize, 2**64)),
)
def test_random_trees(
    rows_of: Callable[..., Any], seed: int, depth: int, block_size: int, saved: int
) -> None:
    rows = rows_of(random.Random(seed), block_size, depth)
    args = rows.block_tables, rows.query_lens, rows.kv_lens, shared_with_previous(rows.block_tables)
    assert same(GPUPlanner(block_size, saved).plan(*args), Planner(block_size, saved).plan(*args))


@settings(deadline=None)
@given(st.data(), st.sampled_from((0, 4, 20)))
def test_any_depths_and_lengths(data: st.DataObject, saved: int) -> None:
    """Also such as no tree has; and what a planner remembers of the step before changes no plan."""
    remembers, num_rows = GPUPlanner(2, saved), data.draw(st.integers(1, 9))
    for _ in range(3):
        numbers = st.lists(st.integers(0, 6), min_size=num_rows - 1, max_size=num_rows - 1)
        queries = data.draw(st.lists(st.integers(1, 3), min_size=num_rows, max_size=num_rows))
        lens = [n + data.draw(st.integers(0, 15)) for n in queries]
        for _ in range(2):
            args = [[0] * 20] * num_rows, queries, lens, [0, *data.draw(numbers)]
            assert same(remembers.plan(*args), Planner(2, saved).plan(*args))
            lens = [n + 1 for n in lens]


def test_a_tree_is_folded_once_while_it_stays() -> None:
    """Rows that grow leave it as it is; lengths that cut off what is shared do not."""
    planner, tables = GPUPlanner(2, 0), [[0, 1, 2], [0, 1, 3]]
    first, grown, shorter, still = (planner.plan(tables, [1, 1], [n, n], [0, 2]) for n in (5, 6, 3, 4))
    assert grown.segment_array is first.segment_array and grown.private_block0 is first.private_block0
    assert [s[1:] for s in shorter.segments] == [(0, 2, 0, 1)]
    assert [s[1:] for s in still.segments] == [(0, 2, 0, 2)], "both see all that they have in common again"
    for shared in (first.private_block0, first.query_lens, first.query_starts, first.segment_array):
        with pytest.raises(ValueError, match="read-only"):
            shared[0] = 0


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "shared", "why"),
    [
        ([0, 1], [1, 1], [0, 0], "at least one query"),
        ([2, 1], [1, 1], [0, 0], "more queries than KV"),
        ([1, 1], [1, 1], [1, 0], "no row before it"),
        ([1], [1, 1], [0, 0], "differ in rows"),
        ([1, 1], [1, 2**30 + 1], [0, 0], "more than 2\\^30 tokens"),
    ],
)
def test_nonsense_is_a_bug(query_lens: list[int], kv_lens: list[int], shared: list[int], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        GPUPlanner(4).plan([[0], [1]], query_lens, kv_lens, shared)


def test_nonsense_is_a_bug_in_a_tree_that_is_known() -> None:
    planner = GPUPlanner(4)
    planner.plan([[0], [1]], [2, 1], [2, 1], [0, 0])
    for kv_lens in ([1, 1], [2, 0]):
        with pytest.raises(AssertionError, match="more queries than KV"):
            planner.plan([[0], [1]], [2, 1], kv_lens, [0, 0])


@pytest.mark.parametrize("shared", [-1, 2**30 + 1, 2**63])
def test_a_number_that_does_not_fit(shared: int) -> None:
    with pytest.raises((ValueError, OverflowError)):
        GPUPlanner(4).plan([[0], [1]], [1, 1], [1, 1], [0, shared])
