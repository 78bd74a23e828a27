"""A prefix cache with a simulated device, for tests that say "write these tokens" and then count blocks.

A slot of the device remembers namespace and prefix in place of the KV that they would give, so that a branch
that reads foreign or stale KV is seen at once. Each `write` ends with a full recount.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from ramet.radix.accounting import check
from ramet.radix.cursor import Cursor, State
from ramet.radix.prefix_cache import PrefixCache, Reservation
from ramet.radix.tokens import pack, unpack
from ramet.radix.tree import Node

Slot = tuple[Hashable, tuple[int, ...]]
Write = tuple[Cursor, Iterable[int]]


class NodeView(NamedTuple):
    """One node, as far as tests look at it."""

    start: int
    end: int
    blocks: list[int]
    cursors: int
    live: int
    seats: int


class Flying(NamedTuple):
    """One row of a step between its launch and its commit."""

    reservation: Reservation
    token_ids: list[int]


class Sim:
    """A cache, its device, and all branches that were made through it."""

    def __init__(
        self, num_blocks: int, block_size: int = 4, min_partial: int | None = 1, **kwargs: Any
    ) -> None:
        self.cache = PrefixCache(num_blocks, block_size, min_partial=min_partial, **kwargs)
        self.device: list[list[Slot | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.branches: list[Cursor] = []

    # -- branches ----------------------------------------------------------------------------------

    def attach(self, token_ids: Iterable[int], namespace: Hashable = 0) -> Cursor:
        cursor = self.cache.attach(namespace, pack(token_ids))
        self.branches.append(cursor)
        return cursor

    def admit(self, token_ids: Iterable[int], namespace: Hashable = 0) -> Cursor | None:
        cursor = self.cache.admit(namespace, pack(token_ids))
        if cursor is not None:
            self.branches.append(cursor)
        return cursor

    def prompt(self, token_ids: Iterable[int], namespace: Hashable = 0) -> Cursor:
        """A branch that holds all of these tokens: attach, then compute what was not cached."""
        wanted = list(token_ids)
        cursor = self.attach(wanted, namespace)
        if cursor.length < len(wanted):
            self.write((cursor, wanted[cursor.length :]))
        return cursor

    def cached(self, token_ids: Iterable[int], namespace: Hashable = 0) -> None:
        """Leave these tokens in the cache, idle."""
        self.prompt(token_ids, namespace).release()

    def fork(self, parent: Cursor, at: int | None = None) -> Cursor:
        child = parent.fork(at)
        self.branches.append(child)
        return child

    # -- steps ---------------------------------------------------------------------------------------

    def write(self, *rows: Write) -> None:
        """One step for all rows: reserve, copy, write, commit."""
        self.land(self.launch(*rows))
        self.check()

    def launch(self, *rows: Write) -> list[Flying]:
        """The first half of a step: blocks are reserved, copies are done, the device has written."""
        writes = [(cursor, list(token_ids)) for cursor, token_ids in rows]
        reservations = self.cache.reserve([(cursor, len(token_ids)) for cursor, token_ids in writes])
        self.run_copies()
        for reservation, (_, token_ids) in zip(reservations, writes, strict=True):
            self._fill(reservation, token_ids)
        return [Flying(r, token_ids) for r, (_, token_ids) in zip(reservations, writes, strict=True)]

    def land(self, flying: Sequence[Flying]) -> None:
        for reservation, token_ids in flying:
            self.cache.commit(reservation, pack(token_ids))

    def run_copies(self) -> None:
        """All queued copies in one launch: each reads what was there before any of them wrote."""
        copies = self.cache.take_copies()
        read = [self.device[copy.source][: copy.num_slots] for copy in copies]
        for copy, slots in zip(copies, read, strict=True):
            self.device[copy.target][: copy.num_slots] = slots
        self.cache.copies_done()

    def _fill(self, reservation: Reservation, token_ids: list[int]) -> None:
        cursor, size = reservation.cursor, self.cache.block_size
        past = unpack(cursor.tokens())
        row = list(cursor.block_ids()) + ([] if cursor.row is not None else reservation.blocks)
        full = past + token_ids
        for position in range(len(past), len(full)):
            block = row[position // size]
            assert self.cache.pool.ref_counts[block] == 1, "a shared or published block is written"
            self.device[block][position % size] = (cursor.namespace, tuple(full[: position + 1]))

    # -- what there is ---------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return self.cache.pool.num_free

    @property
    def refs(self) -> list[int]:
        """The pool's reference counts by block id."""
        return self.cache.pool.ref_counts

    @property
    def evictable(self) -> int:
        return self.cache.num_evictable

    @property
    def nodes(self) -> list[NodeView]:
        """All nodes but the roots, parents before children."""
        found: list[Node] = list(self.cache.tree.roots.values())
        for node in found:
            found.extend(node.children.values())
        return [
            NodeView(n.start, n.end, list(n.blocks), n.cursors, n.live, n.seats)
            for n in found
            if n.parent is not None
        ]

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(node.start, node.end) for node in self.nodes]

    def cached_length(self, token_ids: Iterable[int], namespace: Hashable = 0) -> int:
        return self.cache.tree.match(namespace, pack(token_ids)).length

    def snapshot(self) -> Any:
        """Everything that "nothing changed" speaks of, the order of eviction included."""
        tree, pool = self.cache.tree, self.cache.pool
        places = [(c, c.node, c.tail, c.length, c.state, c.epoch) for c in self.branches]
        order = list(tree._idle)
        return list(pool._free), list(pool.ref_counts), list(self.cache.copies), order, self.nodes, places

    def check(self) -> None:
        """Recount everything, and let each branch read its past through its block table."""
        check(self.cache, self.branches)
        size = self.cache.block_size
        for cursor in self.branches:
            if cursor.state is not State.LIVE:
                continue
            past, row = unpack(cursor.tokens()), cursor.block_ids()
            for position in range(cursor.length):
                slot = self.device[row[position // size]][position % size]
                assert slot == (cursor.namespace, tuple(past[: position + 1])), "a branch reads foreign KV"

    def close(self) -> None:
        """Release everything: nothing may be held, and all of it can be evicted."""
        for cursor in self.branches:
            cursor.release()
        self.check()
        assert self.free + self.evictable == self.cache.pool.num_blocks, "idle, but blocks are in use"
        self.cache.tree.evict(self.cache.pool.num_blocks)
        assert self.free == self.cache.pool.num_blocks
        assert not self.cache.tree.roots


@pytest.fixture
def make_sim() -> Callable[..., Sim]:
    return Sim
