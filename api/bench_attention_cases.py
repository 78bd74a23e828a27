"""The decode steps that GPU attention is measured on: trees of branches, as block tables."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from ramet.kernels.kv_pool import KVPool
from ramet.kernels.plan import AttentionPlan, Planner, shared_with_previous

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16  # of Llama 3 8B
SCALE = HEAD_DIM**-0.5
DTYPE = torch.bfloat16
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2  # K and V of a token, a layer


@dataclass
class Node:
    """Some tokens of KV, and what continues from there; without children, a branch ends here."""

    num_tokens: int
    children: list[Node] = field(default_factory=list)


def even_tree(*levels: tuple[int, int]) -> list[Node]:
    """A forest of (fan-out, tokens a node) on each level."""
    if not levels:
        return []
    (fan_out, num_tokens), *below = levels
    return [Node(num_tokens, even_tree(*below)) for _ in range(fan_out)]


def random_tree(seed: int, num_branches: int = 96, depth: int = 6) -> list[Node]:
    """A ragged tree: fan-outs of 2 to 6, nodes of 64 to 4,096 tokens, leaves on any level."""
    rng = random.Random(seed)

    def grow(num_branches: int, level: int) -> Node:
        node = Node(BLOCK_SIZE * int(4 * 2 ** (6 * rng.random())))
        if num_branches == 1 or level == depth:
            node.children = [Node(rng.randint(16, 1024)) for _ in range(num_branches)]
            return node
        cuts = sorted(rng.sample(range(1, num_branches), min(rng.randint(1, 5), num_branches - 1)))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, num_branches], strict=True)]
        node.children = [grow(size, level + 1) for size in sizes]
        return node

    return [grow(num_branches, 1)]


@dataclass(frozen=True)
class Case:
    """One decode step of S branches in depth-first order."""

    name: str
    block_size: int
    block_tables: list[list[int]]
    kv_lens: list[int]
    num_shared_blocks: list[int]
    unique_tokens: int

    @property
    def scores(self) -> int:
        """Pairs of a query and a key that it sees."""
        return sum(self.kv_lens)

    @property
    def num_branches(self) -> int:
        return len(self.kv_lens)

    @property
    def num_blocks(self) -> int:
        return 1 + max(map(max, self.block_tables))

    @property
    def unique_bytes(self) -> int:
        """What one layer has to move at least: each token's K and V once, queries and outputs."""
        return self.unique_tokens * TOKEN_BYTES + 2 * self.num_branches * NUM_HEADS * HEAD_DIM * 2

    @property
    def flops(self) -> int:
        return 4 * self.scores * NUM_HEADS * HEAD_DIM

    def plan(self, planner: Planner) -> AttentionPlan:
        ones = [1] * self.num_branches
        return planner.plan(self.block_tables, ones, self.kv_lens, self.num_shared_blocks)

    def pool(self, num_layers: int, device: str = "cuda") -> KVPool:
        """A pool of random numbers in the shape of Llama 3 8B."""
        pool = KVPool(num_layers, self.num_blocks, NUM_KV_HEADS, HEAD_DIM, self.block_size, DTYPE, device)
        for layer in range(num_layers):
            pool.key(layer).normal_()
            pool.value(layer).normal_()
        return pool


def case(name: str, forest: list[Node], block_size: int = BLOCK_SIZE, permuted: bool = True) -> Case:
    """The step of all branches of a forest, on block ids at random places (or side by side)."""
    tables: list[list[int]] = []
    lens: list[int] = []
    num_blocks = unique = 0

    def walk(node: Node, path: list[int], above: int) -> None:
        nonlocal num_blocks, unique
        own = -(-node.num_tokens // block_size)
        path = [*path, *range(num_blocks, num_blocks + own)]
        num_blocks, unique = num_blocks + own, unique + node.num_tokens
        for child in node.children:
            walk(child, path, above + node.num_tokens)
        if not node.children:
            tables.append(path)
            lens.append(above + node.num_tokens)

    for root in forest:
        walk(root, [], 0)
    if permuted:
        ids = list(range(num_blocks))
        random.Random(0).shuffle(ids)
        tables = [[ids[block] for block in table] for table in tables]
    return Case(name, block_size, tables, lens, shared_with_previous(tables), unique)


def ragged(seed: int, num_branches: int, shortest: int, longest: int) -> list[Node]:
    """Branches of any length between two, that share nothing."""
    rng = random.Random(seed)
    return [Node(rng.randint(shortest, longest)) for _ in range(num_branches)]


UNSHARED = {
    "64x8k": even_tree((64, 8192)),
    "256x2k": even_tree((256, 2048)),
    "64x1k": even_tree((64, 1024)),
    "8x8k": even_tree((8, 8192)),
    "1x8k": even_tree((1, 8192)),
    "ragged 64": ragged(0, 64, 128, 8192),
    "ragged 128": ragged(1, 128, 128, 4096),
    "ragged 256": ragged(2, 256, 64, 4096),
}
TREES = {
    "A": even_tree((1, 8192), (64, 512)),
    "G": even_tree((16, 2048), (8, 256)),
    "T": even_tree((1, 4096), (8, 2048), (8, 512)),
    "R": random_tree(4),
    "Q": even_tree((1, 32768), (32, 1024)),
    "P": even_tree((1, 65536), (64, 4096)),
    "S": even_tree((1, 2048), (8, 128)),
}
