"""Whatever happens to a search, nothing is left of it; what it has found goes on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from ramet import AsyncBranch, InvalidInput, search
from ramet.api.async_client import AsyncBranch as RemoteBranch
from ramet.api.search.tasks import all_of, to_the_end
from tests.api.search.conftest import Place, letters, run, word_value


def mcts(branch: Any, **more: Any) -> Awaitable[Any]:
    """A search that uses every verb: it scores, forks, extends, samples on the side, and calls a tool."""
    settings: dict[str, Any] = {
        "budget": 12,
        "depth": 2,
        "concurrency": 2,
        "tool": lambda node: "!",
        "value": search.rollouts(lambda text: text.count("a") / 9, 2, max_tokens=1),
        **more,
    }
    return search.mcts(branch, search.listed(letters), **settings)


def beam(branch: Any, **more: Any) -> Awaitable[Any]:
    steps = search.sampled(2, max_tokens=1, seed=1)
    settings: dict[str, Any] = {"value": search.self_evaluation("ok?", "y", "n"), **more}
    return search.beam(branch, steps, width=2, depth=2, **settings)


def depth_first(branch: Any, **more: Any) -> Awaitable[Any]:
    settings: dict[str, Any] = {"value": word_value("ba"), **more}
    return search.tree_of_thought(
        branch, search.listed(letters), depth=2, order="depth", enough=1, **settings
    )


def best_of(branch: Any, **more: Any) -> Awaitable[Any]:
    settings: dict[str, Any] = {"value": search.likelihood, **more}
    return search.best_of(branch, 3, max_tokens=4, **settings)


def mcts_of(branch: Any, steps: Any, **more: Any) -> Awaitable[Any]:
    return search.mcts(branch, steps, search.likelihood, budget=100, depth=2, concurrency=1, **more)


def beam_of(branch: Any, steps: Any, **more: Any) -> Awaitable[Any]:
    return search.beam(branch, steps, search.likelihood, width=2, depth=2, **more)


def depth_first_of(branch: Any, steps: Any, **more: Any) -> Awaitable[Any]:
    return search.tree_of_thought(branch, steps, search.likelihood, depth=2, order="depth", **more)


SEARCHES = [mcts, beam, depth_first, best_of]


class Watched:
    """A branch that lets a function know of each verb that is begun or done, also on its forks."""

    def __init__(self, branch: Any, tell: Callable[[str], None]) -> None:
        self.branch = branch
        self.tell = tell

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.branch, name)
        if name not in ("fork", "extend", "expand", "score", "release", "prune"):
            return real

        async def verb(*args: Any, **settings: Any) -> Any:
            self.tell("begun")
            result = await real(*args, **settings)
            self.tell("done")
            if name in ("fork", "expand"):
                return [Watched(one, self.tell) for one in result]
            return result

        return verb


async def cancelled(kind: Any, branch: Any, when: str, index: int) -> bool:
    """Cancel a search when its verb number `index` is begun, or done; False if it has no such verb."""
    count = 0

    def tell(what: str) -> None:
        nonlocal count
        if what == when:
            count += 1
            if count == index + 1:
                # A verb that is begun is cancelled while it waits, one that is done before anybody has its
                # result.
                asyncio.get_running_loop().call_soon(task.cancel)

    task: asyncio.Task[Any] = asyncio.ensure_future(kind(Watched(branch, tell)))
    with suppress(asyncio.CancelledError):
        await (await task).branch.prune()
    return count > index


@pytest.mark.parametrize("when", ["begun", "done"])
@pytest.mark.parametrize("kind", SEARCHES)
def test_cancelled_at_any_verb_it_leaves_nothing(place: Place, kind: Any, when: str) -> None:
    stride = 1 if place.name == "process" else 3  # a server takes its time

    async def main() -> None:
        async with place.open() as branch:
            before = place.num_held
            index = 0 if when == "begun" else stride // 2
            while await cancelled(kind, branch, when, index):
                await place.settles_at(before)
                index += stride
            assert index > 4, "a search has many places to be cancelled at"
            await place.settles_at(before)

    asyncio.run(main())


@pytest.mark.parametrize("role", ["value", "tool", "done", "watch"])
@pytest.mark.parametrize("kind", [mcts, beam, depth_first])
def test_what_a_function_raises_ends_the_search(place: Place, kind: Any, role: str) -> None:
    for at, is_async in ((0, True), (2, False)):
        count = 0

        def fail(node: Any, at: int = at) -> Any:
            nonlocal count
            count += 1
            if count > at:
                raise LookupError("this is what the function said")
            return {"value": 0.5, "tool": "x", "done": False, "watch": None}[role]

        async def fail_later(node: Any, fail: Any = fail) -> Any:
            await asyncio.sleep(0)
            return fail(node)

        async def main(function: Any) -> None:
            async with place.open() as branch:
                before = place.num_held
                with pytest.raises(LookupError, match="this is what"):
                    await kind(branch, **{role: function})
                await place.settles_at(before)

        asyncio.run(main(fail_later if is_async else fail))


def test_a_judge_that_gives_no_number_is_refused(place: Place) -> None:
    async def main() -> None:
        async with place.open() as branch:
            before = place.num_held
            for worth in ("good", float("nan"), None, float("inf")):
                with pytest.raises(ValueError, match="value must be"):
                    await best_of(branch, value=lambda node, worth=worth: worth)
                await place.settles_at(before)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [mcts_of, beam_of, depth_first_of])
def test_children_that_steps_leave_out_go(place: Place, kind: Any) -> None:
    """A judge of one's own may throw away what the model has written, before a search sees it."""

    async def steps(node: Any) -> list[Any]:
        children: list[Any] = await node.sample(3, max_tokens=2, seed=4)
        return children[1:]

    siblings: set[int] = set()

    def watch(node: Any) -> None:
        if node.parent is not None:
            siblings.add(len(node.parent.children))

    found, _ = run(place, lambda branch: kind(branch, steps, watch=watch))
    assert siblings == {2}
    assert found.best.depth == 2


