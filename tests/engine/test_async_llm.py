"""The verbs as coroutines: the same results, many at once, back-pressure, cancelling, closing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ramet import LLM, InvalidInput, StepFailed
from ramet.engine.async_llm import AsyncLLM, Closed
from ramet.testing import ScriptedModel, check_idle, check_invariants, fail_forward

PROMPT = random.Random(3).choices(range(512), k=40)


def scripted(**settings: Any) -> LLM:
    model = ScriptedModel(lambda past: {(sum(past) * 31 + i * 7) % 512: 1.0 * i for i in range(4)})
    llm = LLM(model, **{"num_blocks": 128, **settings})
    llm.on_step(lambda: check_invariants(llm))
    return llm


def run(work: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], llm: LLM | None = None) -> Any:
    """Do `work` with an engine of its own, and leave nothing behind."""
    inner = llm or scripted()

    async def main() -> Any:
        async with AsyncLLM(inner) as engine:
            return await asyncio.wait_for(work(engine), 60)

    result = asyncio.run(main())
    while inner.engine.forgotten:
        inner.engine.step()
    check_idle(inner)
    return result


def test_the_same_as_the_blocking_verbs() -> None:
    settings: dict[str, Any] = {"n": 3, "seed": 5, "max_tokens": 20}
    llm = scripted()
    expected = [c.token_ids for c in llm.generate(PROMPT, **settings)[0].choices]
    root = llm.branch(PROMPT)
    kids = [kid.token_ids for kid in root.expand(n=2, seed=1, max_tokens=9)]
    scores = [score.token_logprobs for score in root.score([[1, 2], [3]])]

    async def work(engine: AsyncLLM) -> None:
        output = (await engine.generate(PROMPT, **settings))[0]
        assert [choice.token_ids for choice in output.choices] == expected
        parts: list[list[int]] = [[], [], []]
        async for delta in engine.stream(PROMPT, **settings):
            parts[delta.index] += delta.token_ids
        assert parts == expected
        async with await engine.branch(PROMPT) as branch:
            assert [kid.token_ids for kid in await branch.expand(n=2, seed=1, max_tokens=9)] == kids
            assert [score.token_logprobs for score in await branch.score([[1, 2], [3]])] == scores
            (fork,) = await branch.fork()
            await fork.extend([1, 2])
            choices = await engine.step([fork], temperature=0)
            assert fork.token_ids == [*PROMPT, 1, 2, *choices[0].token_ids]
            await fork.truncate(20)
            assert len(fork) == 20
            assert await fork.promote() >= 0
            assert (await engine.stats()).pages.num_in_use > 0

    run(work)


def test_what_is_asked_at_the_same_time_runs_in_the_same_batches() -> None:
    alone = scripted()
    for i in range(16):
        alone.generate([*PROMPT, i], max_tokens=20)
    llm = scripted()

    async def work(engine: AsyncLLM) -> None:
        await asyncio.gather(*(engine.generate([*PROMPT, i], max_tokens=20) for i in range(16)))

    run(work, llm)
    assert llm.stats().num_steps < alone.stats().num_steps / 4


def test_a_slow_reader_holds_its_generation_and_nobody_elses() -> None:
    llm = scripted()

    async def work(engine: AsyncLLM) -> None:
        stream = engine.stream(PROMPT, max_tokens=400, max_unread=8, seed=1)
        first = await anext(stream)
        await engine.generate(PROMPT, max_tokens=100, seed=2)
        held = [s for s in llm.engine.sequences if s.is_held]
        assert len(held) == 1
        assert len(held[0].token_ids) - len(PROMPT) - len(first.token_ids) == 8
        rest = [token for delta in [d async for d in stream] for token in delta.token_ids]
        expected = scripted().generate(PROMPT, max_tokens=400, seed=1)[0].choices[0].token_ids
        assert first.token_ids + rest == expected

    run(work, llm)


def test_a_held_stream_gives_its_pages_up_to_who_can_run() -> None:
    llm = scripted(num_blocks=6)

    async def work(engine: AsyncLLM) -> None:
        stream = engine.stream(PROMPT, max_tokens=40, max_unread=1, seed=1)
        first = await anext(stream)
        other = random.Random(4).choices(range(512), k=60)
        await engine.generate(other, max_tokens=20, seed=2)
        rest = [token for delta in [d async for d in stream] for token in delta.token_ids]
        expected = scripted().generate(PROMPT, max_tokens=40, seed=1)[0].choices[0].token_ids
        assert first.token_ids + rest == expected

    run(work, llm)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.02])
def test_a_cancelled_caller_leaves_nothing(delay: float) -> None:
    llm = scripted()

    async def work(engine: AsyncLLM) -> None:
        branch = await engine.branch(PROMPT)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(engine.generate(PROMPT, n=3, max_tokens=1000)),
            asyncio.create_task(branch.expand(n=3, max_tokens=1000)),
        ]
        stream = engine.stream(PROMPT, max_tokens=1000)
        await anext(stream)
        await asyncio.sleep(delay)
        for task in tasks:
            task.cancel()
        await stream.aclose()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await branch.generate(max_tokens=3)).token_ids
        await branch.prune()
        assert not (await engine.stats()).num_running

    run(work, llm)


def test_errors_reach_their_caller_and_nobody_else() -> None:
    llm = scripted()

    async def work(engine: AsyncLLM) -> None:
        with pytest.raises(InvalidInput):
            await engine.generate([[]])
        with pytest.raises(InvalidInput):
            await anext(engine.stream([600]))
        with pytest.raises(InvalidInput, match="prompt"):
            await anext(engine.stream(5))  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            await anext(engine.stream(PROMPT, max_unread=0))
        with fail_forward(llm, 3), pytest.raises(StepFailed):
            await engine.generate(PROMPT, max_tokens=30)
        assert len((await engine.generate(PROMPT, max_tokens=3))[0].choices[0].token_ids) == 3

    run(work, llm)


def test_closing_ends_what_runs_with_an_error() -> None:
    llm = scripted()

    async def main() -> None:
        engine = AsyncLLM(llm)
        task = asyncio.create_task(engine.generate(PROMPT, max_tokens=100_000))
        stream = engine.stream(PROMPT, max_tokens=1000, max_unread=4)
        await anext(stream)
        await engine.close()
        with pytest.raises(Closed):
            await task
        with pytest.raises(Closed):
            async for _ in stream:
                pass
        with pytest.raises(Closed):
            await engine.stats()
        await engine.close()

    asyncio.run(main())
    check_idle(llm)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_loop_reaches_everybody() -> None:
    llm = scripted()

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    async def main() -> None:
        engine = AsyncLLM(llm)
        stream = engine.stream(PROMPT, max_tokens=1000, max_unread=4)
        await anext(stream)
        llm.on_step(broken)
        with pytest.raises(ZeroDivisionError):
            await engine.generate(PROMPT, max_tokens=10)
        with pytest.raises((ZeroDivisionError, Closed)):
            async for _ in stream:
                pass
        with pytest.raises(Closed):
            await engine.stats()
        await engine.close()

    asyncio.run(main())


def test_several_prompts_are_read_while_they_come() -> None:
    prompts = [[1, 2, 3], PROMPT]
    settings: dict[str, Any] = {"n": 2, "seed": 3, "max_tokens": 6, "logprobs": 1, "return_entropy": True}
    expected = scripted().generate(prompts, **settings)

    async def work(engine: AsyncLLM) -> None:
        with engine.start(prompts, max_unread=2, **settings) as started:
            await started.started()
            told: dict[tuple[int, int], list[Any]] = {(p, i): [] for p in range(2) for i in range(2)}
            async for delta in started.deltas():
                told[delta.prompt_index, delta.index].append(delta)
            outputs = await started.result()
        for (prompt_index, index), deltas in told.items():
            choice = expected[prompt_index].choices[index]
            assert outputs[prompt_index].choices[index] == choice
            assert [t for d in deltas for t in d.token_ids] == choice.token_ids
            assert [t for d in deltas for t in d.token_logprobs] == choice.token_logprobs
            assert [t for d in deltas for t in d.logprobs] == choice.logprobs
            assert [t for d in deltas for t in d.entropies] == choice.entropies
            assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]

    run(work)


def test_cancelled_work_keeps_its_tokens() -> None:
    llm = scripted()

    async def work(engine: AsyncLLM) -> None:
        with engine.start(PROMPT, n=2, max_tokens=10_000, max_unread=4) as started:
            deltas = [await started.read()]
            await started.cancel()
            while new := await started.read():
                deltas.append(new)
            choices = (await started.result())[0].choices
        for choice in choices:
            assert choice.finish_reason == "abort" and 0 < len(choice.token_ids) < 10_000
            mine = [d for many in deltas for d in many if d.index == choice.index]
            assert [t for d in mine for t in d.token_ids] == choice.token_ids
            assert mine[-1].finish_reason == "abort"
        async with await engine.branch(PROMPT) as branch:
            with branch.start_expand(n=2, max_tokens=10_000, max_unread=4) as growing:
                await growing.read()
                await growing.cancel()
                kids = await growing.result()
            assert [kid.token_ids[: len(PROMPT)] for kid in kids] == [PROMPT, PROMPT]
            with branch.start_generate(max_tokens=10_000, max_unread=4) as generating:
                await generating.read()
                await generating.cancel()
                choice = await generating.result()
            assert branch.token_ids == [*PROMPT, *choice.token_ids]

    run(work, llm)


def test_work_that_is_closed_early_leaves_nothing_and_says_so() -> None:
    async def work(engine: AsyncLLM) -> None:
        started = engine.start(PROMPT, max_tokens=10_000, max_unread=4)
        await started.read()
        started.close()
        started.close()
        with pytest.raises(Closed):
            await started.result()
        with pytest.raises(InvalidInput):
            await engine.start([600]).started()
        assert not (await engine.stats()).num_running

    run(work)


def test_who_is_born_is_known_before_what_became_of_them() -> None:
    async def work(engine: AsyncLLM) -> None:
        async with await engine.branch(PROMPT) as root:
            for wait in (False, True):
                loop, seen = asyncio.get_running_loop(), list[Any]()

                def born(kids: list[Any]) -> None:
                    loop.call_soon_threadsafe(seen.extend, kids)  # noqa: B023

                settings: dict[str, Any] = {"n": 2, "max_tokens": 1, "max_unread": 4}
                with root.start_expand(born=born, **settings) as growing:
                    if wait:
                        time.sleep(0.2)  # the loop is busy until all is done
                    kids = await growing.result()
                    assert [kid.id for kid in seen] == [kid.id for kid in kids]

    run(work)


def test_namespaces_share_nothing() -> None:
    async def work(engine: AsyncLLM) -> None:
        cached = [
            (await engine.generate(PROMPT, max_tokens=1, namespace=name))[0].num_cached_tokens
            for name in ("a", "b", "a")
        ]
        assert cached == [0, 0, len(PROMPT) // 16 * 16]
        async with await engine.branch(PROMPT, namespace="c") as branch:
            await branch.generate(max_tokens=1)
            output = (await engine.generate(PROMPT, max_tokens=1, namespace="c"))[0]
            assert output.num_cached_tokens == len(PROMPT) // 16 * 16

    run(work)


@pytest.mark.parametrize("verb", ["stream", "fork", "expand", "branch"])
def test_what_comes_too_late_for_a_cancelled_caller_is_let_go(verb: str) -> None:
    """The engine is done, or all but, when the caller, whose loop was busy, is cancelled."""
    llm = scripted()

    async def work(engine: AsyncLLM) -> None:
        root = await engine.branch(PROMPT)
        verbs: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "stream": lambda: anext(engine.stream(PROMPT, max_tokens=1000, max_unread=4)),
            "fork": lambda: root.fork(3),
            "expand": lambda: root.expand(3, max_tokens=1),
            "branch": lambda: engine.branch([*PROMPT, 1]),
        }
        for busy in (0.0, 0.001, 0.1):
            task = asyncio.ensure_future(verbs[verb]())
            await asyncio.sleep(0)
            time.sleep(busy)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await engine.stats()).num_running == 0
        assert len(llm.engine.sequences) == 1
        await root.prune()

    run(work, llm)
