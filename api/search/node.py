"""One state of a search, on a branch of its own, with the branch's verbs, which count what they take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from ramet.api.search.branches import B, Likelihood, Prompt
from ramet.api.search.tasks import all_of
from ramet.engine.checks import check_int
from ramet.engine.errors import InvalidInput
from ramet.engine.sampling_params import derive_seed

if TYPE_CHECKING:
    from ramet.api.search.tree import Tree

_MOST_CANDIDATES = 256  # of one call over HTTP


@dataclass(eq=False)
class Node(Generic[B]):
    """All that was said up to here, what it is worth, and what was tried from here on."""

    tree: Tree[B] = field(repr=False)
    branch: B = field(repr=False)
    parent: Node[B] | None = field(default=None, repr=False)
    index: int = 0  # among all that its parent has made, rollouts included
    text: str = ""  # of its step, with what a tool said after it
    logprob: float = 0.0  # of its step, a token
    finished: bool = False  # nothing comes after it: it is an answer
    position: int = 0  # tokens of its branch
    prior: float = 1.0  # its share among its siblings, by `logprob`
    value: float = 0.0  # what the value function said of it
    visits: int = 0  # values that went into `total`: its own, and those of nodes below
    total: float = 0.0
    pending: float = 0.0  # visits that are on their way, and count as worth nothing until they are there
    closed: bool = False  # nothing is left to be tried from here on
    children: list[Node[B]] = field(default_factory=list, repr=False)
    num_made: int = field(default=0, repr=False)
    data: Any = None  # the caller's: the state of a tool, say

    @property
    def mean(self) -> float:
        """Of the values of this node and those below."""
        return self.total / self.visits if self.visits else self.value

    @property
    def path(self) -> list[Node[B]]:
        """From the first step to this node's; nothing for the root."""
        path: list[Node[B]] = []
        at = self
        while at.parent is not None:
            path.append(at)
            at = at.parent
        return path[::-1]

    @property
    def depth(self) -> int:
        return len(self.path)

    @property
    def transcript(self) -> str:
        """The texts of all steps up to here."""
        return "".join(node.text for node in self.path)

    def family(self) -> Iterator[Node[B]]:
        """This node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.family()

    # -- the verbs -------------------------------------------------------------------------------------

    async def sample(self, n: int, **settings: Any) -> list[Node[B]]:
        """`n` children, each a continuation that the model samples, in one batch.

        `settings` are the fields of SamplingParams; a `seed` is one for the whole search, and gives each node
        its own.
        """
        return self._adopt(await self._sample(n, settings))

    async def rollouts(self, n: int, **settings: Any) -> list[str]:
        """What the model would say from here on, `n` times; nothing of it stays."""
        children = await self._sample(n, settings)
        await all_of(child.branch.prune() for child in children)
        return [child.text for child in children]

    async def choose(self, candidates: Sequence[str], most: int | None = None) -> list[Node[B]]:
        """Children for given continuations: the `most` likeliest of them, by log-probability a token."""
        if most is not None:
            check_int("most", most, 1, None)
        scores = await self.score(candidates)
        means = [score.logprob / len(score.token_ids) for score in scores]
        best = sorted(range(len(candidates)), key=lambda index: -means[index])[:most]
        return await self.add([candidates[index] for index in best], [means[index] for index in best])

    async def add(self, texts: Sequence[str], logprobs: Sequence[float] = ()) -> list[Node[B]]:
        """Children for these continuations, in this order; `logprobs` are theirs, a token, if known."""
        if not texts:
            return []
        branches = await self.branch.fork(len(texts))
        children = [
            self._child(branch, text, logprob)
            for branch, text, logprob in zip(branches, texts, logprobs or [0.0] * len(texts), strict=True)
        ]
        await all_of(child._extend(child.text) for child in children)
        return self._adopt(children)

    async def append(self, text: str) -> None:
        """Add a text that nobody sampled: what a tool said, say."""
        await self._extend(text)
        self.text += text

    async def score(self, candidates: Sequence[Prompt], *, suffix: str | None = None) -> list[Likelihood]:
        """How likely each continuation is, after a `suffix` that is thrown away again."""
        scores: list[Likelihood] = []
        for first in range(0, len(candidates), _MOST_CANDIDATES):
            scores += await self.branch.score(candidates[first : first + _MOST_CANDIDATES], suffix=suffix)
        num_suffix = await self.tree.num_tokens_of(suffix, self.branch) if suffix and scores else 0
        num_new = sum(len(score.token_ids) for score in scores)
        self.tree.count(num_suffix + num_new, len(scores) * (self.position + num_suffix) + num_new)
        return scores

    async def prune(self) -> None:
        """Give up this node and all below it."""
        assert self.parent is not None, "the root goes with the tree"
        await self.branch.prune()
        self.parent.children.remove(self)

    # -- parts of them ---------------------------------------------------------------------------------

    async def _sample(self, n: int, settings: dict[str, Any]) -> list[Node[B]]:
        if settings.get("best_of") is not None:
            raise InvalidInput("best_of", "must be None in a search, which counts all that is sampled")
        if settings.get("seed") is not None:
            for node in self.path:
                settings["seed"] = derive_seed(settings["seed"], node.index + 1)
            settings["seed"] = derive_seed(settings["seed"], self.num_made)
        children = []
        for branch in await self.branch.expand(n, **settings):
            said = branch.output
            assert said is not None, "a child of an expansion has said something"
            child = self._child(branch, said.text, said.mean_logprob)
            child.finished = said.finish_reason == "stop" and not isinstance(said.stop_reason, str)
            child.position += len(said.token_ids)
            children.append(child)
        num_new = sum(child.position - self.position for child in children)
        self.tree.count(num_new, self.position + num_new)
        return children

    async def _extend(self, text: Prompt) -> None:
        num_new = len(await self.branch.extend(text))
        self.position += num_new
        self.tree.count(num_new, 0)  # without branches it is sent with the next request

    def _child(self, branch: B, text: str, logprob: float) -> Node[B]:
        child = Node(self.tree, branch, self, self.num_made, text, logprob, position=self.position)
        self.num_made += 1
        return child

    def _adopt(self, children: list[Node[B]]) -> list[Node[B]]:
        weights = [math.exp(child.logprob) for child in children]
        for child, weight in zip(children, weights, strict=True):
            child.prior = weight / (sum(weights) or 1.0)
        self.children += children
        self.tree.num_nodes += len(children)
        return children
