"""Least frequently used first: keeps the prefixes that many prompts have hit, however long ago."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ramet.radix.tree import Node


class LFU:
    """Fewest prefix hits first; among equals the least recently used."""

    def priority(self, node: Node) -> float:
        return float(node.hits)
