"""Beam search over steps, which is also tree of thought breadth first; and tree of thought depth first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Generic, Literal

from ramet.api.search.branches import B
from ramet.api.search.node import Node
from ramet.api.search.policy import Done, Policy, Steps, Tool, Value, Watch
from ramet.api.search.tasks import all_of
from ramet.api.search.tree import Found, Tree
from ramet.engine.checks import check_int
from ramet.engine.errors import InvalidInput


async def beam(
    branch: B,
    steps: Steps,
    value: Value,
    *,
    width: int,
    depth: int,
    budget: int | None = None,
    tool: Tool | None = None,
    done: Done | None = None,
    watch: Watch | None = None,
) -> Found[B]:
    """Keep the `width` states of the highest value and grow each by a step, `depth` times.

    Answers stay among them until better states take their place. What is not kept is pruned at once. With a
    `budget`, no level begins once it is spent. See `mcts` for the other arguments and what is raised.
    """
    check_int("width", width, 1, None)
    _check_limits(depth, budget)
    policy: Policy[B] = Policy(steps, value, tool, done, watch)
    async with Tree(branch) as tree:
        level = [tree.root]
        for _ in range(depth):
            growing = [node for node in level if not node.finished]
            if not growing or (budget is not None and tree.num_tokens >= budget):
                break
            families = await all_of(policy.grow(node) for node in growing)
            found = [node for node in level if node.finished]
            found += [child for family in families for child in family]
            if not found:
                break  # none of them can go on
            found.sort(key=lambda node: -node.value)
            level = found[:width]
            await _prune_all_but(level, [*found[width:], *growing])
        answers = [node for node in level if node.finished] or level
        return await tree.found(answers[0], answers)


async def _prune_all_but(kept: Iterable[Node[B]], others: Iterable[Node[B]]) -> None:
    """Prune each of `others` that no kept node is below, from as far up as nothing is kept."""
    paths = {node for one in kept for node in one.path}
    tops: dict[Node[B], None] = {}
    for node in others:
        top = next((one for one in node.path if one not in paths), None)
        if top is not None:
            tops[top] = None
    await all_of(top.prune() for top in tops)


async def tree_of_thought(
    branch: B,
    steps: Steps,
    value: Value,
    *,
    depth: int,
    order: Literal["breadth", "depth"] = "breadth",
    width: int = 5,
    least: float = -math.inf,
    enough: float = -math.inf,
    budget: int | None = None,
    tool: Tool | None = None,
    done: Done | None = None,
    watch: Watch | None = None,
) -> Found[B]:
    """Tree of thought, in one of the two orders of Yao et al. (2023).

    Breadth first is `beam` of this `width`. Depth first goes down the best child first, leaves out those of a
    value below `least`, and ends with the first answer whose value is `enough`; what it comes back from is
    pruned. With a `budget`, nothing grows once it is spent. See `mcts` for the rest.
    """
    if order == "breadth":
        return await beam(
            branch, steps, value, width=width, depth=depth, budget=budget, tool=tool, done=done, watch=watch
        )
    if order != "depth":
        raise InvalidInput("order", 'must be "breadth" or "depth"', order)
    _check_limits(depth, budget)
    async with Tree(branch) as tree:
        policy: Policy[B] = Policy(steps, value, tool, done, watch)
        search = _DepthFirst(policy, depth, least, enough, budget)
        await search.go_down(tree.root)
        return await tree.found(search.best or tree.root)


class _DepthFirst(Generic[B]):
    def __init__(
        self, policy: Policy[B], depth: int, least: float, enough: float, budget: int | None
    ) -> None:
        self.policy = policy
        self.depth = depth
        self.least = least
        self.enough = enough
        self.budget = math.inf if budget is None else budget
        self.best: Node[B] | None = None  # an answer if there is one, else an end of the highest value

    async def go_down(self, node: Node[B]) -> bool:
        """Whether an answer that is good enough is here or below."""
        if node.finished or node.depth == self.depth or node.tree.num_tokens >= self.budget:
            await self._compare(node)
            return node.finished and node.value >= self.enough
        children = await self.policy.grow(node)
        for child in sorted(children, key=lambda child: -child.value):
            if child.value >= self.least and await self.go_down(child):
                return True
            if self.best is None or child not in self.best.path:
                await child.prune()
        return False

    async def _compare(self, node: Node[B]) -> None:
        """Keep it, instead of the best so far, if it is better."""
        best = self.best
        if best is None or (node.finished, node.value) > (best.finished, best.value):
            self.best = node
            if best is not None:
                await _prune_all_but([node], [best])


def _check_limits(depth: int, budget: int | None) -> None:
    check_int("depth", depth, 1, None)
    if budget is not None:
        check_int("budget", budget, 1, None)
