"""What several branches hold together: each stretch of tokens once, and who has it. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ramet.radix.cursor import Cursor, Tail
from ramet.radix.tree import Node


@dataclass
class Share:
    """A stretch of tokens, in whole blocks but for the last one, that the same branches have."""

    start: int  # position of its first token
    end: int = 0  # how far any of the branches reads it
    blocks: list[int] = field(default_factory=list)
    num_users: int = 0  # branches that have it
    ending: list[int] = field(default_factory=list)  # those that end in it, by the names that were given
    parent: int | None = None  # index of the share before it

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def add(self, end: int, blocks: list[int]) -> None:
        """One more branch that reads up to `end`, in these blocks."""
        self.num_users += 1
        if end > self.end:
            self.end, self.blocks = end, blocks


def shares_of(cursors: Mapping[int, Cursor]) -> list[Share]:
    """The shares of named live branches, parents before children. O(branches + nodes on their paths)."""
    shares: dict[Node | Tail, Share] = {}
    above: dict[Node | Tail, Node] = {}
    for name, cursor in cursors.items():
        tail, node = cursor.tail, cursor.node
        if tail is not None:
            share = shares.setdefault(tail, Share(node.end))
            share.add(cursor.length, [tail.block])
            above[tail] = node
        ends_in: Node | Tail = node if tail is None else tail
        while node.parent is not None:  # a root holds nothing
            share = shares.setdefault(node, Share(node.start))
            end = min(cursor.length, node.end)
            share.add(end, node.blocks[: -(-(end - node.start) // cursor.cache.block_size)])
            above[node] = node = node.parent
        if ends_in in shares:
            shares[ends_in].ending.append(name)
    order = sorted(shares, key=lambda place: shares[place].end)  # a child reads on from its parent's end
    index = {place: number for number, place in enumerate(order)}
    for place in order:
        shares[place].parent = index.get(above[place])
    return [shares[place] for place in order]
