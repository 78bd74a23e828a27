"""What is derived from the tree, and that the recount sees what it is there to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from ramet.radix.accounting import check, depth_first, num_sharers, page_stats
from ramet.radix.cursor import Cursor

if TYPE_CHECKING:
    from tests.radix.conftest import Sim

MakeSim = Callable[..., "Sim"]


def family(sim: Sim) -> list[Cursor]:
    """A prompt of two and a half blocks; a fork at its end, one inside block 1, and a child of the fork."""
    root = sim.prompt(range(10))
    at_end, inside = sim.fork(root), sim.fork(root, at=6)
    sim.write((at_end, range(10, 13)), (inside, [50, 51]))
    deep = sim.fork(at_end)
    return [root, at_end, inside, deep]


def test_two_counts_of_a_shared_block(make_sim: MakeSim) -> None:
    """The pool counts direct owners, `num_sharers` the branches that have the block in their table."""
    sim = make_sim(16)
    branches = family(sim)
    tables = [list(branch.block_ids()) for branch in branches]
    for branch, table in zip(branches, tables, strict=True):
        assert num_sharers(branch) == [sum(block in other for other in tables) for block in table]
    assert num_sharers(branches[0]) == [4, 3, 1]
    assert [sim.refs[block] for block in tables[0]] == [1, 1, 1]
    assert num_sharers(branches[3]) == [4, 3, 2, 2]
    assert [sim.refs[block] for block in tables[3]] == [1, 1, 1, 2], "only an open tail has several owners"


def test_a_parked_branch_shares_nothing(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    branch = sim.prompt(range(8))
    sim.fork(branch).park()
    assert num_sharers(branch) == [1, 1]


def test_depth_first_keeps_what_is_shared_together(make_sim: MakeSim) -> None:
    sim = make_sim(16)
    root, at_end, inside, deep = family(sim)
    stranger = sim.prompt(range(60, 66))
    rows = [deep, stranger, inside, root, at_end]
    order, shared = depth_first(rows, 4)
    assert sorted(order) == [0, 1, 2, 3, 4]
    tables = [list(row.block_ids()) for row in rows]
    for at, num_blocks in enumerate(shared):
        mine = tables[order[at]]
        before = tables[order[at - 1]] if at else []
        common = [a == b for a, b in zip(mine, before, strict=False)]
        in_tree = rows[order[at]].node.end // 4
        assert num_blocks == min([*common, False].index(False), in_tree)
    assert sum(shared) == 1 + 2 + 3, (
        "the best order: three siblings on one, two on two, twins on three blocks"
    )
    assert depth_first([], 4) == ([], [])


def test_page_stats(make_sim: MakeSim) -> None:
    sim = make_sim(16)
    root, at_end, inside, deep = family(sim)
    stats = page_stats(sim.cache, sim.branches)
    # Blocks 0 and 1; the root's tail of 2; a block of the fork and its tail of 1; a block of the inner one.
    assert stats.logical_tokens == 10 + 13 + 8 + 13
    assert stats.physical_tokens == 8 + 2 + (4 + 1) + 4
    assert stats.sharing_ratio == stats.logical_tokens / stats.physical_tokens
    assert (stats.num_blocks, stats.block_size, stats.num_in_use, stats.num_free) == (16, 4, 6, 10)
    assert stats.waste == 1 - 19 / 24
    assert (stats.num_copies, stats.num_dropped, stats.num_evicted) == (2, 0, 0)
    for branch in (root, at_end, inside, deep):
        branch.release()
    idle = page_stats(sim.cache, sim.branches)
    assert (idle.num_cached_idle, idle.num_in_use, idle.logical_tokens) == (4, 0, 0)
    assert (idle.sharing_ratio, idle.waste) == (1.0, 0.0)


# -- the recount finds each kind of drift ----------------------------------------------------------


def _counter(sim: Sim) -> None:
    sim.cache.tree.num_evictable += 1


def _namespace_counter(sim: Sim) -> None:
    sim.branches[0].node.space.num_cached += 1


def _lock(sim: Sim) -> None:
    sim.branches[0].node.live += 1


def _tail_owner(sim: Sim) -> None:
    tail = sim.branches[0].tail
    assert tail is not None
    tail.owners += 1


def _lost_tokens(sim: Sim) -> None:
    tail = sim.branches[0].tail
    assert tail is not None
    tail.tokens.clear()


def _reference(sim: Sim) -> None:
    sim.refs[0] += 1


def _row(sim: Sim) -> None:
    sim.branches[0].keep_row()
    sim.branches[0].block_ids()[0] = 7


def _resting_place(sim: Sim) -> None:
    sim.branches[1].length += 100


def _idle_set(sim: Sim) -> None:
    sim.cache.tree._idle.clear()


def _resident(sim: Sim) -> None:
    next(iter(sim.cache.tree.roots.values())).num_resident += 1


def _misfiled(sim: Sim) -> None:
    sim.branches[0].node.first = b""


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (_counter, "counter drifted"),
        (_namespace_counter, "namespace's counter drifted"),
        (_lock, "cursors, seats or live"),
        (_tail_owner, "tail's owners"),
        (_lost_tokens, "lost tokens"),
        (_reference, "reference counts differ"),
        (_row, "kept row differs"),
        (_resting_place, "rests off the end"),
        (_idle_set, "lost its entry"),
        (_resident, "resident children"),
        (_misfiled, "misfiled"),
    ],
)
def test_the_recount_finds(make_sim: MakeSim, damage: Callable[[Sim], None], found: str) -> None:
    sim = make_sim(16)
    sim.prompt(range(10))
    sim.prompt(range(8))
    sim.cached(range(60, 68))
    check(sim.cache, sim.branches)
    damage(sim)
    with pytest.raises(AssertionError, match=found):
        check(sim.cache, sim.branches)


def test_the_recount_wants_all_branches(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    sim.prompt(range(8))
    with pytest.raises(AssertionError):
        check(sim.cache, [])
