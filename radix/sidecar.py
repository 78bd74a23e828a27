"""Log-probabilities beside the tokens of the tree: one number a token, given all tokens before it.

A node has none until somebody writes some. NaN is "not known". They are facts about the tokens, not about
the blocks, so they go where the tokens go: split, joined, moved and forgotten with them. What two branches
know of the same tokens is the same, so the first to write it stays.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import isnan, nan
from typing import TYPE_CHECKING

from ramet.radix.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from ramet.radix.cursor import Cursor
    from ramet.radix.tree import Node


def unknown(count: int) -> array[float]:
    """`count` numbers that are not known."""
    return array("f", (nan,)) * count


def known_logprobs(cursor: Cursor) -> array[float]:
    """One number for each token of the branch, NaN where none is known. O(length).

    The open block of a branch has none: what is known of it can be written once it is full.
    """
    parts: list[array[float]] = []
    node: Node | None = cursor.node
    while node is not None:
        parts.append(unknown(_num_tokens(node)) if node.logprobs is None else node.logprobs)
        node = node.parent
    found = array("f")
    for part in reversed(parts):
        found += part
    found += unknown(max(0, cursor.length - len(found)))
    del found[cursor.length :]
    return found


def write_logprobs(cursor: Cursor, start: int, logprobs: Sequence[float]) -> None:
    """Keep the log-probabilities of the branch's tokens from position `start` on, as far as they are in full
    blocks. What is known already stays; NaN is skipped. O(path + len(logprobs))."""
    assert not logprobs or 0 <= start <= cursor.length - len(logprobs), "a branch knows its own tokens only"
    node: Node | None = cursor.node
    while node is not None and node.end > start:
        begin = node.start
        first, last = max(begin, start), min(node.end, start + len(logprobs))
        if first < last:
            _fill(node, first - begin, logprobs[first - start : last - start])
        node = node.parent


def _fill(node: Node, at: int, logprobs: Sequence[float]) -> None:
    mine = node.logprobs
    if mine is None:
        node.logprobs = mine = unknown(_num_tokens(node))
        mine[at : at + len(logprobs)] = array("f", logprobs)
        return
    for index, logprob in enumerate(logprobs, at):
        if isnan(mine[index]):
            mine[index] = logprob


def joined(nodes: Sequence[Node]) -> array[float] | None:
    """What the nodes know, end to end; None if none of them knows anything."""
    if all(node.logprobs is None for node in nodes):
        return None
    whole = array("f")
    for node in nodes:
        whole += unknown(_num_tokens(node)) if node.logprobs is None else node.logprobs
    return whole


def cut_front(node: Node, count: int) -> array[float] | None:
    """Take the first `count` numbers from a node that loses so many tokens at its front."""
    if node.logprobs is None:
        return None
    front = node.logprobs[:count]
    del node.logprobs[:count]
    return front


def extend(node: Node, count: int, logprobs: array[float] | None) -> None:
    """Follow a node that has just got `count` tokens more, about which `logprobs` is known."""
    if node.logprobs is None:
        if logprobs is None:
            return
        node.logprobs = unknown(_num_tokens(node) - count)
    node.logprobs += unknown(count) if logprobs is None else logprobs


def _num_tokens(node: Node) -> int:
    return len(node.key) // TOKEN_BYTES
