"""Branches as they are between two steps: what they hold, and what they share. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from ramet.engine.block_changes import BlockChanges
from ramet.engine.branch import Branch
from ramet.engine.scheduler import Scheduler
from ramet.radix.cursor import BlockTable
from ramet.radix.shares import Share, shares_of


@dataclass(frozen=True)
class BranchLook:
    """One branch. Blocks unless a name says tokens."""

    position: int  # tokens in all
    resident_tokens: int  # those that have KV now
    released: bool
    running: bool
    parked: bool  # its blocks were given up; it computes its tokens again when it is used
    table: BlockTable
    shared_blocks: int  # that other live branches have too, whoever's they are
    exclusive_blocks: int
    copies: int  # blocks that it copied on write so far
    cached_tokens: int  # of the prompt it began with, found in the cache

    @property
    def state(self) -> Literal["generating", "parked", "idle"]:
        return "generating" if self.running else "parked" if self.parked else "idle"


@dataclass(frozen=True)
class TreeLook:
    """Several branches together. Tokens count what has KV now."""

    logical_tokens: int  # if nothing were shared
    physical_tokens: int
    blocks: int
    shared_blocks: int  # that more than one of these branches has
    shares: list[Share]  # parents before children; branches by their place in the list

    @property
    def sharing_ratio(self) -> float:
        """Logical over physical tokens: 1 when nothing is shared."""
        return self.logical_tokens / self.physical_tokens if self.physical_tokens else 1.0


def look_at(branch: Branch) -> BranchLook:
    """O(path)."""
    sequence = branch._sequence
    live = sequence.is_live and not branch.released
    table = sequence.live_cursor.block_table if live else BlockTable([], 0)
    exclusive = sequence.live_cursor.num_exclusive_blocks if live else 0
    return BranchLook(
        position=len(sequence.token_ids),
        resident_tokens=sequence.num_computed if live else 0,
        released=branch.released,
        running=sequence.run is not None,
        parked=not live and sequence.run is None,
        table=table,
        shared_blocks=len(table.blocks) - exclusive,
        exclusive_blocks=exclusive,
        copies=sequence.num_copies,
        cached_tokens=sequence.num_cached_tokens or 0,
    )


def look_at_changes(
    scheduler: Scheduler, trees: Seq[Seq[Branch]], always: Seq[bool]
) -> tuple[BlockChanges, list[TreeLook | None]]:
    """What happened to blocks since the last call, and a look at those trees that it concerns.

    Where `always` says so a tree is looked at in any case. The scheduler notes nothing before the first call.
    """
    new = BlockChanges(scheduler.cache.block_size)
    changes, scheduler.changes = scheduler.changes or new, new
    concerned = [any(branch.id in changes.of for branch in tree) for tree in trees]
    wanted = [concerns or asked for concerns, asked in zip(concerned, always, strict=True)]
    return changes, [look_at_all(tree) if one else None for tree, one in zip(trees, wanted, strict=True)]


def look_at_all(branches: Seq[Branch]) -> TreeLook:
    """O(branches and the nodes on their paths)."""
    live = [(i, b._sequence.live_cursor) for i, b in enumerate(branches) if b._sequence.is_live]
    shares = shares_of(dict(live))
    size = live[0][1].cache.block_size if live else 1
    blocks = [-(-share.num_tokens // size) for share in shares]
    return TreeLook(
        logical_tokens=sum(cursor.length for _, cursor in live),
        physical_tokens=sum(share.num_tokens for share in shares),
        blocks=sum(blocks),
        shared_blocks=sum(n for n, share in zip(blocks, shares, strict=True) if share.num_users > 1),
        shares=shares,
    )
