"""What runs when: siblings, priorities, victims, progress, requests that are not cached."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest

from ramet import LLM, Branch, InvalidInput, SamplingParams
from ramet.engine.preemption import choose_victim
from ramet.engine.runs import Generation
from ramet.engine.sequence import Sequence
from ramet.testing import ScriptedModel, check_idle, check_invariants

MakeLLM = Callable[..., LLM]


def tokens(length: int, seed: int) -> list[int]:
    return random.Random(f"scheduler {seed}").choices(range(512), k=length)


SHARED = tokens(100, 0)


@pytest.fixture
def make() -> MakeLLM:
    """Engines whose next token is a function of the whole past."""

    def build(**settings: int) -> LLM:
        model = ScriptedModel(lambda past: (sum(past) * 31 + len(past)) % 512)
        llm = LLM(model, **{"num_blocks": 64, **settings})  # type: ignore[arg-type]
        llm.on_step(lambda: check_invariants(llm))
        return llm

    return build


def start(llm: LLM, prompt: list[int], max_tokens: int, priority: int = 0) -> tuple[Sequence, Generation]:
    sequence = llm.engine.new_sequence(list(prompt), keep=False)
    run = llm.engine.generations(sequence, SamplingParams(temperature=0, max_tokens=max_tokens))[0]
    llm.engine.submit(sequence, run, priority=priority)
    return sequence, run


# -- siblings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [512, 32, 7])
def test_cold_siblings_compute_their_prefix_once(make: MakeLLM, budget: int) -> None:
    """8 prompts with 100 common tokens and one of their own: 96 are common blocks, the rest is each one's."""
    llm = make(max_batch_tokens=budget)
    prompts = [[*SHARED, i] for i in range(8)]
    outputs = llm.generate(prompts, temperature=0, max_tokens=1)
    alone = [make().generate(p, temperature=0, max_tokens=1)[0].choices[0].token_ids for p in prompts]
    assert [output.choices[0].token_ids for output in outputs] == alone
    assert llm.stats().num_computed_tokens == 101 + 7 * (101 - 96)
    assert llm.stats().pages.num_dropped == 0, "nobody computed a block twice"
    check_idle(llm)


def test_siblings_behind_a_leader_do_not_hold_up_strangers(make: MakeLLM) -> None:
    llm = make(max_batch_tokens=64)
    start(llm, [*SHARED, 1], 4)
    follower, _ = start(llm, [*SHARED, 2], 4)
    stranger, run = start(llm, tokens(20, 9), 4)
    llm.engine.step()
    llm.engine.step()
    assert follower in llm.engine.scheduler.waiting
    assert run.choice.token_ids
    assert stranger.run is run


def test_a_follower_leads_when_the_leader_is_aborted(make: MakeLLM) -> None:
    llm = make(max_batch_tokens=32)
    leader, _ = start(llm, [*SHARED, 1], 4)
    _, run = start(llm, [*SHARED, 2], 4)
    llm.engine.step()
    llm.engine.release(leader)
    llm.engine.run([run])
    assert (
        run.choice.token_ids
        == make().generate([*SHARED, 2], temperature=0, max_tokens=4)[0].choices[0].token_ids
    )
    check_idle(llm)


def test_forks_that_were_extended_alike_compute_it_once(make: MakeLLM) -> None:
    llm = make()
    root = llm.branch(SHARED[:20])
    root.extend(SHARED[20:])
    kids = root.fork(4)
    before = llm.stats().num_computed_tokens
    llm.step(kids, temperature=0)
    # 80 tokens once, also the four behind the last full block; of the others the last token is a query.
    assert llm.stats().num_computed_tokens - before == 80 + 3
    root.prune()
    check_idle(llm)


def num_written(llm: LLM, work: Callable[[], object]) -> int:
    """Tokens that get KV while `work` is done: those that only ask for logits again are not counted."""
    before = llm.stats()
    work()
    after = llm.stats()
    queries = after.num_query_tokens - before.num_query_tokens
    return after.num_computed_tokens - before.num_computed_tokens - queries


