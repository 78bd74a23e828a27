"""The only door to the pages: who may use which blocks, and what must be copied before a step.

A step goes: `reserve` the tokens that each branch will write (the only call that can fail, before any
change), hand `take_copies` to the device and say `copies_done`, run, then `commit` each reservation, or
`cancel` it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from ramet.radix.block_pool import BlockPool, OutOfBlocks
from ramet.radix.cursor import Cursor, State, Tail
from ramet.radix.eviction import LRU, EvictionPolicy
from ramet.radix.publish import publish
from ramet.radix.tokens import TOKEN_BYTES
from ramet.radix.tree import Match, RadixTree

__all__ = ["Copy", "OutOfBlocks", "PrefixCache", "Reservation"]


_NO_BLOCKS: list[int] = []  # of the many reservations that stay inside an open block; never written to


class Copy(NamedTuple):
    """Copy the first `num_slots` slots of block `source` to block `target`, in all layers."""

    source: int
    target: int
    num_slots: int


class Reservation:
    """Blocks that a running step will fill for one branch. Ends in exactly one commit or cancel."""

    __slots__ = ("blocks", "cursor", "epoch", "joined", "num_tokens")

    def __init__(self, cursor: Cursor, blocks: list[int], num_tokens: int) -> None:
        self.cursor = cursor
        self.epoch = cursor.epoch
        self.blocks = blocks  # beyond the tail
        self.num_tokens = num_tokens
        self.joined: tuple[Cursor, ...] = ()  # forks of the branch since, which share its tail


class PrefixCache:
    """Branches over a radix tree of blocks. Knows block ids and tokens, no device."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        policy: EvictionPolicy | None = None,
        min_partial: int | None = None,
        block_order: Sequence[int] | None = None,
    ) -> None:
        """`min_partial`: tokens that a match inside a block must have to be worth a copy later; 1 is exact
        to the token, the default is a quarter of a block. `block_order`: how ids are handed out at first."""
        assert block_size > 0, "a block holds at least one token"
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, block_order)
        partial = max(1, block_size // 4 if min_partial is None else min_partial)
        self.tree = RadixTree(self.pool, block_size, policy or LRU(), partial)
        self.reservations: set[Reservation] = set()
        self.copies: dict[int, Copy] = {}  # queued, by target: each holds its source and its target
        self.num_copies = 0
        self.num_dropped = 0  # duplicates found when publishing

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free or evictable. The source of a queued copy cannot, until it is done."""
        return self.pool.num_free + self.tree.num_evictable - len(self.copies)

    @property
    def num_cached(self) -> int:
        return self.tree.num_cached

    @property
    def num_evictable(self) -> int:
        return self.tree.num_evictable

    # -- a prompt comes in -------------------------------------------------------------------------

    def attach(self, namespace: Hashable, tokens: bytes, most: int | None = None) -> Cursor:
        """A branch at the longest cached prefix of the first `most` of `tokens` (packed). Takes no block."""
        return self._attach(namespace, self.tree.match(namespace, tokens, most))

    def num_cached_blocks(self, namespace: Hashable, tokens: bytes) -> int:
        """Leading whole blocks of `tokens` that the cache holds. Changes nothing."""
        return self.tree.match(namespace, tokens).length // self.block_size

    def admit(
        self, namespace: Hashable, tokens: bytes, cursor: Cursor | None = None, *, headroom: int = 0
    ) -> Cursor | None:
        """`attach`, if all of `tokens` and `headroom` more can then be reserved; None, unchanged, if not.

        With `cursor`, a parked branch is resumed instead of a new one made: its own tokens are its prompt,
        and a prefix of `tokens`. What is cached is charged once, and what the hit itself occupies is not
        counted as room. A borrowed block that cannot be paid for is given up for the whole-block hit.
        """
        match = self.tree.match(namespace, tokens)
        num_tokens = len(tokens) // TOKEN_BYTES + headroom
        if not self._fits(match, num_tokens):
            match = self.tree.whole_blocks(match)
            if not self._fits(match, num_tokens):
                return None
        if cursor is None:
            return self._attach(namespace, match)
        self.resume(cursor, match)
        return cursor

    def resume(self, cursor: Cursor, match: Match | None = None) -> bytes:
        """Make a parked branch live again at what is still cached of it; returns the tokens to recompute."""
        tokens = cursor.tokens()
        namespace = cursor.namespace
        if match is None:
            match = self.tree.match(namespace, tokens)
        cursor.place(match, namespace)
        self.tree.join_ancestors(cursor.node)
        return tokens[cursor.length * TOKEN_BYTES :]

    def _attach(self, namespace: Hashable, match: Match) -> Cursor:
        node = self.tree.rest(match, namespace)
        node.hits += 1
        self.tree.lock(node)
        self.tree.join_ancestors(node)
        return Cursor(self, node, None, match.length)

    def _fits(self, match: Match, num_tokens: int) -> bool:
        """Whether `num_tokens` in all can be held after an attach at `match`. Changes nothing."""
        if match.length >= num_tokens:
            return True
        needed = -(-num_tokens // self.block_size) - match.length // self.block_size
        available = self.num_available - self.tree.num_idle_on(match)
        node = match.node
        if match.length % self.block_size and node is not None:
            # Nobody else uses the block that would be borrowed, so it is taken over instead of copied.
            unused = not (node.live or node.children or node.seats) and match.num_blocks == len(node.blocks)
            needed -= unused and needed > available
        return needed <= available

    def forget(self, namespace: Hashable) -> int:
        """Free at once what is cached in a namespace and no live branch holds; its log-probabilities go, too.

        Parked branches keep their tokens. Returns how many blocks were freed. O(nodes of the namespace).
        """
        nodes = [self.tree.roots[namespace]] if namespace in self.tree.roots else []
        for node in nodes:  # grows as it goes: parents before children
            nodes.extend(node.children.values())
        free = self.pool.num_free
        for node in reversed(nodes):
            if not node.live:
                node.logprobs = None
                while node.blocks:
                    self.tree.pop_block(node)
        return self.pool.num_free - free

    # -- a step ------------------------------------------------------------------------------------

    def num_needed(self, writes: Iterable[tuple[Cursor, int]]) -> int:
        """Blocks that `reserve` would take for (branch, number of tokens) pairs, each at least one."""
        size = self.block_size
        total = 0
        writers: dict[Tail, int] = {}
        for cursor, num_tokens in writes:
            tail = cursor.tail
            # One block for each border that the tokens cross, and one if no block is open.
            total += (cursor.length % size + num_tokens - 1) // size + (tail is None)
            if tail is not None and tail.owners > 1:
                writers[tail] = writers.get(tail, 0) + 1
        if writers:
            # The last owner that writes does so in place, if no owner stays behind.
            total += sum(min(count, tail.owners - 1) for tail, count in writers.items())
        return total

    def reserve(self, writes: Sequence[tuple[Cursor, int]]) -> list[Reservation]:
        """Take the blocks that each branch needs to write so many tokens more (at least one).

        Copies are queued for blocks that others share. Raises OutOfBlocks before any change.
        """
        needed = self.num_needed(writes)
        if needed and needed > self.pool.num_free:
            self._make_room(writes, needed)
        size = self.block_size
        reservations = []
        for cursor, num_tokens in writes:
            assert num_tokens > 0, "a reservation is for at least one token"
            cursor.own_tail()
            tail = cursor.tail
            blocks = _NO_BLOCKS
            missing = (cursor.length % size + num_tokens - 1) // size + (tail is None)
            if missing:
                blocks = [self.pool.take() for _ in range(missing)]
                if cursor.row is not None:
                    cursor.row += blocks
            reservation = Reservation(cursor, blocks, num_tokens)
            if tail is not None:
                tail.writer = reservation
            reservations.append(reservation)
        self.reservations.update(reservations)
        return reservations

    def _make_room(self, writes: Sequence[tuple[Cursor, int]], needed: int) -> None:
        """Evict, and take over borrowed blocks where even that would not do."""
        short = needed - self.num_available
        taken_over: list[Cursor] = []
        if short > 0:
            taken_over = [cursor for cursor, _ in writes if cursor.can_take_over()][:short]
            if len(taken_over) < short:
                raise OutOfBlocks(needed, self.num_available)
        while (missing := needed - len(taken_over) - self.pool.num_free) > 0:
            self.tree.evict(missing)  # again, if it was the source of a copy in flight
        for cursor in taken_over:
            cursor.take_over()

    def copy_of(self, block: int, num_slots: int) -> int:
        """Take a block and queue a copy of `block` into it. Both are held until the copy is done."""
        target = self.pool.take()
        pending = self.copies.get(block)
        source = block if pending is None else pending.source  # a fused launch has no order: read the origin
        self.pool.share(source)
        self.pool.share(target)
        self.copies[target] = Copy(source, target, num_slots)
        self.num_copies += 1
        return target

    def take_copies(self) -> list[Copy]:
        """The copies to run before the step writes. They stay queued until `copies_done`."""
        return list(self.copies.values())

    def copies_done(self) -> None:
        """The device has run (or safely ordered) all queued copies: let go of their blocks."""
        for copy in self.copies.values():
            self.pool.drop(copy.source)
            self.pool.drop(copy.target)
        self.copies.clear()

    def commit(self, reservation: Reservation, tokens: bytes) -> None:
        """The step has written `tokens` (packed): append them and publish the blocks that are full.

        A reservation whose branch was truncated, parked or released since is dropped.
        """
        cursor = reservation.cursor
        if not self._close(reservation):
            return
        num_tokens = len(tokens) // TOKEN_BYTES
        assert not self.copies, "copies run before the writes of their step"
        assert num_tokens == reservation.num_tokens, "a step writes what was reserved for it"
        tail, size = cursor.tail, self.tree.block_bytes
        key = bytearray() if tail is None else tail.tokens
        key += tokens
        cursor.length += num_tokens
        if tail is not None and len(key) < size:
            return  # the open block stays open
        blocks = reservation.blocks if tail is None else [tail.block, *reservation.blocks]
        num_full = len(key) // size
        rest = key[num_full * size :]
        cursor.tail = Tail(blocks[num_full], rest) if rest else None
        if num_full:
            self._publish(reservation, tail, key[: num_full * size], blocks[:num_full])

    def _publish(
        self, reservation: Reservation, tail: Tail | None, key: bytearray, blocks: list[int]
    ) -> None:
        """Publish a run. Branches that were forked in mid-step borrow what was the tail from then on."""
        cursor = reservation.cursor
        joined = [] if tail is None else [c for c in reservation.joined if c.tail is tail]
        if joined:
            first = key[: self.tree.block_bytes]
            self.num_dropped += publish(cursor, first, blocks[:1])
            for other in joined:
                other.borrow_published(cursor.node)
            key, blocks = key[len(first) :], blocks[1:]
        self.num_dropped += publish(cursor, key, blocks)

    def cancel(self, reservation: Reservation) -> None:
        """The step did not happen: give the reserved blocks back. Earlier commits stay."""
        cursor = reservation.cursor
        if self._close(reservation):
            self._return_blocks(reservation)
            if cursor.row is not None:
                del cursor.row[-(-cursor.length // self.block_size) :]

    def _close(self, reservation: Reservation) -> bool:
        """End a reservation; False, with its blocks returned, if its branch has moved on since."""
        self.reservations.remove(reservation)
        cursor = reservation.cursor
        if cursor.tail is not None and cursor.tail.writer is reservation:
            cursor.tail.writer = None
        if cursor.epoch == reservation.epoch and cursor.state is State.LIVE:
            return True
        self._return_blocks(reservation)
        return False

    def _return_blocks(self, reservation: Reservation) -> None:
        for block in reservation.blocks:
            self.pool.drop(block)
