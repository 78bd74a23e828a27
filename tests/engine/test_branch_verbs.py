"""Verbs that servers need: compute at once, score after a suffix, hold, park, look; all can be abandoned."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ramet import LLM, AsyncLLM, InvalidInput, OutOfCapacity, SamplingParams, StepFailed
from ramet.engine.sequence import Hold
from ramet.testing import ScriptedModel, check_idle, check_invariants, fail_forward

PROMPT = [(i * i) % 500 for i in range(40)]


def row(past: list[int]) -> list[float]:
    """A whole row of logits that depends on the last tokens."""
    state = sum(past[-3:]) * 31 + len(past)
    return [((token_id * 7919 + state) % 97) / 10 for token_id in range(512)]


def scripted(**settings: Any) -> LLM:
    llm = LLM(ScriptedModel(row), **{"num_blocks": 64, "block_size": 4, **settings})
    llm.on_step(lambda: check_invariants(llm))
    return llm


def run(work: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            await asyncio.wait_for(work(engine), 60)

    asyncio.run(main())
    while llm.engine.forgotten:
        llm.engine.step()
    check_idle(llm)


def logprob(past: list[int], token_id: int) -> float:
    logits = row(past)
    return logits[token_id] - math.log(sum(map(math.exp, logits)))


def test_compute_appends_and_runs_at_once_and_knows_the_logprobs() -> None:
    llm = scripted(max_batch_tokens=3)

    async def work(engine: AsyncLLM) -> None:
        async with await engine.branch(PROMPT) as branch:
            before = llm.stats().num_computed_tokens
            assert await branch.compute([5, 6, 7, 8]) == []
            assert llm.stats().num_computed_tokens - before == 4
            for new in ([9], [10, 11, 12, 13, 14]):
                past = branch.token_ids
                found = await branch.compute(new, logprobs=True)
                expected = [logprob(past + new[:i], new[i]) for i in range(len(new))]
                assert found == pytest.approx(expected, abs=1e-4)
                (look,) = await engine.look([branch])
                assert look.resident_tokens == look.position == len(past) + len(new)
            assert await branch.compute() == []
            with pytest.raises(InvalidInput):
                await branch.compute([512])
            with pytest.raises(OutOfCapacity):
                await branch.compute([1] * 1000)

    run(work, llm)


def test_what_is_abandoned_or_fails_leaves_the_branch_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    llm = scripted(max_batch_tokens=2)
    llm.on_step(lambda: time.sleep(0.001))

    async def work(engine: AsyncLLM) -> None:
        async with await engine.branch(PROMPT) as branch:
            for verb in (
                lambda: branch.compute([1] * 60),
                lambda: branch.compute([1] * 60, logprobs=True),
                lambda: branch.generate(max_tokens=150),
                lambda: branch.score([[1] * 60]),
            ):
                task = asyncio.create_task(verb())
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await engine.stats()
                assert branch.token_ids == PROMPT
            with fail_forward(llm, 1), pytest.raises(StepFailed):
                await branch.compute([2, 3, 4, 5, 6, 7])
            assert branch.token_ids == PROMPT
            assert (await branch.generate(max_tokens=3)).token_ids

    run(work, llm)
    assert not caplog.records


def test_score_after_a_suffix_and_of_a_branch_that_runs() -> None:
    llm = scripted()

    async def work(engine: AsyncLLM) -> None:
        async with await engine.branch(PROMPT) as branch:
            (fork,) = await branch.fork()
            await fork.extend([7, 8, 9])
            expected = await fork.score([[1, 2], [3]])
            await fork.prune()
            assert await branch.score([[1, 2], [3]], suffix=[7, 8, 9]) == expected
            assert branch.token_ids == PROMPT
            with branch.start_generate(max_tokens=100, max_unread=2, temperature=0) as generating:
                await generating.read()
                (score,) = await branch.score([[1, 2]])
                assert score.token_logprobs[1] < 0
            with pytest.raises(InvalidInput):
                await branch.score([[1]], suffix=[600])

    run(work, llm)


def test_many_score_one_branch_at_once() -> None:
    """Each ends at its own time, while others are at any point of theirs."""
    llm = scripted(max_batch_tokens=3)

    async def work(engine: AsyncLLM) -> None:
        async with await engine.branch(PROMPT) as branch:

            async def ask(index: int) -> None:
                for turn in range(4):
                    length = 1 + (index + turn) % 5
                    (found,) = await branch.score([list(range(index, index + length))])
                    expected = [logprob([*PROMPT, *range(index, i)], i) for i in range(index, index + length)]
                    assert found.token_logprobs == pytest.approx(expected, abs=1e-4)

            await asyncio.gather(*(ask(index) for index in range(8)))

    run(work, llm)


def test_scores_say_what_is_greedy_and_the_first_logit() -> None:
    llm = scripted()
    branch = llm.branch(PROMPT)
    best = max(range(512), key=row(PROMPT).__getitem__)
    then = max(range(512), key=row([*PROMPT, best]).__getitem__)
    scores = branch.score([[best], [best, then], [best, then + 1], [best + 1]])
    assert [score.is_greedy for score in scores] == [True, True, False, False]
    assert [score.first_logit for score in scores] == pytest.approx(
        [row(PROMPT)[score.token_ids[0]] for score in scores]
    )
    branch.prune()
    check_idle(llm)


def test_children_are_there_before_all_are_done() -> None:
    llm = scripted()

    async def work(engine: AsyncLLM) -> None:
        async with await engine.branch(PROMPT) as root:
            children: list[Any] = []
            each = [SamplingParams(max_tokens=most, seed=1) for most in (1, 10_000)]
            with root.start_expand(params=each, max_unread=4, born=children.extend) as growing:
                await growing.read()
                done, running = children
                assert done.output.finish_reason == "length"
                assert (await done.generate(max_tokens=2)).finish_reason == "length"
                (look,) = await engine.look([running])
                assert look.running
            await engine.stats()  # it is closed now: what is complete stays
            looks = await engine.look([done, running])
            assert [look.released for look in looks] == [False, True]
            await done.prune()

    run(work, llm)


def test_leased_branches_are_parked_last_and_pinned_ones_never() -> None:
    llm = scripted(num_blocks=12)

    async def work(engine: AsyncLLM) -> None:
        leased, plain, pinned = [await engine.branch([index] * 8) for index in (1, 2, 3)]
        await leased.hold(Hold.LEASE)
        await pinned.hold(Hold.PIN)

        async def resident() -> list[int]:
            return [look.resident_tokens for look in await engine.look([leased, plain, pinned])]

        assert await resident() == [8, 8, 8]
        await engine.generate([9] * 30, max_tokens=1)  # 8 blocks: 6 are free
        assert await resident() == [8, 0, 8]
        await engine.generate([8] * 34, max_tokens=1)  # 9
        assert await resident() == [0, 0, 8]
        with pytest.raises(OutOfCapacity) as caught:
            await engine.generate([7] * 44, max_tokens=1)  # 11: only the pinned ones are in the way
        assert caught.value.needed <= caught.value.available
        await pinned.hold(Hold.NONE)
        await engine.generate([7] * 44, max_tokens=1)
        assert await resident() == [0, 0, 0]
        assert (await pinned.generate(max_tokens=1, temperature=0)).token_ids  # it computes again
        await pinned.park()
        await pinned.park()
        assert (await resident())[2] == 0
        for branch in (leased, plain, pinned):
            await branch.prune()

    run(work, llm)


def test_a_tree_is_looked_at_as_one() -> None:
    llm = scripted()

    async def work(engine: AsyncLLM) -> None:
        async with await engine.branch(PROMPT) as root:
            kids = await root.fork(3)
            for index, kid in enumerate(kids):
                await kid.compute([index] * 4)
            whole = await engine.look_at_tree([root, *kids])
            assert (whole.logical_tokens, whole.physical_tokens) == (4 * 40 + 12, 40 + 12)
            assert (whole.blocks, whole.shared_blocks) == (13, 10)
            assert whole.sharing_ratio == pytest.approx(172 / 52)
            looks = await engine.look([root, *kids])
            assert [look.exclusive_blocks for look in looks] == [0, 1, 1, 1]
            assert await kids[0].prune() == 1
            (look,) = await engine.look([kids[0]])
            assert look.released and look.resident_tokens == 0

    run(work, llm)


def test_what_is_of_the_wrong_type_is_refused_and_changes_nothing() -> None:
    llm = scripted()

    async def work(engine: AsyncLLM) -> None:
        async with await engine.branch(PROMPT) as branch:
            starts: list[Callable[[Any], object]] = [
                lambda most: engine.start(PROMPT, max_unread=most),
                lambda most: branch.start_generate(max_unread=most),
                lambda most: branch.start_expand(max_unread=most),
            ]
            wrong: Any
            for wrong in (0, True, "4", 1.5):
                for start in starts:
                    with pytest.raises(InvalidInput, match="max_unread"):
                        start(wrong)
            for wrong in (2, "PIN", None):
                with pytest.raises(InvalidInput, match="hold"):
                    await branch.hold(wrong)
            for wrong in (5, [5], "branch", [branch, branch]):
                with pytest.raises(InvalidInput, match="branches"):
                    await engine.look(wrong)
                with pytest.raises(InvalidInput, match="branches"):
                    await engine.look_at_tree(wrong)
            wrong = 1
            with pytest.raises(InvalidInput, match="logprobs"):
                await branch.compute([5], logprobs=wrong)
            with pytest.raises(InvalidInput, match="compute"):
                await engine.branch(PROMPT, compute=wrong)
            with pytest.raises(InvalidInput, match="namespace"):
                await engine.branch(PROMPT, namespace=[])  # type: ignore[arg-type]
            with pytest.raises(InvalidInput, match="namespace"):
                await engine.start(PROMPT, namespace=[]).result()  # type: ignore[arg-type]
            await branch.hold(Hold.PIN)
            assert len((await branch.generate(max_tokens=2)).token_ids) == 2

    run(work, llm)
