"""Random operations against a naive model that keeps plain token lists and a simulated device.

The device remembers for each slot which prefix its KV belongs to. After every operation each branch must read
exactly its own past through its block table, and a full recount must agree with every counter.
"""

from __future__ import annotations

from math import isnan
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ramet.radix.accounting import check, depth_first, num_sharers, page_stats
from ramet.radix.cursor import Cursor, State
from ramet.radix.lfu import LFU
from ramet.radix.prefix_cache import OutOfBlocks, PrefixCache, Reservation
from ramet.radix.sidecar import known_logprobs, write_logprobs
from ramet.radix.tokens import pack, unpack
from ramet.radix.tree import Node

PICK = st.integers(0, 1 << 16)
Slot = tuple[str, tuple[int, ...]]  # namespace and prefix, in place of the KV that they would give


class Branches(RuleBasedStateMachine):
    block_size = 4

    @initialize(
        num_blocks=st.sampled_from([6, 12, 40]),
        vocabulary=st.integers(1, 3),
        min_partial=st.sampled_from([None, 1]),
        lfu=st.booleans(),
    )
    def start(self, num_blocks: int, vocabulary: int, min_partial: int | None, lfu: bool) -> None:
        self.cache = PrefixCache(
            num_blocks, self.block_size, min_partial=min_partial, policy=LFU() if lfu else None
        )
        self.device: list[list[Slot | None]] = [[None] * self.block_size for _ in range(num_blocks)]
        self.vocabulary = vocabulary
        self.past: dict[Cursor, list[int]] = {}
        self.space: dict[Cursor, str] = {}
        self.flying: list[tuple[Reservation, list[int], list[int]]] = []  # reserved, past, new tokens

    # -- helpers ---------------------------------------------------------------------------------

    def pick(self, pick: int, state: State, *, idle: bool = False) -> Cursor | None:
        busy = {r.cursor for r, _, _ in self.flying} if idle else set()
        those = [c for c in self.past if c.state is state and c not in busy]
        return those[pick % len(those)] if those else None

    def tokens(self, data: st.DataObject, most: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, self.vocabulary - 1), min_size=1, max_size=most))

    def room(self) -> bool:
        return len(self.past) < 14

    def snapshot(self) -> Any:
        tree, pool = self.cache.tree, self.cache.pool
        places = [(c, c.node, c.tail, c.length, c.state) for c in self.past]
        counts = (tree.num_evictable, tree.num_cached, list(tree._idle), len(self.cache.copies))
        return list(pool._free), list(pool.ref_counts), counts, places

    def run_copies(self) -> None:
        for source, target, count in self.cache.take_copies():
            self.device[target][:count] = self.device[source][:count]
        self.cache.copies_done()

    def reserve(self, writes: list[tuple[Cursor, list[int]]]) -> bool:
        before = self.snapshot()
        needed = self.cache.num_needed([(c, len(new)) for c, new in writes])
        free = self.cache.pool.num_free
        evictable = self.cache.num_evictable
        try:
            reservations = self.cache.reserve([(c, len(new)) for c, new in writes])
        except OutOfBlocks:
            assert self.snapshot() == before
            return False
        assert free + evictable - self.cache.pool.num_free - self.cache.num_evictable <= needed
        self.run_copies()
        for reservation, (cursor, new) in zip(reservations, writes, strict=True):
            self.write(reservation, self.past[cursor], new)
            self.flying.append((reservation, list(self.past[cursor]), new))
        return True

    def write(self, reservation: Reservation, past: list[int], new: list[int]) -> None:
        """What the device does in a step: fill the slots right behind the branch's past."""
        cursor = reservation.cursor
        row = list(cursor.block_ids())
        row += [] if cursor.row is not None else reservation.blocks
        full = past + new
        for position in range(len(past), len(full)):
            block = row[position // self.block_size]
            assert self.cache.pool.ref_counts[block] == 1, "a shared or published block is written"
            self.device[block][position % self.block_size] = (self.space[cursor], tuple(full[: position + 1]))

    def land(self) -> None:
        for reservation, past, new in self.flying:
            cursor = reservation.cursor
            fresh = cursor.state is State.LIVE and cursor.epoch == reservation.epoch
            self.cache.commit(reservation, pack(new))
            if fresh:
                assert self.past[cursor] == past
                self.past[cursor] = past + new
        self.flying.clear()

    def best_match(self, namespace: str, prompt: list[int]) -> int:
        """The longest cached prefix by brute force over all resident paths."""
        root = self.cache.tree.roots.get(namespace)
        best, stack = 0, [(root, [0] * 0)] if root is not None else []
        while stack:
            node, above = stack.pop()
            held = above + unpack(node.key)[: len(node.blocks) * self.block_size]
            agreed = 0
            while agreed < min(len(held), len(prompt)) and held[agreed] == prompt[agreed]:
                agreed += 1
            partial = agreed % self.block_size
            best = max(best, agreed if partial >= self.cache.tree.min_partial else agreed - partial)
            stack += [(child, held) for child in node.children.values() if child.blocks]
        return best

    # -- operations ----------------------------------------------------------------------------------

    @rule(data=st.data(), pick=PICK, cut=PICK, other=st.booleans(), row=st.booleans())
    def admit(self, data: st.DataObject, pick: int, cut: int, other: bool, row: bool) -> None:
        if not self.room():
            return
        old = list(self.past.values())
        shared = old[pick % len(old)] if old else []
        prompt = shared[: cut % (len(shared) + 1)] + self.tokens(data, 3 * self.block_size + 2)
        namespace = "other" if other else "own"
        match = self.cache.tree.match(namespace, pack(prompt))
        assert match.length == self.best_match(namespace, prompt)
        before = self.snapshot()
        cursor = self.cache.admit(namespace, pack(prompt))
        if cursor is None:
            assert self.snapshot() == before
            return
        assert cursor.length <= match.length
        self.past[cursor], self.space[cursor] = prompt[: cursor.length], namespace
        if row:
            cursor.keep_row()
        if cursor.length < len(prompt):
            # Admission has promised the blocks, so this may not fail.
            assert self.reserve([(cursor, prompt[cursor.length :])])

    @rule(data=st.data(), pick=PICK, count=st.integers(1, 5), same=st.booleans())
    def step(self, data: st.DataObject, pick: int, count: int, same: bool) -> None:
        busy = {r.cursor for r, _, _ in self.flying}
        ready = [c for c in self.past if c.state is State.LIVE and c not in busy]
        rows = [ready[(pick + i) % len(ready)] for i in range(min(count, len(ready)))]
        twin = self.tokens(data, 2 * self.block_size) if same else None
        self.reserve([(c, twin or self.tokens(data, 2 * self.block_size)) for c in rows])

    @rule()
    def commit(self) -> None:
        self.land()

    @rule()
    def fail(self) -> None:
        for reservation, _, _ in self.flying:
            self.cache.cancel(reservation)
        self.flying.clear()

    @rule(pick=PICK, row=st.booleans())
    def fork(self, pick: int, row: bool) -> None:
        parent = self.pick(pick, State.LIVE)
        if parent is not None and self.room():
            free = self.cache.pool.num_free
            child = parent.fork()
            assert self.cache.pool.num_free == free
            self.past[child], self.space[child] = list(self.past[parent]), self.space[parent]
            if row:
                child.keep_row()

    @rule(pick=PICK, at=PICK)
    def fork_at(self, pick: int, at: int) -> None:
        parent = self.pick(pick, State.LIVE)
        if parent is not None and self.room():
            at %= parent.length + 1
            child = parent.fork(at)
            self.past[child], self.space[child] = self.past[parent][:at], self.space[parent]

    @rule(pick=PICK, at=PICK)
    def truncate(self, pick: int, at: int) -> None:
        cursor = self.pick(pick, State.LIVE)
        if cursor is not None:
            at %= cursor.length + 1
            cursor.truncate(at)
            self.past[cursor] = self.past[cursor][:at]

    @rule(pick=PICK, parked=st.booleans())
    def release(self, pick: int, parked: bool) -> None:
        cursor = self.pick(pick, State.PARKED if parked else State.LIVE)
        if cursor is not None:
            cursor.release()
            cursor.release()
            del self.past[cursor]

    @rule(pick=PICK, parked=st.booleans())
    def prune(self, pick: int, parked: bool) -> None:
        cursor = self.pick(pick, State.PARKED if parked else State.LIVE)
        if cursor is not None:
            free = self.cache.pool.num_free
            freed = cursor.prune()
            assert self.cache.pool.num_free - free == freed >= 0
            assert cursor.prune() == 0
            del self.past[cursor]

    @rule(pick=PICK)
    def park(self, pick: int) -> None:
        cursor = self.pick(pick, State.LIVE)
        if cursor is not None:
            cursor.park()

    @rule(pick=PICK, careful=st.booleans())
    def resume(self, pick: int, careful: bool) -> None:
        cursor = self.pick(pick, State.PARKED)
        if cursor is None:
            return
        past = self.past[cursor]
        if careful:
            before = self.snapshot()
            if self.cache.admit(self.space[cursor], pack(past), cursor) is None:
                assert self.snapshot() == before
                return
        else:
            rest = unpack(self.cache.resume(cursor))
            assert past == past[: cursor.length] + rest
        self.past[cursor] = past[: cursor.length]
        if cursor.length < len(past):
            done = self.reserve([(cursor, past[cursor.length :])])
            assert done or not careful

    @rule(pick=PICK, at=PICK, count=st.integers(1, 40), skip=st.integers(0, 3))
    def learn(self, pick: int, at: int, count: int, skip: int) -> None:
        """Write the log-probabilities of a part of a branch, with a gap in it."""
        cursor = self.pick(pick, State.LIVE)
        if cursor is None or not cursor.length:
            return
        past = self.past[cursor]
        at %= len(past)
        said = [logprob_of(tuple(past[: at + i + 1])) for i in range(min(count, len(past) - at))]
        for gap in range(1, min(skip + 1, len(said))):
            said[gap] = float("nan")
        before = known_logprobs(cursor)
        write_logprobs(cursor, at, said)
        after = known_logprobs(cursor)
        full = cursor.node.end  # what lies in the open block is not kept
        for position in range(len(past)):
            new = not isnan(said[position - at]) if at <= position < at + len(said) else False
            known = not isnan(before[position]) or (new and position < full)
            assert known == (not isnan(after[position]))

    @rule(count=st.integers(1, 40))
    def evict(self, count: int) -> None:
        evictable, free = self.cache.num_evictable, self.cache.pool.num_free
        assert self.cache.tree.evict(count) == min(count, evictable)
        assert self.cache.pool.num_free == free + min(count, evictable)

    @rule(other=st.booleans())
    def forget(self, other: bool) -> None:
        namespace = "other" if other else "own"
        roots = self.cache.tree.roots
        before = {key: root.space.num_cached for key, root in roots.items()}
        free, evictable = self.cache.pool.num_free, self.cache.num_evictable
        freed = self.cache.forget(namespace)
        assert evictable - self.cache.num_evictable >= freed == self.cache.pool.num_free - free
        for key, root in roots.items():
            nodes = [root]
            for node in nodes:
                nodes.extend(node.children.values())
            idle = sum(len(node.blocks) for node in nodes if not node.live)
            assert idle == 0 if key == namespace else root.space.num_cached == before[key]
            assert key != namespace or all(node.live or node.logprobs is None for node in nodes)

    # -- what must hold after each of them -------------------------------------------------------

    @invariant()
    def counters_equal_a_recount(self) -> None:
        if hasattr(self, "cache"):
            check(self.cache, self.past)

    @invariant()
    def each_branch_reads_its_own_past(self) -> None:
        for cursor, past in getattr(self, "past", {}).items():
            assert cursor.length == len(past) or cursor.state is State.PARKED
            assert unpack(cursor.tokens()) == past[: cursor.length]
            if cursor.state is State.LIVE:
                row = cursor.block_ids()
                for position in range(len(past)):
                    block = row[position // self.block_size]
                    slot = (self.space[cursor], tuple(past[: position + 1]))
                    assert self.device[block][position % self.block_size] == slot

    @invariant()
    def what_is_known_of_a_token_is_a_function_of_its_prefix(self) -> None:
        roots = self.cache.tree.roots.values() if hasattr(self, "cache") else ()
        stack: list[tuple[Node, list[int]]] = [(root, []) for root in roots]
        while stack:
            node, above = stack.pop()
            path = above + unpack(node.key)
            stack += [(child, path) for child in node.children.values()]
            for index, logprob in enumerate(node.logprobs or (), len(above)):
                assert isnan(logprob) or logprob == logprob_of(tuple(path[: index + 1]))

    @invariant()
    def derived_numbers_agree(self) -> None:
        live = [c for c in getattr(self, "past", {}) if c.state is State.LIVE]
        if not live:
            return
        tables = [list(c.block_ids()) for c in live]
        order, shared = depth_first(live, self.block_size)
        assert sorted(order) == list(range(len(live)))
        for row, common in enumerate(shared):
            if row:
                mine, before = tables[order[row]], tables[order[row - 1]]
                assert mine[:common] == before[:common]
        nodes = [live[index].node for index in order]
        assert len(_runs(nodes)) == len(set(nodes)), "a node's rows are contiguous"
        if not self.flying:
            for cursor, table in zip(live, tables, strict=True):
                assert num_sharers(cursor) == [sum(b in t for t in tables) for b in table]
        stats = page_stats(self.cache, live)
        assert stats.logical_tokens == sum(c.length for c in live)
        held = {(b, s) for c in live for b, s in _slots(c, self.block_size)}
        assert stats.physical_tokens == len(held)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.land()
        for cursor in self.past:
            cursor.release()
        check(self.cache, [])
        self.cache.tree.evict(self.cache.pool.num_blocks)
        assert self.cache.pool.num_free == self.cache.pool.num_blocks
        assert not self.cache.tree.roots


def _slots(cursor: Cursor, block_size: int) -> list[tuple[int, int]]:
    """The (block, slot) of each token of a branch."""
    row = cursor.block_ids()
    return [(row[p // block_size], p % block_size) for p in range(cursor.length)]


def logprob_of(prefix: tuple[int, ...]) -> float:
    """Something that depends on the whole prefix and that 32 bits hold exactly."""
    return -float(hash(prefix) % 99991)


def _runs(nodes: list[Node]) -> list[Node]:
    return [node for i, node in enumerate(nodes) if i == 0 or node is not nodes[i - 1]]


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_random_operations(size: int) -> None:
    machine = type(f"Branches{size}", (Branches,), {"block_size": size})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