def test_a_sampled_token_is_computed_once_however_many_forks_go_on_from_it(make: MakeLLM) -> None:
    """A node of a search: what it sampled last has no KV yet, and each fork gets a tool's own result."""
    llm = make()

    def grow(node: Branch, first: int) -> None:
        kids = node.fork(4)
        for index, kid in enumerate(kids):
            kid.extend([first + index, 7])
        llm.expand(kids, 2, temperature=0, max_tokens=1)

    for length in range(20, 38):  # the sampled token at every place in a block
        node = llm.branch(tokens(length, length))
        node.generate(max_tokens=3, temperature=0)
        assert num_written(llm, partial(grow, node, 100)) == 1 + 4 * 2
        assert num_written(llm, partial(grow, node, 200)) == 4 * 2, "also for forks that come later"
        assert num_written(llm, partial(node.generate, max_tokens=1)) == 0, "and for the node itself"
        expected = make().generate(node.token_ids[:-1], temperature=0, max_tokens=1)
        assert node.token_ids[-1] == expected[0].choices[0].token_ids[0]
        node.prune()
        check_idle(llm)


def test_whoever_runs_first_computes_what_forks_have_in_common(make: MakeLLM) -> None:
    def both(llm: LLM) -> tuple[Branch, Branch]:
        node = llm.branch(SHARED[:30])
        node.extend(SHARED[30:35])
        return node, node.fork()[0]

    llm = make()
    for order in (0, 1):
        pair = both(llm)
        assert num_written(llm, partial(pair[order].generate, max_tokens=1)) == 5
        assert num_written(llm, partial(pair[1 - order].generate, max_tokens=1)) == 0
        # What was a fork's is freed with it, and what is its parent's with the parent.
        pair[0].prune()
        check_idle(llm)
        llm = make()
    # One that is let go, goes back or goes its own way is waited for by nobody.
    for leave in (Branch.prune, Branch.release, lambda one: one.truncate(31), lambda one: one.truncate(20)):
        llm = make()
        node, fork = both(llm)
        leave(fork)
        assert num_written(llm, partial(node.generate, max_tokens=1)) == 5
        node.prune()
        check_idle(llm)


def test_a_leader_of_forks_that_is_aborted_is_followed_by_the_next(make: MakeLLM) -> None:
    llm = make(max_batch_tokens=4)
    node = llm.branch(SHARED[:30])
    node.extend(SHARED[30:44])
    kids = node.fork(3)
    engine = llm.engine
    runs = [engine.generations(kid._sequence, SamplingParams(max_tokens=2, temperature=0))[0] for kid in kids]
    for kid, one in zip(kids, runs, strict=True):
        engine.submit(kid._sequence, one)
    engine.step()
    assert [kid._sequence in engine.scheduler.running for kid in kids] == [True, False, False]
    kids[0].prune()
    engine.run(runs[1:])
    alone = make().generate(SHARED[:44], max_tokens=2, temperature=0)[0].choices[0].token_ids
    assert [one.choice.token_ids for one in runs[1:]] == [alone] * 2
    node.prune()
    check_idle(llm)


# -- priorities ------------------------------------------------------------------------------------------


def test_a_higher_priority_is_admitted_first(make: MakeLLM) -> None:
    llm = make(max_batch_tokens=16)
    runs = [start(llm, tokens(16, i), 1, priority=p)[1] for i, p in enumerate((0, 0, 5, 1))]
    order: list[int] = []
    for _ in range(4):
        llm.engine.step()
        order += [i for i, run in enumerate(runs) if run.finished and i not in order]
    assert order == [2, 3, 0, 1]


def test_a_lower_priority_makes_room_even_if_it_is_older(make: MakeLLM) -> None:
    llm = make(num_blocks=8)
    _, low = start(llm, tokens(60, 1), 60)
    llm.engine.step()
    _, high = start(llm, tokens(60, 2), 60, priority=1)
    while not high.finished:
        llm.engine.step()
    assert not low.finished
    assert llm.stats().num_preemptions >= 1
    llm.engine.run([low])
    assert len(low.choice.token_ids) == 60
    check_idle(llm)


