"""Sampling through the engine: what a setting does to the tokens, and that nothing else does.

The letters are those of cases that other engines' users have reported. REF is a fresh engine that runs a
request alone, in one chunk, with nothing cached.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ramet import LLM, InvalidInput, SamplingParams
from ramet.engine.errors import StepFailed
from ramet.engine.outputs import Choice, Output
from ramet.engine.runs import Generation
from ramet.engine.sampling_params import derive_seed
from ramet.testing import ScriptedModel, check_idle, check_invariants, tiny_llama

MakeLLM = Callable[..., LLM]


def tokens(length: int, seed: int, vocab_size: int = 512) -> list[int]:
    return random.Random(f"sampling {seed}").choices(range(vocab_size), k=length)


@pytest.fixture(scope="module")
def plain_module() -> Any:
    """The weights of `make_tiny`, with the attention that transformers gives them."""
    return tiny_llama()


def one(llm: LLM, prompt: list[int], **settings: Any) -> Choice:
    return llm.generate(prompt, **settings)[0].choices[0]


def scripted(logits: list[float], **settings: Any) -> LLM:
    """The same logits at every position."""
    llm = LLM(
        ScriptedModel(lambda past: logits, vocab_size=len(logits)), block_size=4, num_blocks=32, **settings
    )
    llm.on_step(lambda: check_invariants(llm))
    return llm


# -- one random stream for each request ---------------------------------------------------------------


def test_e1_a_seed_depends_on_no_neighbour_and_no_preemption(make_tiny: MakeLLM) -> None:
    prompt = tokens(20, 1)
    own = SamplingParams(temperature=0.8, seed=42, max_tokens=16)
    reference = make_tiny().generate(prompt, own)[0].choices[0].token_ids
    unseeded = SamplingParams(temperature=0.8, max_tokens=30)
    seeded = SamplingParams(temperature=0.8, seed=7, max_tokens=30)
    for others, settings in [
        ([unseeded], {}),
        ([seeded, unseeded, seeded], {}),
        ([own], {}),
        ([unseeded, seeded], {"num_blocks": 6}),  # preempted
    ]:
        prompts = [tokens(24, 9 + i) for i in range(len(others))]
        for place in (0, len(others)):
            llm = make_tiny(**settings)
            mixed, params = list(prompts), list(others)
            mixed.insert(place, prompt)
            params.insert(place, own)
            assert llm.generate(mixed, params)[place].choices[0].token_ids == reference
            check_idle(llm)


def test_e1_a_seed_changes_nothing_where_nothing_is_drawn(make_tiny: MakeLLM) -> None:
    prompt = tokens(20, 1)
    greedy = one(make_tiny(), prompt, temperature=0, max_tokens=16).token_ids
    assert one(make_tiny(), prompt, temperature=0, seed=3, max_tokens=16).token_ids == greedy


def test_e2_n_choices_come_again_and_each_ends_by_itself(make_tiny: MakeLLM) -> None:
    prompt = tokens(20, 2)
    params = SamplingParams(n=4, seed=7, max_tokens=24)
    first = make_tiny().generate(prompt, params)[0].choices
    assert [choice.index for choice in first] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in first}) > 1
    llm = make_tiny(num_blocks=8)  # less than all of them need at once
    again = llm.generate(prompt, params)[0].choices
    assert [choice.token_ids for choice in again] == [choice.token_ids for choice in first]
    check_idle(llm)
    stop = first[1].token_ids[5]
    ended = make_tiny().generate(prompt, n=4, seed=7, max_tokens=24, stop_token_ids=[stop])[0].choices
    for choice, whole in zip(ended, first, strict=True):
        at = whole.token_ids.index(stop) + 1 if stop in whole.token_ids else 24
        assert choice.token_ids == whole.token_ids[:at]
        assert choice.finish_reason == ("stop" if stop in whole.token_ids else "length")


def test_e2_a_stream_of_n_that_is_closed_leaves_nothing(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    stream = llm.stream(tokens(20, 2), n=4, max_tokens=24, presence_penalty=1, prompt_logprobs=1)
    next(stream)
    stream.close()
    check_idle(llm)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0},
        {"top_k": 1},
        {"temperature": 1e-8},
        {"min_p": 1.0},
        {"temperature": 0, "top_k": 10**9, "min_p": 0.5},
    ],
)
def test_e3_extremes_are_greedy_and_leave_the_neighbour_alone(
    make_tiny: MakeLLM, settings: dict[str, Any]
) -> None:
    prompts = [tokens(20, 3), tokens(30, 4)]
    greedy = [one(make_tiny(), p, temperature=0, max_tokens=12).token_ids for p in prompts]
    plain = SamplingParams(temperature=0, max_tokens=12)
    outputs = make_tiny().generate(prompts, [SamplingParams(max_tokens=12, **settings), plain])
    assert [output.choices[0].token_ids for output in outputs] == greedy


def test_e3_off_values_are_off(make_tiny: MakeLLM) -> None:
    prompt = tokens(20, 3)
    plain = one(make_tiny(), prompt, seed=1, max_tokens=12).token_ids
    each: list[dict[str, Any]] = [
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 10**9},
        {"min_p": 0},
        {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"logit_bias": {}, "banned_token_ids": []},
        {"allowed_token_ids": range(512)},
        {"logit_bias": {5: 0, 6: 0.0}},
        {"logprobs": 3, "prompt_logprobs": 2, "logprob_token_ids": [1], "return_entropy": True},
    ]
    for settings in each:
        assert one(make_tiny(), prompt, seed=1, max_tokens=12, **settings).token_ids == plain


# -- penalties and their history -------------------------------------------------------------------------


def naive(
    llm: LLM, prompt: list[int], max_tokens: int, change: Callable[[list[float], list[int], list[int]], None]
) -> list[int]:
    """Greedy tokens by a loop over the model's own log-probabilities, changed by a function in Python."""
    made: list[int] = []
    for _ in range(max_tokens):
        first = llm.generate([*prompt, *made], temperature=0, max_tokens=1, logprob_token_ids=range(128))[0]
        named = first.choices[0].named_logprobs
        assert named is not None
        logits = [token.logprob for token in named[0]]
        change(logits, prompt, made)
        made.append(max(range(len(logits)), key=logits.__getitem__))
    return made


