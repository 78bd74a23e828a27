"""Which idle block goes first. A policy is one method; the default is least recently used.

The tree keeps its evictable leaves in one ordered set with the key (priority, last use, uid), so a policy
says only what comes before recency. See lfu.py for another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ramet.radix.tree import Node


class EvictionPolicy(Protocol):
    """Decides the order of eviction among leaves that no branch stands on."""

    def priority(self, node: Node) -> float:
        """Where the node stands: lower is evicted sooner, equals by least recent use.

        Asked once, when the node becomes evictable; it must be O(1).
        """
        ...


class LRU:
    """Least recently used first."""

    def priority(self, node: Node) -> float:
        return 0.0
