"""Faults that other engines' users have reported, as cases on a tiny random llama.

A: prefix cache and tree. B: reference counts, copy-on-write, fork, rollback. C: eviction and accounting.
D1, D6: requests that cannot fit, and steps that fail. Block size 16; REF is a fresh engine with a large pool.
E: who ends what when steps fail and requests meet, on a scripted model with block size 4.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from torch import Tensor

from ramet import LLM, Branch, BranchReleased, InvalidInput, OutOfCapacity, SamplingParams
from ramet.engine.errors import StepFailed
from ramet.engine.runs import Generation, Run
from ramet.engine.sequence import Sequence
from ramet.engine.step import Step
from ramet.radix.accounting import num_sharers
from ramet.testing import ScriptedModel, check_idle, check_invariants, fail_forward, fail_reservation

MakeLLM = Callable[..., LLM]


def tokens(length: int, seed: int) -> list[int]:
    return random.Random(f"cases {seed}").choices(range(512), k=length)


X, Y, Z = (tokens(200, seed) for seed in range(3))


@pytest.fixture(scope="module")
def ref(make_tiny: MakeLLM) -> Callable[[list[int], int], list[int]]:
    """Greedy tokens without a cache, alone, in one chunk."""

    def run(prompt: list[int], max_tokens: int) -> list[int]:
        return make_tiny().generate(prompt, temperature=0, max_tokens=max_tokens)[0].choices[0].token_ids

    return run


Ref = Callable[[list[int], int], list[int]]


def greedy(llm: LLM, prompt: list[int], max_tokens: int = 1) -> tuple[list[int], int]:
    """(tokens, cached tokens) of one request that runs alone."""
    output = llm.generate(prompt, temperature=0, max_tokens=max_tokens)[0]
    return output.choices[0].token_ids, output.num_cached_tokens


def start(llm: LLM, prompt: list[int], max_tokens: int) -> tuple[Sequence, Generation]:
    """Submit a greedy request and let it run with what the test does next."""
    sequence = llm.engine.new_sequence(list(prompt), keep=False)
    run = llm.engine.generations(sequence, SamplingParams(temperature=0, max_tokens=max_tokens))[0]
    llm.engine.submit(sequence, run)
    return sequence, run


def finish(llm: LLM, *runs: Generation) -> list[list[int]]:
    llm.engine.run(runs)
    return [run.choice.token_ids for run in runs]


# -- A: prefix cache and tree -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a1_whole_prompt_cached(make_tiny: MakeLLM, ref: Ref, length: int) -> None:
    llm = make_tiny(num_blocks=16)
    expected = ref(X[:length], 4)
    num_cached_blocks = []
    for attempt in range(3):
        found, cached = greedy(llm, X[:length], 4)
        assert found == expected
        assert cached <= length - 1
        if attempt:
            assert cached >= (length - 1) // 16 * 16
        check_idle(llm)
        num_cached_blocks.append(llm.engine.cache.num_cached)
    assert num_cached_blocks[1] == num_cached_blocks[2]


def test_a2_the_hit_is_looked_up_again_at_admission(make_tiny: MakeLLM, ref: Ref) -> None:
    llm = make_tiny(num_blocks=8)
    greedy(llm, X[:64])
    _, long = start(llm, Z[:60], 30)
    waiter, other = start(llm, [*X[:64], 7], 4)
    while not long.finished:
        llm.engine.step()
        if not long.finished:
            assert waiter in llm.engine.scheduler.waiting, "it needs five blocks and only four are not Z's"
    assert finish(llm, other) == [ref([*X[:64], 7], 4)]
    assert long.choice.token_ids == ref(Z[:60], 30)
    assert waiter.num_cached_tokens == 32, "Z's growth to six blocks evicted the last two of X"
    check_idle(llm)


def test_a3_no_hit_on_what_is_not_computed(make_tiny: MakeLLM, ref: Ref) -> None:
    llm = make_tiny(max_batch_tokens=128)
    outputs = llm.generate([X[:33], X[:33]], temperature=0, max_tokens=4)
    assert [o.choices[0].token_ids for o in outputs] == [ref(X[:33], 4)] * 2
    assert outputs[1].num_cached_tokens == 32, "the twin waited a step"
    aborted, _ = start(llm, Y[:33], 4)
    llm.engine.release(aborted)
    assert greedy(llm, Y[:33], 4) == (ref(Y[:33], 4), 0)
    check_idle(llm)


def test_a4_no_entry_outlives_its_block(make_tiny: MakeLLM, ref: Ref) -> None:
    llm = make_tiny(num_blocks=4)
    greedy(llm, X[:48])
    greedy(llm, Y[:64])
    assert greedy(llm, X[:48]) == (ref(X[:48], 1), 0)
    for seed in range(1000):
        greedy(llm, tokens(40, 100 + seed))
        assert count_nodes(llm) <= 4


def count_nodes(llm: LLM) -> int:
    stack = list(llm.engine.cache.tree.roots.values())
    count = -len(stack)
    while stack:
        stack.extend(stack.pop().children.values())
        count += 1
    return count


def test_a6_twins_drop_the_duplicate_after_repointing(make_tiny: MakeLLM, ref: Ref) -> None:
    llm = make_tiny(num_blocks=12)
    runs = [start(llm, X[:40], 30)[1], start(llm, X[:40], 30)[1], start(llm, Y[:20], 40)[1]]
    one, two, three = finish(llm, *runs)
    assert one == two == ref(X[:40], 30)
    assert three == ref(Y[:20], 40)
    assert llm.stats().pages.num_dropped >= 2
    check_idle(llm)


@pytest.mark.parametrize(("max_tokens", "expected"), [(13, {32}), (12, {16, 31})])
def test_a7_the_last_sampled_token_has_no_kv(
    make_tiny: MakeLLM, ref: Ref, max_tokens: int, expected: set[int]
) -> None:
    llm = make_tiny()
    generated, _ = greedy(llm, X[:20], max_tokens)
    follow_up = X[:20] + generated + Y[:5]
    found, cached = greedy(llm, follow_up, 4)
    assert cached in expected
    assert found == ref(follow_up, 4)


@pytest.mark.model
def test_a7_a_stop_string_does_not_change_the_key(make_smollm2: MakeLLM) -> None:
    llm = make_smollm2()
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 30}
    prompt = llm.encode("Count: one, two, three, four, five, six, seven,")
    free = llm.generate(prompt, **settings)[0].choices[0]
    stopped = llm.generate(prompt, stop=free.text[8:12], **settings)[0].choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(free.text[8:12])]
    follow_up = prompt + stopped.token_ids + llm.encode(" and so on")
    cold = make_smollm2().generate(follow_up, **settings)[0].choices[0].token_ids
    assert llm.generate(follow_up, **settings)[0].choices[0].token_ids == cold


# -- B: reference counts, copy-on-write, fork, rollback ----------------------------------------------


@pytest.mark.parametrize("num_tokens", [16, 17])
def test_b1_divergence_inside_a_shared_block(make_tiny: MakeLLM, ref: Ref, num_tokens: int) -> None:
    """With 16 tokens each four branches need exactly 2 shared + 4 own blocks; with 17 they need 10."""
    llm = make_tiny(num_blocks=6)
    root = llm.branch(X[:33])
    branches = [root, *root.fork(3)]
    peak = 0

    def watch() -> None:
        nonlocal peak
        peak = max(peak, llm.stats().pages.num_in_use)

    llm.on_step(watch)
    for first, branch in enumerate(branches):
        branch.extend([first])
    choices = llm.step(branches, temperature=0, max_tokens=num_tokens - 1)
    for first, choice in enumerate(choices):
        assert choice.token_ids == ref([*X[:33], first], num_tokens - 1)
    if num_tokens == 16:
        assert peak == 6
        assert llm.stats().num_preemptions == 0
        for branch in branches:
            sharers = num_sharers(branch._sequence.live_cursor)
            assert sharers == [4, 4, 1]
    else:
        assert llm.stats().num_preemptions > 0
    root.prune()
    check_idle(llm)


def test_b1_unused_blocks_keep_their_content(make_tiny: MakeLLM) -> None:
    llm = make_tiny(num_blocks=12)
    storage = llm.engine.runner.pool.storage  # type: ignore[attr-defined]
    storage.fill_(7.5)
    root = llm.branch(X[:33])
    llm.step([root, *root.fork(3)], [SamplingParams(seed=s, max_tokens=14) for s in range(4)])
    by_block = storage.movedim(3, 0).flatten(1)
    used = {b for branch in (root, *root.children) for b in branch.block_table.blocks}
    for block in set(range(12)) - used:
        assert (by_block[block] == 7.5).all()


@pytest.mark.parametrize("length", [33, 48])
@pytest.mark.parametrize("max_tokens", [1, 2, 16, 17])
def test_b2_nothing_is_released_twice(make_tiny: MakeLLM, length: int, max_tokens: int) -> None:
    llm = make_tiny()
    output = llm.generate(X[:length], n=4, temperature=1.0, seed=3, max_tokens=max_tokens)[0]
    assert [choice.index for choice in output.choices] == [0, 1, 2, 3]
    check_idle(llm)
    sequence, run = start(llm, X[:length], max_tokens)
    while not run.finished:
        llm.engine.step()
    llm.engine.abort(sequence)
    llm.engine.release(sequence)
    assert llm.engine.release(sequence) == 0
    check_idle(llm)


def test_b3_more_forks_than_blocks(make_tiny: MakeLLM, ref: Ref) -> None:
    llm = make_tiny(num_blocks=4)
    root = llm.branch(X[:33])
    branches = root.fork(5)
    for first, branch in enumerate(branches):
        branch.extend([first])
    choices = llm.step(branches, temperature=0, max_tokens=19)
    for first, choice in enumerate(choices):
        assert choice.token_ids == ref([*X[:33], first], 19)
    assert root.generate(temperature=0, max_tokens=20).token_ids == ref(X[:33], 20)
    root.prune()
    check_idle(llm)


def test_b4_waiting_takes_no_reference(make_tiny: MakeLLM, ref: Ref) -> None:
    llm = make_tiny(num_blocks=6)
    holder, live = start(llm, X[:40], 8)
    llm.engine.step()
    pool = llm.engine.cache.pool
    before = list(pool.ref_counts)
    _, behind = start(llm, Y[:64], 1)
    waiter, _ = start(llm, X[:32] + Z[:64], 1)
    llm.engine.step()
    assert list(pool.ref_counts) == before, "neither could start"
    llm.engine.release(waiter)
    assert list(pool.ref_counts) == before
    assert holder in llm.engine.scheduler.running
    assert finish(llm, live, behind) == [ref(X[:40], 8), ref(Y[:64], 1)]
    check_idle(llm)


def test_b5_rollback_leaves_no_old_identity(make_tiny: MakeLLM, ref: Ref) -> None:
    llm = make_tiny()
    a, b = X[:40], Y[:17]
    branch = llm.branch(a)
    branch.truncate(24)
    branch.extend(b)
    assert branch.generate(temperature=0, max_tokens=4).token_ids == ref(a[:24] + b, 4)
    for prompt in ([*a[:32], 5], [*a[:24], *b[:8], 5]):
        assert greedy(llm, prompt, 4)[0] == ref(prompt, 4)


# -- C: eviction and accounting ------------------------------------------------------------------------


def test_c2_hit_blocks_are_not_room(make_tiny: MakeLLM, ref: Ref) -> None:
    llm = make_tiny(num_blocks=6)
    greedy(llm, X[:64])
    _, holder = start(llm, Z[:20], 12)
    waiter, run = start(llm, X[:64] + Y[:16], 4)
    llm.engine.step()
    tree, pool = llm.engine.cache.tree, llm.engine.cache.pool
    before = list(pool.ref_counts), list(tree._idle)
    while not holder.finished:
        assert waiter in llm.engine.scheduler.waiting
        assert (list(pool.ref_counts), list(tree._idle)) == before
        llm.engine.step()
        if len(holder.choice.token_ids) < 12 and len(Z[:20]) + len(holder.choice.token_ids) > 32:
            break
    assert finish(llm, run) == [ref(X[:64] + Y[:16], 4)]
    assert waiter.num_cached_tokens == 64
    check_idle(llm)


def test_c3_the_end_of_a_prefix_goes_first(make_tiny: MakeLLM, ref: Ref) -> None:
    for _ in range(10):
        llm = make_tiny(num_blocks=4)
        greedy(llm, X[:48])
        greedy(llm, Y[:20])
        assert greedy(llm, [*X[:48], 3])[1] == 32


# -- D: what cannot fit, and steps that fail ---------------------------------------------------------------


def test_d1_a_request_that_can_never_fit(make_tiny: MakeLLM, ref: Ref) -> None:
    llm = make_tiny(num_blocks=8)
    with pytest.raises(OutOfCapacity) as raised:
        llm.generate(X[:129], max_tokens=1)
    assert (raised.value.needed, raised.value.available) == (9, 8)
    assert greedy(llm, X[:10])[0] == ref(X[:10], 1)
    assert greedy(llm, X[:128])[0] == ref(X[:128], 1)
    # One token longer than the pool: the last one is sampled and not fed.
    choice = llm.generate(X[:128], temperature=0, max_tokens=2)[0].choices[0]
    assert (choice.token_ids, choice.finish_reason) == (ref(X[:128], 1), "length")
    check_idle(llm)


@pytest.mark.parametrize(("length", "expected"), [(62, 3), (63, 2), (64, 1)])
def test_h4_the_context_limit(make_tiny: MakeLLM, length: int, expected: int) -> None:
    """The last sampled token is not fed, so it may lie one past the limit."""
    llm = make_tiny(max_model_len=64)
    for max_tokens in (10, None):
        for _ in range(2):
            choice = llm.generate(X[:length], temperature=0, max_tokens=max_tokens)[0].choices[0]
            assert (len(choice.token_ids), choice.finish_reason) == (expected, "length")
    with pytest.raises(OutOfCapacity):
        llm.generate(X[:65], max_tokens=1)


def test_d6_a_failing_forward_ends_only_its_own_step(make_tiny: MakeLLM, ref: Ref) -> None:
    llm = make_tiny()
    branch = llm.branch(Y[:33])
    with fail_forward(llm, 2), pytest.raises(StepFailed, match="injected"):
        llm.generate([X[:20], X[:30]], temperature=0, max_tokens=8)
    check_invariants(llm)
    assert branch.generate(temperature=0, max_tokens=4).token_ids == ref(Y[:33], 4)
    with fail_forward(llm, 1), pytest.raises(StepFailed):
        branch.expand(n=3, max_tokens=4)
    length = len(branch)
    assert branch.generate(temperature=0, max_tokens=3).token_ids == ref(branch.token_ids[:length], 3)
    branch.prune()
    assert greedy(llm, X[:20], 4)[0] == ref(X[:20], 4)
    check_idle(llm)


@pytest.mark.parametrize("index", range(6))
def test_d6_a_reservation_that_fails_is_waited_out(make_tiny: MakeLLM, ref: Ref, index: int) -> None:
    llm = make_tiny()
    with fail_reservation(llm, index):
        outputs = llm.generate([X[:20], Y[:30]], temperature=0, max_tokens=8)
    assert [o.choices[0].token_ids for o in outputs] == [ref(X[:20], 8), ref(Y[:30], 8)]
    check_idle(llm)


def test_d6_an_interrupt_leaves_nothing_behind(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    stream = llm.stream(X[:40], n=3, max_tokens=30)
    for _ in range(10):
        next(stream)
    stream.close()
    check_idle(llm)

    def interrupt() -> None:
        raise KeyboardInterrupt

    llm.engine.listeners.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(X[:40], n=3, max_tokens=30)
    llm.engine.listeners.remove(interrupt)
    check_idle(llm)


# -- E: who ends what: failed first steps, interrupts, listeners, and requests side by side ---------------


def scripted(**settings: Any) -> LLM:
    llm = LLM(ScriptedModel(lambda past: (7 * sum(past) + len(past)) % 50), **{"block_size": 4, **settings})
    llm.on_step(lambda: check_invariants(llm))
    return llm


def test_e1_a_fan_out_that_fails_ends_its_generations() -> None:
    llm = scripted(num_blocks=8)
    with fail_forward(llm, 0), pytest.raises(StepFailed, match="injected"):
        llm.generate([1, 2, 3], n=3, max_tokens=3)
    check_idle(llm)
    branch = llm.branch([1, 2, 3])
    with fail_forward(llm, 0), pytest.raises(StepFailed, match="injected"):
        branch.expand(n=3, max_tokens=3)
    with fail_forward(llm, 0), pytest.raises(StepFailed, match="injected"):
        list(llm.stream([1, 2, 3], n=3, max_tokens=3))
    assert len(branch.expand(n=3, max_tokens=3)) == 3
    branch.prune()
    check_idle(llm)


def test_e2_a_prompt_that_is_refused_leaves_none_of_its_fellows() -> None:
    llm = scripted(num_blocks=4)
    with pytest.raises(OutOfCapacity):
        llm.generate([[1, 2], [3] * 17])
    check_idle(llm)


def test_e3_what_was_cached_whole_is_no_reason_to_refuse_another() -> None:
    """A request with nothing to compute ends in the step that admits it, and makes room for the next."""
    llm = scripted(num_blocks=4)
    llm.branch([1] * 16).release()
    cached, run = llm.engine.new_sequence([1] * 16, keep=False), Run()
    llm.engine.submit(cached, run)
    _, other = start(llm, [2] * 16, 1)
    llm.engine.run([run, other])
    assert len(other.choice.token_ids) == 1
    check_idle(llm)


def test_e4_copies_that_were_interrupted_are_done_later_and_hold_no_room() -> None:
    llm = scripted(num_blocks=4)
    expected = scripted(num_blocks=99).generate([1, 2, 3, 9], temperature=0, max_tokens=4)[0].choices
    root = llm.branch([1, 2, 3])
    (child,) = root.fork()
    root.extend([9])
    child.extend([4])
    runner, original = llm.engine.runner, llm.engine.runner.copy_blocks

    def interrupt(copies: object) -> None:
        raise KeyboardInterrupt

    runner.copy_blocks = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.step([root, child], temperature=0)
    runner.copy_blocks = original  # type: ignore[method-assign]
    check_invariants(llm)
    assert llm.generate([1] * 16, max_tokens=1)[0].choices[0].finish_reason == "length"
    assert root.generate(temperature=0, max_tokens=4).token_ids == expected[0].token_ids
    root.prune()
    check_idle(llm)


@pytest.mark.parametrize("at", range(5))
def test_e5_an_interrupt_in_the_model_leaves_the_others_running(at: int) -> None:
    llm = scripted(num_blocks=12, max_batch_tokens=6)
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    expected = scripted().generate([5, 6], **settings)[0].choices[0].token_ids
    stream = llm.stream([5, 6], **settings)
    found = list(next(stream).token_ids)
    branch = llm.branch([1, 2, 3])
    runner, original = llm.engine.runner, llm.engine.runner.forward
    count = 0

    def forward(step: Step) -> Tensor:
        nonlocal count
        count += 1
        if count > at:
            raise KeyboardInterrupt
        return original(step)

    calls: list[Callable[[], object]] = [
        lambda: branch.generate(**settings),
        lambda: branch.expand(n=3, **settings),
        lambda: branch.score([[1] * 9, [2] * 9, [3]]),
        lambda: llm.generate([[7] * 9, [8] * 9], n=2, **settings),
        lambda: llm.branch([9] * 30),
    ]
    for call in calls:
        count = 0
        runner.forward = forward  # type: ignore[method-assign]
        with suppress(KeyboardInterrupt):  # some are done before
            call()
        runner.forward = original  # type: ignore[method-assign]
        check_invariants(llm)
        assert not llm.engine.scheduler.waiting
    for delta in stream:
        found += delta.token_ids
    assert found == expected
    branch.prune()
    check_idle(llm)


def test_e6_a_stream_gives_what_was_generated_while_it_rested() -> None:
    llm = scripted(num_blocks=12)
    settings: dict[str, Any] = {"n": 2, "seed": 1, "max_tokens": 6}
    expected = [choice.token_ids for choice in llm.generate([1, 2], **settings)[0].choices]
    found: list[list[int]] = [[], []]
    for delta in llm.stream([1, 2], **settings):
        found[delta.index] += delta.token_ids
        llm.generate([3, 4], max_tokens=20)  # its steps end the stream's choices, too
    assert found == expected
    check_idle(llm)


def test_e7_a_listener_may_release_or_fork_what_runs_but_not_change_it() -> None:
    llm = scripted(num_blocks=12, max_batch_tokens=2)
    branch = llm.branch([1, 2, 3])
    verbs: list[Callable[[], object]] = [
        lambda: branch.extend([1]),
        lambda: branch.truncate(1),
        branch.generate,
        lambda: branch.expand(n=2),
        lambda: branch.score([[1]]),
        lambda: llm.step([branch]),
    ]
    forks = []

    def change() -> None:
        if len(branch) == 6:
            return  # its run has ended with this step
        for verb in verbs:
            with pytest.raises(InvalidInput, match="in use"):
                verb()
        forks.extend(branch.fork())

    llm.on_step(change)
    branch.generate(temperature=0, max_tokens=3)
    llm.engine.listeners.remove(change)
    assert [fork.token_ids for fork in forks] == [branch.token_ids[:end] for end in (4, 5)]
    many_steps: list[Callable[[Branch], object]] = [
        lambda branch: branch.expand(n=3),
        lambda branch: branch.score([[1, 2], [3]]),
    ]
    for call in many_steps:
        (child,) = branch.fork()
        child.extend([4, 5, 6])
        llm.on_step(child.release)
        with pytest.raises(BranchReleased):
            call(child)
        llm.engine.listeners.pop()
    branch.prune()
    check_idle(llm)


def test_e7_a_listener_may_take_itself_away() -> None:
    llm = scripted(num_blocks=12)
    calls = []

    def once() -> None:
        calls.append("once")
        llm.engine.listeners.remove(once)

    llm.on_step(once)
    llm.on_step(lambda: calls.append("always"))
    llm.branch([1]).generate(max_tokens=1)
    assert calls == ["once", "always", "always"]


def test_e8_a_branch_that_is_released_inside_a_failing_step() -> None:
    def next_token(past: list[int]) -> int:
        if len(past) > 5:
            branch.release()
            raise RuntimeError("boom")
        return 1

    llm = LLM(ScriptedModel(next_token), num_blocks=8, block_size=4)
    branch = llm.branch([1, 2, 3])
    assert branch.generate(temperature=0, max_tokens=9).finish_reason == "abort"
    check_idle(llm)


def test_e9_scores_that_are_no_numbers_fail() -> None:
    def next_token(past: list[int]) -> list[float]:
        return [float("nan") if past[-1] == 7 else 0.0] * 512

    llm = LLM(ScriptedModel(next_token), num_blocks=8, block_size=4)
    branch = llm.branch([1, 2, 3])
    assert len(branch.score([[1, 2], [7]])) == 2
    with pytest.raises(StepFailed, match="not finite"):
        branch.score([[1, 2], [7, 1]])
    branch.extend([7])
    with pytest.raises(StepFailed, match="not finite"):
        branch.score([[1]])
    branch.prune()
    check_idle(llm)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32])
def test_d2_preempted_and_prefilled_again_at_a_block_boundary(
    make_tiny: MakeLLM, ref: Ref, length: int
) -> None:
    """Two prompts in a pool of 4: each needs up to 4 blocks in the end."""
    llm = make_tiny(num_blocks=4)
    streams = [start(llm, prompt[:length], 30)[1] for prompt in (X, Y)]
    emitted: list[list[int]] = [[], []]
    while not all(run.finished for run in streams):
        llm.engine.step()
        for seen, run in zip(emitted, streams, strict=True):
            new = run.choice.token_ids[len(seen) :]
            assert len(new) <= 1, "a step emits a token once"
            seen += new
    assert emitted == [ref(X[:length], 30), ref(Y[:length], 30)]
    assert llm.stats().num_preemptions >= 1
    check_idle(llm)


@pytest.mark.parametrize("num_steps", range(6))
def test_d3_abort_at_every_stage_of_a_chunked_prefill(make_tiny: MakeLLM, ref: Ref, num_steps: int) -> None:
    """200 tokens in chunks of 64, the first 64 cached: waiting, after each chunk, after the first tokens."""
    llm = make_tiny(max_batch_tokens=64)
    greedy(llm, X[:64])
    sequence, run = start(llm, X, 8)
    for _ in range(num_steps):
        llm.engine.step()
    llm.engine.abort(sequence)
    generated = list(run.choice.token_ids)
    assert len(generated) == max(0, num_steps - 2), "136 tokens are left: three chunks, the last one samples"
    assert run.choice.finish_reason == "abort"
    check_idle(llm)
    llm.engine.step()
    assert run.choice.token_ids == generated
    assert greedy(llm, X, 4)[0] == ref(X, 4)
    check_idle(llm)


def test_e1_a_seed_does_not_depend_on_neighbours_or_preemption(make_tiny: MakeLLM) -> None:
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=16)
    other = SamplingParams(temperature=0.8, max_tokens=16)
    alone = make_tiny().generate(X[:20], seeded)[0].choices[0].token_ids
    for prompts, params, row in (
        ([X[:20], Y[:20]], [seeded, other], 0),
        ([X[:20], Y[:20]], [seeded, seeded], 0),
        ([Y[:20], Z[:20], Y[:30], X[:20]], [other, other, other, seeded], 3),
        ([X[:20], X[:20]], [seeded, seeded], 1),
    ):
        for num_blocks in (64, 4):
            llm = make_tiny(num_blocks=num_blocks)
            assert llm.generate(prompts, params)[row].choices[0].token_ids == alone
            check_idle(llm)
    assert make_tiny().generate(X[:20], temperature=0, seed=1) == make_tiny().generate(
        X[:20], temperature=0, seed=2
    )