def test_presence_and_frequency_follow_what_was_made(make_tiny: MakeLLM) -> None:
    """On log-probabilities, which differ from logits by a constant, these two mean the same."""

    def change(logits: list[float], prompt: list[int], made: list[int]) -> None:
        for token_id in set(made):
            logits[token_id] -= 0.5 + 1.5 * made.count(token_id)

    prompt = tokens(40, 5, 100)
    expected = naive(make_tiny(), prompt, 20, change)
    choice = one(
        make_tiny(),
        prompt,
        temperature=0,
        max_tokens=20,
        presence_penalty=0.5,
        frequency_penalty=1.5,
        allowed_token_ids=range(128),
    )
    assert choice.token_ids == expected


E4_PROMPT = tokens(10, 6, 30) * 4  # with repeats


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"repetition_penalty": 1.2, "frequency_penalty": 2.0, "temperature": 0.8, "seed": 3},
    ],
)
def test_e4_penalties_see_the_same_tokens_on_every_way(make_tiny: MakeLLM, penalties: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 24, **penalties})
    cold = make_tiny().generate(E4_PROMPT, params)[0].choices[0].token_ids
    assert cold != one(make_tiny(), E4_PROMPT, temperature=0, max_tokens=24).token_ids
    warm = make_tiny()
    warm.generate(E4_PROMPT, params)
    assert warm.generate(E4_PROMPT, params)[0].choices[0].token_ids == cold
    chunked = make_tiny(max_batch_tokens=16)
    assert chunked.generate(E4_PROMPT, params)[0].choices[0].token_ids == cold
    dry = make_tiny(num_blocks=9)
    outputs = dry.generate([E4_PROMPT, tokens(40, 7), [*E4_PROMPT[:-1], 400]], params)
    assert dry.stats().num_preemptions > 0
    assert outputs[0].choices[0].token_ids == cold
    alone = [
        make_tiny().generate(p, params)[0].choices[0].token_ids
        for p in (tokens(40, 7), [*E4_PROMPT[:-1], 400])
    ]
    assert [output.choices[0].token_ids for output in outputs[1:]] == alone
    kids = make_tiny().branch(E4_PROMPT).expand(3, params=[params, SamplingParams(max_tokens=3), params])
    outputs_of_kids = [kid.output.token_ids if kid.output else None for kid in kids]
    assert outputs_of_kids[::2] == [cold, cold]