@pytest.mark.parametrize("kind", [mcts, beam, depth_first])
def test_whether_it_is_an_answer_may_be_said_by_any_object(place: Place, kind: Any) -> None:
    """As re.search does."""
    found, _ = run(place, lambda branch: kind(branch, done=lambda node: re.search("^.", node.text)))
    assert found.best.finished is True


def test_what_is_thrown_away_by_the_engine_would_not_be_counted(place: Place) -> None:
    async def main() -> None:
        async with place.open() as branch:
            with pytest.raises(InvalidInput, match="best_of must"):
                await search.best_of(branch, 2, best_of=8)

    asyncio.run(main())


@pytest.mark.parametrize("kind", SEARCHES)
def test_what_it_found_goes_on(place: Place, kind: Any) -> None:
    async def search_and_go_on(branch: Any) -> Any:
        found = await kind(branch)
        said = await found.branch.generate(max_tokens=2, temperature=0)
        assert len(said.token_ids) == 2
        return found

    found, token_ids = run(place, search_and_go_on)
    # The branch holds the prompt, the steps, and what was said just now.
    assert len(token_ids) == found.best.position + 2


def test_counts_are_of_tokens(place: Place) -> None:
    async def scored(branch: Any) -> Any:
        async with search.Tree(branch) as tree:
            start = tree.root.position
            await tree.root.choose(["ab", "cde"])
            # Five tokens scored, then appended; a client without branches sends the prompt with each.
            assert (tree.num_tokens, tree.num_flat_tokens) == (10, 2 * start + 5)
            (child, _) = await tree.root.sample(2, max_tokens=3)
            assert (tree.num_tokens, tree.num_flat_tokens) == (16, 3 * start + 11)
            await child.score(["x", "y"], suffix="why?")
            assert tree.num_tokens == 22
            assert tree.num_flat_tokens == 3 * start + 11 + 2 * (start + 3 + 4) + 2
            await child.append("12")
            assert tree.num_tokens == 24 and child.position == start + 5
            return await tree.found(child)

    run(place, scored)


def test_both_kinds_of_branches_have_the_verbs() -> None:
    """As the type checker sees it, and by name."""

    def searched(here: AsyncBranch, there: RemoteBranch) -> tuple[search.Branch, search.Branch]:
        return here, there

    verbs = {name for name in vars(search.Branch) if not name.startswith("_")}
    assert {"fork", "extend", "expand", "score", "release", "prune"} <= verbs
    for kind in (AsyncBranch, RemoteBranch):
        assert verbs - {"output"} <= set(dir(kind))


def test_a_seed_is_one_for_the_search(place: Place) -> None:
    """Every node draws from a stream of its own, and the same search draws the same again."""
    said = []

    async def twice(branch: Any) -> Any:
        async with search.Tree(branch) as tree:
            first = await tree.root.sample(2, max_tokens=8, seed=5)
            again = await tree.root.sample(2, max_tokens=8, seed=5)
            below = await first[0].sample(1, max_tokens=8, seed=5)
            said.append([node.text for node in [*first, *again, *below]])
            return await tree.found(first[0])

    run(place, twice)
    run(place, twice)
    assert said[0] == said[1] and len(set(said[0])) == 5


def test_all_of_gives_the_first_error_and_cancels_the_rest() -> None:
    ended = []

    async def forever() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("first")

    async def main() -> None:
        with pytest.raises(KeyError, match="first"):
            await all_of([forever(), fail(), forever()])
        assert ended == ["cancelled"] * 2

    asyncio.run(main())


def test_what_must_be_done_is_done_before_the_caller_is_cancelled() -> None:
    done = []

    async def work() -> None:
        await asyncio.sleep(0.02)
        done.append(True)

    async def main() -> None:
        task = asyncio.ensure_future(to_the_end(work()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done

    asyncio.run(main())
