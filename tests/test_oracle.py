"""The oracle: cold = warm = chunked = forked = truncated = parked = batched = streamed, token for token.

Each way makes the same tokens from the same prompt by another route through the engine. The reference is a
fresh engine that runs the prompt alone, in one chunk, with nothing cached.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ramet import LLM, SamplingParams
from ramet.engine.outputs import Choice
from ramet.testing import check_idle, delay_copies, tiny_llama

MakeLLM = Callable[..., LLM]
Way = Callable[[LLM, list[int], SamplingParams], list[int]]

GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.95, top_k=50, seed=42, max_tokens=24, logprobs=2, ignore_eos=True
)

# Every other setting that changes what comes out. On most ways the penalties see a history that was computed,
# cached, forked or recomputed in another way than that of the reference.
ADJUSTED = replace(
    GREEDY,
    logit_bias={3: 2.0, 77: -100.0, 200: 1.5},
    allowed_token_ids=range(0, 512, 2),
    banned_token_ids=[4, 8, 16],
    repetition_penalty=1.3,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    min_tokens=6,
    stop_token_ids=[2, 6, 10, 12],
    logprob_token_ids=[5, 9],
    return_entropy=True,
)
ADJUSTED_AND_SEEDED = replace(
    SEEDED,
    min_p=0.02,
    logit_bias={3: 2.0, 77: -100.0},
    banned_token_ids=list(range(100, 130)),
    repetition_penalty=0.8,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
)


def tokens(length: int, seed: int, vocab_size: int = 512) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(vocab_size), k=length)


def cold(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return llm.generate(prompt, params)[0].choices[0].token_ids


def warm(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """The prompt and its own continuation are in the cache."""
    first = cold(llm, prompt, params)
    again = llm.generate(prompt, params)[0]
    assert again.num_cached_tokens >= (len(prompt) - 1) // 16 * 16
    assert again.choices[0].token_ids == first
    return again.choices[0].token_ids


def after_a_longer_prompt(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """The hit ends inside a block that someone else's tokens fill."""
    llm.generate(prompt + tokens(40, 77), max_tokens=1, temperature=0)
    return cold(llm, prompt, params)