def test_e4_the_first_step_has_no_output_to_penalise(make_tiny: MakeLLM) -> None:
    plain = one(make_tiny(), E4_PROMPT, temperature=0, max_tokens=1, logprobs=5)
    choice = one(make_tiny(), E4_PROMPT, temperature=0, max_tokens=1, logprobs=5, frequency_penalty=2.0)
    assert (choice.token_ids, choice.logprobs) == (plain.token_ids, plain.logprobs)


def test_a_choice_is_penalised_for_its_own_tokens_only(make_tiny: MakeLLM) -> None:
    """n choices of one prompt are those of n requests with their seeds."""
    params = SamplingParams(n=3, seed=5, max_tokens=16, repetition_penalty=1.5, presence_penalty=1.0)
    choices = make_tiny().generate(E4_PROMPT, params)[0].choices
    for index, choice in enumerate(choices):
        alone = SamplingParams(
            seed=derive_seed(5, index), max_tokens=16, repetition_penalty=1.5, presence_penalty=1.0
        )
        assert make_tiny().generate(E4_PROMPT, alone)[0].choices[0].token_ids == choice.token_ids


def test_e5_a_departing_row_leaves_nothing_behind(make_tiny: MakeLLM) -> None:
    prompts = {name: tokens(18 + i, 20 + i) for i, name in enumerate("ABCD")}
    plain = SamplingParams(temperature=0, max_tokens=8)
    k = make_tiny().generate(prompts["C"], plain)[0].choices[0].token_ids[0]
    params = {
        "A": SamplingParams(temperature=0, max_tokens=12, logit_bias={k: -100}, presence_penalty=1.0),
        "B": SamplingParams(temperature=0.9, seed=1, max_tokens=3, banned_token_ids=[k], min_p=0.1),
        "C": plain,
        "D": SamplingParams(temperature=0, max_tokens=9, allowed_token_ids=range(100)),
    }
    reference = {n: make_tiny().generate(p, params[n])[0].choices[0].token_ids for n, p in prompts.items()}
    assert k not in reference["A"]
    shuffler = random.Random(0)
    llm = make_tiny()
    for _ in range(50):
        names = shuffler.sample("ABCD", 4)
        runs: dict[str, Generation] = {}
        for name in names:
            for _ in range(shuffler.randrange(4)):
                llm.engine.step()
            sequence = llm.engine.new_sequence(list(prompts[name]), keep=False)
            runs[name] = llm.engine.generations(sequence, params[name])[0]
            llm.engine.submit(sequence, runs[name])
        llm.engine.run(runs.values())
        assert {name: run.choice.token_ids for name, run in runs.items()} == reference
    check_idle(llm)


# -- what may be chosen, and when it ends -----------------------------------------------------------------


def test_min_tokens_holds_off_end_tokens_and_stop_tokens() -> None:
    llm = LLM(ScriptedModel(lambda past: [0.0, 3.0, 2.0, 1.0], 4, frozenset([1])), block_size=4, num_blocks=8)
    assert one(llm, [3], temperature=0, max_tokens=9).token_ids == [1]
    assert one(llm, [3], temperature=0, max_tokens=9, min_tokens=3).token_ids == [2, 2, 2, 1]
    choice = one(llm, [3], temperature=0, max_tokens=9, min_tokens=2, stop_token_ids=[2])
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([3, 3, 1], "stop", 1)
    choice = one(llm, [3], temperature=0, max_tokens=4, min_tokens=2, ignore_eos=True)
    assert choice.token_ids == [1, 1, 1, 1], "what ends nothing is not held off"
    assert one(llm, [3], temperature=0, max_tokens=3, min_tokens=3).token_ids == [2, 2, 2]


