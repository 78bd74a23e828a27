"""Beam search over steps, and tree of thought in both orders, beside a look at all there is."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from ramet import search
from tests.api.search.conftest import Place, letters, run

STEPS = search.listed(letters)


def worth(word: str) -> float:
    """Some value of a word, other for each: what is good early is not always good later."""
    return sum((ord(letter) - 96) * weight for letter, weight in zip(word, (3, -8, 5, 2), strict=False))


def value(node: Any) -> float:
    return worth(node.transcript)


def words(length: int) -> list[str]:
    return ["".join(letters) for letters in itertools.product("ab", repeat=length)]


def beams(width: int, depth: int) -> list[str]:
    """What a beam of plain texts keeps."""
    level = [""]
    for _ in range(depth):
        level = sorted((w + x for w in level for x in "ab"), key=lambda w: -worth(w))[:width]
    return level


@pytest.mark.parametrize("width", [1, 2, 3, 16])
def test_a_beam_keeps_the_best_of_each_level(place: Place, width: int) -> None:
    alive: list[int] = []
    found, _ = run(
        place,
        lambda branch: search.beam(
            branch,
            STEPS,
            value,
            width=width,
            depth=4,
            watch=lambda node: alive.append(len(place.llm.engine.sequences)),
        ),
    )
    assert [node.transcript for node in found.answers] == beams(width, 4)
    assert found.text == beams(width, 4)[0]
    if width == 16:
        assert found.best.value == max(map(worth, words(4)))
    # The prompt's branch and its fork; a beam's states with their paths; and the next level's.
    assert max(alive) <= 2 + 4 * width + 2 * width


def test_an_answer_stays_in_a_beam_until_it_is_beaten(place: Place) -> None:
    def beam(branch: Any) -> Any:
        return search.beam(
            branch, STEPS, value, width=2, depth=4, done=lambda node: node.transcript in ("aa", "ba")
        )

    found, _ = run(place, beam)
    # "a" is worth 3 and "b" 6; "ba" -2 and "aa" -5 are answers, and nothing that grows is better than both
    # until the end: "bb" is -10.
    assert [node.transcript for node in found.answers] == ["ba", "aa"]


def test_a_beam_whose_states_cannot_go_on_ends(place: Place) -> None:
    steps = search.listed(lambda node: [] if node.depth == 2 else ["a", "b"])
    found, _ = run(place, lambda branch: search.beam(branch, steps, value, width=2, depth=9))
    assert found.best.depth == 2
    nothing = search.listed(lambda node: [])
    found, _ = run(place, lambda branch: search.beam(branch, nothing, value, width=2, depth=9))
    assert found.text == "" and found.best is found.tree.root


def test_a_beam_spends_no_more_than_its_budget_and_a_level(place: Place) -> None:
    found, _ = run(place, lambda branch: search.beam(branch, STEPS, value, width=2, depth=9, budget=9))
    # A level takes 4 tokens for each state that grows: 4, then 8.
    assert found.tree.num_tokens == 12 and found.best.depth == 2


def test_breadth_first_is_a_beam(place: Place) -> None:
    found, _ = run(place, lambda branch: search.tree_of_thought(branch, STEPS, value, width=2, depth=3))
    assert [node.transcript for node in found.answers] == beams(2, 3)


def test_depth_first_comes_back_from_what_is_not_good_enough(place: Place) -> None:
    order: list[str] = []

    def watch(node: Any) -> None:
        order.append(node.transcript)

    def go(least: float, enough: float) -> Any:
        order.clear()
        found, _ = run(
            place,
            lambda branch: search.tree_of_thought(
                branch,
                STEPS,
                value,
                order="depth",
                depth=3,
                least=least,
                enough=enough,
                done=lambda node: node.depth == 3,
                watch=watch,
            ),
        )
        return found

    # By value: b 6, a 3; ba -2, bb -10; bab 8, baa 3; aab 5.
    found = go(-100, 8)
    assert found.text == "bab"
    families = [sorted(order[first : first + 2]) for first in range(0, len(order), 2)]
    assert families == [["a", "b"], ["ba", "bb"], ["baa", "bab"]], "the best child first, and no further"
    found = go(-100, 100)
    assert found.text == "bab" and len(order) == 2 + 4 + 8, "all was looked at, and the best stays"
    found = go(-4, 100)
    assert "bba" not in order and "aaa" not in order, "nothing grows from what is worth too little"


def test_depth_first_holds_one_path(place: Place) -> None:
    most = 0

    def watch(node: Any) -> None:
        nonlocal most
        most = max(most, len(place.llm.engine.sequences))

    run(
        place,
        lambda branch: search.tree_of_thought(
            branch, STEPS, value, order="depth", depth=4, enough=100, watch=watch
        ),
    )
    # The prompt's branch and its fork, the path with its siblings, and the path of the best so far.
    assert most <= 2 + 2 * 4 + 4


@pytest.mark.parametrize(("field", "bad"), [("width", 0), ("depth", 0), ("budget", 0), ("order", "best")])
def test_bad_arguments_are_refused(place: Place, field: str, bad: Any) -> None:
    async def main() -> None:
        async with place.open() as branch:
            with pytest.raises(ValueError, match=f"^{field} must be"):
                await search.tree_of_thought(branch, STEPS, value, **{"depth": 3, "width": 2, field: bad})

    asyncio.run(main())
