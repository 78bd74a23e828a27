"""A cascade over a tree reads, for each branch, exactly its own blocks."""

from __future__ import annotations

import pytest

from ramet.api.bench_attention_cases import TREES, UNSHARED, Case, Node, case, even_tree, random_tree
from ramet.api.bench_attention_levels import Level, cascade_levels

FORESTS = {**TREES, "8x8k": UNSHARED["8x8k"], "ragged 64": UNSHARED["ragged 64"]}


def read_by_each_branch(step: Case, levels: list[Level]) -> tuple[list[list[int]], list[int]]:
    """The blocks that each branch reads, level after level, and how many tokens these hold."""
    blocks: list[list[int]] = [[] for _ in step.block_tables]
    tokens = [0 for _ in step.block_tables]
    for level in levels:
        assert sum(level.group_sizes) == step.num_branches, "a level has all branches"
        row = 0
        for size, ids, last in zip(level.group_sizes, level.block_ids, level.last_block_lens, strict=True):
            for branch in range(row, row + size):
                blocks[branch] += ids
                tokens[branch] += (len(ids) - 1) * step.block_size + last if ids else 0
            row += size
    return blocks, tokens


@pytest.mark.parametrize("max_shared", [None, 0, 1, 2])
@pytest.mark.parametrize("name", FORESTS)
def test_each_branch_reads_its_blocks_once_and_in_order(name: str, max_shared: int | None) -> None:
    step = case(name, FORESTS[name])
    levels = cascade_levels(step, max_shared)
    assert max_shared is None or len(levels) <= max_shared + 1
    assert read_by_each_branch(step, levels) == (step.block_tables, step.kv_lens)


def test_an_even_tree_has_the_levels_that_it_was_made_of() -> None:
    step = case("T", even_tree((1, 64), (3, 32), (4, 20)), block_size=16)
    root, middle, leaves = cascade_levels(step)
    assert (root.group_sizes, middle.group_sizes, leaves.group_sizes) == ([12], [4] * 3, [1] * 12)
    assert [len(ids) for ids in root.block_ids + middle.block_ids + leaves.block_ids] == [4] + [2] * 15
    assert leaves.last_block_lens == [4] * 12


def test_branches_that_share_nothing_on_a_level_are_groups_without_blocks() -> None:
    alone, pair = Node(32), Node(48, [Node(16), Node(16)])
    shared, rest = cascade_levels(case("mixed", [alone, pair, alone, alone], block_size=16))
    assert shared.group_sizes == [1, 2, 2]
    assert [len(ids) for ids in shared.block_ids] == [0, 3, 0]
    assert [len(ids) for ids in rest.block_ids] == [2, 1, 1, 2, 2]


@pytest.mark.parametrize("seed", range(10))
def test_all_shared_levels_read_each_block_once(seed: int) -> None:
    step = case("random", random_tree(seed))
    ids = [block for level in cascade_levels(step) for group in level.block_ids for block in group]
    assert sorted(ids) == list(range(step.num_blocks))