def test_bias_allowed_and_banned_tokens() -> None:
    llm = scripted([0.0, 3.0, 2.0, 1.0])
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 2}
    assert one(llm, [0], **greedy, banned_token_ids=[1]).token_ids == [2, 2]
    assert one(llm, [0], **greedy, allowed_token_ids=[0, 3]).token_ids == [3, 3]
    assert one(llm, [0], **greedy, allowed_token_ids=[0, 3], banned_token_ids=[3]).token_ids == [0, 0]
    assert one(llm, [0], **greedy, logit_bias={3: 5}).token_ids == [3, 3]
    assert one(llm, [0], **greedy, logit_bias={3: 100}, banned_token_ids=[3]).token_ids == [1, 1]
    assert one(llm, [0], **greedy, logit_bias={1: -1.5}, presence_penalty=1.0).token_ids == [2, 1]
    check_idle(llm)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"logit_bias": {512: 1}}, "logit_bias"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"banned_token_ids": [999999]}, "banned_token_ids"),
        ({"logprob_token_ids": [2**63]}, "logprob_token_ids"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"banned_token_ids": range(512)}, "banned_token_ids"),
        ({"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1}, "allowed_token_ids"),
        ({"echo": True}, "echo"),  # the tiny model has no tokenizer
    ],
)
def test_what_only_the_engine_can_refuse(make_tiny: MakeLLM, settings: dict[str, Any], field: str) -> None:
    llm = make_tiny()
    calls: list[Callable[[], object]] = [
        lambda: llm.generate([1, 2], **settings),
        lambda: llm.stream([1, 2], **settings),
        lambda: llm.branch([1]).generate(**settings),
    ]
    for call in calls:
        with pytest.raises(InvalidInput) as caught:
            call()
        assert caught.value.field == field


def test_what_is_for_whole_prompts_is_refused_for_branches(make_tiny: MakeLLM) -> None:
    branch = make_tiny().branch([1, 2, 3])
    calls: list[Callable[..., object]] = [branch.generate, branch.expand]
    for call in calls:
        with pytest.raises(InvalidInput, match="prompt_logprobs must be None for a branch"):
            call(prompt_logprobs=0)


# -- what is reported ---------------------------------------------------------------------------------------


def test_named_tokens_and_entropy_beside_torch(make_tiny: MakeLLM, plain_module: Any) -> None:
    prompt = tokens(17, 8)
    choice = one(
        make_tiny(),
        prompt,
        seed=2,
        temperature=1.5,
        max_tokens=6,
        logprob_token_ids=[400, 3],
        return_entropy=True,
        repetition_penalty=2.0,
    )
    with torch.no_grad():
        logits = plain_module(torch.tensor([[*prompt, *choice.token_ids]])).logits[0, len(prompt) - 1 : -1]
    raw = logits.log_softmax(-1)
    named, entropies = choice.named_logprobs, choice.entropies
    assert named is not None
    assert entropies is not None
    assert [[token.token_id for token in place] for place in named] == [[400, 3]] * 6
    found = torch.tensor([[token.logprob for token in place] for place in named])
    torch.testing.assert_close(found, raw[:, [400, 3]], atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(entropies), -(raw.exp() * raw).sum(-1), atol=1e-4, rtol=0)


def own_logprobs(output: Output) -> list[float | None]:
    """Each prompt token's own log-probability out of its entry."""
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    return [
        None if entry is None else next(t.logprob for t in entry if t.token_id == token_id)
        for token_id, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    ]


def assert_close(found: list[float | None], expected: list[float | None]) -> None:
    assert found[0] is expected[0] is None
    assert found[1:] == pytest.approx(expected[1:], abs=1e-4)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 65])
def test_h3_prompt_logprobs_with_a_cached_prefix(
    make_tiny: MakeLLM, plain_module: Any, length: int, count: int
) -> None:
    prompt = tokens(length, length)
    with torch.no_grad():
        raw = plain_module(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [None, *(float(raw[i, token_id]) for i, token_id in enumerate(prompt[1:]))]
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=count)
    plain = SamplingParams(temperature=0, max_tokens=3)
    generated = make_tiny().generate(prompt, plain)[0].choices[0].token_ids
    for settings in ({}, {"max_batch_tokens": 16}, {"max_batch_tokens": 5, "min_partial": 1}):
        llm = make_tiny(**settings)
        for before in (None, plain, params, params):  # cold, cached without scores, with scores
            if before is not None:
                llm.generate(prompt, before)
            output = llm.generate(prompt, params)[0]
            assert_close(own_logprobs(output), expected)
            assert output.choices[0].token_ids == generated
        assert llm.generate(prompt, plain)[0].num_cached_tokens >= (length - 1) // 16 * 16
        check_idle(llm)
    if count:
        top = [None if e is None else e[0].token_id for e in output.prompt_logprobs or ()]
        assert top == [None, *raw.argmax(-1)[:-1].tolist()]


