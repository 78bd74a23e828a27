"""Look-up against brute force, namespaces, and the structure that splits, slides and joins leave."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import pytest

from ramet.radix.tokens import unpack
from ramet.radix.tree import Match, Node

if TYPE_CHECKING:
    from tests.radix.conftest import Sim

MakeSim = Callable[..., "Sim"]


def resident_paths(sim: Sim, namespace: Hashable = 0) -> list[list[int]]:
    """The cached tokens from the root down to the end of each node."""
    root = sim.cache.tree.roots.get(namespace)
    paths: list[list[int]] = []
    stack: list[tuple[Node, list[int]]] = [(root, [])] if root is not None else []
    while stack:
        node, above = stack.pop()
        held = above + unpack(node.key)[: len(node.blocks) * sim.cache.block_size]
        paths.append(held)
        stack += [(child, held) for child in node.children.values() if child.blocks]
    return paths


def longest(sim: Sim, prompt: list[int]) -> int:
    """The best match by trying all paths."""
    size, best = sim.cache.block_size, 0
    for path in resident_paths(sim):
        agreed = 0
        while agreed < min(len(path), len(prompt)) and path[agreed] == prompt[agreed]:
            agreed += 1
        partial = agreed % size
        best = max(best, agreed if partial >= sim.cache.tree.min_partial else agreed - partial)
    return best


def ranked_nodes(sim: Sim) -> list[Node]:
    nodes = list(sim.cache.tree.roots.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return [node for node in nodes if node.ranked is not None]


@pytest.mark.parametrize("min_partial", [1, 2, 3])
def test_wide_fan_out_matches_brute_force(make_sim: MakeSim, min_partial: int) -> None:
    """Three symbols give up to 81 first blocks below the root; evictions, splits and slides in between."""
    rng = random.Random(min_partial)
    sim = make_sim(60, min_partial=min_partial)
    saw_wide = 0
    for _ in range(400):
        prompt = rng.choices(range(3), k=rng.randint(4, 12))
        cursor = sim.admit(prompt)
        assert cursor is not None
        if cursor.length < len(prompt):
            sim.write((cursor, prompt[cursor.length :]))
        cursor.release()
        if rng.random() < 0.2:
            sim.cache.tree.evict(rng.randint(1, 40))
        sim.branches.clear()
        sim.check()
        saw_wide += bool(ranked_nodes(sim))
        for _ in range(10):
            wanted = rng.choices(range(3), k=rng.randint(1, 12))
            assert sim.cached_length(wanted) == longest(sim, wanted)
    assert 50 < saw_wide < 400, "both ways of looking among children were tried"


def test_a_tie_goes_to_the_first_in_byte_order(make_sim: MakeSim) -> None:
    """The same answer with eight children, which are scanned, and with more, which are ordered."""
    sim = make_sim(40)
    for last in range(8):
        sim.cached([1, 1, 9 - last, 5])
    scanned = sim.attach([1, 1, 77])
    assert ranked_nodes(sim) == []
    assert unpack(scanned.node.key) == [1, 1, 2, 5]
    sim.cached([1, 1, 10, 5])
    assert len(ranked_nodes(sim)) == 1
    ordered = sim.attach([1, 1, 77])
    assert ordered.node is scanned.node
    assert sim.cached_length([8, 1, 1]) == 0, "nothing agrees, although there are neighbours"


def test_children_that_were_evicted_are_not_found(make_sim: MakeSim) -> None:
    sim = make_sim(40)
    for first in range(12):
        sim.cached([first, 7, 7, 7])
    assert sim.cached_length([3, 7]) == 2
    while len(sim.nodes) > 2:
        sim.cache.tree.evict(1)
        sim.check()
    assert ranked_nodes(sim) == [], "few children are not kept in order"
    assert sim.cached_length([3, 7]) == 0
    assert sim.cached_length([11, 7]) == 2


@pytest.mark.parametrize(("block_size", "expected"), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4), (32, 8)])
def test_min_partial_is_a_quarter_of_a_block(make_sim: MakeSim, block_size: int, expected: int) -> None:
    sim = make_sim(4, block_size, min_partial=None)
    assert sim.cache.tree.min_partial == expected
    sim.cached(range(block_size))
    for agreed in range(block_size):
        found = sim.cached_length([*range(agreed), 999])
        assert found == (agreed if agreed >= expected else 0)


def test_a_shared_first_token_is_no_hit_on_a_strangers_block(make_sim: MakeSim) -> None:
    sim = make_sim(4, 16, min_partial=None)
    sim.cached([1, *range(100, 131)])
    assert sim.cached_length([1, *range(500, 520)]) == 0
    assert sim.cached_length([1, *range(100, 115), 1, 2]) == 16
    assert sim.cached_length([1, *range(100, 117), 9]) == 16, "two tokens into the next block"
    assert sim.cached_length([1, *range(100, 119), 9]) == 20


def test_at_most_so_many_tokens_are_matched(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    sim.cached(range(16))
    for most in range(17):
        match = sim.cache.tree.match(0, sim_pack(range(16)), most)
        assert match.length == most
        assert match.num_blocks == -(-most // 4)


def sim_pack(token_ids: range) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in token_ids)


def test_a_prompt_shorter_than_a_block(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    sim.cached(range(3))
    assert sim.nodes == [], "an open tail is not published"
    assert sim.cached_length(range(3)) == 0
    sim.cached(range(4))
    assert sim.cached_length(range(3)) == 3
    assert sim.cached_length([]) == 0


# -- namespaces ------------------------------------------------------------------------------------


def test_namespaces_never_cross(make_sim: MakeSim) -> None:
    sim = make_sim(40)
    keys: list[Hashable] = ["a", ("a",), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("a", "b", None)]
    for key in keys:
        assert sim.cached_length(range(8), key) == 0
        sim.cached(range(8), key)
        assert sim.cached_length(range(8), key) == 8
    assert [root.space.num_cached for root in sim.cache.tree.roots.values()] == [2] * len(keys)
    assert sim.cache.num_cached == 2 * len(keys)
    sim.check()


def test_a_look_up_creates_nothing(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    assert sim.cache.tree.match("nobody", sim_pack(range(8))) == Match(None, 0, 0)
    assert sim.cache.tree.whole_blocks(Match(None, 0, 0)) == Match(None, 0, 0)
    assert sim.cache.tree.num_idle_on(Match(None, 0, 0)) == 0
    assert not sim.cache.tree.roots
    sim.cached(range(8), "somebody")
    before = sim.snapshot()
    for prompt in ([0, 1], [0, 1, 2, 3, 4, 9], [9]):
        sim.cached_length(prompt, "somebody")
        sim.cached_length(prompt, "nobody")
    assert sim.snapshot() == before


def test_an_empty_root_is_deleted(make_sim: MakeSim) -> None:
    sim = make_sim(4)
    released, parked = sim.attach([], "a"), sim.attach([], "b")
    assert set(sim.cache.tree.roots) == {"a", "b"}
    released.release()
    parked.park()
    assert set(sim.cache.tree.roots) == {"b"}, "a seat holds its root"
    parked.release()
    assert not sim.cache.tree.roots
    sim.cached(range(4), "c")
    sim.cache.tree.evict(1)
    assert not sim.cache.tree.roots


def test_do_not_cache_is_a_key_that_nobody_else_has(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    secret = object()
    branch = sim.prompt(range(10), secret)
    child = sim.fork(branch)
    sim.write((child, [50]))
    assert child.block_ids()[:2] == branch.block_ids()[:2], "forks inside still share"
    assert sim.cached_length(range(10)) == 0
    assert sim.cached_length(range(10), object()) == 0
    assert child.prune() == 1, "down to where it was forked"
    assert branch.prune() == 3, "nothing was cached when the request came"
    assert sim.free == 8
    assert not sim.cache.tree.roots


# -- structure -------------------------------------------------------------------------------------


def test_a_split_moves_no_cursor_and_no_seat(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    deep, seated = sim.prompt(range(16)), sim.prompt(range(16))
    seated.park()
    lower = deep.node
    sim.fork(deep, at=5)
    assert deep.node is seated.node is lower
    assert (lower.start, lower.end) == (8, 16)
    assert sim.cache.tree.num_splits == 1
    sim.check()


def test_an_attach_joins_what_nobody_rests_on(make_sim: MakeSim) -> None:
    sim = make_sim(16)
    ends = [sim.prompt(range(end)) for end in (4, 8, 16, 24, 32)]
    middle = ends[2]
    for cursor in ends:
        if cursor is not middle:
            cursor.release()
    assert sim.spans == [(0, 4), (4, 8), (8, 16), (16, 24), (24, 32)]
    deep = sim.attach(range(32))
    assert sim.spans == [(0, 16), (16, 32)]
    assert deep.block_ids() == list(range(8))
    assert middle.block_ids() == list(range(4))
    sim.check()
    seat = sim.attach(range(20))
    seat.park()
    middle.release()
    deep.release()
    sim.attach(range(32))
    assert sim.spans == [(0, 20), (20, 32)], "a seat is someone too"
    sim.check()


def test_a_fork_in_the_road_is_not_joined(make_sim: MakeSim) -> None:
    sim = make_sim(16)
    sim.cached(range(8))
    sim.cached([*range(4), 9, 9, 9, 9])
    sim.attach(range(8))
    assert sorted(sim.spans) == [(0, 4), (4, 8), (4, 8)]


def test_sliding_over_part_of_a_child_and_onto_its_end(make_sim: MakeSim) -> None:
    sim = make_sim(16)
    first = sim.prompt(range(4))
    second = sim.fork(first)
    sim.write((first, range(4, 16)))
    sim.write((second, range(4, 8)))
    assert (second.node.start, second.node.end) == (0, 8), "below a live child too"
    sim.write((second, [*range(8, 12), 50, 50, 50, 50]))
    assert second.length == 16
    assert sorted(sim.spans) == [(0, 12), (12, 16), (12, 16)]
    third = sim.fork(second, at=12)
    sim.write((third, range(12, 16)))
    assert third.node is first.node, "the whole of a child is moved onto, not slid over"
    sim.check()


def test_sliding_over_all_that_is_resident_of_a_ghost(make_sim: MakeSim) -> None:
    sim = make_sim(16)
    first = sim.prompt(range(4))
    parked = sim.fork(first)
    sim.write((parked, range(4, 16)))
    parked.park()
    sim.cache.tree.evict(2)
    assert [(node.start, node.end, len(node.blocks)) for node in sim.nodes] == [(0, 4, 1), (4, 16, 1)]
    sim.write((first, range(4, 8)))
    assert [(node.start, node.end, len(node.blocks)) for node in sim.nodes] == [(0, 8, 2), (8, 16, 0)]
    assert sim.evictable == 0
    sim.write((first, range(8, 16)))
    assert first.node is parked.node, "the ghost adopts the rest"
    assert sim.cache.resume(parked) == b""
    sim.check()


def test_a_run_that_leaves_an_idle_child_in_its_middle(make_sim: MakeSim) -> None:
    """Two cursors on the border, so it splits instead of sliding."""
    sim = make_sim(16)
    stay = sim.prompt(range(4))
    go = sim.fork(stay)
    sim.cached(range(20))
    sim.write((go, [*range(4, 12), 50, 50, 50, 50]))
    assert sorted(sim.spans) == [(0, 4), (4, 12), (12, 16), (12, 20)]
    assert sim.cache.num_dropped == 2
    sim.check()


def test_ghosts_go_when_nobody_needs_their_tokens(make_sim: MakeSim) -> None:
    sim = make_sim(8)
    branch = sim.prompt(range(12))
    other = sim.fork(branch)
    sim.write((other, [50, 50, 50, 50]))
    branch.park()
    other.park()
    sim.cache.tree.evict(3)
    assert [(node.start, node.end, len(node.blocks)) for node in sim.nodes] == [(0, 12, 1), (12, 16, 0)]
    branch.release()
    assert sim.spans == [(0, 12), (12, 16)], "the other seat is below"
    other.release()
    assert [(node.start, node.end, len(node.blocks)) for node in sim.nodes] == [(0, 4, 1)]
    sim.check()


def test_a_ghost_in_the_middle_of_a_run_is_adopted(make_sim: MakeSim) -> None:
    sim = make_sim(16)
    branch = sim.prompt(range(16))
    branch.park()
    sim.cache.tree.evict(4)
    assert sim.cached_length(range(16)) == 0
    fresh = sim.prompt([*range(8), 50, 50, 50, 50])
    assert [(node.start, node.end, len(node.blocks)) for node in sorted(sim.nodes)] == [
        (0, 8, 2),
        (8, 12, 1),
        (8, 16, 0),
    ]
    assert unpack(sim.cache.resume(branch)) == list(range(8, 16))
    assert fresh.node.parent is branch.node
    sim.check()
