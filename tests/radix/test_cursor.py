"""The verbs of a branch, also in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from ramet.radix.accounting import check
from ramet.radix.cursor import State
from ramet.radix.prefix_cache import Copy, OutOfBlocks
from ramet.radix.tokens import pack, unpack

if TYPE_CHECKING:
    from tests.radix.conftest import Sim

MakeSim = Callable[..., "Sim"]


# -- fork and copy-on-write ------------------------------------------------------------------------


def test_a_fork_takes_no_block_and_shares_the_tail(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    parent = sim.prompt(range(6))
    child = sim.fork(parent)
    assert sim.free == 2
    assert child.block_table == parent.block_table == ([0, 1], 2)
    assert child.tail is parent.tail
    assert child.namespace == parent.namespace == 0


def test_a_fork_reads_only_what_it_forked(make_sim: MakeSim) -> None:
    """The tail's other owner goes on writing in place, behind what the fork can see."""
    sim = make_sim(6)
    parent = sim.prompt(range(5))
    child = sim.fork(parent)
    flying = sim.launch((parent, [5]))
    assert sim.cache.num_copies == 1, "a shared tail is copied, whoever writes first"
    sim.land(flying)
    grandchild = sim.fork(parent, at=5)
    assert grandchild.tail is parent.tail
    assert unpack(grandchild.tokens()) == list(range(5))
    parent.release()
    sim.write((grandchild, [50]))
    assert sim.cache.num_copies == 1, "the last owner writes in place, over what it does not see"
    assert unpack(grandchild.tokens()) == [*range(5), 50]
    assert unpack(child.tokens()) == list(range(5))


def test_a_copy_of_a_copy_reads_the_origin(make_sim: MakeSim) -> None:
    """One fused launch has no order, so no copy may read another one's target."""
    sim = make_sim(8)
    parent = sim.prompt(range(6))
    sim.fork(parent)
    (first,) = sim.cache.reserve([(parent, 1)])
    child = sim.fork(parent)
    (second,) = sim.cache.reserve([(child, 1)])
    assert sim.cache.take_copies() == [Copy(1, 2, 2), Copy(1, 3, 2)]
    assert sim.refs[:4] == [1, 3, 2, 2], "the origin is held once by its branch and once by each copy"
    sim.cache.cancel(first)
    sim.cache.cancel(second)
    sim.run_copies()
    sim.check()
    assert sim.refs[:4] == [1, 1, 1, 1]


