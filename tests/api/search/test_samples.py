"""Best-of-n and self-consistency."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ramet import search
from tests.api.search.conftest import Place, run


def test_the_best_is_the_likeliest(place: Place) -> None:
    found, _ = run(place, lambda branch: search.best_of(branch, 6, max_tokens=5, seed=3, temperature=2.0))
    logprobs = [node.logprob for node in found.answers]
    assert len(logprobs) == 6 and logprobs == sorted(logprobs, reverse=True)
    assert found.best is found.answers[0] and found.tree.num_tokens == 30


def test_a_judge_decides(place: Place) -> None:
    async def judge(node: Any) -> float:
        await asyncio.sleep(0)
        return -float(node.text.count("e"))

    def ask(branch: Any) -> Any:
        return search.best_of(branch, 5, judge, max_tokens=8, seed=3, temperature=2.0)

    found, _ = run(place, ask)
    counts = [node.text.count("e") for node in found.answers]
    assert counts == sorted(counts) and len(set(counts)) > 1


def test_what_most_agree_on_wins(place: Place) -> None:
    def last_letter(text: str) -> str | None:
        return text[-1] if text[-1] in "abcdefghijklm" else None

    def ask(branch: Any) -> Any:
        return search.self_consistency(branch, 16, last_letter, max_tokens=3, seed=1, temperature=3.0)

    found, _ = run(place, ask)
    said = [last_letter(node.text) for node in found.answers]
    counts = {letter: said.count(letter) for letter in said if letter is not None}
    assert found.votes == counts and len(counts) > 1
    winner = last_letter(found.text)
    assert winner is not None and counts[winner] == max(counts.values())
    assert found.best.value == max(counts.values()) / 16
    winners = [node for node in found.answers if last_letter(node.text) == winner]
    assert found.best.logprob == max(node.logprob for node in winners)


def test_an_answer_may_take_its_time(place: Place) -> None:
    async def length(text: str) -> int:
        await asyncio.sleep(0)
        return len(text)

    found, _ = run(place, lambda branch: search.self_consistency(branch, 3, length, max_tokens=2))
    assert found.votes == {2: 3} and found.best.value == 1.0


def test_nobody_has_an_answer(place: Place) -> None:
    found, _ = run(place, lambda branch: search.self_consistency(branch, 3, lambda text: None, max_tokens=2))
    assert found.votes == {} and found.best.value == 0.0


@pytest.mark.parametrize("n", [0, 129, True, 1.5])
def test_n_is_checked(place: Place, n: Any) -> None:
    async def main() -> None:
        async with place.open() as branch:
            with pytest.raises(ValueError, match=r"^n must be"):
                await search.best_of(branch, n)
            with pytest.raises(ValueError, match=r"^n must be"):
                await search.self_consistency(branch, n, str)

    asyncio.run(main())
