"""Best-of: which choices come back, and when the others stop."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from ramet import LLM, AsyncLLM, InvalidInput, SamplingParams
from ramet.engine.outputs import Choice
from ramet.testing import ScriptedModel, check_idle, check_invariants

MakeLLM = Callable[..., LLM]
BEST_OF = [("mean", Choice.mean_logprob), ("cumulative", Choice.cumulative_logprob)]


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"contest {seed}").choices(range(512), k=length)


@pytest.mark.parametrize(("best_by", "score"), BEST_OF)
@pytest.mark.parametrize("ends", [[], list(range(0, 512, 9))])
def test_the_best_of_all_that_would_have_been_made_come_back(
    make_tiny: MakeLLM, best_by: Any, score: Any, ends: list[int]
) -> None:
    settings: dict[str, Any] = {"seed": 3, "max_tokens": 20, "stop_token_ids": ends}
    prompt = tokens(19)
    everything = make_tiny().generate(prompt, n=24, **settings)[0].choices
    assert len({len(choice.token_ids) for choice in everything}) > 1 or not ends
    ranked = sorted(everything, key=score.fget, reverse=True)
    llm = make_tiny()
    best = llm.generate(prompt, n=3, best_of=24, best_by=best_by, **settings)[0].choices
    assert [choice.token_ids for choice in best] == [choice.token_ids for choice in ranked[:3]]
    assert [choice.index for choice in best] == [0, 1, 2]
    assert {choice.finish_reason for choice in best} <= {"stop", "length"}
    check_idle(llm)
    kids = llm.branch(prompt).expand(n=3, best_of=24, best_by=best_by, **settings)
    assert [kid.output.token_ids for kid in kids if kid.output] == [choice.token_ids for choice in best]
    assert kids[0].parent is not None
    assert set(kids[0].parent.children) == set(kids)


def coin(past: list[int]) -> dict[int, float]:
    """The first token is good or bad; a good one soon ends, a bad one gets worse and worse."""
    if past[-1] == 0:
        return {1: math.log(0.5), 2: math.log(0.5)}
    return {3: 0.0} if past[-1] == 1 else {2: math.log(0.5), 4: math.log(0.5)}


def test_who_cannot_win_any_more_is_cancelled_and_its_blocks_are_free_at_once() -> None:
    llm = LLM(ScriptedModel(coin, vocab_size=5, eos_token_ids=frozenset([3])), block_size=2, num_blocks=256)
    held = []

    def look() -> None:
        check_invariants(llm)
        held.append(
            (llm.stats().num_running, llm.stats().pages.num_in_use, llm.stats().pages.num_cached_idle)
        )

    llm.on_step(look)
    root = llm.branch([0] * 4)  # two blocks
    kids = root.expand(n=1, best_of=16, best_by="cumulative", seed=1, max_tokens=40, banned_token_ids=[4])
    assert kids[0].output is not None
    assert kids[0].output.token_ids == [1, 3]
    # Once one has ended, all that have a token more than it are behind: two steps, not forty.
    assert len(held) <= 5
    running, in_use, cached = held[-1]
    assert running == 0
    assert in_use == len(kids[0].block_table.blocks), "the winner's and the prompt's, none of fifteen others"
    assert cached == 0


def test_losers_that_were_complete_free_their_blocks_as_well(make_tiny: MakeLLM) -> None:
    llm = make_tiny(block_size=4)
    root = llm.branch(tokens(9))
    (best,) = root.expand(n=1, best_of=6, seed=1, max_tokens=12)
    pages = llm.stats().pages
    assert pages.num_in_use == len({*root.block_table.blocks, *best.block_table.blocks})
    assert pages.num_cached_idle == 0


def test_a_prompt_is_computed_once_for_128_choices(make_tiny: MakeLLM) -> None:
    """And each child may have settings of its own."""
    llm = make_tiny(num_blocks=512)
    prompt = tokens(40)
    output = llm.generate(prompt, n=128, max_tokens=2, seed=5)[0]
    assert len(output.choices) == 128
    # The prompt, and then one row a choice: the last token of each is not fed.
    assert llm.stats().num_computed_tokens == 40 + 128
    each = [
        SamplingParams(max_tokens=1 + index % 3, temperature=index % 2, seed=index) for index in range(128)
    ]
    kids = llm.branch(prompt).expand(params=each)
    assert [len(kid.output.token_ids) for kid in kids if kid.output] == [
        1 + index % 3 for index in range(128)
    ]
    greedy = [kid.output.token_ids for kid in kids[::2] if kid.output]
    longest = max(greedy, key=len)
    assert all(longest[: len(one)] == one for one in greedy)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        *[
            ("best_of", {"n": 2, "best_of": value})
            for value in (0, 1, -1, 129, 10**6, True, 2.0, "3", math.nan)
        ],
        *[("best_by", {"best_by": value}) for value in ("", "sum", None, 1)],
    ],
)
def test_bad_values_name_their_field(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as raised:
        SamplingParams(**settings)
    assert raised.value.field == field


def test_best_of_is_refused_where_it_cannot_be(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    branch = llm.branch([1])
    for call in (
        lambda: llm.stream([1, 2], best_of=2),
        lambda: branch.generate(best_of=2),
        lambda: branch.expand(params=[SamplingParams(best_of=2)]),
        lambda: llm.step([branch], best_of=2),
    ):
        with pytest.raises(InvalidInput, match="best_of"):
            call()

    async def streamed() -> None:
        async with AsyncLLM(llm) as asynchronous:
            with pytest.raises(InvalidInput, match="best_of"):
                async for _ in asynchronous.stream([1, 2], best_of=2):
                    pass
            assert len((await asynchronous.generate([1, 2], best_of=2, max_tokens=3))[0].choices) == 1

    asyncio.run(streamed())


def test_a_cancelled_contest_gives_the_best_of_what_is_there(make_tiny: MakeLLM) -> None:
    llm = make_tiny()

    async def run() -> None:
        async with AsyncLLM(llm) as asynchronous:
            with asynchronous.start(tokens(9), n=2, best_of=5, max_tokens=500, seed=2) as work:
                while (await asynchronous.stats()).num_running != 5:
                    await asyncio.sleep(0)
                assert await work.cancel()
                choices = (await work.result())[0].choices
            assert [choice.finish_reason for choice in choices] == ["abort"] * 2
            assert choices[0].mean_logprob >= choices[1].mean_logprob

    asyncio.run(run())
    check_idle(llm)