def test_a_copy_holds_its_source(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    parent = sim.prompt(range(2))
    child = sim.fork(parent)
    sim.cache.cancel(*sim.cache.reserve([(child, 1)]))
    parent.release()
    assert sim.refs == [1, 2, 0, 0], "its owner is gone, the copy has not run"
    check(sim.cache, sim.branches)
    assert sim.free == 2
    sim.run_copies()
    assert sim.refs == [0, 1, 0, 0]
    sim.check()


@pytest.mark.parametrize("at", range(11))
def test_fork_at_any_position(make_sim: MakeSim, at: int) -> None:
    sim = make_sim(8)
    parent = sim.prompt(range(10))
    child = sim.fork(parent, at)
    assert sim.free == 5
    assert unpack(child.tokens()) == list(range(at))
    assert child.block_table.filled == (0 if at == 0 else (at - 1) % 4 + 1)
    assert child.block_table.blocks == [0, 1, 2][: -(-at // 4)]
    sim.write((child, [50]))
    assert sim.cache.num_copies == (1 if at % 4 else 0)


def test_only_live_branches_have_verbs(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    cursor = sim.prompt(range(4))
    with pytest.raises(AssertionError, match="forward"):
        cursor.truncate(5)
    with pytest.raises(AssertionError, match="parked branch is placed"):
        sim.cache.resume(cursor)
    cursor.park()
    with pytest.raises(AssertionError, match="forks"):
        cursor.fork()
    with pytest.raises(AssertionError, match="truncated"):
        cursor.truncate(0)
    with pytest.raises(AssertionError, match="parked"):
        cursor.park()
    with pytest.raises(AssertionError, match="other users"):
        cursor.take_over()
    sim.check()


# -- in the middle of a step -----------------------------------------------------------------------


def test_forked_in_mid_step_the_child_borrows_what_becomes_a_block(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    parent = sim.prompt(range(6))
    flying = sim.launch((parent, range(6, 13)))
    child = sim.fork(parent)
    grandchild = sim.fork(child)
    gone = sim.fork(parent)
    short = sim.fork(parent, at=5)
    gone.truncate(3)
    child.keep_row()
    assert child.tail is parent.tail
    sim.land(flying)
    sim.check()
    assert [c.borrows for c in (child, grandchild, short)] == [True, True, True]
    assert [c.length for c in (child, grandchild, short, gone)] == [6, 6, 5, 3]
    assert child.block_ids() == parent.block_ids()[:2]
    assert parent.length == 13
    assert sim.refs[:2] == [1, 1], "the tree owns it alone"


def test_forked_in_mid_step_of_a_tail_that_stays_open(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    parent = sim.prompt(range(5))
    flying = sim.launch((parent, [5]))
    child = sim.fork(parent)
    sim.land(flying)
    sim.check()
    assert child.tail is parent.tail
    assert (parent.length, child.length) == (6, 5)
    sim.write((child, [50]))
    assert sim.cache.num_copies == 1
    assert unpack(parent.tokens()) == list(range(6))


def test_a_duplicate_published_in_mid_step_serves_the_fork_too(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    sim.prompt(range(8))
    twin = sim.attach([])
    sim.write((twin, range(6)))
    twin.keep_row()
    flying = sim.launch((twin, [6, 7]))
    child = sim.fork(twin)
    child.keep_row()
    sim.land(flying)
    sim.check()
    assert twin.block_ids() == [0, 1]
    assert child.block_ids() == [0, 1]
    assert child.borrows


@pytest.mark.parametrize("verb", ["truncate", "park", "release"])
def test_a_late_commit_is_dropped(make_sim: MakeSim, verb: str) -> None:
    sim = make_sim(8)
    branch = sim.prompt(range(6))
    branch.keep_row()
    flying = sim.launch((branch, range(6, 15)))
    assert sim.free == 4
    sim.check()  # the reserved blocks have an owner
    if verb == "truncate":
        branch.truncate(6)
    else:
        getattr(branch, verb)()
    sim.land(flying)
    sim.check()
    assert branch.length == 6
    assert sim.cached_length(range(15)) == 4
    assert not sim.cache.reservations
    sim.close()


def test_a_late_cancel_returns_the_blocks_once(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    branch = sim.prompt(range(6))
    (flying,) = sim.launch((branch, range(6, 15)))
    branch.release()
    sim.cache.cancel(flying.reservation)
    sim.check()
    sim.close()


@pytest.mark.parametrize("row", [False, True])
def test_a_step_that_fails_leaves_nothing_behind(make_sim: MakeSim, row: bool) -> None:
    sim = make_sim(8)
    branch = sim.prompt(range(6))
    sim.write((branch, range(6, 9)))
    if row:
        branch.keep_row()
    before = sim.nodes, list(sim.refs), branch.block_table
    for flight in sim.launch((branch, range(9, 20))):
        sim.cache.cancel(flight.reservation)
    sim.check()
    assert (sim.nodes, sim.refs, branch.block_table) == before, "earlier chunks stay published"
    sim.write((branch, range(9, 20)))
    assert unpack(branch.tokens()) == list(range(20))


def test_the_row_follows_by_deltas(make_sim: MakeSim) -> None:
    sim = make_sim(16)
    parent = sim.prompt(range(10))
    child = sim.fork(parent)
    for cursor in (parent, child):
        cursor.keep_row()
        cursor.keep_row()
    sim.write((parent, range(10, 21)), (child, range(10, 15)))
    child.truncate(9)
    sim.write((child, [9, 10, 11]))
    child.truncate(3)
    sim.write((child, [3, 50]))
    assert child.row == child.block_ids()
    assert parent.row == parent.block_ids() == list(parent.block_table.blocks)


# -- truncate, prune -------------------------------------------------------------------------------


def test_truncate_then_the_same_again_is_the_same(make_sim: MakeSim) -> None:
    for position in range(13):
        sim = make_sim(8)
        branch = sim.prompt(range(13))
        branch.truncate(position)
        sim.check()
        assert sim.free == 8 - (3 if position <= 12 else 4)
        if position < 13:
            sim.write((branch, range(position, 13)))
        assert sim.cache.num_cached == 3, "what was there is not stored twice"
        sim.close()


def test_truncate_to_nothing_keeps_the_branch(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    branch = sim.prompt(range(6))
    branch.truncate(0)
    assert branch.block_table == ([], 0)
    assert sim.evictable == 1
    sim.write((branch, [50, 51]))
    assert unpack(branch.tokens()) == [50, 51]


def test_prune_goes_down_to_where_the_branch_was_truncated(make_sim: MakeSim) -> None:
    sim = make_sim(16)
    parent = sim.prompt(range(16))
    child = sim.fork(parent)
    child.truncate(5)
    sim.write((child, range(50, 60)))
    parent.release()
    assert child.prune() == 3, "15 tokens: one shared block, then three of its own"
    assert sim.cached_length(range(16)) == 16, "the rest is the parent's"
    assert child.prune() == 0
    sim.check()


def test_prune_spares_what_others_use(make_sim: MakeSim) -> None:
    sim = make_sim(16)
    branch = sim.prompt(range(12))
    seat = sim.fork(branch, at=8)
    seat.park()
    below = sim.fork(branch)
    sim.write((below, range(12, 16)))
    assert branch.prune() == 0
    assert below.prune() == 1, "from its fork on"
    assert sim.free == 13
    sim.check()


def test_a_branch_whose_path_is_gone_prunes_what_is_left(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    branch = sim.prompt(range(16))
    upper = sim.fork(branch, at=4)
    upper.release()
    branch.park()
    sim.cache.tree.evict(3)
    assert [(n.end, len(n.blocks)) for n in sim.nodes] == [(4, 1), (16, 0)]
    assert branch.prune() == 1
    assert not sim.cache.tree.roots


def test_a_released_handle_frees_nothing_of_its_successors(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    old = sim.prompt(range(4))
    old.release()
    new = sim.prompt(range(4))
    sim.write((new, range(4, 12)))
    assert new.node is old.node, "the same node, grown since"
    new.release()
    assert old.prune() == 0
    assert sim.cached_length(range(12)) == 12


# -- park and resume -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 3, 4, 7, 8, 10])
def test_a_parked_branch_holds_tokens_and_no_block(make_sim: MakeSim, length: int) -> None:
    sim = make_sim(4)
    branch = sim.prompt(range(length))
    branch.park()
    assert branch.state is State.PARKED
    assert sim.free + sim.evictable == 4
    sim.cache.tree.evict(4)
    assert unpack(branch.tokens()) == list(range(length))
    assert unpack(sim.cache.resume(branch)) == list(range(length))
    assert branch.length == 0
    if length:
        sim.write((branch, range(length)))
    sim.close()


def test_a_borrowing_branch_is_parked_and_resumed(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    sim.cached(range(8))
    branch = sim.attach(range(6))
    assert branch.borrows
    branch.park()
    assert unpack(branch.tokens()) == list(range(6))
    assert sim.cache.resume(branch) == b""
    assert branch.length == 6
    sim.check()


def test_a_parked_branch_comes_back_to_what_another_one_computed(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    branch = sim.prompt(range(10))
    branch.park()
    sim.cache.tree.evict(8)
    sim.prompt(range(10))
    assert unpack(sim.cache.resume(branch)) == [8, 9]
    sim.check()


# -- take-over -------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_node", [False, True])
def test_a_borrowed_block_is_taken_over_when_the_pool_is_dry(make_sim: MakeSim, whole_node: bool) -> None:
    sim = make_sim(3)
    branch = sim.prompt(range(12))
    if whole_node:
        sim.fork(branch, at=8).release()
    branch.truncate(10)
    branch.keep_row()
    assert branch.can_take_over()
    sim.write((branch, [50]))
    assert (sim.free, sim.cache.num_copies, sim.cache.num_cached) == (0, 0, 2)
    assert branch.row == [0, 1, 2]
    assert unpack(branch.tokens()) == [*range(10), 50]


def test_a_block_at_the_root_is_taken_over(make_sim: MakeSim) -> None:
    sim = make_sim(1)
    branch = sim.prompt(range(4))
    branch.truncate(2)
    sim.write((branch, [50]))
    assert branch.block_table == ([0], 3)
    assert sim.cache.num_cached == 0


@pytest.mark.parametrize("other", ["cursor", "seat", "child"])
def test_a_borrowed_block_with_other_users_is_not_taken_over(make_sim: MakeSim, other: str) -> None:
    sim = make_sim(3 if other == "child" else 2)
    branch = sim.prompt(range(8))
    user = sim.fork(branch)
    if other == "seat":
        user.park()
    if other == "child":
        sim.write((user, range(8, 12)))
    branch.truncate(7)
    before = sim.snapshot()
    with pytest.raises(OutOfBlocks) as refused:
        sim.write((branch, [50]))
    assert (refused.value.needed, refused.value.available) == (1, 0)
    assert sim.snapshot() == before


def test_releasing_twice_is_releasing_once(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    parent = sim.prompt(range(6))
    child = sim.fork(parent)
    for _ in range(3):
        child.release()
        sim.check()
    assert sim.refs[:2] == [1, 1]
    assert sim.cache.attach(0, pack(range(6))).length == 4
