"""TreeQuest's searches over branches: every node is a branch, and several are generated side by side.

A branch may be one in process (`AsyncBranch`) or one on a server (`AsyncClient`'s).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from ramet.api.search.branches import B
from ramet.api.search.tasks import all_of, to_the_end
from ramet.engine.checks import check_int
from ramet.engine.errors import InvalidInput


@dataclass(frozen=True)
class Thought:
    """TreeQuest's state of a node: no branch in it, so that a search can be pickled and go on elsewhere."""

    token_ids: tuple[int, ...]  # of its path, from the end of the root on
    text: str  # its own, without that of the nodes above


class BranchSearch(Generic[B]):
    """One search below one branch, which is to be pruned by whoever made it.

    Args:
        algorithm: any of TreeQuest's, such as `treequest.ABMCTSA()`.
        root: what the first nodes go on from; it stays as it is.
        value: how good a branch is, 0 to 1.
        actions: TreeQuest's actions by name: the fields of SamplingParams that each generates with.

    Attributes:
        state: TreeQuest's own, with Thoughts as node states. To go on from one that was stored, assign it.
    """

    def __init__(
        self,
        algorithm: Any,
        root: B,
        value: Callable[[B], Awaitable[float]],
        actions: Mapping[str, Mapping[str, Any]],
    ) -> None:
        if not actions:
            raise InvalidInput("actions", "must name at least one action")
        self.algorithm = algorithm
        self.root = root
        self.value = value
        self.actions = actions
        self.state = algorithm.init_tree()
        self._branches: dict[tuple[int, ...], B] = {(): root}

    async def run(self, num_nodes: int, *, batch_size: int = 8) -> None:
        """Add nodes, up to `batch_size` of them at a time; each is told as soon as it is there.

        If one fails, those that are under way with it leave nothing behind, and its error is raised.
        """
        check_int("num_nodes", num_nodes, 1, None)
        check_int("batch_size", batch_size, 1, None)
        for start in range(0, num_nodes, batch_size):
            size = min(batch_size, num_nodes - start)
            self.state, trials = self.algorithm.ask_batch(self.state, size, list(self.actions))
            await all_of(self._try(trial) for trial in trials)

    async def branch(self, thought: Thought) -> B:
        """The branch of a node, made again from its tokens if this search never had it."""
        if thought.token_ids in self._branches:
            return self._branches[thought.token_ids]
        (branch,) = await self.root.fork()
        try:
            await branch.extend(list(thought.token_ids))
        except BaseException:
            await to_the_end(branch.prune())
            raise
        return await self._keep(thought, branch)

    async def _try(self, trial: Any) -> None:
        above: Thought = trial.parent_state or Thought((), "")
        # A fork for each: several trials may go on from one node at once.
        (child,) = await (await self.branch(above)).fork()
        try:
            choice = await child.generate(**self.actions[trial.action])
            score = await self.value(child)
        except BaseException:
            await to_the_end(child.prune())
            raise
        thought = Thought((*above.token_ids, *choice.token_ids), choice.text)
        await self._keep(thought, child)
        self.state = self.algorithm.tell(self.state, trial.trial_id, (thought, score))

    async def _keep(self, thought: Thought, branch: B) -> B:
        """Nodes that say the same share the first's branch."""
        kept = self._branches.setdefault(thought.token_ids, branch)
        if kept is not branch:
            await to_the_end(branch.prune())
        return kept
