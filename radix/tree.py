"""The radix tree: which block holds which tokens, which of them are in use, and what goes first.

It owns every full block. A node is an edge of whole blocks; branches stand on nodes as cursors (see
cursor.py) and keep the path above them from eviction. The tree knows no tails, no requests and no device.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from itertools import islice
from typing import NamedTuple

from sortedcontainers import SortedList

from ramet.radix import sidecar
from ramet.radix.block_pool import BlockPool
from ramet.radix.eviction import EvictionPolicy
from ramet.radix.tokens import TOKEN_BYTES, common_tokens

# Above this many children a node keeps them in order, so that a partial match is a bisection, not a scan.
_RANK_ABOVE = 8
_RANK_BELOW = 4


# What all leaves have in common, and so never written to: most nodes are leaves.
_NO_CHILDREN: dict[bytes, Node] = {}


class Namespace:
    """What a tenant's prompts share and no one else's can reach; one for all the nodes of a root."""

    __slots__ = ("key", "num_cached")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.num_cached = 0  # blocks of this namespace in the tree


class Node:
    """An edge of tokens with the blocks that hold their KV.

    `blocks` covers a leading part of `key`, usually all of it. Tokens without a block (a *ghost*) stay only
    where a parked branch (a *seat*) or a child still needs them.
    """

    __slots__ = (
        "blocks",  # block ids, one for each block_size tokens of the key's resident part
        "children",  # first block of a child's key -> child
        "cursors",  # live branches that rest here
        "end",  # position after the last token of the key
        "first",  # first block of the key: what the parent files the node under
        "hits",  # times that a prompt was attached here
        "idle_entry",  # what stands for it in the tree's ordered set, None when not evictable
        "key",  # token ids as bytes
        "last",  # logical time of the last use
        "live",  # own cursors + children with live > 0; the node is protected iff this is positive
        "logprobs",  # one number for each token of the key, or None: see sidecar.py
        "num_resident",  # children that hold at least one block
        "parent",
        "ranked",  # keys of the resident children in order, kept where there are many
        "seats",  # parked branches that rest here
        "space",  # the namespace that the node belongs to
        "uid",
    )

    def __init__(
        self, uid: int, parent: Node | None, space: Namespace, key: bytearray, blocks: list[int], end: int
    ) -> None:
        self.uid = uid
        self.parent = parent  # None for a root
        self.space = space
        self.key = key
        self.blocks = blocks
        self.end = end
        self.first = b""  # a root is filed nowhere
        self.children = _NO_CHILDREN
        self.ranked: SortedList | None = None
        self.num_resident = 0
        self.cursors = 0
        self.seats = 0
        self.live = 0
        self.last = 0
        self.hits = 0
        self.idle_entry: IdleEntry | None = None
        self.logprobs: array[float] | None = None

    @property
    def start(self) -> int:
        """Position of the first token of the key."""
        return self.end - len(self.key) // TOKEN_BYTES


# (priority, last, uid, node): the order of eviction. A uid is unique, so nodes themselves are never compared.
IdleEntry = tuple[float, int, int, Node]


class Match(NamedTuple):
    """How far a prompt is cached: a cursor would rest after `num_blocks` blocks of `node`.

    If `length` ends inside the last of them, that block is borrowed: read up to `length`, copied on write.
    `node` is None where the namespace does not exist.
    """

    node: Node | None
    num_blocks: int
    length: int


class RadixTree:
    """Token prefixes of many namespaces over one block pool."""

    def __init__(self, pool: BlockPool, block_size: int, policy: EvictionPolicy, min_partial: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.policy = policy
        self.min_partial = min_partial
        self.roots: dict[Hashable, Node] = {}
        self.num_cached = 0  # blocks that the tree owns
        self.num_evictable = 0  # those of them in nodes without live branches
        self.num_splits = 0
        self.num_evicted = 0
        self._idle = SortedList()  # the IdleEntry of each evictable leaf
        self._clock = 0
        self._uid = 0

    # -- look-up: changes nothing -----------------------------------------------------------------

    def match(self, namespace: Hashable, tokens: bytes, most: int | None = None) -> Match:
        """The longest cached prefix of `tokens`, `most` tokens at the most. O(nodes on the path) memcmps."""
        node: Node | None = self.roots.get(namespace)
        if node is None:
            return Match(None, 0, 0)
        size = self.block_bytes
        end = len(tokens) if most is None else most * TOKEN_BYTES
        offset = 0
        while True:
            child = node.children.get(tokens[offset : offset + size]) if offset + size <= end else None
            if child is None or not child.blocks:
                return self._match_partial_child(node, tokens, offset, end)
            resident = len(child.blocks) * size
            whole = resident == len(child.key) and offset + resident <= end
            if not (whole and tokens.startswith(child.key, offset)):
                return self._match_inside(child, tokens, offset, end)
            node = child
            offset += resident

    def _match_inside(self, node: Node, tokens: bytes, offset: int, end: int) -> Match:
        """The match ends inside `node`, whose first block agrees: find the last block that does."""
        size = self.block_bytes
        low, high = 1, min(len(node.blocks), (end - offset) // size)
        while low < high:
            middle = (low + high + 1) // 2
            if tokens[offset + low * size : offset + middle * size] == node.key[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        offset += low * size
        if low < len(node.blocks):
            most = min((end - offset) // TOKEN_BYTES, self.block_size)
            partial = common_tokens(tokens, offset, node.key, low * size, most)
            if partial >= self.min_partial:
                return Match(node, low + 1, offset // TOKEN_BYTES + partial)
        return Match(node, low, offset // TOKEN_BYTES)

    def _match_partial_child(self, node: Node, tokens: bytes, offset: int, end: int) -> Match:
        """All of `node` agrees and no child's first block does: borrow the child that agrees longest."""
        most = min((end - offset) // TOKEN_BYTES, self.block_size)
        best, partial = None, 0
        if node.num_resident and most >= self.min_partial:
            wanted = tokens[offset : offset + most * TOKEN_BYTES]
            best, partial = self._longest_child(node, wanted, most)
        if best is not None and partial >= self.min_partial:
            return Match(best, 1, offset // TOKEN_BYTES + partial)
        return Match(node, len(node.blocks), offset // TOKEN_BYTES)

    def _longest_child(self, node: Node, wanted: bytes, most: int) -> tuple[Node | None, int]:
        """The resident child that agrees with `wanted` longest; of equals the first in byte order."""
        if node.ranked is None:
            best, longest = None, 0
            for key in sorted(k for k, child in node.children.items() if child.blocks):
                count = common_tokens(wanted, 0, key, 0, most)
                if count > longest:
                    best, longest = node.children[key], count
            return best, longest
        # In byte order the longest agreement stands next to where `wanted` would be. No positions are asked
        # for: a sorted list that was never asked for one keeps no index of them up to date.
        near = [
            *islice(node.ranked.irange(maximum=wanted, reverse=True), 1),
            *islice(node.ranked.irange(minimum=wanted), 1),
        ]
        longest = max(common_tokens(wanted, 0, key, 0, most) for key in near)
        if not longest:
            return None, 0
        first = next(node.ranked.irange(minimum=wanted[: longest * TOKEN_BYTES]))
        return node.children[first], longest

    def whole_blocks(self, match: Match) -> Match:
        """`match` without its borrowed block, if it has one."""
        node, num_blocks, length = match
        if node is None or length % self.block_size == 0:
            return match
        length -= length % self.block_size
        if num_blocks > 1:
            return Match(node, num_blocks - 1, length)
        assert node.parent is not None, "a root has no block to borrow"
        return Match(node.parent, len(node.parent.blocks), length)

    def num_idle_on(self, match: Match) -> int:
        """Blocks of the matched path that are evictable now and would not be after an attach."""
        node, count, total = match.node, match.num_blocks, 0
        while node is not None and not node.live:
            total += count
            node = node.parent
            count = len(node.blocks) if node is not None else 0
        return total

    # -- protection: what live branches stand on cannot be evicted ------------------------------------

    def lock(self, node: Node) -> None:
        """A cursor comes to rest on `node`. Walks up only as far as nodes become protected."""
        node.cursors += 1
        at: Node | None = node
        while at is not None:
            at.live += 1
            if at.live > 1:
                return
            self.num_evictable -= len(at.blocks)
            self._leave_idle(at)
            at = at.parent

    def unlock(self, node: Node, *, touch: bool) -> None:
        """A cursor leaves `node`; `touch` says that this was a use. Walks up as far as protection ends."""
        node.cursors -= 1
        if touch:
            self._clock += 1
            node.last = self._clock
        at: Node | None = node
        while at is not None:
            at.live -= 1
            if at.live:
                return
            self.num_evictable += len(at.blocks)
            self._enter_idle(at)
            at = at.parent

    def leave_seat(self, node: Node) -> None:
        """A parked branch leaves `node`: tokens that only it needed go."""
        node.seats -= 1
        self._collect(node)

    def _enter_idle(self, node: Node) -> None:
        if node.idle_entry is None and not node.live and not node.num_resident and node.blocks:
            node.idle_entry = (self.policy.priority(node), node.last, node.uid, node)
            self._idle.add(node.idle_entry)

    def _leave_idle(self, node: Node) -> None:
        if node.idle_entry is not None:
            self._idle.remove(node.idle_entry)
            node.idle_entry = None

    # -- eviction --------------------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> int:
        """Free up to `num_blocks` evictable blocks, leaves first, last block of a leaf first.

        Returns how many were freed. O(log n) a block, whatever the number of leaves.
        """
        freed = min(num_blocks, self.num_evictable)  # below whatever is not protected there is an idle leaf
        for _ in range(freed):
            node = self._idle[0][-1]
            if len(node.blocks) == 1:
                self._idle.pop(0)  # it stands first: no search
                node.idle_entry = None
            self.pop_block(node)
        self.num_evicted += freed
        return freed

    def pop_block(self, node: Node) -> None:
        """Free the last block of an unprotected leaf."""
        assert not node.live and not node.num_resident, "only the end of an idle leaf can go"
        blocks = node.blocks
        self.pool.drop(blocks.pop())
        self.num_evictable -= 1
        self.num_cached -= 1
        node.space.num_cached -= 1
        if not blocks:
            if node.idle_entry is not None:
                self._leave_idle(node)
            self._lost_last_block(node)
        elif not node.seats and not node.children:
            self._trim(node)

    def detach_last_block(self, node: Node) -> int:
        """Take the last block of a leaf out of the tree, for the one branch that stands on it."""
        assert node.cursors == 1 and not node.children and not node.seats, "the block has other users"
        block = node.blocks.pop()
        self._count(node, -1)
        self._trim(node)
        return block

    def drop_empty(self, node: Node) -> None:
        """Remove a leaf whose last block was detached. Its cursor has moved up."""
        self._lost_last_block(node)

    def _lost_last_block(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "a root never holds blocks"
        parent.num_resident -= 1
        if parent.num_resident < _RANK_BELOW:
            parent.ranked = None
        elif parent.ranked is not None:
            parent.ranked.remove(node.first)
        if not parent.num_resident and parent.parent is not None:
            # What was used below was used here: without this a cold parent would go before its turn.
            parent.last = max(parent.last, node.last)
            parent.hits = max(parent.hits, node.hits)
            self._enter_idle(parent)
        self._collect(node)

    # -- structure -----------------------------------------------------------------------------------------

    def root_of(self, namespace: Hashable) -> Node:
        """The root of a namespace, created if need be. Only an attach calls this, never a look-up."""
        root = self.roots.get(namespace)
        if root is None:
            self._uid += 1
            root = Node(self._uid, None, Namespace(namespace), bytearray(), [], 0)
            self.roots[namespace] = root
        return root

    def rest(self, match: Match, namespace: Hashable) -> Node:
        """The node that ends where the match does; splits if that is inside a node."""
        if match.node is None or match.length == 0:
            return self.root_of(namespace)
        return self.node_ending(match.node, match.num_blocks)

    def node_ending(self, node: Node, num_blocks: int) -> Node:
        """A node that ends after `num_blocks` blocks of `node`: itself, or its new upper half."""
        if num_blocks * self.block_bytes == len(node.key):
            return node
        return self.split(node, num_blocks)

    def split(self, node: Node, num_blocks: int) -> Node:
        """Cut `node` after `num_blocks` blocks and return the new upper half.

        The lower half keeps its identity, so that no cursor or seat on it moves.
        """
        cut = num_blocks * self.block_bytes
        parent = node.parent
        assert parent is not None and 0 < cut < len(node.key), "a split falls inside a node"
        upper = self._new_node(parent, node.first, node.key[:cut], node.blocks[:num_blocks])
        upper.last, upper.hits = node.last, node.hits
        upper.logprobs = sidecar.cut_front(node, num_blocks * self.block_size)
        del node.key[:cut]
        del node.blocks[:num_blocks]
        self._file(node, upper, bytes(node.key[: self.block_bytes]))
        upper.live = 1 if node.live else 0
        upper.num_resident = 1 if node.blocks else 0
        if node.idle_entry is not None and not node.blocks:
            self._leave_idle(node)
            self._enter_idle(upper)
        self.num_splits += 1
        return upper

    def join_ancestors(self, node: Node) -> None:
        """Join runs of ancestors that nobody rests on and that have one child into the node below them.

        `node` is locked, so all of its path is protected and resident and no counter moves. O(path).
        """
        low = node
        while low.parent is not None:
            above = low.parent
            run = [low]
            while above.parent is not None and not (above.cursors or above.seats or len(above.children) > 1):
                run.append(above)
                above = above.parent
            if len(run) > 1:
                self._join(run[::-1], above)
            low = above

    def _join(self, run: list[Node], parent: Node) -> None:
        """Make the last node of `run` (top to bottom, below `parent`) hold what all of them held."""
        low = run[-1]
        low.logprobs = sidecar.joined(run)
        low.blocks = [block for node in run for block in node.blocks]
        low.key = bytearray().join(node.key for node in run)
        low.last = max(node.last for node in run)
        low.hits = max(node.hits for node in run)
        self._file(low, parent, run[0].first)
        for node in run[:-1]:
            # Out of every cycle, so that reference counting frees it at once.
            node.parent = None
            node.children = _NO_CHILDREN

    def add_child(self, parent: Node, key: bytearray, blocks: list[int]) -> Node:
        """A new child of a protected node. The caller locks it."""
        child = self._new_node(parent, bytes(key[: self.block_bytes]), key, blocks)
        child.last = self._clock
        self._child_arrived(parent, child.first)
        self._count(child, len(blocks))
        self.num_evictable += len(blocks)  # until the caller's lock takes them out again
        return child

    def grow(self, node: Node, key: bytearray, blocks: list[int]) -> None:
        """Lengthen a protected node without children in place."""
        assert node.live and not node.children and node.parent is not None, "only a branch's own leaf grows"
        node.key += key
        node.blocks.extend(blocks)
        node.end += len(blocks) * self.block_size
        sidecar.extend(node, len(blocks) * self.block_size, None)
        self._count(node, len(blocks))

    def adopt(self, node: Node, blocks: list[int]) -> None:
        """Give a protected node blocks for the ghost tokens that follow its resident ones."""
        assert node.live, "only a branch that stands here brings blocks"
        assert node.parent is not None, "a root holds no tokens"
        if not node.blocks:
            self._child_arrived(node.parent, node.first)
        node.blocks.extend(blocks)
        self._count(node, len(blocks))

    def slide(self, node: Node, child: Node, num_blocks: int) -> list[int]:
        """Move the border between a node and its only child down by `num_blocks` resident blocks.

        Returns their ids. The node's one cursor moves with its end; no node is made.
        """
        assert node.cursors == 1 and not node.seats and len(node.children) == 1, "others use this border"
        cut = num_blocks * self.block_bytes
        moved = child.blocks[:num_blocks]
        assert len(moved) == num_blocks and cut < len(child.key), "only resident blocks of the child move"
        node.key += child.key[:cut]
        node.blocks.extend(moved)
        count = num_blocks * self.block_size
        node.end += count
        sidecar.extend(node, count, sidecar.cut_front(child, count))
        del child.key[:cut]
        del child.blocks[:num_blocks]
        if not child.live:
            self.num_evictable -= num_blocks
        node.children = _NO_CHILDREN
        node.ranked = None
        self._file(child, node, bytes(child.key[: self.block_bytes]))
        if not child.blocks:
            self._leave_idle(child)
            node.num_resident = 0
        return moved

    def _new_node(self, parent: Node, first: bytes, key: bytearray, blocks: list[int]) -> Node:
        self._uid += 1
        node = Node(self._uid, parent, parent.space, key, blocks, parent.end + len(key) // TOKEN_BYTES)
        self._file(node, parent, first)
        return node

    def _file(self, node: Node, parent: Node, first: bytes) -> None:
        """Make `node` the child of `parent` whose key starts with the block `first`."""
        node.parent = parent
        node.first = first
        if parent.children is _NO_CHILDREN:
            parent.children = {}
        parent.children[first] = node

    def _count(self, node: Node, num_blocks: int) -> None:
        self.num_cached += num_blocks
        node.space.num_cached += num_blocks

    def _child_arrived(self, parent: Node, first: bytes) -> None:
        """A child of `parent` has its first block resident."""
        parent.num_resident += 1
        if parent.ranked is not None:
            parent.ranked.add(first)
        elif parent.num_resident > _RANK_ABOVE:
            parent.ranked = SortedList(
                key for key, child in parent.children.items() if child.blocks or key == first
            )

    def _trim(self, node: Node) -> None:
        """Forget the ghost tokens at the end of a node that has a block left."""
        resident = len(node.blocks) * self.block_bytes
        if resident:
            node.end -= (len(node.key) - resident) // TOKEN_BYTES
            del node.key[resident:]
            if node.logprobs is not None:
                del node.logprobs[resident // TOKEN_BYTES :]

    def _collect(self, node: Node) -> None:
        """Remove `node` if nobody needs it any more, and then its ancestors likewise."""
        while not node.children and not node.seats and not node.cursors:
            parent = node.parent
            if parent is None:
                del self.roots[node.space.key]
                return
            if node.blocks:
                self._trim(node)
                return
            del parent.children[node.first]
            node.parent = None
            node = parent

    def collect_root(self, node: Node) -> None:
        """Remove a root that the last cursor has left and that holds nothing."""
        if node.parent is None:
            self._collect(node)
