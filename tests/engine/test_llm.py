"""The Python interface: what its verbs promise, and what bad input gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ramet import LLM, BranchReleased, InvalidInput, OutOfCapacity, SamplingParams, StepFailed
from ramet.testing import ScriptedModel, check_idle, fail_forward, tiny_llama

MakeLLM = Callable[..., LLM]
PROMPT = random.Random(0).choices(range(512), k=40)


def test_a_whole_prompt_that_is_cached_needs_no_step(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    first = llm.branch(PROMPT[:32])
    steps = llm.stats().num_steps
    second = llm.branch(PROMPT[:32])
    assert llm.stats().num_steps == steps
    assert second.block_table == first.block_table == ([0, 1], 16)


def test_after_a_change_of_weights_nothing_old_is_used() -> None:
    module = tiny_llama()
    llm = LLM(module, num_blocks=64)
    root = llm.branch(PROMPT)
    kid = root.expand(n=2, max_tokens=20, seed=1)[1]
    before = root.score([[5, 6]], suffix=[7])[0]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.1)
    assert llm.reset_prefix_cache() > 0
    pages = llm.stats().pages
    assert (pages.num_in_use, pages.num_cached_idle) == (0, 0)
    fresh = LLM(module, num_blocks=64)
    again = root.score([[5, 6]], suffix=[7])[0]
    assert again.token_logprobs == fresh.branch(PROMPT).score([[5, 6]], suffix=[7])[0].token_logprobs
    assert again.token_logprobs != before.token_logprobs
    told = llm.generate(PROMPT, max_tokens=1, prompt_logprobs=0)[0].prompt_logprobs
    assert told == fresh.generate(PROMPT, max_tokens=1, prompt_logprobs=0)[0].prompt_logprobs
    expected = fresh.branch(kid.token_ids).generate(max_tokens=9, temperature=0).token_ids
    assert kid.generate(max_tokens=9, temperature=0).token_ids == expected
    root.prune()
    check_idle(llm)


def test_fork_takes_no_block_and_diverges_by_one_copy_each(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    root = llm.branch(PROMPT)
    free = llm.stats().pages.num_free
    kids = root.fork(3)
    assert llm.stats().pages.num_free == free
    assert all(kid.block_table == root.block_table for kid in kids)
    llm.step(kids, temperature=1.0, seed=1)
    assert llm.stats().pages.num_copies == 0, "the last prompt token ran as a query only"
    llm.step(kids, temperature=1.0, seed=1)
    assert llm.stats().pages.num_copies == 3, "the parent keeps the block that the three copied"
    assert llm.stats().pages.num_free == free - 3


def test_expand_computes_the_parents_tokens_once(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    root = llm.branch(PROMPT)
    root.extend(PROMPT[:20])
    before = llm.stats().num_computed_tokens
    kids = root.expand(n=8, max_tokens=1, temperature=1.0)
    assert llm.stats().num_computed_tokens - before == 20
    assert len({kid.output.token_ids[0] for kid in kids if kid.output}) > 1, "each has its own stream"
    assert [kid.output.index for kid in kids if kid.output] == list(range(8))


def test_a_branch_that_is_computed_later_is_computed_with_its_first_use(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    branch = llm.branch(PROMPT, compute=False)
    assert llm.stats().num_steps == 0
    (score,) = branch.score([[5]])
    assert (llm.stats().num_steps, llm.stats().num_computed_tokens) == (1, len(PROMPT))
    (known,) = make_tiny().branch(PROMPT).score([[5]])
    assert score.logprob == pytest.approx(known.logprob, abs=1e-5)


def test_children_with_their_own_settings(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    root = llm.branch(PROMPT)
    kids = root.expand(params=[SamplingParams(temperature=0, max_tokens=n) for n in (1, 5, 9)])
    assert [len(kid) - len(root) for kid in kids] == [1, 5, 9]
    assert kids[2].token_ids[: len(kids[1])] == kids[1].token_ids


def test_several_branches_expand_in_one_batch(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    leaves = llm.branch(PROMPT).fork(2)
    leaves[1].extend(PROMPT[:20])
    apart = [[kid.token_ids for kid in leaf.expand(n=2, max_tokens=5, seed=3)] for leaf in leaves]
    llm = make_tiny()
    leaves = llm.branch(PROMPT).fork(2)
    leaves[1].extend(PROMPT[:20])
    steps, tokens = llm.stats().num_steps, llm.stats().num_computed_tokens
    families = llm.expand(leaves, 2, max_tokens=5, seed=3)
    assert [[kid.token_ids for kid in family] for family in families] == apart
    assert llm.stats().num_steps - steps == 5
    # One query of the first leaf, the second leaf's 20 tokens, and four tokens of each child.
    assert llm.stats().num_computed_tokens - tokens == 1 + 20 + 4 * 4
    own = llm.expand(leaves, params=[SamplingParams(n=n, max_tokens=1) for n in (1, 3)])
    assert [len(family) for family in own] == [1, 3]
    assert [kid.parent for family in own for kid in family] == [leaves[0]] + [leaves[1]] * 3
    assert llm.expand([], 2) == []


def test_several_branches_expand_all_or_none(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    root = llm.branch(PROMPT)
    good, gone = root.fork(2)
    gone.release()
    before = llm.stats()
    with pytest.raises(BranchReleased):
        llm.expand([good, gone], 2)
    for branches, settings in (([good, good], {}), ([good], {"n": 0}), ([good], {"params": [], "n": 1})):
        with pytest.raises(InvalidInput):
            llm.expand(branches, **settings)
    assert llm.stats() == before, "nothing ran"
    assert good.children == [], "and no child is left"
    assert len(good.expand(n=2, max_tokens=2)) == 2, "the branch is free to go on"


def test_a_branch_that_a_listener_releases_leaves_no_child_of_the_others(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_batch_tokens=16)
    branches = [llm.branch([*PROMPT, i]) for i in range(3)]
    for branch in branches:
        branch.extend(PROMPT)  # more than a step computes
    llm.on_step(branches[1].release)
    with pytest.raises(BranchReleased, match=str(branches[1].id)):
        llm.expand(branches, 2, max_tokens=4)
    assert not any(branch.children for branch in branches)
    assert len(llm.engine.sequences) == 2
    for branch in branches:
        branch.prune()
    check_idle(llm)


def test_one_seed_gives_n_different_choices_again_and_again(make_tiny: MakeLLM) -> None:
    settings: dict[str, Any] = {"n": 4, "seed": 7, "temperature": 1.0, "max_tokens": 24}
    first, second = (
        [c.token_ids for c in make_tiny().generate(PROMPT, **settings)[0].choices] for _ in range(2)
    )
    assert first == second
    assert len({tuple(ids) for ids in first}) == 4


def test_score_equals_the_log_probabilities_of_generated_tokens(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    root = llm.branch(PROMPT)
    kids = root.expand(n=3, max_tokens=20, seed=5)
    free, tokens = llm.stats().pages.num_free, root.token_ids
    scores = root.score([kid.output.token_ids for kid in kids if kid.output])
    for kid, score in zip(kids, scores, strict=True):
        assert kid.output is not None
        assert score.token_logprobs == pytest.approx(kid.output.token_logprobs, abs=1e-4)
        assert score.logprob == pytest.approx(kid.output.cumulative_logprob, abs=1e-3)
    assert root.token_ids == tokens
    assert llm.stats().pages.num_free == free, "scoring leaves nothing behind"


def test_score_against_teacher_forcing_in_torch(make_tiny: MakeLLM, tiny_module: Any) -> None:
    llm = make_tiny(max_batch_tokens=9)  # the candidates come in chunks
    candidates = [[5], PROMPT[3:9], PROMPT[:25]]
    scores = llm.branch(PROMPT).score(candidates)
    for candidate, score in zip(candidates, scores, strict=True):
        full = llm.branch(PROMPT + candidate[:-1])
        again = full.score([[candidate[-1]]])[0].token_logprobs[0]
        assert score.token_logprobs[-1] == pytest.approx(again, abs=1e-4)
        assert len(score.token_logprobs) == len(candidate)


def test_prune_returns_the_blocks_freed(make_tiny: MakeLLM) -> None:
    llm = make_tiny(num_blocks=64)
    root = llm.branch(PROMPT)
    kids = root.expand(n=3, max_tokens=30, seed=1)
    grandkids = [grandkid for kid in kids for grandkid in kid.expand(n=2, max_tokens=20)]
    free = llm.stats().pages.num_free
    freed = kids[0].prune()
    assert freed > 0
    assert llm.stats().pages.num_free == free + freed
    assert kids[0].released
    assert grandkids[0].released
    assert not grandkids[2].released
    assert root.prune() + freed + free == llm.config.num_blocks
    check_idle(llm)


def test_promote_keeps_one_child(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    root = llm.branch(PROMPT)
    kids = root.expand(n=4, max_tokens=8)
    assert kids[2].promote() > 0
    assert [kid.released for kid in kids] == [True, True, False, True]
    assert root.children == [kids[2]]
    assert kids[2].generate(max_tokens=2).token_ids


def test_a_long_line_of_forks_is_pruned_without_recursion(make_tiny: MakeLLM) -> None:
    llm = LLM(ScriptedModel(lambda past: len(past) % 512), num_blocks=512)
    root = branch = llm.branch([1])
    for _ in range(3000):
        (branch,) = branch.fork()
    root.prune()
    check_idle(llm)


def test_the_context_manager_prunes(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    with llm.branch(PROMPT) as root:
        root.expand(n=2, max_tokens=4)
    check_idle(llm)


def test_a_released_branch_says_so(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    branch = llm.branch(PROMPT)
    branch.release()
    branch.release()
    assert branch.prune() == 0
    calls: list[Callable[[], Any]] = [
        branch.fork,
        lambda: branch.extend([1]),
        branch.generate,
        lambda: branch.expand(n=2),
        lambda: branch.score([[1]]),
        lambda: branch.truncate(1),
        branch.promote,
        lambda: branch.block_table,
        lambda: llm.step([branch]),
    ]
    for call in calls:
        with pytest.raises(BranchReleased, match=str(branch.id)):
            call()


def bad_calls(llm: Any, branch: Any) -> list[tuple[str, Callable[[], Any]]]:
    no_list: list[Any] = [5, None, {1: 2}, b"ab", np.array(5), torch.tensor(5), torch.tensor([True])]
    no_params: list[Any] = [5, [5], "a", {}]
    return [
        ("prompt", lambda: llm.generate([[]])),
        ("prompt", lambda: llm.generate([[1, 2], []])),
        ("prompt", lambda: llm.generate([[1], [512]])),
        ("prompt", lambda: llm.generate([-1])),
        ("prompt", lambda: llm.generate([True])),
        ("prompt", lambda: llm.generate([[1.5]])),
        ("prompt", lambda: llm.generate("text without a tokenizer")),
        ("prompt", lambda: llm.branch()),
        *[("prompt", lambda wrong=wrong: llm.generate(wrong)) for wrong in no_list],
        ("prompt", lambda: llm.branch(5)),
        *[("text", lambda wrong=wrong: branch.extend(wrong)) for wrong in no_list],
        *[("candidates", lambda wrong=wrong: branch.score(wrong)) for wrong in (5, None, [5], "a")],
        *[
            ("params", lambda verb=verb, wrong=wrong: verb(wrong))
            for wrong in no_params
            for verb in (
                lambda params: llm.generate([1], params=params),
                lambda params: llm.step([branch], params=params),
                lambda params: llm.expand([branch], params=params),
                lambda params: branch.generate(params=params),
                lambda params: branch.expand(params=params),
            )
        ],
        *[("branches", lambda wrong=wrong: llm.step(wrong)) for wrong in (5, None, [1], branch)],
        *[("branches", lambda wrong=wrong: llm.expand(wrong)) for wrong in (5, None, [1], branch)],
        ("cache", lambda: llm.generate([1], cache="no")),
        ("messages", lambda: llm.branch(messages=[{"role": "user", "content": "hi"}])),
        ("stop", lambda: llm.generate([1], stop="x")),
        ("stop_token_ids", lambda: llm.generate([1], stop_token_ids=[512])),
        ("temprature", lambda: llm.generate([1], temprature=1.0)),
        ("params", lambda: llm.generate([1], SamplingParams(), n=2)),
        ("n", lambda: branch.fork(0)),
        ("n", lambda: branch.fork(10**9)),
        ("n", lambda: branch.expand(n=0)),
        ("n", lambda: branch.expand(n=10**6)),
        ("n", lambda: branch.generate(n=2)),
        ("at", lambda: branch.fork(at=0)),
        ("at", lambda: branch.fork(at=41)),
        ("at", lambda: branch.fork(at="3")),
        ("position", lambda: branch.truncate(-1)),
        ("position", lambda: branch.truncate(2.0)),
        ("candidates", lambda: branch.score("text")),
        ("candidates", lambda: branch.score([[1], []])),
        ("candidates", lambda: branch.score([[512]])),
        ("text", lambda: branch.extend([512])),
        ("branches", lambda: llm.step([branch, branch])),
        ("branches", lambda: llm.step([LLM(ScriptedModel(len), num_blocks=4).branch([1])])),
        ("params", lambda: llm.step([branch], SamplingParams(), max_tokens=2)),
        ("params", lambda: llm.step([branch], [SamplingParams()], max_tokens=2)),
        ("temprature", lambda: llm.step([branch], temprature=1.0)),
        ("prompt", lambda: llm.stream([512])),
        ("stop", lambda: llm.stream([1], stop="x")),
        ("params", lambda: branch.expand(params=[])),
        ("params", lambda: branch.expand(3, params=[SamplingParams()])),
    ]


@pytest.mark.parametrize("index", range(len(bad_calls(None, None))))
def test_bad_input_names_its_field_and_changes_nothing(make_tiny: MakeLLM, index: int) -> None:
    llm = make_tiny()
    branch = llm.branch(PROMPT)
    before = llm.stats()
    field, call = bad_calls(llm, branch)[index]
    with pytest.raises(InvalidInput) as raised:
        call()
    assert raised.value.field == field
    assert llm.stats() == before
    assert len(llm.engine.sequences) == 1


def test_arrays_are_lists(make_tiny: MakeLLM) -> None:
    """Of one dimension a prompt, of two several; also where each row holds one token."""
    llm: Any = make_tiny()

    def prompts(given: Any) -> list[list[int]]:
        return [output.prompt_token_ids for output in llm.generate(given, max_tokens=1)]

    for array in (np.array, torch.tensor):
        assert prompts(array([1, 2])) == [[1, 2]]
        assert prompts(array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
        assert prompts([array([5]), array([6, 7])]) == [[5], [6, 7]]
        assert prompts([array(5), array(6)]) == [[5, 6]]
        branch = llm.branch(array([1, 2]))
        branch.extend(array([3]))
        assert branch.token_ids == [1, 2, 3]
        assert [score.token_ids for score in branch.score(array([[4], [5]]))] == [[4], [5]]
        assert len(branch.fork(np.int64(2))) == 2


def test_too_long_is_refused_before_anything_runs(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_model_len=50)
    branch = llm.branch(PROMPT)
    before = llm.stats()
    for call in (
        lambda: llm.generate([PROMPT, PROMPT * 2]),
        lambda: branch.extend(PROMPT),
        lambda: branch.score([PROMPT]),
        lambda: llm.stream(PROMPT * 2),
    ):
        with pytest.raises(OutOfCapacity, match="tokens"):
            call()
        assert len(llm.engine.sequences) == 1
    assert llm.stats() == before


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"min_partial": 17}, "min_partial"),
        ({"num_blocks": 2**40}, "num_blocks"),  # 4 KiB each
        ({"num_blocks": 2**70}, "num_blocks"),
        ({"max_model_len": "64"}, "max_model_len"),
        ({"device": 1.5}, "device"),
    ],
)
def test_bad_settings_of_an_engine(tiny_module: Any, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        LLM(tiny_module, **{"num_blocks": 8, **settings})
    assert raised.value.field == field


def test_a_stream_tells_of_a_step_that_failed_while_it_rested(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    stream = llm.stream(PROMPT, max_tokens=20, ignore_eos=True)
    next(stream)
    with fail_forward(llm, 0), pytest.raises(StepFailed):
        llm.generate([1, 2, 3], max_tokens=1)
    with pytest.raises(StepFailed):
        next(stream)
    check_idle(llm)


def test_stream_equals_generate(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    settings: dict[str, Any] = {"n": 3, "seed": 2, "max_tokens": 20}
    whole = llm.generate(PROMPT, **settings)[0].choices
    parts: list[list[int]] = [[], [], []]
    for delta in llm.stream(PROMPT, **settings):
        parts[delta.index] += delta.token_ids
    assert parts == [choice.token_ids for choice in whole]
    check_idle(llm)


def test_bad_logits_end_only_their_own_request() -> None:
    def next_token(past: list[int]) -> list[float]:
        return [float("nan")] * 512 if past[0] == 13 else [float(t == len(past)) for t in range(512)]

    llm = LLM(ScriptedModel(next_token), num_blocks=64)
    good, bad = llm.branch([1, 2, 3]), llm.branch([13, 2])
    with pytest.raises(Exception, match="not finite"):
        llm.step([good, bad], temperature=0, max_tokens=3)
    assert good.token_ids == [1, 2, 3, 3, 4, 5]
    assert bad.token_ids == [13, 2]


def test_numbers_that_went_bad_are_found_by_nobody() -> None:
    """They reach the keys and values of the tokens before them, which others share."""
    module: Any = tiny_llama()
    bad = next(token for token in range(512) if token not in PROMPT)
    with torch.no_grad():
        module.get_input_embeddings().weight[bad] = torch.nan
    good = [*PROMPT, bad + 1]

    def greedy(llm: LLM) -> list[int]:
        return llm.generate(good, temperature=0, max_tokens=4)[0].choices[0].token_ids

    expected = greedy(LLM(module, num_blocks=32))
    llm = LLM(module, num_blocks=32)
    for n in (1, 3):
        with pytest.raises(StepFailed, match="not finite"):
            llm.generate([*PROMPT, bad, 1], n=n)
        assert greedy(llm) == expected
        llm.engine.cache.tree.evict(32)
    branch = llm.branch([*PROMPT, bad])
    with pytest.raises(StepFailed, match="not finite"):
        branch.generate()
    assert greedy(llm) == expected
    branch.release()
    check_idle(llm)


def test_the_pool_is_allocated_once(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    pool = llm.engine.runner.pool  # type: ignore[attr-defined]
    address, allocated = pool.storage.data_ptr(), pool.storage.untyped_storage().nbytes()
    root = llm.branch(PROMPT)
    root.expand(n=8, max_tokens=40)
    root.prune()
    assert (pool.storage.data_ptr(), pool.storage.untyped_storage().nbytes()) == (address, allocated)
    assert isinstance(pool.storage, torch.Tensor)
