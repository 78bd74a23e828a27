"""Monte Carlo tree search: grow the most promising leaf, and let all nodes above it know what came of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Generic, TypeAlias

from ramet.api.search.branches import B
from ramet.api.search.node import Node
from ramet.api.search.policy import Done, Policy, Steps, Tool, Value, Watch
from ramet.api.search.tree import Found, Tree
from ramet.engine.checks import check_float, check_int

Select: TypeAlias = Callable[[Node[Any], Node[Any]], float]  # how promising a parent's child is


def uct(exploration: float = 1.4) -> Select:
    """Upper confidence bounds for trees: mean + c * sqrt(ln N / n) (Kocsis and Szepesvari, 2006)."""
    check_float("exploration", exploration, 0.0, math.inf)

    def promise(parent: Node[Any], child: Node[Any]) -> float:
        tried, total = child.visits + child.pending, parent.visits + parent.pending
        return child.total / tried + exploration * math.sqrt(math.log(max(1.0, total)) / tried)

    return promise


def puct(exploration: float = 1.4) -> Select:
    """The same with the model's opinion as a prior: mean + c * p * sqrt(N) / (1 + n) (Silver et al., 2017).

    The prior is a softmax of the steps' mean log-probabilities.
    """
    check_float("exploration", exploration, 0.0, math.inf)

    def promise(parent: Node[Any], child: Node[Any]) -> float:
        tried, total = child.visits + child.pending, parent.visits + parent.pending
        return child.total / tried + exploration * child.prior * math.sqrt(total) / (1.0 + tried)

    return promise


async def mcts(
    branch: B,
    steps: Steps,
    value: Value,
    *,
    budget: int,
    depth: int = 16,
    select: Select | None = None,
    concurrency: int = 4,
    virtual_loss: float = 1.0,
    enough: float = math.inf,
    tool: Tool | None = None,
    done: Done | None = None,
    watch: Watch | None = None,
) -> Found[B]:
    """Search below `branch`, which does not change, until `budget` tokens are spent or nothing is left.

    Args:
        steps: makes a node's children; see `sampled` and `listed`.
        value: of a new node, at best from 0 to 1; see `self_evaluation`, `likelihood`, `rollouts`.
        budget: tokens generated, appended and scored; what is under way when they are spent is finished.
        depth: steps of a path; deeper is not looked.
        select: which child is gone down to, `uct()` or `puct()` (the default).
        concurrency: leaves that grow at once; their steps run in the same batches.
        virtual_loss: visits without worth that a leaf is given while it grows, so that others are tried.
        enough: an answer with this value ends the search.
        tool: what is appended to a new node, say the result of what the step asked for.
        done: whether a new node is an answer; where the model ended the text it is one in any case.
        watch: is told of each node that is new, or whose values have changed.

    The best is the answer of the highest value, or else the end of the most visited path. Raises
    InvalidInput, whatever the functions raise, and as the verbs of the branch do; then no branch is left.
    """
    check_int("budget", budget, 1, None)
    check_int("depth", depth, 1, None)
    check_int("concurrency", concurrency, 1, None)
    check_float("virtual_loss", virtual_loss, 0.0, math.inf)
    policy: Policy[B] = Policy(steps, value, tool, done, watch)
    async with Tree(branch) as tree:
        search = _Search(tree, policy, select or puct(), budget, depth, virtual_loss, enough)
        await search.run(concurrency)
        answers = sorted(search.answers, key=lambda node: -node.value)
        return await tree.found(answers[0] if answers else _most_visited(tree.root), answers)


class _Search(Generic[B]):
    def __init__(
        self,
        tree: Tree[B],
        policy: Policy[B],
        select: Select,
        budget: int,
        depth: int,
        virtual_loss: float,
        enough: float,
    ) -> None:
        self.tree = tree
        self.policy = policy
        self.select = select
        self.budget = budget
        self.depth = depth
        self.virtual_loss = virtual_loss
        self.enough = enough
        self.answers: list[Node[B]] = []
        self._growing: set[Node[B]] = set()

    async def run(self, concurrency: int) -> None:
        """Keep so many leaves growing; end with all of them if one fails, or if this is cancelled."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                while len(tasks) < concurrency and self._can_pay and (leaf := self._leaf()):
                    self._pend(leaf, self.virtual_loss)
                    self._growing.add(leaf)
                    tasks.add(asyncio.create_task(self._grow(leaf)))
                if not tasks:
                    return
                ended, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.gather(*ended)  # the first error, and the others are known, too
                if self._has_enough:
                    return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _can_pay(self) -> bool:
        return self.tree.num_tokens < self.budget

    @property
    def _has_enough(self) -> bool:
        return any(node.value >= self.enough for node in self.answers)

    def _leaf(self) -> Node[B] | None:
        """The most promising leaf that nobody grows yet, the best children first."""
        found = [self.tree.root]  # a stack: the next one last
        while found:
            node = found.pop()
            if node.closed or node in self._growing:
                continue
            if not node.children:
                return node
            best_first = sorted(node.children, key=lambda child: self.select(node, child), reverse=True)
            found += reversed(best_first)
        return None

    async def _grow(self, leaf: Node[B]) -> None:
        try:
            children = await self.policy.grow(leaf)
        finally:
            self._growing.remove(leaf)
            self._pend(leaf, -self.virtual_loss)
        self.answers += [child for child in children if child.finished]
        for child in children:
            child.closed = child.finished or child.depth >= self.depth
        total = sum(child.value for child in children)
        at: Node[B] | None = leaf
        while at is not None:
            at.visits += len(children)
            at.total += total
            at.closed = all(child.closed for child in at.children)
            await self.policy.tell(at)
            at = at.parent

    def _pend(self, leaf: Node[B], visits: float) -> None:
        at: Node[B] | None = leaf
        while at is not None:
            at.pending += visits
            at = at.parent


def _most_visited(node: Node[B]) -> Node[B]:
    while node.children:
        node = max(node.children, key=lambda child: (child.visits, child.mean))
    return node
