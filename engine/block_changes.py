"""What happens to the blocks of branches, noted by the scheduler for whoever wants to hear of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ramet.engine.sequence import Sequence


@dataclass(slots=True)
class BlockChange:
    """What happened to one branch. Blocks are ids."""

    took: bool = False  # blocks for new tokens
    copies: list[int] = field(default_factory=list)  # blocks that began as a copy of a shared one
    given_up: list[int] = field(default_factory=list)  # blocks that it held when it was parked
    given_up_tokens: int = 0
    is_back: bool = False  # it was parked, and runs again
    restored: list[int] = field(default_factory=list)  # blocks that hold again what was given up
    restored_tokens: int = 0  # those computed again
    found_tokens: int = 0  # in the prefix cache, when it was admitted


class BlockChanges:
    """Of all branches that somebody holds, by id, since somebody last asked."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.of: defaultdict[int, BlockChange] = defaultdict(BlockChange)

    def admitted(self, sequence: Sequence) -> None:
        """It has found its place: what is cached of it is its own again, or for the first time."""
        if sequence.keep:
            change = self.of[sequence.id]
            change.found_tokens += sequence.num_computed
            if sequence.num_given_up:
                change.is_back = True
                change.restored += sequence.live_cursor.block_ids()

    def wrote(self, sequence: Sequence, end: int, blocks: Seq[int], copy: int | None) -> None:
        """It will write up to `end`: into `blocks`, which are new, and before them into a `copy`, if any."""
        begin, until = sequence.num_computed, sequence.num_given_up
        if not sequence.keep or not (blocks or copy is not None or begin < until):
            return
        change = self.of[sequence.id]
        if copy is not None:
            change.copies.append(copy)
        num_restored = 0
        if begin < until:
            change.restored_tokens += min(end, until) - begin
            num_restored = -(-until // self.block_size) - -(-begin // self.block_size)
            change.restored += blocks[:num_restored]
        change.took = change.took or len(blocks) > num_restored

    def parked(self, sequence: Sequence) -> None:
        """It is about to give up its blocks."""
        if sequence.keep:
            change = self.of[sequence.id]
            change.given_up += sequence.live_cursor.block_ids()
            change.given_up_tokens += sequence.num_computed

    def rested(self, sequence: Sequence) -> None:
        """Its run has ended, perhaps without what it had written."""
        if sequence.keep:
            self.of[sequence.id]  # now it is known that there may be something
