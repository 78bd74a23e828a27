"""Who goes first: the order of eviction, which no counter sees."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from ramet.radix.lfu import LFU
from ramet.radix.tree import Node

if TYPE_CHECKING:
    from tests.radix.conftest import Sim

MakeSim = Callable[..., "Sim"]

# Prompts without a common token, one letter each: A(8) are the first eight tokens of prompt A.
BASES = {name: 1000 * index for index, name in enumerate("ABCD", start=1)}


def ids(name: str, count: int, start: int = 0) -> list[int]:
    return [BASES[name] + i for i in range(start, count)]


def who_goes(sim: Sim, names: str) -> str:
    """Evict block by block until nothing is left; the letter of the prompt that each block was part of."""
    order = ""
    held = {name: sim.cached_length(ids(name, 40)) for name in names}
    while sim.cache.tree.evict(1):
        sim.check()
        now = {name: sim.cached_length(ids(name, 40)) for name in names}
        order += "".join(name for name in names if now[name] < held[name])
        held = now
    return order


def test_the_least_recently_released_goes_first_and_last_block_first(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    a, b, c = (sim.prompt(ids(name, 8)) for name in "ABC")
    for cursor in (b, a, c):
        cursor.release()
    assert sim.cache.tree.evict(1) == 1
    assert sim.cached_length(ids("B", 8)) == 4, "the end of the leaf, not its beginning"
    assert who_goes(sim, "ABC") == "BAACC"


def test_order_is_one_over_all_namespaces(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    for namespace in ("first", "second", "third"):
        sim.cached(ids("A", 4), namespace)
    sim.prompt(ids("A", 4), "first").release()
    assert sim.cache.tree.evict(2) == 2
    assert list(sim.cache.tree.roots) == ["first"]


def test_an_attach_in_between_is_a_use(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    for name in "ABC":
        sim.cached(ids(name, 4))
    sim.prompt(ids("A", 4)).release()
    assert who_goes(sim, "ABC") == "BCA"


def test_parking_and_truncating_are_uses(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    a, b = sim.prompt(ids("A", 4)), sim.prompt(ids("B", 4))
    b.park()
    sim.cached(ids("C", 4))
    a.truncate(0)
    a.release()
    b.release()
    assert who_goes(sim, "ABC") == "BCA", "releasing a seat uses no block"


def test_a_leaf_goes_before_the_path_above_it(make_sim: MakeSim) -> None:
    """Random trees, evicted to the end: what is cached always hangs together."""
    rng = random.Random(0)
    for _ in range(20):
        sim = make_sim(60)
        for _ in range(12):
            sim.cached(rng.choices(range(2), k=rng.randint(1, 20)))
        while sim.cache.tree.evict(1):
            sim.check()
            for node in _all_nodes(sim):
                assert node.parent is None or node.parent.parent is None or node.parent.blocks


def _all_nodes(sim: Sim) -> list[Node]:
    nodes = list(sim.cache.tree.roots.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def test_the_parent_inherits_the_clock_of_its_last_child(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    a = sim.prompt(ids("A", 4))  # never released itself before its child
    child = sim.fork(a)
    sim.write((child, ids("A", 8, start=4)))
    a.release()
    sim.cached(ids("B", 4))
    assert child.prune() == 1, "a use of A's path, later than B's"
    assert sim.cached_length(ids("A", 8)) == 4
    assert who_goes(sim, "AB") == "BA"


def test_the_parent_keeps_its_clock_if_it_is_the_later_one(make_sim: MakeSim) -> None:
    sim = make_sim(8, policy=_LongestFirst())
    a = sim.prompt(ids("A", 4))
    child = sim.fork(a)
    sim.write((child, ids("A", 16, start=4)))
    child.release()
    sim.cached(ids("B", 4))
    a.release()
    assert who_goes(sim, "AB") == "AAABA", "the three long blocks, B, then the parent"


class _LongestFirst:
    def priority(self, node: Node) -> float:
        return -len(node.blocks)


def test_nothing_is_merged_on_release(make_sim: MakeSim) -> None:
    """The two halves were used at different times; one node could remember only one of them."""
    sim = make_sim(8)
    a = sim.prompt(ids("A", 4))
    child = sim.fork(a)
    sim.write((child, ids("A", 8, start=4)))
    child.release()
    a.release()
    assert sim.spans == [(0, 4), (4, 8)]
    sim.cached(ids("B", 4))
    sim.prompt(ids("A", 4)).release()
    assert who_goes(sim, "AB") == "ABA"


def test_splitting_a_cold_node_does_not_make_it_hot(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    sim.cached(ids("A", 12))
    sim.cached(ids("B", 4))
    upper = sim.prompt(ids("A", 4))
    assert sim.spans == [(0, 4), (0, 4), (4, 12)]
    upper.release()
    assert who_goes(sim, "AB") == "AABA", "only the part that was used again outlives B"


def test_a_block_that_was_only_copied_from_stays_cold(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    sim.cached(ids("A", 8))
    sim.cached(ids("B", 4))
    borrower = sim.attach([*ids("A", 6), 7, 7])
    sim.write((borrower, [7]))
    assert borrower.node.end == 4
    assert sim.cache.tree.evict(1) == 1
    assert sim.cached_length(ids("A", 8)) == 4
    assert sim.cached_length(ids("B", 4)) == 4


def test_both_halves_of_a_split_keep_the_clock(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    sim.cached(ids("A", 12))
    sim.cached(ids("B", 4))
    borrower = sim.attach([*ids("A", 6), 7, 7])  # splits at 8
    sim.write((borrower, [7]))  # and at 4: the middle block was nobody's place to rest
    assert [node.end for node in sim.nodes if node.live] == [4]
    assert sim.cache.tree.evict(2) == 2
    assert sim.cached_length(ids("A", 12)) == 4
    assert sim.cached_length(ids("B", 4)) == 4


def test_parking_counts_from_when_it_happens(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    b = sim.prompt(ids("B", 4))
    sim.cached(ids("A", 4))
    b.park()
    b.release()
    assert who_goes(sim, "AB") == "AB"


def test_a_parent_inherits_the_hits_of_its_last_child(make_sim: MakeSim) -> None:
    sim = make_sim(8, policy=LFU())
    a = sim.prompt(ids("A", 4))
    child = sim.fork(a)
    sim.write((child, ids("A", 8, start=4)))
    for _ in range(3):
        sim.attach(ids("A", 8)).release()
    a.release()  # only now: nobody between the two nodes, and an attach would have joined them
    for _ in range(2):
        sim.cached(ids("B", 4))  # one hit
    assert child.prune() == 1
    assert who_goes(sim, "AB") == "BA"


def test_lfu_keeps_what_many_have_hit(make_sim: MakeSim) -> None:
    orders = []
    for policy in (None, LFU()):
        sim = make_sim(8, policy=policy)
        for name in "AAAB":  # A is hit twice, B never; B is the later one
            sim.cached(ids(name, 4))
        orders.append(who_goes(sim, "AB"))
    assert orders == ["AB", "BA"]


def test_hits_of_a_child_count_for_the_parent_that_outlives_it(make_sim: MakeSim) -> None:
    sim = make_sim(8, policy=LFU())
    a = sim.prompt(ids("A", 4))
    child = sim.fork(a)
    sim.write((child, ids("A", 8, start=4)))
    child.release()
    a.release()
    for _ in range(3):
        sim.prompt(ids("A", 8)).release()
    for _ in range(2):
        sim.cached(ids("B", 4))
    assert sim.attach(ids("A", 8)).prune() == 0, "pruning stops at the hit"
    sim.branches.pop()
    assert who_goes(sim, "AB") == "BAA"


def test_a_policy_is_one_method(make_sim: MakeSim) -> None:
    class PaidLast:
        def priority(self, node: Node) -> float:
            return 1.0 if node.space.key == "paid" else 0.0

    sim = make_sim(4, policy=PaidLast())
    for namespace in ("paid", "free", "paid"):
        sim.cached(ids("A", 4), namespace)
    assert sim.cache.tree.evict(1) == 1
    assert list(sim.cache.tree.roots) == ["paid"]


@pytest.mark.parametrize("asked", [0, 1, 3, 100])
def test_evict_says_how_many_it_freed(make_sim: MakeSim, asked: int) -> None:
    sim = make_sim(8)
    sim.cached(ids("A", 8))
    held = sim.prompt(ids("B", 8))
    assert sim.cache.tree.evict(asked) == min(asked, 2)
    assert sim.cache.tree.num_evicted == min(asked, 2)
    assert held.block_ids()
    sim.check()
    assert sim.cache.tree.evict(100) == 2 - min(asked, 2)
    assert sim.cache.tree.evict(100) == 0, "all that is left is locked"
