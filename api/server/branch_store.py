"""A tenant's branches and trees: tables, limits, and who stands where. It never touches tokens.

Another tenant has another one: an id that is not in here is unknown, and nobody looks any further.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ramet.api.server.branch_schemas import MAX_ANNOTATIONS, Lease, Settable
from ramet.api.server.errors import ApiError, invalid, not_found
from ramet.api.server.events import EventLog
from ramet.api.server.ids import new_id
from ramet.engine.async_llm import AsyncBranch
from ramet.engine.async_work import Work

MAX_BRANCHES = 4096
MAX_TREE_BRANCHES = 1024
MAX_TREE_TOKENS = 1 << 20
MAX_QUEUED = 8  # operations that wait on one branch
MAX_CHECKPOINTS = 64
_MAX_REMEMBERED = 4096  # branches that are gone, so that an error can say why


@dataclass
class Turn:
    """Messages that were appended at once; what comes after them is the model's reply."""

    start: int
    end: int
    messages: list[dict[str, Any]]  # all that the branch holds up to `end`


@dataclass(eq=False)
class Entry:
    """A branch as its tenant knows it."""

    branch: AsyncBranch
    tree: Tree
    created_at: float
    expires_at: float
    path: tuple[str, ...] = ()  # ids of its ancestors, the root first
    forked_at: int = 0
    id: str = field(default_factory=lambda: new_id("br_"))
    name: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    lease: Lease | None = None
    lease_ends_at: float | None = None
    pin: str = "none"
    num_generated: int = 0
    work: Work[Any] | None = None  # that generates from it now
    growing: asyncio.Event | None = None  # set once it is complete, as the child of a generation
    gone: bool = False
    pruned: bool = False  # gone with all that grows from it
    _queued: int = 0
    _turnstile: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def parent_id(self) -> str | None:
        return self.path[-1] if self.path else None

    def check(self, body: Settable) -> None:
        """Raise ApiError if `set` would make the annotations too many."""
        if len({**self.annotations, **(body.annotations or {})}) > MAX_ANNOTATIONS:
            raise invalid("annotations", f"must be at most {MAX_ANNOTATIONS} of a branch in all")

    def set(self, body: Settable) -> None:
        """Take over what was given, beside the lease and the pin."""
        if body.name is not None:
            self.name = body.name
        if body.metadata is not None:
            self.metadata = dict(body.metadata)
        if body.annotations is not None:
            self.annotations = {**self.annotations, **body.annotations}

    def check_mark(self, checkpoint: str | None) -> None:
        """Raise ApiError if there would be too many names of positions."""
        known = checkpoint is None or checkpoint in self.checkpoints
        if not known and len(self.checkpoints) >= MAX_CHECKPOINTS:
            raise invalid("checkpoint", f"must be one of the {MAX_CHECKPOINTS} that the branch has at most")

    def mark(self, checkpoint: str | None) -> None:
        """Name the position where the branch is now. Raises as `check_mark` does."""
        self.check_mark(checkpoint)
        if checkpoint is not None:
            self.checkpoints[checkpoint] = len(self.branch)

    def cut(self, position: int) -> None:
        """Forget what is said of later positions."""
        self.checkpoints = {name: at for name, at in self.checkpoints.items() if at <= position}
        self.turns = [turn for turn in self.turns if turn.end <= position]
        self.forked_at = min(self.forked_at, position)
        self.num_generated = min(self.num_generated, position)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """What changes a branch is done in the order in which it was asked for.

        Raises ApiError if too much waits, or if the branch is gone when it is this one's turn.
        """
        if self._queued >= MAX_QUEUED:
            raise ApiError(409, f"{MAX_QUEUED} operations wait on this branch", code="branch_busy")
        self._queued += 1
        try:
            async with self._turnstile:
                if self.growing is not None:
                    await self.growing.wait()
                if self.gone:
                    raise not_found("branch", self.id)
                yield
        finally:
            self._queued -= 1


@dataclass(eq=False)
class Tree:
    """What a search grows: branches that count together."""

    created_at: float
    events: EventLog
    id: str = field(default_factory=lambda: new_id("tree_"))
    branches: dict[str, Entry] = field(default_factory=dict)
    num_pruned: int = 0
    num_expired: int = 0

    @property
    def num_tokens(self) -> int:
        """What its branches added, each token once."""
        return sum(max(0, len(one.branch) - one.forked_at) for one in self.branches.values())

    def check_tokens(self, more: int) -> None:
        if self.num_tokens + more > MAX_TREE_TOKENS:
            message = f"a tree has at most {MAX_TREE_TOKENS} tokens"
            raise ApiError(429, message, code="tree_token_limit_exceeded")


class BranchStore:
    """All branches and trees of one tenant."""

    def __init__(self) -> None:
        self.trees: dict[str, Tree] = {}
        self._entries: dict[str, Entry] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()  # id -> why

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """In the order in which they came."""
        return list(self._entries.values())

    def get(self, branch_id: str, param: str | None = None) -> Entry:
        """Raises ApiError for an id that this tenant does not have, whoever else may.

        `param` is the field of the body that it came in, if it was not the path.
        """
        entry = self._entries.get(branch_id)
        if entry is None:
            if self._gone.get(branch_id) == "expired":
                message = f"the branch {branch_id!r} has expired"
                raise ApiError(404, message, code="branch_expired", param=param)
            raise not_found("branch", branch_id, param)
        return entry

    def tree(self, tree_id: str, param: str | None = None) -> Tree:
        tree = self.trees.get(tree_id)
        if tree is None:
            raise not_found("tree", tree_id, param)
        return tree

    def check_room(self, tree: Tree | None, n: int) -> None:
        """Raise ApiError if `n` more branches are too many."""
        for most, now, whose in (
            (MAX_BRANCHES, len(self._entries), "tenant"),
            (MAX_TREE_BRANCHES, len(tree.branches) if tree is not None else 0, "tree"),
        ):
            if now + n > most:
                raise ApiError(429, f"a {whose} has at most {most} branches", code="branch_limit_exceeded")

    def add(self, entry: Entry) -> None:
        self.trees.setdefault(entry.tree.id, entry.tree)
        entry.tree.branches[entry.id] = self._entries[entry.id] = entry

    def remove(self, entry: Entry, why: str) -> None:
        """Forget a branch, and its tree with the last one. Idempotent; its blocks are let go of elsewhere."""
        if entry.gone:
            return
        entry.gone = True
        del self._entries[entry.id], entry.tree.branches[entry.id]
        self._gone[entry.id] = why
        if len(self._gone) > _MAX_REMEMBERED:
            self._gone.popitem(last=False)
        if why == "expired":
            entry.tree.num_expired += 1
        else:
            entry.tree.num_pruned += 1
        entry.tree.events.add(f"branch.{why}", {"branch_id": entry.id})
        if not entry.tree.branches:
            del self.trees[entry.tree.id]
            entry.tree.events.close()

    def family(self, entry: Entry) -> list[Entry]:
        """A branch and all its descendants that are left."""
        return [one for one in entry.tree.branches.values() if one is entry or entry.id in one.path]
