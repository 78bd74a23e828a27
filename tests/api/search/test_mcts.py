"""Monte Carlo tree search: where it goes, when it ends, and what it says of the tree."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ramet import AsyncLLM, InvalidInput, search
from ramet.api.search.node import Node
from ramet.api.search.policy import call
from tests.api.search.conftest import Place, letters, run, word_value
from tests.api.serving import LETTERS, make_llm

STEPS = search.listed(letters)


def node(parent: Any = None, **about: Any) -> Any:
    made: Any = Node(tree=None, branch=None, parent=parent, **about)  # type: ignore[arg-type]
    if parent is not None:
        parent.children.append(made)
    return made


def test_uct_is_the_mean_and_a_bound_on_its_error() -> None:
    parent = node(visits=8)
    child = node(parent, visits=2, total=1.0)
    assert search.uct(0.0)(parent, child) == 0.5
    assert search.uct(2.0)(parent, child) == pytest.approx(0.5 + 2 * math.sqrt(math.log(8) / 2))
    # A visit that is on its way counts as one that was worth nothing.
    parent.pending = child.pending = 1.0
    assert search.uct(2.0)(parent, child) == pytest.approx(1 / 3 + 2 * math.sqrt(math.log(9) / 3))


def test_puct_prefers_what_the_model_holds_likely() -> None:
    parent = node(visits=9)
    child = node(parent, visits=2, total=1.0, prior=0.25)
    assert search.puct(2.0)(parent, child) == pytest.approx(0.5 + 2 * 0.25 * 3 / 3)
    likely = node(parent, visits=2, total=1.0, prior=0.75)
    assert search.puct()(parent, likely) > search.puct()(parent, child)


@pytest.mark.parametrize("select", [search.uct(), search.puct()])
def test_it_finds_the_one_good_leaf(place: Place, select: Any) -> None:
    """Of the 64 words of six letters the values lead to one; looking at all would take 126 nodes."""
    word = "abbaba"
    grown = []

    def watch(node: Any) -> None:
        if node.visits == 1 and not node.children:
            grown.append(node)

    found, token_ids = run(
        place,
        lambda branch: search.mcts(
            branch,
            STEPS,
            word_value(word),
            budget=10_000,
            depth=6,
            select=select,
            concurrency=1,
            done=lambda node: node.depth == 6,
            enough=1.0,
            watch=watch,
        ),
    )
    assert found.text == word and found.best.value == 1.0 and found.best.finished
    assert bytes(token_ids[-6:]).decode("latin1")[0] != ""  # the branch holds the word, one token a letter
    assert len(token_ids) == found.best.position
    assert found.tree.num_nodes == len(grown) < 126


def test_what_is_below_counts_for_what_is_above(place: Place) -> None:
    found, _ = run(
        place,
        lambda branch: search.mcts(branch, STEPS, word_value("aa"), budget=10_000, depth=3, concurrency=1),
    )
    root = found.tree.root
    below = list(root.family())[1:]
    assert len(below) == 2 + 4 + 8, "a finite tree is searched to its end, and then the search ends"
    for one in root.family():
        own = [] if one is root else [one]
        assert one.visits == len(own) + sum(child.visits for child in one.children)
        assert one.total == pytest.approx(sum(n.value for n in one.family() if n is not root))
        assert one.pending == 0
    # Nothing was finished: the best is the end of the most visited path.
    assert found.answers == [found.best] and found.best.depth == 3


def test_it_stops_when_the_tokens_are_spent(place: Place) -> None:
    def of(budget: int) -> int:
        found, _ = run(
            place,
            lambda branch: search.mcts(
                branch, STEPS, word_value("b" * 9), budget=budget, depth=9, concurrency=2
            ),
        )
        taken: int = found.tree.num_tokens
        return taken

    # A leaf takes four tokens to grow: two are scored, two appended. Two leaves may be under way at the end.
    for budget in (1, 8, 21):
        assert budget <= of(budget) < budget + 8


def test_a_leaf_that_grows_is_left_to_itself(place: Place) -> None:
    """Four leaves grow at once, and none twice: virtual loss sends the searchers apart."""
    growing: list[str] = []
    most = 0
    all_there = asyncio.Event()

    async def tool(node: Any) -> None:
        nonlocal most
        growing.append(node.parent.transcript)
        most = max(most, len(set(growing)))
        if most == 4:
            all_there.set()
        if node.depth == 3:  # by then there are four leaves
            await asyncio.wait_for(all_there.wait(), 5)
        growing.remove(node.parent.transcript)

    found, _ = run(
        place,
        lambda branch: search.mcts(
            branch, STEPS, lambda node: 0.5, budget=200, depth=9, concurrency=4, tool=tool
        ),
    )
    assert most == 4
    words = [one.transcript for one in found.tree.root.family()]
    assert len(words) == len(set(words))


def test_an_answer_that_is_good_enough_ends_what_is_under_way(place: Place) -> None:
    """Three other leaves are growing then, each at another verb; nothing of them is left."""

    async def done(node: Any) -> bool:
        await asyncio.sleep(0.001 * (node.index + 2 * node.depth))
        return bool(node.transcript == "abb")

    async def value(node: Any) -> float:
        believed: float = await call(search.self_evaluation("so?", "y", "n"), node)
        return 1.0 if node.finished else min(0.5, believed)

    for _ in range(5):
        found, _ = run(
            place,
            lambda branch: search.mcts(
                branch, STEPS, value, budget=10_000, depth=4, concurrency=4, enough=1.0, done=done
            ),
        )
        assert found.text == "abb"
        assert not any(one.pending for one in found.tree.root.family())


def test_the_model_may_end_the_text(place: Place) -> None:
    """A token that ends it makes a node an answer without being asked; a stop string does not."""
    steps = search.sampled(2, max_tokens=3, stop_token_ids=LETTERS)
    found, _ = run(place, lambda branch: search.mcts(branch, steps, search.likelihood, budget=1))
    assert found.best.finished and len(found.answers) == 2
    steps = search.sampled(2, max_tokens=3, stop=["a", "b", "c", "d", "e", "f"])
    found, _ = run(place, lambda branch: search.mcts(branch, steps, search.likelihood, budget=1))
    assert not found.best.finished


def test_values_are_left_on_a_server(place: Place) -> None:
    async def main() -> None:
        async with place.open() as branch:
            if not hasattr(branch, "update"):
                with pytest.raises(AttributeError):
                    await search.mcts(branch, STEPS, word_value("ab"), budget=8, watch=search.annotate)
                return
            found = await search.mcts(branch, STEPS, word_value("ab"), budget=8, watch=search.annotate)
            about = (await found.branch.refresh())["annotations"]
            best = found.best
            assert about["visits"] == best.visits and about["value"] == round(best.mean, 4)
            await found.branch.prune()

    asyncio.run(main())


@pytest.fixture
def shallow_stack() -> Iterator[int]:
    """The deepest stack, lowered: so the test takes fewer steps."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    yield 400
    sys.setrecursionlimit(before)


