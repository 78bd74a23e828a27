"""Ten short stories with exact counts, in blocks of four tokens that are handed out as 0, 1, 2, ..."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from ramet.radix.cursor import State
from ramet.radix.prefix_cache import Copy, OutOfBlocks
from ramet.radix.tokens import unpack

if TYPE_CHECKING:
    from tests.radix.conftest import Sim

MakeSim = Callable[..., "Sim"]


def test_1_three_forks_of_nine_tokens_go_different_ways(make_sim: MakeSim) -> None:
    sim = make_sim(6)
    parent = sim.prompt(range(9))
    branches = [parent, *(sim.fork(parent) for _ in range(3))]
    assert sim.free == 3
    assert sim.refs == [1, 1, 4, 0, 0, 0]
    assert [node.live for node in sim.nodes] == [4]
    assert sim.cache.num_needed([(branch, 1) for branch in branches]) == 3

    sim.write(*((branch, [100 + i]) for i, branch in enumerate(branches)))
    assert sim.free == 0
    assert sim.refs == [1] * 6
    assert sim.cache.num_copies == 3
    assert branches[-1].block_table == ([0, 1, 2], 2), "the last one to write does so in place"

    sim.write(*((branch, [7, 7]) for branch in branches))
    assert sim.cache.num_cached == 6
    assert [node.live for node in sim.nodes] == [4, 1, 1, 1, 1]

    before = sim.snapshot()
    with pytest.raises(OutOfBlocks):
        sim.write((parent, [1]))
    assert sim.snapshot() == before


def test_2_fork_inside_a_block_while_the_tail_is_shared(make_sim: MakeSim) -> None:
    sim = make_sim(6)
    parent = sim.prompt(range(9))
    sim.fork(parent)
    child = sim.fork(parent, at=6)
    assert sim.refs == [1, 1, 2, 0, 0, 0]
    assert sim.free == 3, "no block is taken"
    assert parent.tail is not None
    assert parent.tail.owners == 2
    assert (child.node.end, child.length, child.tail) == (8, 6, None)

    (flight,) = sim.cache.reserve([(child, 1)])
    assert sim.cache.take_copies() == [Copy(source=1, target=3, num_slots=2)]
    sim.cache.cancel(flight)
    sim.run_copies()
    sim.write((child, [50]))
    assert sim.cache.num_copies == 1
    assert sim.free == 2
    assert sim.refs == [1, 1, 2, 1, 0, 0]
    assert [(node.start, node.end, node.live) for node in sim.nodes] == [(0, 4, 2), (4, 8, 2)]
    assert child.length == 7


def test_3_the_same_tokens_written_again_are_stored_once(make_sim: MakeSim) -> None:
    sim = make_sim(6)
    parent = sim.prompt(range(12))
    child = sim.fork(parent)
    child.truncate(6)
    assert sim.free == 3
    assert sim.spans == [(0, 8), (8, 12)]

    sim.write((child, [6]))
    assert sim.free == 2
    assert sim.refs == [1, 1, 1, 1, 0, 0]

    sim.write((child, [7]))
    assert sim.free == 3
    assert sim.refs == [1, 1, 1, 0, 0, 0]
    assert sim.cache.num_dropped == 1
    assert (child.node.start, child.node.end) == (4, 8)
    assert child.node is parent.node.parent


def test_4_twins_in_one_step(make_sim: MakeSim) -> None:
    sim = make_sim(6)
    twins = [sim.attach(range(9)) for _ in range(2)]
    flying = sim.launch(*((twin, range(9)) for twin in twins))
    assert sim.free == 0, "six are used before the commit"

    sim.land(flying)
    sim.check()
    assert sim.free == 2
    assert sim.cache.num_dropped == 2
    assert [(node.start, node.end, node.cursors) for node in sim.nodes] == [(0, 8, 2)]
    tails = [twin.tail for twin in twins]
    assert tails[0] is not tails[1]
    assert [tail.owners for tail in tails if tail is not None] == [1, 1]


def test_5_decoding_along_an_idle_path_leaves_no_fragments(make_sim: MakeSim) -> None:
    sim = make_sim(12)
    first = sim.prompt(range(4))
    second = sim.fork(first)
    sim.write((first, range(4, 24)))
    first.release()
    assert [(node.start, node.end, node.live) for node in sim.nodes] == [(0, 4, 1), (4, 24, 0)]
    assert sim.evictable == 5

    for evictable in (4, 3, 2):
        sim.write((second, range(second.length, second.length + 4)))
        assert len(sim.nodes) == 2
        assert sim.evictable == evictable
        assert sim.free == 6


def test_6_eviction_under_a_cursor(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    sim.cached(range(24))
    branch = sim.attach([*range(10), 99])
    assert branch.length == 10
    assert [(node.start, node.end, node.live) for node in sim.nodes] == [(0, 12, 1), (12, 24, 0)]
    assert sim.evictable == 3
    assert sim.cache.tree.evict(8) == 3
    assert sim.free == 5

    sim.write((branch, [99]))
    assert sim.cache.num_copies == 1
    assert sim.free == 4
    assert sim.evictable == 1, "the block that was copied from"
    assert sim.cache.tree.evict(1) == 1
    assert sim.free == 5
    assert sim.cache.num_cached == 2


def test_7_a_full_pool_and_a_prompt_that_differs_in_its_last_token(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    sim.cached(range(16))
    prompt = [*range(15), 99]
    branch = sim.admit(prompt)
    assert branch is not None
    assert (branch.length, branch.borrows, sim.free, sim.evictable) == (15, True, 0, 0)
    assert sim.cache.num_needed([(branch, 1)]) == 1

    flying = sim.launch((branch, [99]))
    assert sim.cache.num_copies == 0, "taken over, not copied"
    assert sim.cache.num_cached == 3
    assert branch.tail is not None
    assert sim.refs == [1, 1, 1, 1]
    sim.land(flying)
    sim.check()
    assert sim.cache.num_cached == 4

    branch.release()
    again = sim.admit(prompt)
    assert again is not None
    assert again.length == 16, "nothing to write: one query-only row"


def test_7_a_shared_block_is_not_taken_over(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    sibling = sim.prompt(range(16))
    branch = sim.fork(sibling)
    branch.truncate(15)
    before = sim.snapshot()
    with pytest.raises(OutOfBlocks):
        sim.write((branch, [99]))
    assert sim.snapshot() == before
    sim.check()


def test_8_a_step_gets_all_of_its_blocks_or_none(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    first = sim.prompt(range(9))
    second, third = sim.fork(first), sim.fork(first)
    rows = [(first, [5]), (second, [5]), (third, [5])]
    assert sim.cache.num_needed([(branch, 1) for branch, _ in rows]) == 2
    with pytest.raises(OutOfBlocks) as refused:
        sim.write(*rows)
    assert (refused.value.needed, refused.value.available) == (2, 1)
    assert sim.refs == [1, 1, 3, 0]
    assert sim.cache.num_needed([(branch, 1) for branch, _ in rows[:2]]) == 2

    sim.write((first, [5]))
    assert sim.refs == [1, 1, 2, 1]
    second.release()
    assert sim.cache.num_needed([(third, 1)]) == 0
    sim.write((third, [6]))
    assert sim.refs == [1, 1, 1, 1]
    assert sim.cache.num_copies == 1


def test_9_two_parked_branches_come_back(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    first = sim.prompt(range(14))
    second = sim.fork(first, at=12)
    sim.write((second, [50, 51]))
    first.park()
    second.park()
    assert (sim.free, sim.evictable) == (5, 3)
    assert [node.seats for node in sim.nodes] == [2]

    assert sim.cache.tree.evict(2) == 2
    assert sim.free == 7
    (node,) = sim.nodes
    assert (node.start, node.end, len(node.blocks)) == (0, 12, 1), "eight tokens are ghosts"

    rest = unpack(sim.cache.resume(first))
    assert (first.length, rest) == (4, [*range(4, 14)])
    assert sim.spans == [(0, 4), (4, 12)]
    sim.write((first, rest))
    assert sim.free == 4
    assert first.node is second.node, "the ghost tokens adopt two blocks"

    assert unpack(sim.cache.resume(second)) == [50, 51]
    assert second.length == 12
    assert [(node.cursors, node.seats) for node in sim.nodes if node.end == 12] == [(2, 0)]
    assert second.state is State.LIVE
    sim.check()


def test_10_pruning_stops_at_the_fork(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    parent = sim.prompt(range(10))
    child = sim.fork(parent)
    parent.release()
    sim.write((child, range(10, 18)))
    assert sim.free == 3
    assert child.prune() == 3
    assert sim.free == 6
    assert sim.refs == [1, 1, 0, 0, 0, 0, 0, 0]
    assert (sim.cache.num_cached, sim.evictable) == (2, 2), "the parent's two full blocks stay"
    sim.check()
