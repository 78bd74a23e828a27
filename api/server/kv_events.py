"""What the feed of a tree tells of its blocks: taken, copied, given up, back again, let go of.

Looked at a few times a second and not in each step, so a tree that grows costs one event a look, and a tree
whose feed nobody reads costs nothing. The events are the difference between two looks, so their sum is what
the tree's accounting says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from ramet.api.server import log
from ramet.api.server.branch_store import Tree
from ramet.api.server.errors import of_engine
from ramet.api.server.events import Told
from ramet.api.server.state import State
from ramet.engine.block_changes import BlockChange
from ramet.engine.look import TreeLook

TELL_S = 0.25
_MAX_NAMED = 128  # branches that one event names


async def watch(state: State, tree: Tree) -> None:
    """Somebody reads the feed: from now on it tells of blocks."""
    if tree.events.told is None:
        tree.events.told = Told()
        await tell(state)


async def tell_for_ever(state: State) -> None:
    while state.engine.is_running:
        await asyncio.sleep(TELL_S)
        try:
            await tell(state)
        except Exception as error:
            if of_engine(error) is None:
                log.error("a bug", error)


async def tell(state: State) -> None:
    """Tell in each feed that somebody reads what happened to blocks since the last time."""
    async with state.telling:
        watched = [(tree, tree.events.told) for store in state.stores() for tree in store.trees.values()]
        trees = [(tree, told) for tree, told in watched if told is not None]
        stale = [told.upto != tree.events.last_of_branches for tree, told in trees]
        if not any(stale) and not state.engine.has_changes:
            return
        for tree, told in trees:
            told.upto = tree.events.last_of_branches
        branches = [[entry.branch for entry in tree.branches.values()] for tree, _ in trees]
        changes, looks = await state.engine.look_at_changes(branches, stale)
        for (tree, told), look in zip(trees, looks, strict=True):
            if look is not None and not tree.events.closed:
                own = {
                    entry.id: changes.of[entry.branch.id]
                    for entry in tree.branches.values()
                    if entry.branch.id in changes.of
                }
                _tell(tree, told, own, look, state.engine.block_nbytes)


def totals(state: State, tree: Tree) -> dict[str, int]:
    """What the feed has told so far, in all."""
    told = tree.events.told or Told()
    return {
        "blocks": len(told.blocks),
        "bytes": len(told.blocks) * state.engine.block_nbytes,
        "resident_tokens": told.resident_tokens,
    }


def _tell(tree: Tree, told: Told, own: dict[str, BlockChange], look: TreeLook, block_nbytes: int) -> None:
    """Add the events of one tree; `own` is what happened to its branches, and to no others."""
    now = {block for share in look.shares for block in share.blocks}
    total = len(told.blocks)
    gained, lost = now - told.blocks, told.blocks - now
    told.blocks, told.resident_tokens = now, look.physical_tokens

    def add(name: str, sign: int, num_blocks: int, ids: list[str], **more: int) -> None:
        nonlocal total
        if not num_blocks and not ids:
            return
        total += sign * num_blocks
        data: dict[str, Any] = {
            "branch_ids": ids[:_MAX_NAMED],
            "num_branches": len(ids),
            "blocks": num_blocks,
            "bytes": num_blocks * block_nbytes,
            **more,
            "kv": {"blocks": total, "bytes": total * block_nbytes},
        }
        tree.events.add_kv(name, data)

    parked = {name: one for name, one in own.items() if one.given_up_tokens}
    back = {name: one for name, one in own.items() if one.is_back or one.restored_tokens}
    found = {name: one for name, one in own.items() if name not in back and one.found_tokens}
    takers = [name for name, one in own.items() if one.took or name in found]
    evicted = lost & _all(one.given_up for one in parked.values())
    copied = gained & _all(one.copies for one in own.values())
    restored = (gained & _all(one.restored for one in back.values())) - copied
    num_free = len(lost) - len(evicted)
    num_taken = len(gained) - len(restored) - len(copied)
    if not takers:  # blocks that turned out to be duplicates of others, which are used in their place
        num_same = min(num_free, num_taken)
        num_free, num_taken = num_free - num_same, num_taken - num_same
    add("kv.free", -1, num_free, [])
    add("kv.evict", -1, len(evicted), [*parked], tokens=sum(one.given_up_tokens for one in parked.values()))
    add(
        "kv.restore",
        1,
        len(restored),
        [*back],
        tokens=sum(one.restored_tokens for one in back.values()),
        cached_tokens=sum(one.found_tokens for one in back.values()),
    )
    if copied:
        add("kv.cow", 1, len(copied), [name for name, one in own.items() if one.copies])
    if num_taken:
        cached_tokens = sum(one.found_tokens for one in found.values())
        add("kv.alloc", 1, num_taken, takers, cached_tokens=cached_tokens)


def _all(many: Iterable[list[int]]) -> set[int]:
    return {block for blocks in many for block in blocks}
