"""What is derived: who shares what, the depth-first order of a batch, statistics, and the full recount.

Nothing here changes anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ramet.radix.cursor import Cursor, State, Tail
from ramet.radix.prefix_cache import PrefixCache
from ramet.radix.tokens import TOKEN_BYTES
from ramet.radix.tree import Node


class DepthFirst(NamedTuple):
    """A batch in depth-first order of the tree, so that each node covers a contiguous range of rows."""

    order: list[int]  # indices into the cursors that were given
    num_shared_blocks: list[int]  # leading blocks that a row has in common with the row before it


def depth_first(cursors: Sequence[Cursor], block_size: int) -> DepthFirst:
    """Order live branches depth first. O(branches + nodes on their paths)."""
    rows_at: dict[Node, list[int]] = {}
    children: dict[Node | None, list[Node]] = {None: []}  # of the nodes on the batch's paths
    for index, cursor in enumerate(cursors):
        node: Node | None = cursor.node
        while node is not None and node not in rows_at:
            rows_at[node] = []
            parent = node.parent
            if parent in children:
                children[parent].append(node)
            else:
                children[parent] = [node]
            node = parent
        rows_at[cursor.node].append(index)
    order: list[int] = []
    shared: list[int] = []
    common = 0  # tokens that the next row has in common with the last one
    stack = children[None][::-1]
    while stack:
        node = stack.pop()
        if common and node.start < common:
            common = node.start
        for index in rows_at[node]:
            order.append(index)
            shared.append(common // block_size)
            common = node.end
        if node in children:
            stack += reversed(children[node])
    return DepthFirst(order, shared)


def num_sharers(cursor: Cursor) -> list[int]:
    """For each block of a branch's table, how many live branches have it in theirs. O(size of the sub-trees).

    This is what people mean by the reference count of a shared block; the pool counts direct owners only.
    """
    path: list[Node] = []
    node: Node | None = cursor.node
    while node is not None:
        path.append(node)
        node = node.parent
    counts: list[int] = []
    for node in reversed(path):
        counts += [_num_branches_in(node)] * len(node.blocks)
    if cursor.tail is not None:
        counts.append(cursor.tail.owners)
    return counts


def _num_branches_in(node: Node) -> int:
    total, stack = 0, [node]
    while stack:
        at = stack.pop()
        total += at.cursors
        stack.extend(child for child in at.children.values() if child.live)
    return total


@dataclass(frozen=True)
class PageStats:
    """One look at the pages. Blocks unless a name says tokens."""

    block_size: int
    num_blocks: int
    num_free: int
    num_cached_idle: int  # in the tree and evictable
    num_in_use: int
    logical_tokens: int  # what the live branches would hold if nothing were shared
    physical_tokens: int  # what they do hold
    num_copies: int  # copy-on-write copies so far
    num_evicted: int
    num_dropped: int  # duplicates found when publishing

    @property
    def sharing_ratio(self) -> float:
        """Logical over physical tokens: 1 when nothing is shared."""
        return self.logical_tokens / self.physical_tokens if self.physical_tokens else 1.0

    @property
    def waste(self) -> float:
        """The part of the slots in use that holds no token."""
        slots = self.num_in_use * self.block_size
        return 1 - self.physical_tokens / slots if slots else 0.0


def page_stats(cache: PrefixCache, cursors: Iterable[Cursor]) -> PageStats:
    """Statistics over all branches of a cache. O(nodes + branches)."""
    logical = 0
    tails: dict[Tail, int] = {}
    reach: dict[Node, int] = {}  # how far the branches that rest on a node read it
    for cursor in cursors:
        if cursor.state is State.LIVE:
            logical += cursor.length
            reach[cursor.node] = max(cursor.length, reach.get(cursor.node, 0))
            if cursor.tail is not None:
                filled = cursor.length - cursor.node.end
                tails[cursor.tail] = max(filled, tails.get(cursor.tail, 0))
    # The last block of a leaf that is only borrowed is not read to its end.
    unread = sum(max(0, node.end - at) for node, at in reach.items() if node.live == node.cursors)
    live_blocks = cache.num_cached - cache.num_evictable
    free = cache.pool.num_free
    return PageStats(
        block_size=cache.block_size,
        num_blocks=cache.pool.num_blocks,
        num_free=free,
        num_cached_idle=cache.num_evictable,
        num_in_use=cache.pool.num_blocks - free - cache.num_evictable,
        logical_tokens=logical,
        physical_tokens=live_blocks * cache.block_size + sum(tails.values()) - unread,
        num_copies=cache.num_copies,
        num_evicted=cache.tree.num_evicted,
        num_dropped=cache.num_dropped,
    )


# -- the full recount ------------------------------------------------------------------------------------


def check(cache: PrefixCache, cursors: Iterable[Cursor]) -> None:
    """Assert every invariant by a full recount; `cursors` are all branches of the cache. O(everything)."""
    cursors = [cursor for cursor in cursors if cursor.state is not State.RELEASED]
    owners = [0] * cache.pool.num_blocks
    _check_cursors(cache, cursors, owners)
    for reservation in cache.reservations:
        for block in reservation.blocks:
            owners[block] += 1
    for copy in cache.copies.values():
        owners[copy.source] += 1
        owners[copy.target] += 1
    _check_tree(cache, cursors, owners)
    cache.pool.check(owners)
    used = cache.pool.num_blocks - cache.pool.num_free - cache.num_evictable
    assert 0 <= used <= cache.pool.num_blocks, "free + cached idle + in use is not the pool"


def _check_cursors(cache: PrefixCache, cursors: list[Cursor], owners: list[int]) -> None:
    tails: Counter[Tail] = Counter()
    reserved = {r.cursor for r in cache.reservations}
    for cursor in cursors:
        end = cursor.node.end
        if cursor.state is State.PARKED:
            assert cursor.tail is None and cursor.row is None, "a parked branch holds blocks"
            continue
        if cursor.tail is None:
            assert end - cache.block_size < cursor.length <= end, "a cursor rests off the end of its node"
        else:
            tails[cursor.tail] += 1
            assert end < cursor.length < end + cache.block_size, "a tail is open and not empty"
            assert len(cursor.tail.tokens) >= (cursor.length - end) * TOKEN_BYTES, "a tail lost tokens"
        if cursor.row is not None and cursor not in reserved:
            row, cursor.row = cursor.row, None
            assert row == cursor.block_ids(), "the kept row differs from the path"
            cursor.row = row
    for tail, count in tails.items():
        assert tail.owners == count, "a tail's owners differ from a recount"
        owners[tail.block] += count


def _check_tree(cache: PrefixCache, cursors: list[Cursor], owners: list[int]) -> None:
    tree = cache.tree
    resting = Counter(c.node for c in cursors if c.state is State.LIVE)
    seated = Counter(c.node for c in cursors if c.state is State.PARKED)
    nodes: list[Node] = list(tree.roots.values())
    for node in nodes:  # grows as it goes: parents before children
        nodes.extend(node.children.values())
    live: dict[Node, int] = {}
    evictable = cached = idle = 0
    per_space: Counter[object] = Counter()
    for node in reversed(nodes):
        live[node] = resting[node] + sum(1 for child in node.children.values() if live[child])
        assert (node.cursors, node.seats, node.live) == (resting[node], seated[node], live[node]), (
            "cursors, seats or live differ from a recount"
        )
        _check_node(cache, node)
        cached += len(node.blocks)
        evictable += 0 if live[node] else len(node.blocks)
        per_space[node.space] += len(node.blocks)
        idle += node.idle_entry is not None
        for block in node.blocks:
            owners[block] += 1
    assert set(resting) | set(seated) <= set(nodes), "a branch rests on a node that left the tree"
    assert (evictable, cached) == (tree.num_evictable, tree.num_cached), "a block counter drifted"
    assert idle == len(tree._idle), "the ordered set holds a node that left the tree"
    for root in tree.roots.values():
        assert root.space.num_cached == per_space[root.space], "a namespace's counter drifted"


def _check_node(cache: PrefixCache, node: Node) -> None:
    tree = cache.tree
    size = tree.block_bytes
    resident = {key for key, child in node.children.items() if child.blocks}
    assert len(node.key) % size == 0, "a key is whole blocks"
    ghost = len(node.blocks) * size < len(node.key)
    assert len(node.blocks) * size <= len(node.key), "a block without tokens"
    assert not (ghost and (node.live or resident)), "residency must fall down a path, below live branches too"
    assert node.logprobs is None or len(node.logprobs) * TOKEN_BYTES == len(node.key), (
        "numbers without tokens"
    )
    assert node.num_resident == len(resident), "resident children differ from a recount"
    if node.ranked is not None:
        assert list(node.ranked) == sorted(resident), "the ordered children differ from the children"
    assert node.ranked is not None or len(resident) <= 8, "a wide node is not ordered"
    leaf = not node.live and bool(node.blocks) and not resident
    assert leaf == (node.idle_entry is not None), "evictable leaves are exactly those in the ordered set"
    if node.idle_entry is not None:
        assert node.idle_entry[-1] is node and node.idle_entry in tree._idle, "a leaf lost its entry"
    if node.parent is None:
        assert not node.key and (node.cursors or node.seats or node.children), "a root that nobody needs"
        return
    assert node.first == node.key[:size] and node.parent.children[node.first] is node, "a child is misfiled"
    assert node.space is node.parent.space, "a node crossed into another namespace"
    assert node.start == node.parent.end, "positions do not join"
    assert node.blocks or node.seats or node.children, "a ghost that nobody needs"
    assert not ghost or node.seats or node.children, "tokens without blocks that nobody needs"
