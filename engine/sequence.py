"""One branch as the engine sees it: all of its tokens, its place in the pages, and what it is asked to do."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from enum import IntEnum
from typing import TYPE_CHECKING

from ramet.radix.cursor import Cursor, State

if TYPE_CHECKING:
    from ramet.engine.runs import Run

_ids = itertools.count(1)


class Hold(IntEnum):
    """How fast an idle branch keeps its blocks when others lack some."""

    NONE = 0
    LEASE = 1  # they go after those of all idle branches without one
    PIN = 2  # they stay


class Stem:
    """Tokens up to `end` that several branches have to compute alike: the first that runs does it for all.

    It grows where a branch is forked that has tokens without KV, the one it sampled last, say.
    """

    __slots__ = ("end", "members")

    def __init__(self, end: int) -> None:
        self.end = end
        self.members: dict[Sequence, None] = {}

    def join(self, sequence: Sequence) -> None:
        sequence.leave_stem()
        sequence.stem = self
        self.members[sequence] = None

    def settle(self, first: Sequence) -> None:
        """`first` has computed it: all others that hold blocks go on from there."""
        for sequence in list(self.members):
            sequence.leave_stem()
            if sequence.is_live and sequence.num_computed < self.end:
                sequence.move_to(first.live_cursor.fork(self.end))


class Sequence:
    """Tokens with, for some leading part of them, KV.

    `token_ids[:num_computed]` have KV while the cursor is live; the rest is *to do*: new text, sampled tokens
    that were not fed yet, or what is to be recomputed after parking.
    """

    __slots__ = (
        "arrival",
        "cacheable",
        "cursor",
        "hold",
        "id",
        "keep",
        "namespace",
        "num_cached_tokens",
        "num_copies",
        "num_given_up",
        "priority",
        "pruned",
        "run",
        "safe_until",
        "stem",
        "token_ids",
    )

    def __init__(self, token_ids: list[int], namespace: Hashable, *, keep: bool) -> None:
        self.id = next(_ids)
        self.token_ids = token_ids
        self.namespace = namespace
        self.keep = keep  # whether somebody holds a handle: if not, the end of its run is its own
        self.cursor: Cursor | None = None  # None until first admitted
        self.run: Run | None = None  # None while idle
        self.pruned = False  # let go of with all that grows from it
        self.cacheable = True  # whether its pages may serve others, and stay when it goes
        self.hold = Hold.NONE
        self.priority = 0  # of its run: higher comes first
        self.arrival: tuple[int, ...] = ()  # orders requests; a fork comes right after what it came from
        self.stem: Stem | None = None  # what it has to compute, and others as well
        self.safe_until = 0  # not preempted again before it has this many tokens
        self.num_cached_tokens: int | None = None  # of the prompt, at the first admission
        self.num_given_up = 0  # tokens that had KV when it was parked, until they have it again
        self.num_copies = 0  # blocks that it copied on write

    @property
    def is_live(self) -> bool:
        return self.cursor is not None and self.cursor.state is State.LIVE

    @property
    def live_cursor(self) -> Cursor:
        """The cursor of a sequence that is known to be live."""
        assert self.cursor is not None and self.cursor.state is State.LIVE, "the sequence holds no blocks"
        return self.cursor

    @property
    def num_computed(self) -> int:
        """Leading tokens that have KV now."""
        return self.live_cursor.length if self.is_live else 0

    @property
    def is_held(self) -> bool:
        """Whether its run rests until whoever reads the results has caught up."""
        return self.run is not None and self.run.held

    @property
    def rank(self) -> tuple[int, tuple[int, ...]]:
        """The order in which sequences are served: by priority, then oldest first."""
        return -self.priority, self.arrival

    @property
    def num_to_do(self) -> int:
        return len(self.token_ids) - self.num_computed

    def fork(self, at: int | None = None, *, keep: bool) -> Sequence:
        """A sequence with the same tokens, or the first `at` of them, on the same pages."""
        position = len(self.token_ids) if at is None else at
        child = Sequence(self.token_ids[:position], self.namespace, keep=keep)
        child.cacheable = self.cacheable
        child.priority = self.priority
        if self.is_live:
            child.cursor = self.live_cursor.fork(min(position, self.num_computed))
            if position > self.num_computed and self.run is None:
                if self.stem is None or self.stem.end != position:
                    Stem(position).join(self)
                assert self.stem is not None, "it has just joined one"
                self.stem.join(child)
        return child

    def leave_stem(self) -> None:
        if self.stem is not None:
            del self.stem.members[self]
            self.stem = None

    def move_to(self, cursor: Cursor) -> None:
        """Rest at `cursor`, which is further along its own tokens, instead."""
        old = self.live_cursor
        cursor.base = old.base
        if old.row is not None:
            cursor.keep_row()
        self.cursor = cursor
        old.release()

    def truncate(self, position: int) -> None:
        """Forget all but the first `position` tokens."""
        del self.token_ids[position:]
        self.num_given_up = min(self.num_given_up, position)
        if self.stem is not None and position < self.stem.end:
            self.leave_stem()
        if self.cursor is None:
            return
        if self.cursor.state is State.PARKED and position < self.cursor.length:
            # Its place is deeper than its tokens now; it finds what is cached again as a new prompt would.
            self.cursor.release()
            self.cursor = None
        elif position < self.num_computed:
            self.cursor.truncate(position)