def forked(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """Siblings diverge before and after; the parent goes on too."""
    root = llm.branch(prompt)
    one, two, three = root.fork(3)
    llm.step([one, two], [SamplingParams(temperature=1.0, seed=s, max_tokens=9) for s in (1, 2)])
    result = three.generate(params).token_ids
    assert root.generate(params).token_ids == result
    root.prune()
    return result


def expanded(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """Children of one prefill with different settings, in one batch."""
    root = llm.branch(prompt)
    others = [SamplingParams(temperature=1.1, seed=s, max_tokens=5 + s) for s in range(3)]
    kids = root.expand(params=[others[0], params, *others[1:]])
    assert kids[1].output is not None
    result = kids[1].output.token_ids
    root.prune()
    return result


def fork_in_the_middle(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """A fork from inside a longer branch, inside one of its full blocks."""
    root = llm.branch(prompt + tokens(37, 5))
    (branch,) = root.fork(at=len(prompt))
    result = branch.generate(params).token_ids
    root.prune()
    return result


def truncated(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """Grow, go back, grow again; a sibling keeps what was cut off."""
    branch = llm.branch(prompt)
    branch.generate(temperature=1.2, seed=9, max_tokens=21, ignore_eos=True)
    (sibling,) = branch.fork()
    branch.truncate(len(prompt))
    result = branch.generate(params).token_ids
    if not sees_own_output(params):
        branch.truncate(len(prompt) + 3)
        assert branch.generate(_part(params, 3, None)).token_ids == result[3:]
    branch.release()
    sibling.release()
    return result


def parked(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """Park the branch between two generations, evict everything, go on."""
    if sees_own_output(params):
        return preempted(llm, prompt, params)
    branch = llm.branch(prompt)
    first = branch.generate(_part(params, 0, 7)).token_ids
    branch._sequence.live_cursor.park()
    llm.engine.scheduler.remove(branch._sequence)
    llm.engine.cache.tree.evict(llm.config.num_blocks)
    result = first + branch.generate(_part(params, 7, None)).token_ids
    branch.release()
    return result


def preempted(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """Park the request in mid-generation, evict everything, go on."""
    stream = llm.stream(prompt, params)
    result = [token for _ in range(7) for token in next(stream).token_ids]
    scheduler = llm.engine.scheduler
    for sequence in list(scheduler.running):
        sequence.live_cursor.park()
        scheduler.remove(sequence)
        scheduler.submit(sequence)
    llm.engine.cache.tree.evict(llm.config.num_blocks)
    return result + [token for delta in stream for token in delta.token_ids]


def batched(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """Among strangers of other lengths, some of which share a part of the prompt."""
    strangers = [prompt[: len(prompt) // 2] + tokens(9 * i + 1, i) for i in range(5)]
    mixed = [*strangers[:3], prompt, *strangers[3:]]
    return llm.generate(mixed, params)[3].choices[0].token_ids


def streamed(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return [token for delta in llm.stream(prompt, params) for token in delta.token_ids]


def late_copies(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    with delay_copies(llm):
        return forked(llm, prompt, params)


def _part(params: SamplingParams, start: int, end: int | None) -> SamplingParams:
    assert params.max_tokens is not None
    return replace(params, max_tokens=(params.max_tokens if end is None else end) - start)


def sees_own_output(params: SamplingParams) -> bool:
    """Whether one generation is not the same as two in a row."""
    return bool(params.presence_penalty or params.frequency_penalty or params.min_tokens)


WAYS: list[tuple[Way, dict[str, int]]] = [
    (cold, {}),
    (warm, {}),
    (cold, {"max_batch_tokens": 16}),
    (cold, {"max_batch_tokens": 7}),
    (warm, {"max_batch_tokens": 7, "min_partial": 1}),
    (after_a_longer_prompt, {"min_partial": 1}),
    (after_a_longer_prompt, {}),
    (forked, {}),
    (late_copies, {}),
    (expanded, {}),
    (fork_in_the_middle, {}),
    (truncated, {}),
    (parked, {}),
    (preempted, {}),
    (batched, {}),
    (batched, {"max_batch_tokens": 11}),
    (batched, {"num_blocks": 12}),  # not enough for all: some are preempted
    (streamed, {}),
    (forked, {"block_size": 1, "num_blocks": 512}),
    (truncated, {"block_size": 4, "num_blocks": 128, "min_partial": 1}),
    (batched, {"block_size": 32}),
]
WAYS_OF_THE_REAL_MODEL = [(way, settings) for way, settings in WAYS if settings.get("block_size", 16) == 16]


def name_of(way: Way, settings: dict[str, int]) -> str:
    return way.__name__ + "".join(f"-{key}={value}" for key, value in settings.items())


IDS = [name_of(*way) for way in WAYS]
IDS_OF_THE_REAL_MODEL = [name_of(*way) for way in WAYS_OF_THE_REAL_MODEL]


def assert_same(reference: Choice, found: list[int]) -> None:
    """Token for token, unless the two likeliest tokens are closer than 1e-3 at the first difference."""
    if found == reference.token_ids:
        return
    first = next(i for i, (a, b) in enumerate(zip(reference.token_ids, found, strict=True)) if a != b)
    assert reference.logprobs is not None
    best, second = reference.logprobs[first][:2]
    gap = best.logprob - second.logprob
    assert gap < 1e-3, f"token {first} differs: {found[first]} for {reference.token_ids[first]}, gap {gap}"


# Lengths around the edges of a block of 16; the drawn tokens need fewer, as they take the same way.
PROMPTS = [
    *((GREEDY, n) for n in (1, 15, 16, 17, 33)),
    (SEEDED, 31),
    (ADJUSTED, 34),
    (ADJUSTED_AND_SEEDED, 30),
]
NAMES = [f"{'greedy' if p.temperature == 0 else 'seeded'}-{n}" for p, n in PROMPTS]


@pytest.fixture(scope="module")
def references(make_tiny: MakeLLM, device: str) -> dict[int, Choice]:
    return {n: make_tiny(device).generate(tokens(n, 1), params)[0].choices[0] for params, n in PROMPTS}


@pytest.mark.parametrize(("params", "length"), PROMPTS, ids=NAMES)
@pytest.mark.parametrize(("way", "settings"), WAYS, ids=IDS)
def test_tiny_llama(
    make_tiny: MakeLLM,
    device: str,
    references: dict[int, Choice],
    way: Way,
    settings: dict[str, int],
    params: SamplingParams,
    length: int,
) -> None:
    llm = make_tiny(device, **settings)
    assert_same(references[length], way(llm, tokens(length, 1), params))
    check_idle(llm)


@pytest.fixture(scope="module")
def smollm2_shape() -> Any:
    """SmolLM2-135M's 30 layers of 9 query and 3 KV heads of 64, with random weights."""
    return tiny_llama(
        num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152, weight_std=0.05
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("way", "settings"), WAYS_OF_THE_REAL_MODEL, ids=IDS_OF_THE_REAL_MODEL)
def test_smollm2_shape_on_cuda(
    smollm2_shape: Any, way: Way, settings: dict[str, int], params: SamplingParams
) -> None:
    prompt = tokens(33, 1, vocab_size=49152)
    reference = LLM(smollm2_shape, device="cuda", num_blocks=64).generate(prompt, params)[0].choices[0]
    assert len(set(reference.token_ids)) > 12, "outputs vary"
    numbers: dict[str, Any] = {"num_blocks": 64, **settings}
    llm = LLM(smollm2_shape, device="cuda", **numbers)
    assert_same(reference, way(llm, prompt, params))
    check_idle(llm)


@pytest.mark.model
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_smollm2(make_smollm2: MakeLLM, params: SamplingParams) -> None:
    prompt = make_smollm2().encode(
        "Here is a short list of the planets, from the sun outwards: Mercury, Venus,"
    )
    reference = make_smollm2().generate(prompt, params)[0].choices[0]
    for way, settings in WAYS_OF_THE_REAL_MODEL:
        llm = make_smollm2(**settings)
        assert_same(reference, way(llm, prompt, params))
        check_idle(llm)
