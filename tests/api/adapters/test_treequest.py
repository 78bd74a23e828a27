"""BranchSearch without TreeQuest: the nodes that it makes, and that failures leave nothing.

tests/clients/treequest_adapter.py runs the real package.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from ramet import LLM, AsyncBranch, AsyncLLM, InvalidInput
from ramet.api.adapters.treequest import BranchSearch, Thought
from ramet.testing import check_idle

MakeLLM = Callable[..., LLM]

PROMPT = list(range(40))
ACTIONS: dict[str, dict[str, Any]] = {"go on": {"max_tokens": 3, "temperature": 1.0}}


@dataclass(frozen=True)
class Trial:
    trial_id: int
    action: str
    parent_state: Thought | None


@dataclass
class Chain:
    """An algorithm that puts each batch below the node told last; its state is the list of results."""

    asked: int = 0
    told: list[int] = field(default_factory=list)

    def init_tree(self) -> list[tuple[Thought, float]]:
        return []

    def ask_batch(self, state: list[Any], size: int, actions: list[str]) -> tuple[list[Any], list[Trial]]:
        parent = state[-1][0] if state else None
        ids = range(self.asked, self.asked + size)
        self.asked += size
        return state, [Trial(trial_id, actions[0], parent) for trial_id in ids]

    def tell(self, state: list[Any], trial_id: int, result: tuple[Thought, float]) -> list[Any]:
        self.told.append(trial_id)
        return [*state, result]


async def one(branch: AsyncBranch) -> float:
    return float(len(branch))


def run(make_tiny: MakeLLM, use: Callable[[AsyncLLM, AsyncBranch], Awaitable[None]]) -> None:
    """Do something with a branch; afterwards nothing is left of its tree."""
    llm = make_tiny()

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            async with await engine.branch(PROMPT) as root:
                await use(engine, root)
            assert (await engine.stats()).pages.num_in_use == 0

    asyncio.run(main())
    check_idle(llm)


def test_each_node_goes_on_from_the_tokens_of_its_parent(make_tiny: MakeLLM) -> None:
    async def use(_: AsyncLLM, root: AsyncBranch) -> None:
        search = BranchSearch(Chain(), root, one, ACTIONS)
        await search.run(7, batch_size=3)
        assert search.algorithm.asked == len(search.state) == 7
        lengths = [len(thought.token_ids) for thought, _ in search.state]
        assert lengths == [3, 3, 3, 6, 6, 6, 9]
        for thought, score in search.state:
            branch = await search.branch(thought)
            assert branch.token_ids == [*PROMPT, *thought.token_ids]
            assert score == len(branch)
        assert search.state[3][0].token_ids[:3] == search.state[2][0].token_ids

    run(make_tiny, use)


def test_a_search_goes_on_from_a_stored_state(make_tiny: MakeLLM) -> None:
    async def use(engine: AsyncLLM, root: AsyncBranch) -> None:
        first = BranchSearch(Chain(), root, one, ACTIONS)
        await first.run(2, batch_size=1)
        async with await engine.branch(PROMPT) as other:
            again = BranchSearch(Chain(), other, one, ACTIONS)
            again.state = first.state
            await again.run(1)
            thought, _ = again.state[-1]
            assert thought.token_ids[:6] == first.state[-1][0].token_ids and len(thought.token_ids) == 9

    run(make_tiny, use)


def test_nodes_that_say_the_same_share_a_branch(make_tiny: MakeLLM) -> None:
    async def use(_: AsyncLLM, root: AsyncBranch) -> None:
        search = BranchSearch(Chain(), root, one, {"go on": {"max_tokens": 3, "temperature": 0}})
        await search.run(4, batch_size=2)
        assert [len(thought.token_ids) for thought, _ in search.state] == [3, 3, 6, 6]
        first, second = root._branch.children, await search.branch(search.state[0][0])
        assert len(first) == 1 and second._branch is first[0] and len(second._branch.children) == 1

    run(make_tiny, use)


def test_what_fails_leaves_no_branch_and_the_search_can_go_on(make_tiny: MakeLLM) -> None:
    calls = 0

    async def third_fails(branch: AsyncBranch) -> float:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("no value")
        return 1.0

    async def use(engine: AsyncLLM, root: AsyncBranch) -> None:
        search = BranchSearch(Chain(), root, third_fails, ACTIONS)
        with pytest.raises(RuntimeError, match=r"^no value$"):
            await search.run(4, batch_size=4)
        await engine.stats()
        assert len(root._branch.children) == len(search.state) < 4
        told = len(search.state)
        await search.run(1)
        assert len(search.state) == told + 1

    run(make_tiny, use)


@pytest.mark.parametrize("num_waits", range(8))
def test_what_is_cancelled_leaves_no_branch(make_tiny: MakeLLM, num_waits: int) -> None:
    async def use(engine: AsyncLLM, root: AsyncBranch) -> None:
        search = BranchSearch(Chain(), root, one, {"go on": {"max_tokens": 200}})
        task = asyncio.create_task(search.run(3, batch_size=3))
        await asyncio.sleep(0.003 * num_waits)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.stats()  # after what the thread still had to take back
        assert not search.state and not root._branch.children

    run(make_tiny, use)


def test_bad_arguments_are_refused(make_tiny: MakeLLM) -> None:
    async def use(_: AsyncLLM, root: AsyncBranch) -> None:
        with pytest.raises(InvalidInput, match=r"^actions must name at least one"):
            BranchSearch(Chain(), root, one, {})
        search = BranchSearch(Chain(), root, one, ACTIONS)
        for size in ({"num_nodes": 0}, {"num_nodes": 1, "batch_size": 0}):
            with pytest.raises(InvalidInput, match=next(reversed(size))):
                await search.run(**size)
        assert search.algorithm.asked == 0

    run(make_tiny, use)
