"""Faults that users of other engines have met, as far as they can be told without a model. Blocks of 16."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from ramet.radix.accounting import check, num_sharers
from ramet.radix.cursor import Cursor, State
from ramet.radix.prefix_cache import OutOfBlocks
from ramet.radix.tokens import pack, unpack

if TYPE_CHECKING:
    from tests.radix.conftest import Sim

MakeSim = Callable[..., "Sim"]

X, Y, Z, OTHER = (range(base, base + 1_000) for base in (1_000, 2_000, 3_000, 4_000))


# -- look-up and publishing ------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a_whole_prompt_that_is_cached_already(make_sim: MakeSim, length: int) -> None:
    sim = make_sim(16, 16, min_partial=None)
    cached = []
    for _ in range(3):
        tokens = pack(X[:length])
        cached.append(sim.cache.tree.match(0, tokens, length - 1).length)
        sim.prompt(X[:length]).release()
        assert sim.cache.num_cached == length // 16
    assert cached[0] == 0
    partial = (length - 1) % 16 if length % 16 == 0 else 0  # what is in no full block is not cached
    assert cached[1] == cached[2] == 16 * ((length - 1) // 16) + partial
    sim.close()


def test_the_hit_is_looked_up_again_at_admission(make_sim: MakeSim) -> None:
    sim = make_sim(8, 16)
    sim.cached(X[:64])
    z = sim.prompt(Z[:60])
    waiting = X[:65]
    assert sim.cached_length(waiting) == 64
    assert sim.admit(waiting) is None, "it needs five, four are not held by Z"
    for position in range(60, 89):  # 30 tokens generated: six blocks
        sim.write((z, [Z[position]]))
    assert sim.admit(waiting) is None
    z.release()
    admitted = sim.admit(waiting)
    assert admitted is not None
    assert admitted.length == 32
    sim.write((admitted, waiting[32:]))
    sim.close()


def test_blocks_are_found_only_after_their_step(make_sim: MakeSim) -> None:
    sim = make_sim(8, 16)
    first = sim.attach(X[:33])
    flying = sim.launch((first, X[:33]))
    assert sim.cached_length(X[:33]) == 0, "a twin in the same step computes it too"
    first.release()
    sim.land(flying)
    assert sim.cached_length(X[:33]) == 0, "aborted before its forward"
    sim.close()


def test_the_index_never_points_at_a_reused_block(make_sim: MakeSim) -> None:
    sim = make_sim(4, 16)
    sim.cached(X[:48])
    sim.cached(Y[:64])
    assert sim.cached_length(X[:48]) == 0
    sim.cached(X[:48])
    for index in range(1_000):
        sim.prompt(range(10_000 + 40 * index, 10_040 + 40 * index)).release()
        sim.branches.clear()
        assert len(sim.nodes) <= 4, "no dead entries"
    assert sim.cache.num_cached == 1 + 2, "each takes three of four blocks and leaves its two full ones"


def test_the_lock_covers_exactly_the_matched_path(make_sim: MakeSim) -> None:
    sim = make_sim(16, 16)
    ids = range(1, 65)
    sim.cached(ids)
    held = sim.attach([*ids[:40], *OTHER[:8]])
    assert held.length == 40
    sim.write((held, OTHER[:8]))
    sim.cached([*ids[:20], *OTHER[100:112]])
    path = list(held.block_ids())
    idle = sim.evictable
    assert idle == 2 + 1, "ids 33..48 and 49..64, and the other request's second block"
    assert sim.cache.tree.evict(100) == idle
    sim.check()
    assert held.block_ids() == path
    assert sim.cached_length(ids) == 40, "its own copy of ids 33..40 is a block by now"
    held.release()
    assert sim.evictable == sim.cache.num_cached == 3
    assert all(node.live == 0 for node in sim.nodes)


def test_a_duplicate_is_dropped_after_its_table_is_repointed(make_sim: MakeSim) -> None:
    sim = make_sim(12, 16)
    twins = [sim.attach(X[:40]) for _ in range(2)]
    for twin in twins:
        twin.keep_row()
    flying = sim.launch(*((twin, X[:40]) for twin in twins))
    sim.land(flying)
    other = sim.attach([])
    for position in range(40, 70):
        sim.write(*((twin, [X[position]]) for twin in twins), (other, [OTHER[position]]))
        for branch in sim.branches:
            assert not set(branch.block_ids()) & set(sim.cache.pool._free)
    assert twins[0].block_ids()[:4] == twins[1].block_ids()[:4]
    assert sim.cache.num_dropped == 2 + 2, "two of the prompt, and blocks 2 and 3 of the decode"


@pytest.mark.parametrize(("num_kv", "cached"), [(32, 32), (31, 16)])
def test_the_last_sampled_token_has_no_kv(make_sim: MakeSim, num_kv: int, cached: int) -> None:
    """Prompt 20, then 13 or 12 tokens, of which the last was never fed. The follow-up knows it."""
    sim = make_sim(8, 16)
    branch = sim.prompt(X[:20])
    for position in range(20, num_kv):
        sim.write((branch, [X[position]]))
    branch.release()
    assert sim.cached_length([*X[: num_kv + 1], *OTHER[:5]]) == cached


# -- copy-on-write, fork, rollback -----------------------------------------------------------------


def test_divergence_inside_a_shared_partial_block(make_sim: MakeSim) -> None:
    sim = make_sim(6, 16)
    parent = sim.prompt(X[:33])
    branches = [parent, *(sim.fork(parent) for _ in range(3))]
    for step in range(15):  # 16 tokens each, the last one without KV
        sim.write(*((branch, [100 * index + step]) for index, branch in enumerate(branches)))
        assert sim.free + sim.evictable == 0, "6 = 2 shared + 4 private"
        last = [branch.block_ids()[2] for branch in branches]
        assert len(set(last)) == 4
        assert [num_sharers(branch) for branch in branches] == [[4, 4, 1]] * 4
        for block in last:
            assert sim.device[block][2 + step :] == [None] * (14 - step), "nothing beyond the length"
    with pytest.raises(OutOfBlocks) as refused:
        sim.write(*((branch, [7]) for branch in branches))
    assert (refused.value.needed, refused.value.available) == (4, 0)
    sim.check()


@pytest.mark.parametrize("length", [33, 48])
@pytest.mark.parametrize("num_new", [1, 2, 16, 17])
def test_a_branch_released_twice_in_the_step_in_which_it_ends(
    make_sim: MakeSim, length: int, num_new: int
) -> None:
    sim = make_sim(16, 16)
    parent = sim.prompt(X[:length])
    branches = [parent, *(sim.fork(parent) for _ in range(3))]
    for step in range(num_new - 1):
        sim.write(*((branch, [100 * index + step]) for index, branch in enumerate(branches)))
    flying = sim.launch(*((branch, [100 * index]) for index, branch in enumerate(branches)))
    branches[1].release()
    branches[1].release()
    sim.land(flying)
    branches[1].release()
    assert branches[1].prune() == 0
    sim.check()
    assert min(sim.refs) >= 0
    assert len(set(sim.cache.pool._free)) == sim.free
    sim.close()


def test_a_fork_cannot_fail_and_a_step_fails_whole(make_sim: MakeSim) -> None:
    sim = make_sim(4, 16)
    parent = sim.prompt(X[:33])
    children = [sim.fork(parent) for _ in range(5)]
    before = sim.snapshot()
    with pytest.raises(OutOfBlocks):
        sim.write(*((child, [index]) for index, child in enumerate(children)))
    assert sim.snapshot() == before
    for child in children:
        child.park()
    for position in range(33, 53):
        sim.write((parent, [X[position]]))
    assert unpack(parent.tokens()) == list(X[:53])
    sim.close()


def test_a_request_that_finds_no_room_gives_back_its_references(make_sim: MakeSim) -> None:
    sim = make_sim(6, 16)
    held = sim.prompt(X[:48])
    refs, path, device = list(sim.refs), list(held.block_ids()), [list(slots) for slots in sim.device]
    assert sim.admit(Y[:64]) is None
    too_long = [*X[:32], *Y[:64]]
    assert sim.admit(too_long) is None
    assert sim.refs == refs
    careless = sim.attach(too_long)
    with pytest.raises(OutOfBlocks):
        sim.write((careless, Y[:64]))
    careless.release()
    assert (sim.refs, held.block_ids()) == (refs, path)
    assert sim.device == device
    sim.check()


def test_rollback_leaves_no_old_identity_on_a_block(make_sim: MakeSim) -> None:
    sim = make_sim(8, 16)
    branch = sim.prompt(X[:40])
    branch.truncate(24)
    new = [*OTHER[:8], *OTHER[100:109]]
    for token in new:
        sim.write((branch, [token]))
    assert unpack(branch.tokens()) == [*X[:24], *new]
    for prompt, cached in (([*X[:32], 1], 32), ([*X[:24], *OTHER[:8], 1], 32)):
        request = sim.prompt(prompt)
        assert request.node.end == cached
        sim.check()  # each block holds the KV of the tokens that it is found under


# -- eviction and accounting -----------------------------------------------------------------------


def test_hit_blocks_are_not_counted_as_room(make_sim: MakeSim) -> None:
    sim = make_sim(6, 16)
    sim.cached(X[:64])
    z = sim.prompt(Z[:20])
    waiting = [*X[:64], *OTHER[:16]]
    for position in range(20, 31):
        before = sim.snapshot()
        assert sim.admit(waiting) is None
        assert sim.snapshot() == before
        sim.write((z, [Z[position]]))
    z.release()
    admitted = sim.admit(waiting)
    assert admitted is not None
    assert admitted.length == 64
    sim.write((admitted, OTHER[:16]))
    sim.close()


def test_no_ancestor_goes_before_its_descendant(make_sim: MakeSim) -> None:
    sim = make_sim(4, 16)
    sim.cached(X[:48])
    sim.cached(Y[:20])
    assert sim.cache.tree.num_evicted == 1
    assert sim.cached_length(X[:49]) == 32


def test_ten_thousand_random_operations(make_sim: MakeSim) -> None:
    """A recount after each of them; four symbols, lengths to 100, pool of 32."""
    rng = random.Random(0)
    sim = make_sim(32, 16, min_partial=1)
    for _ in range(10_000):
        live = [branch for branch in sim.branches if branch.state is State.LIVE]
        _random_operation(sim, rng, live)
        sim.branches = [branch for branch in sim.branches if branch.state is not State.RELEASED]
        check(sim.cache, sim.branches)
        locked = sim.cache.num_cached - sim.evictable
        assert 0 <= sim.evictable <= sim.cache.num_cached
        assert sim.free + sim.evictable + locked <= 32
    assert min(sim.cache.tree.num_splits, sim.cache.tree.num_evicted) > 50
    sim.close()


def _random_operation(sim: Sim, rng: random.Random, live: list[Cursor]) -> None:
    kind = rng.choice(["prompt", "prompt", "write", "fork", "truncate", "release", "release", "evict"])
    if kind == "prompt" or not live:
        prompt = rng.choices(range(4), k=rng.randint(1, 100))
        if rng.random() < 0.7:  # most prompts go on from one that was seen
            prompt = [0, 1, 2, 3] * rng.randint(0, 20) + prompt[:20]
        branch = sim.admit(prompt)
        if branch is not None and branch.length < len(prompt):
            sim.land(sim.launch((branch, prompt[branch.length :])))
        return
    branch = rng.choice(live)
    if kind == "write":
        new = rng.choices(range(4), k=rng.randint(1, 20))
        if sim.cache.num_needed([(branch, len(new))]) <= sim.cache.num_available:
            sim.land(sim.launch((branch, new)))
    elif kind == "fork":
        sim.fork(branch, rng.choice([None, rng.randint(0, branch.length)]))
    elif kind == "truncate":
        branch.truncate(rng.randint(0, branch.length))
    elif kind == "release":
        rng.choice([branch.release, branch.prune])()
    else:
        count = rng.randint(1, 8)
        assert sim.cache.tree.evict(count) <= count


def test_evicting_from_a_locked_tree_returns_at_once(make_sim: MakeSim) -> None:
    sim = make_sim(4, 16)
    sim.prompt(X[:64])
    assert sim.cache.tree.evict(4) == 0