def test_a_path_may_be_longer_than_a_stack_is_deep(shallow_stack: int) -> None:
    length = shallow_stack + 1

    async def main() -> Any:
        async with AsyncLLM(make_llm(num_blocks=512)) as llm, await llm.branch("a") as branch:
            step = search.sampled(1, max_tokens=1)
            return await search.mcts(branch, step, search.likelihood, budget=length, depth=length)

    assert asyncio.run(main()).best.position == 1 + length


@pytest.mark.parametrize("reward", [float("nan"), None, "much"])
def test_a_reward_may_take_its_time_and_must_be_a_number(place: Place, reward: Any) -> None:
    async def length(text: str) -> float:
        await asyncio.sleep(0)
        return len(text) / 9

    def ask(of: Any) -> Any:
        value = search.rollouts(of, 2, max_tokens=3)
        return lambda branch: search.mcts(branch, STEPS, value, budget=1, depth=1)

    found, _ = run(place, ask(length))
    assert found.best.value == pytest.approx(4 / 9), "a letter and three more"
    with pytest.raises(InvalidInput, match="value must"):
        run(place, ask(lambda text: reward))


@pytest.mark.parametrize(
    ("field", "bad"),
    [("budget", 0), ("depth", 0), ("concurrency", 0), ("virtual_loss", -1.0), ("virtual_loss", math.nan)],
)
def test_bad_arguments_are_refused_before_anything_is_made(place: Place, field: str, bad: Any) -> None:
    async def main() -> None:
        async with place.open() as branch:
            before = place.num_held
            with pytest.raises(ValueError, match=f"^{field} must be"):
                await search.mcts(branch, STEPS, search.likelihood, **{"budget": 9, field: bad})
            assert place.num_held == before

    asyncio.run(main())
    with pytest.raises(ValueError, match=r"^exploration must be"):
        search.uct(-1.0)

    async def none() -> None:
        async with place.open() as branch:
            with pytest.raises(ValueError, match=r"^most must be"):
                await search.mcts(branch, search.listed(letters, 0), search.likelihood, budget=9)

    asyncio.run(none())
