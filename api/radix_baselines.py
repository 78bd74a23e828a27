"""Two other ways to keep a prefix cache, written for `ramet bench radix` alone, in the same plain Python.

`HashChain` follows vLLM's design: a dict of chained block hashes over a queue of free blocks, and a block
table that each branch owns. `HeapTree` follows the classic form of SGLang's radix cache: look-ups split nodes
and touch them, locks are counted up to the root, and each eviction collects all leaves and heaps them.
Both know full blocks only. They are models of the two designs, not of those engines' speed.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple


class HashChain:
    """Each full block is found under hash(hash of the block before it, its tokens)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks
        self.hash_of: list[int | None] = [None] * num_blocks
        self.block_of: dict[int, int] = {}
        # Blocks without users, the least recently used first. Cached ones stay here until they are taken.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def hashes(self, token_ids: Sequence[int]) -> list[int]:
        """The chain of all full blocks. O(tokens), once a request."""
        size, parent, chain = self.block_size, 0, []
        for at in range(0, len(token_ids) - size + 1, size):
            parent = hash((parent, tuple(token_ids[at : at + size])))
            chain.append(parent)
        return chain

    def match(self, hashes: Sequence[int]) -> list[int]:
        """The cached blocks of the longest prefix. O(blocks)."""
        found = []
        for key in hashes:
            block = self.block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def match_length(self, token_ids: Sequence[int]) -> int:
        return len(self.match(self.hashes(token_ids))) * self.block_size

    def take(self) -> int:
        """The block at the head of the queue; if it was cached, this is its eviction. O(1)."""
        block, _ = self.free.popitem(last=False)
        key = self.hash_of[block]
        if key is not None:
            del self.block_of[key]
            self.hash_of[block] = None
        self.ref_counts[block] = 1
        return block

    def publish(self, block: int, parent: int, token_ids: Sequence[int]) -> int:
        """File a full block; returns its hash, the parent of the next one. O(block)."""
        key = hash((parent, tuple(token_ids)))
        if key not in self.block_of:
            self.block_of[key] = block
            self.hash_of[block] = key
        return key

    def fork(self, table: list[int]) -> list[int]:
        """A copy of the block table, one more reference on each block. O(blocks)."""
        for block in table:
            self.ref_counts[block] += 1
        return list(table)

    def release(self, table: list[int]) -> None:
        """Last block first, so that a prefix outlives what follows it. O(blocks)."""
        for block in reversed(table):
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self.free[block] = None

    def insert(self, token_ids: Sequence[int]) -> list[int]:
        """The table of a branch that holds the full blocks of these tokens. The caller releases it."""
        size, hashes = self.block_size, self.hashes(token_ids)
        table = self.match(hashes)
        for block in table:
            if not self.ref_counts[block]:
                del self.free[block]
            self.ref_counts[block] += 1
        parent = hashes[len(table) - 1] if table else 0
        for index in range(len(table), len(hashes)):
            table.append(self.take())
            parent = self.publish(table[-1], parent, token_ids[index * size : (index + 1) * size])
        return table


class HeapNode:
    """An edge of whole blocks."""

    __slots__ = ("blocks", "children", "key", "last", "locks", "parent")

    def __init__(self, parent: HeapNode | None, key: tuple[int, ...], blocks: list[int], last: int) -> None:
        self.parent = parent
        self.key = key
        self.blocks = blocks
        self.children: dict[tuple[int, ...], HeapNode] = {}
        self.locks = 0
        self.last = last


class Found(NamedTuple):
    node: HeapNode
    blocks: list[int]


class HeapTree:
    """A radix tree whose look-up changes it and whose eviction walks all of it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(num_blocks))[::-1]
        self.root = HeapNode(None, (), [], 0)
        self._clock = count(1)

    def match(self, token_ids: Sequence[int]) -> Found:
        """The longest cached prefix, split off where it ends inside a node, and touched all the way."""
        size, node, at, blocks = self.block_size, self.root, 0, list[int]()
        now = next(self._clock)
        while True:
            node.last = now
            child = node.children.get(tuple(token_ids[at : at + size]))
            if child is None:
                return Found(node, blocks)
            agreed = self._agreed(child.key, token_ids, at)
            if agreed < len(child.key):
                child = self._split(child, agreed)
            node = child
            blocks += node.blocks
            at += agreed

    def match_length(self, token_ids: Sequence[int]) -> int:
        return len(self.match(token_ids).blocks) * self.block_size

    def insert(self, token_ids: Sequence[int]) -> HeapNode:
        """Put the full blocks of these tokens into the tree, evicting if need be. O(tokens)."""
        size = self.block_size
        node, found = self.match(token_ids)
        missing = len(token_ids) // size - len(found)
        if missing:
            if len(self.free) < missing:
                self.lock(node)
                self.evict(missing - len(self.free))
                self.unlock(node)
            key = tuple(token_ids[len(found) * size : (len(found) + missing) * size])
            child = HeapNode(node, key, [self.free.pop() for _ in range(missing)], next(self._clock))
            node.children[key[:size]] = child
            node = child
        return node

    def publish(self, node: HeapNode, token_ids: Sequence[int]) -> HeapNode:
        """A running branch that rests locked on `node` now holds `token_ids`: insert and move the lock."""
        target = self.insert(token_ids)
        self.lock(target)
        self.unlock(node)
        return target

    def lock(self, node: HeapNode | None) -> None:
        while node is not None:
            node.locks += 1
            node = node.parent

    def unlock(self, node: HeapNode | None) -> None:
        while node is not None:
            node.locks -= 1
            node = node.parent

    def evict(self, num_blocks: int) -> int:
        """Free blocks, whole leaves at a time, the least recently used first. O(nodes)."""
        idle = (node for node in self._nodes() if not node.children and not node.locks)
        leaves = [(node.last, id(node), node) for node in idle]
        heapq.heapify(leaves)
        freed = 0
        while freed < num_blocks and leaves:
            node = heapq.heappop(leaves)[2]
            parent = node.parent
            if parent is None:
                break
            self.free += node.blocks
            freed += len(node.blocks)
            del parent.children[node.key[: self.block_size]]
            if not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.last, id(parent), parent))
        return freed

    def _nodes(self) -> list[HeapNode]:
        nodes = [self.root]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes

    def _agreed(self, key: tuple[int, ...], token_ids: Sequence[int], start: int) -> int:
        size, most, at = self.block_size, min(len(key), len(token_ids) - start), 0
        while at + size <= most and key[at : at + size] == tuple(token_ids[start + at : start + at + size]):
            at += size
        return at

    def _split(self, node: HeapNode, cut: int) -> HeapNode:
        size, parent = self.block_size, node.parent
        assert parent is not None, "the root has no key to split"
        upper = HeapNode(parent, node.key[:cut], node.blocks[: cut // size], node.last)
        upper.locks = node.locks
        parent.children[upper.key[:size]] = upper
        node.parent, node.key, node.blocks = upper, node.key[cut:], node.blocks[cut // size :]
        upper.children[node.key[:size]] = node
        return upper
