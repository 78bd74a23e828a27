"""A branch is a cursor: a node of the tree, at most one open tail block, and a length. Its verbs live here.

Fork, truncate, park and release take no block and cannot fail. Writing is in two halves, so that a step that
fails leaves nothing behind: `PrefixCache.reserve` takes the blocks (copy-on-write happens there, in
`own_tail`), `PrefixCache.commit` appends the tokens and publishes full blocks (`publish.py`).
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from ramet.radix.tokens import TOKEN_BYTES
from ramet.radix.tree import Match, Node

if TYPE_CHECKING:
    from ramet.radix.prefix_cache import PrefixCache, Reservation


class State(IntEnum):
    RELEASED = 0
    LIVE = 1  # a cursor: holds its blocks
    PARKED = 2  # a seat: keeps its tokens and its place, not its blocks


class Tail:
    """The open last block of one or more branches.

    A branch reads only the first `length - node.end` of its tokens; another owner may have written more.
    """

    __slots__ = ("block", "owners", "tokens", "writer")

    def __init__(self, block: int, tokens: bytearray) -> None:
        self.block = block
        self.tokens = tokens
        self.owners = 1  # branches; copies in flight are counted by the pool alone
        self.writer: Reservation | None = None  # of the step that is writing here


class BlockTable(NamedTuple):
    """What the kernels read: block ids in order, and how many slots of the last one are filled."""

    blocks: list[int]
    filled: int


class Cursor:
    """One branch's place in the tree.

    Without a tail, node.end - block_size < length <= node.end; if length < node.end the last block is
    *borrowed*: read in place up to `length`, copied before the first write. With a tail,
    node.end < length < node.end + block_size.
    """

    __slots__ = (
        "base",  # position down to which `prune` may free
        "cache",
        "epoch",  # bumped by whatever makes a step in flight stale
        "length",  # tokens whose KV exists
        "node",
        "row",  # block ids kept up to date while the branch runs, or None
        "state",
        "tail",
        "unkept",  # while parked: the tokens after node.end
    )

    def __init__(self, cache: PrefixCache, node: Node, tail: Tail | None, length: int) -> None:
        self.cache = cache
        self.node = node
        self.tail = tail
        self.length = length
        self.base = length
        self.epoch = 0
        self.row: list[int] | None = None
        self.state = State.LIVE
        self.unkept = b""

    # -- the verbs -------------------------------------------------------------------------------

    def fork(self, at: int | None = None) -> Cursor:
        """Another branch with the same past, or with its first `at` tokens. O(1); no device work.

        `at` below the length may split a node, which is O(path to it).
        """
        assert self.state is State.LIVE, "only a live branch forks; resume a parked one first"
        node, tail = self.node, self.tail
        node.cursors += 1
        node.live += 1  # it was positive: nothing above changes
        if tail is not None:
            tail.owners += 1
            self.cache.pool.ref_counts[tail.block] += 1
        child = Cursor(self.cache, node, tail, self.length)
        if tail is not None and tail.writer is not None:
            tail.writer.joined += (child,)
        if at is not None and at != self.length:
            child.truncate(at)
        return child

    def truncate(self, position: int) -> None:
        """Forget all but the first `position` tokens. Takes no block; O(nodes passed)."""
        assert self.state is State.LIVE, "only a live branch is truncated; resume a parked one first"
        assert 0 <= position <= self.length, "truncate goes back, not forward"
        self.epoch += 1
        self.length = position
        self.base = min(self.base, position)
        if self.row is not None:
            del self.row[-(-position // self.cache.block_size) :]
        if self.tail is not None:
            if position > self.node.end:
                return
            self._drop_tail()
        node = self.node
        while node.parent is not None and position <= node.start:
            node = node.parent
        if node.parent is not None:
            node = self.cache.tree.node_ending(node, -(-(position - node.start) // self.cache.block_size))
        if node is not self.node:
            self.move(node, touch=True)

    def release(self) -> None:
        """Let go of everything. What nobody else uses stays cached until it is evicted. Idempotent."""
        if self.state is State.RELEASED:
            return
        parked = self.state is State.PARKED
        self.state = State.RELEASED
        self.epoch += 1
        self.row = None
        if parked:
            self.cache.tree.leave_seat(self.node)
            return
        self._drop_tail()
        self.cache.tree.unlock(self.node, touch=True)
        self.cache.tree.collect_root(self.node)

    def prune(self) -> int:
        """Release, and free at once what this branch added and nobody else uses.

        Goes up no further than `base`: the fork position or hit length, lowered by truncate, rounded down to
        a block. Returns the exact number of blocks freed; a branch that was released before adds nothing.
        """
        if self.state is State.RELEASED:
            return 0
        tree, node = self.cache.tree, self.node
        free_before = self.cache.pool.num_free
        while node.parent is not None and not node.blocks:
            node = node.parent  # a parked branch may rest on a ghost, which goes with it
        self.release()
        floor = self.base // self.cache.block_size
        while node.parent is not None and not (node.live or node.children or node.seats):
            parent = node.parent
            keep = max(0, floor - node.start // self.cache.block_size)
            while len(node.blocks) > keep:
                tree.pop_block(node)
            if keep:
                break
            node = parent
        return self.cache.pool.num_free - free_before

    def park(self) -> None:
        """Keep the tokens and the place, give up the blocks: they stay cached until they are evicted."""
        assert self.state is State.LIVE, "only a live branch is parked"
        self.epoch += 1
        node = self.node
        if self.tail is not None:
            self.unkept = bytes(self.tail.tokens[: (self.length - node.end) * TOKEN_BYTES])
        self._drop_tail()
        self.row = None
        node.seats += 1
        self.state = State.PARKED
        self.cache.tree.unlock(node, touch=True)

    # -- what it holds -----------------------------------------------------------------------------

    @property
    def namespace(self) -> Hashable:
        return self.node.space.key

    def tokens(self) -> bytes:
        """The packed token ids of the branch. O(length)."""
        parts = [self.unkept if self.tail is None else bytes(self.tail.tokens)]
        node: Node | None = self.node
        while node is not None:
            parts.append(bytes(node.key))
            node = node.parent
        return b"".join(reversed(parts))[: self.length * TOKEN_BYTES]

    def block_ids(self) -> list[int]:
        """The blocks that hold the branch's KV, in order. O(1) if a row is kept, else O(path)."""
        if self.row is not None:
            return self.row
        runs: list[list[int]] = []
        node: Node | None = self.node
        while node is not None:
            runs.append(node.blocks)
            node = node.parent
        ids = [block for run in reversed(runs) for block in run]
        if self.tail is not None:
            ids.append(self.tail.block)
        return ids

    @property
    def block_table(self) -> BlockTable:
        """The block ids and the fill level of the last block (0 only for an empty branch)."""
        size = self.cache.block_size
        return BlockTable(list(self.block_ids()), (self.length - 1) % size + 1 if self.length else 0)

    @property
    def num_exclusive_blocks(self) -> int:
        """Blocks that no other live branch has: what parking this one would free. O(path of its own)."""
        count = int(self.tail is not None and self.tail.owners == 1)
        node: Node | None = self.node
        while node is not None and node.live == 1:
            count += len(node.blocks)
            node = node.parent
        return count

    def keep_row(self) -> None:
        """From now on keep `row` up to date by deltas, as a running branch needs it each step."""
        if self.row is None:
            self.row = self.block_ids()

    @property
    def borrows(self) -> bool:
        """Whether the last block is one of the tree's, of which only a part is this branch's."""
        return self.tail is None and self.length < self.node.end

    # -- the halves of a write that change the cursor; called by PrefixCache ---------------------------

    def own_tail(self) -> None:
        """Make the block that the next token goes to this branch's own: copy-on-write.

        Takes one block if the last block is borrowed or shared. The copy is queued, not done.
        """
        tail = self.tail
        if tail is None:
            if self.length < self.node.end:
                self._copy_borrowed()
            return
        filled = (self.length - self.node.end) * TOKEN_BYTES
        if tail.owners > 1:
            block = self.cache.copy_of(tail.block, filled // TOKEN_BYTES)
            self._drop_tail()
            self._set_tail(Tail(block, tail.tokens[:filled]))
        elif len(tail.tokens) > filled:
            del tail.tokens[filled:]

    def _copy_borrowed(self) -> None:
        tree, node = self.cache.tree, self.node
        tokens = self._borrowed_tokens()
        block = self.cache.copy_of(node.blocks[-1], len(tokens) // TOKEN_BYTES)
        whole = len(node.blocks) - 1
        above = tree.split(node, whole) if whole else node.parent
        assert above is not None, "a root has no block to borrow"
        self.move(above, touch=False)
        self._set_tail(Tail(block, tokens))

    def can_take_over(self) -> bool:
        """Whether the borrowed block has no other user, so that it need not be copied."""
        node = self.node
        return self.borrows and node.cursors == 1 and not node.children and not node.seats

    def take_over(self) -> None:
        """Turn the borrowed block into this branch's tail without a copy: it leaves the tree."""
        assert self.can_take_over(), "the borrowed block has other users"
        tree, node = self.cache.tree, self.node
        tokens = self._borrowed_tokens()
        self.tail = Tail(tree.detach_last_block(node), tokens)
        if not node.blocks:
            assert node.parent is not None, "a root has no block to take over"
            self.move(node.parent, touch=False)
            tree.drop_empty(node)

    def _borrowed_tokens(self) -> bytearray:
        """This branch's tokens in the block that it borrows."""
        node = self.node
        beyond = (node.end - self.length) * TOKEN_BYTES
        return node.key[-self.cache.tree.block_bytes : len(node.key) - beyond]

    def move(self, node: Node, *, touch: bool) -> None:
        """Rest on `node` instead. Locks first, so that what both paths share stays protected."""
        old = self.node
        self.cache.tree.lock(node)
        self.node = node
        self.cache.tree.unlock(old, touch=touch)

    def place(self, match: Match, namespace: Hashable) -> None:
        """Leave the seat of a parked branch for a live cursor at `match`."""
        assert self.state is State.PARKED, "only a parked branch is placed again"
        tree, seat = self.cache.tree, self.node
        node = tree.rest(match, namespace)
        tree.lock(node)
        self.node = node
        self.state = State.LIVE
        self.length = match.length
        self.base = min(self.base, self.length)
        self.unkept = b""
        tree.leave_seat(seat)

    def borrow_published(self, node: Node) -> None:
        """The tail that this branch shares has been published as the last block of `node`: borrow it."""
        self._drop_tail()
        if self.row is not None:
            self.row[-1] = node.blocks[-1]
        self.move(node, touch=False)

    def _set_tail(self, tail: Tail) -> None:
        self.tail = tail
        if self.row is not None:
            self.row[-1] = tail.block

    def _drop_tail(self) -> None:
        if self.tail is not None:
            self.tail.owners -= 1
            self.cache.pool.drop(self.tail.block)
            self.tail = None