def test_priority_is_checked(make: MakeLLM) -> None:
    llm = make()
    with pytest.raises(InvalidInput, match="priority"):
        llm.generate([1], priority=1.5)  # type: ignore[arg-type]


# -- victims -----------------------------------------------------------------------------------------------


def test_never_an_older_request_for_a_younger_one(make: MakeLLM) -> None:
    llm = make(num_blocks=12)
    runs = [start(llm, tokens(40, i), 60)[1] for i in range(4)]
    done: list[int] = []
    while not all(run.finished for run in runs):
        llm.engine.step()
        done += [i for i, run in enumerate(runs) if run.finished and i not in done]
    assert done == [0, 1, 2, 3]
    assert llm.stats().num_preemptions > 0
    for i, run in enumerate(runs):
        alone = make().generate(tokens(40, i), temperature=0, max_tokens=60)[0].choices[0].token_ids
        assert run.choice.token_ids == alone
    check_idle(llm)


def test_the_victim_frees_enough_for_the_least_work(make: MakeLLM) -> None:
    """Of three younger ones: one shares all but its last block, one has 3 blocks, one has 6."""
    llm = make()
    sizes = [(SHARED[:48], 1), (tokens(40, 5), 2), (tokens(90, 6), 3)]
    needy, _ = start(llm, SHARED[:52], 30)
    llm.engine.step()
    others = [start(llm, [*prompt, 7], 30)[0] for prompt, _ in sizes]
    llm.engine.step()
    freed = [s.live_cursor.num_exclusive_blocks for s in others]
    assert freed == [1, 3, 6]
    assert [choose_victim(others, needy, n) for n in (1, 2, 3, 4, 6, 9)] == [
        others[0],
        others[1],
        others[1],
        others[2],
        others[2],
        others[2],
    ]
    others[1].safe_until = 1000
    assert choose_victim(others, needy, 2) is others[2], "it has to make progress first"
    assert choose_victim([needy], needy, 2) is needy


def test_each_time_it_runs_a_sequence_gets_a_block_further(make: MakeLLM) -> None:
    """A pool for one and a half: the second is preempted again and again, but never without progress."""
    llm = make(num_blocks=9)
    _, first = start(llm, tokens(30, 1), 90)
    second, run = start(llm, tokens(30, 2), 90)
    lengths: list[int] = []
    was_running = False
    while not (first.finished and run.finished):
        llm.engine.step()
        running = second in llm.engine.scheduler.running
        if was_running and not running and not run.finished:
            lengths.append(len(second.token_ids))
        was_running = running
    assert lengths
    assert all(b - a >= 16 for a, b in pairwise(lengths))
    check_idle(llm)


# -- not cached --------------------------------------------------------------------------------------------


def test_a_request_that_is_not_cached_finds_and_leaves_nothing(make: MakeLLM) -> None:
    """Budget 64, 200 tokens: 4 steps without and 4 with the cache, then 1."""
    llm = make(num_blocks=16, max_batch_tokens=64)

    def steps(*, cache: bool) -> int:
        before = llm.stats()
        output = llm.generate(tokens(200, 3), temperature=0, max_tokens=1, cache=cache)[0]
        assert output.num_cached_tokens == (192 if steps_taken == [4, 4] else 0)
        return llm.stats().num_steps - before.num_steps

    steps_taken: list[int] = []
    steps_taken.append(steps(cache=False))
    assert llm.stats().pages.num_free == 16
    steps_taken.append(steps(cache=True))
    assert llm.stats().pages.num_cached_idle == 12
    steps_taken.append(steps(cache=True))
    assert steps_taken == [4, 4, 1]
    llm.generate(tokens(200, 3), n=3, max_tokens=20, cache=False)
    assert not [ns for ns in llm.engine.cache.tree.roots if ns != ("local",)]
    check_idle(llm)
