"""All branches of one search, and what they took: after an error or a cancellation none is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic

from ramet.api.search.branches import B
from ramet.api.search.node import Node
from ramet.api.search.tasks import all_of, to_the_end


@dataclass(frozen=True)
class Found(Generic[B]):
    """What a search has found.

    Its branch goes on where the best answer ends, and is the caller's to use and to prune; all others are
    gone. The nodes stay to be looked at.
    """

    best: Node[B]
    answers: Sequence[Node[B]]  # all that was found, best first
    tree: Tree[B]
    votes: Mapping[Any, int] = field(default_factory=dict)  # of each answer, where they were counted

    @property
    def branch(self) -> B:
        return self.best.branch

    @property
    def text(self) -> str:
        return self.best.transcript


class Tree(Generic[B]):
    """A fork of the branch that a search was given, and all below it.

    Attributes:
        num_tokens: generated, appended and scored.
        num_flat_tokens: what the same requests would take if each computed all of its prompt.
        num_nodes: made so far, without the root.
    """

    root: Node[B]

    def __init__(self, branch: B) -> None:
        self._source = branch
        self._held: list[B] = []  # whatever is below these is the search's
        self._lengths: dict[str, int] = {}
        self.num_nodes = 0
        self.num_tokens = 0
        self.num_flat_tokens = 0

    async def __aenter__(self) -> Tree[B]:
        try:
            await to_the_end(self._fork())
        except BaseException:
            await self._let_go()
            raise
        (root,) = self._held
        self.root = Node(self, root, position=root.position)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await self._let_go()

    async def found(
        self, best: Node[B], answers: Sequence[Node[B]] = (), votes: Mapping[Any, int] | None = None
    ) -> Found[B]:
        """The end of the search: of all branches the best one's is left."""
        self._held.append(best.branch)
        kept = [self.root, *best.path]
        await all_of(child.branch.prune() for node in kept for child in node.children if child not in kept)
        await to_the_end(all_of(node.branch.release() for node in kept if node is not best))
        return Found(best, answers or [best], self, votes or {})

    async def num_tokens_of(self, text: str, branch: B) -> int:
        """How many tokens a text has; the first time it is tried on a fork of `branch`."""
        if text not in self._lengths:
            (fork,) = await branch.fork()
            self._lengths[text] = len(await fork.extend(text))
            await fork.prune()
        return self._lengths[text]

    def count(self, num_new: int, num_flat: int) -> None:
        self.num_tokens += num_new
        self.num_flat_tokens += num_flat

    async def _fork(self) -> None:
        self._held += await self._source.fork()

    async def _let_go(self) -> None:
        with suppress(Exception):  # a server that is gone holds nothing, and the first error matters
            await to_the_end(all_of(branch.prune() for branch in self._held))