def test_h3_what_is_known_is_not_computed_again(make_tiny: MakeLLM) -> None:
    prompt = tokens(65, 3)
    llm = make_tiny()
    llm.generate(prompt, temperature=0, max_tokens=1)
    llm.generate(prompt, temperature=0, max_tokens=1, prompt_logprobs=0)
    before = llm.stats().num_computed_tokens
    output = llm.generate(prompt, temperature=0, max_tokens=1, prompt_logprobs=0)[0]
    assert llm.stats().num_computed_tokens - before == 2, "the last full block's last row, and the open block"
    assert output.num_cached_tokens == 64
    other = prompt[:40] + tokens(25, 4)
    before = llm.stats().num_computed_tokens
    found = own_logprobs(llm.generate(other, temperature=0, max_tokens=1, prompt_logprobs=0)[0])
    assert llm.stats().num_computed_tokens - before == 65 - 39, "the hit ends inside a block"
    cold = make_tiny().generate(other, temperature=0, max_tokens=1, prompt_logprobs=0)[0]
    assert_close(found, own_logprobs(cold))


def test_h3_generated_tokens_are_known_to_whoever_scores_them_as_a_prompt(make_tiny: MakeLLM) -> None:
    prompt = tokens(20, 5)
    llm = make_tiny()
    choice = one(llm, prompt, seed=1, max_tokens=44, prompt_logprobs=0)
    before = llm.stats().num_computed_tokens
    output = llm.generate(prompt + choice.token_ids, max_tokens=1, prompt_logprobs=0)[0]
    assert llm.stats().num_computed_tokens - before <= 17
    assert own_logprobs(output)[20:] == pytest.approx(choice.token_logprobs, abs=1e-4)


def test_h3_choices_neighbours_streams_and_preemption(make_tiny: MakeLLM) -> None:
    prompts = [tokens(30 + 9 * i, 40 + i) for i in range(4)]
    prompts[3] = prompts[2][:33] + prompts[3]
    params = SamplingParams(n=2, seed=1, max_tokens=20, prompt_logprobs=0)
    cold = [make_tiny().generate(p, params)[0] for p in prompts]
    for settings in (
        {},
        {"num_blocks": 12},
        {"max_batch_tokens": 11},
        {"max_batch_tokens": 24, "num_blocks": 14},
    ):
        llm = make_tiny(**settings)
        for _ in range(2):
            for output, alone in zip(llm.generate(prompts, params), cold, strict=True):
                assert_close(own_logprobs(output), own_logprobs(alone))
                assert [c.token_ids for c in output.choices] == [c.token_ids for c in alone.choices]
        check_idle(llm)
    deltas = list(make_tiny().stream(prompts[0], params))
    assert deltas[0].prompt_logprobs == cold[0].prompt_logprobs
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


def test_prompt_logits_that_are_no_numbers_end_only_their_own_request() -> None:
    def next_token(past: list[int]) -> list[float]:
        return [float("nan")] * 4 if past[-1] == 3 else [0.0, 1.0, 2.0, -9.0]

    llm = LLM(ScriptedModel(next_token, 4), block_size=4, num_blocks=32)
    llm.on_step(lambda: check_invariants(llm))
    for n in (1, 3):
        params = SamplingParams(n=n, temperature=0, max_tokens=3, prompt_logprobs=0)
        other = SamplingParams(temperature=0, max_tokens=3)
        with pytest.raises(StepFailed):
            llm.generate([[0, 3, 1, 0, 1, 2], [1, 1]], [params, other])
        check_idle(llm)
        outputs = llm.generate([[0, 3, 1, 0, 1, 2], [1, 1]], [other, params])
        assert [output.choices[0].token_ids for output in outputs] == [[2, 2, 2]] * 2
    check_idle(llm)


def test_a_request_that_is_not_cached_leaves_no_prompt_logprobs(make_tiny: MakeLLM) -> None:
    prompt = tokens(33, 9)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    llm = make_tiny()
    first, second = (llm.generate(prompt, params, cache=False)[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    assert_close(own_logprobs(first), own_logprobs(second))
    assert llm.stats().pages.num_free == llm.config.num_blocks
