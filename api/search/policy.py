"""What a search is told: how a state goes on, what a tool says to it, when it is done, what it is worth.

Each is a function of a node, and may be a coroutine function. One that is not, and takes long, holds up all
other branches: hand it to `asyncio.to_thread`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Generic, TypeAlias, TypeVar

from ramet.api.search.branches import B
from ramet.api.search.node import Node
from ramet.api.search.tasks import all_of
from ramet.engine.checks import check_float

T = TypeVar("T")
X = TypeVar("X")
Of: TypeAlias = Callable[[Node[Any]], T | Awaitable[T]]  # a function of a node, async or not
OfText: TypeAlias = Callable[[str], T | Awaitable[T]]  # the same of a text

Steps: TypeAlias = Callable[[Node[Any]], Awaitable[list[Node[Any]]]]  # makes a node's children
Tool: TypeAlias = Of[str | None]  # what is appended to a new node, if anything is
Done: TypeAlias = Of[bool]  # whether a new node is an answer
Value: TypeAlias = Of[float]  # of a new node: the higher the better
Watch: TypeAlias = Of[None]  # is told of a node that is new, or whose values have changed


def sampled(n: int = 4, **settings: Any) -> Steps:
    """Steps that the model writes: `n` of them, by these fields of SamplingParams."""
    return lambda node: node.sample(n, **settings)


def listed(candidates: Callable[[Node[Any]], Sequence[str]], most: int | None = None) -> Steps:
    """Steps that are known beforehand, for models that cannot be trusted to write them: the model scores all
    of them in one pass, and the `most` likeliest become children."""
    return lambda node: node.choose(candidates(node), most)


def likelihood(node: Node[Any]) -> float:
    """A value: how sure the model was of its last step, from 0 to 1 (its tokens' geometric mean)."""
    return math.exp(node.logprob)


def self_evaluation(question: str, yes: str = " Yes", no: str = " No") -> Value:
    """A value: how much likelier than `no` the model holds `yes` after a question, from 0 to 1.

    The question is asked on the side: the branch does not change.
    """

    async def value(node: Node[Any]) -> float:
        said_yes, said_no = await node.score([yes, no], suffix=question)
        return 1.0 / (1.0 + math.exp(min(700.0, said_no.logprob - said_yes.logprob)))

    return value


def rollouts(reward: OfText[float], n: int = 1, **settings: Any) -> Value:
    """A value: the mean reward of `n` continuations to the end, each with all that came before it."""

    async def value(node: Node[Any]) -> float:
        if node.finished:
            return await valued(reward, node.transcript)
        ends = await node.rollouts(n, **settings)
        return sum(await all_of(valued(reward, node.transcript + end) for end in ends)) / n

    return value


async def annotate(node: Node[Any]) -> None:
    """A `watch` for branches of a server: leaves a node's values there, for whoever looks at the tree."""
    about = {"visits": node.visits, "value": round(node.mean, 4), "prior": round(node.prior, 4)}
    await node.branch.update(annotations=about)


@dataclass(frozen=True)
class Policy(Generic[B]):
    """All of it together, and the one thing that is done with it: to grow a node."""

    steps: Steps
    value: Value
    tool: Tool | None = None
    done: Done | None = None
    watch: Watch | None = None

    async def grow(self, node: Node[B]) -> list[Node[B]]:
        """Make a node's children, let the tool answer each, and value them; each goes its own pace."""
        children = await self.steps(node)
        left_out = [one for one in node.children if one not in children]  # it made more than it gives
        await all_of(one.prune() for one in left_out)
        await all_of(self._ripen(child) for child in children)
        return children

    async def tell(self, node: Node[B]) -> None:
        if self.watch is not None:
            await call(self.watch, node)

    async def _ripen(self, node: Node[B]) -> None:
        if self.tool is not None and not node.finished:
            said = await call(self.tool, node)
            if said:
                await node.append(said)
        if self.done is not None and not node.finished:
            node.finished = bool(await call(self.done, node))
        node.value = node.total = await valued(self.value, node)
        node.visits = 1
        await self.tell(node)


async def valued(value: Callable[[X], float | Awaitable[float]], of: X) -> float:
    """What a value function says, which must be a number."""
    worth = await call(value, of)
    check_float("value", worth, -math.inf, math.inf)
    return float(worth)


async def call(function: Callable[[X], T | Awaitable[T]], of: X) -> T:
    result = function(of)
    return await result if isawaitable(result) else result
