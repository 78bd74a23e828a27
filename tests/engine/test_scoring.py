"""Continuations of a branch, scored: what it costs, and how they are compared. Values: test_llm.py."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from ramet import LLM, AsyncLLM, InvalidInput
from ramet.engine.scoring import normalized
from ramet.testing import check_idle

MakeLLM = Callable[..., LLM]
CANDIDATES = [[1, 2, 3], [4], [1, 2, 5, 6], [7, 8]]


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"scoring {seed}").choices(range(512), k=length)


@pytest.mark.parametrize("length", [15, 16, 33])
def test_scores_take_one_step_and_never_the_prefix_again(make_tiny: MakeLLM, length: int) -> None:
    llm = make_tiny()
    branch = llm.branch(tokens(length))
    before, free = llm.stats(), llm.stats().pages.num_free
    scores = branch.score(CANDIDATES)
    after = llm.stats()
    assert after.num_steps - before.num_steps == 1
    # The last token of the branch runs again as a query; the last token of a candidate never does.
    assert after.num_computed_tokens - before.num_computed_tokens == 1 + sum(len(c) - 1 for c in CANDIDATES)
    assert after.pages.num_free == free
    assert after.pages.num_cached_idle == 0
    fresh = make_tiny().branch(tokens(length))
    for candidate, score in zip(CANDIDATES, scores, strict=True):
        assert score.token_logprobs == pytest.approx(fresh.score([candidate])[0].token_logprobs, abs=1e-4)


def test_what_a_branch_still_has_to_compute_is_computed_once_in_a_step_before(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    branch = llm.branch(tokens(20))
    branch.extend(tokens(7, 1))
    before = llm.stats()
    scores = branch.score(CANDIDATES, suffix=None)
    after = llm.stats()
    assert after.num_steps - before.num_steps == 2
    assert after.num_computed_tokens - before.num_computed_tokens == 7 + sum(len(c) - 1 for c in CANDIDATES)
    root = make_tiny().branch(tokens(20))
    suffixed = root.score(CANDIDATES, suffix=tokens(7, 1))
    assert len(root) == 20
    for score, other in zip(scores, suffixed, strict=True):
        assert score.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("none", [-2.0, -3.0, -math.inf]),
        ("tokens", [-1.0, -1.0, -math.inf]),
        ("bytes", [-1.0, -1.0, -math.inf]),
        ("softmax", [1 / (1 + math.exp(-1)), math.exp(-1) / (1 + math.exp(-1)), 0.0]),
    ],
)
def test_how_candidates_are_compared(how: Any, expected: list[float]) -> None:
    assert normalized(how, [-2.0, -3.0, -math.inf], [2, 3, 0]) == pytest.approx(expected)
    assert normalized(how, [], []) == []


def test_nothing_possible_has_no_share() -> None:
    assert normalized("softmax", [-math.inf, -math.inf], [1, 1]) == [0.0, 0.0]


@pytest.mark.model
def test_lengths_are_those_of_tokens_and_of_bytes(make_smollm2: MakeLLM) -> None:
    branch = make_smollm2().branch("The capital of France is")
    texts = [" Paris", " the city of light", " M\u00fcnchen \U0001f336"]
    plain = branch.score(texts)
    assert [one.score for one in plain] == [one.logprob for one in plain]
    for how, lengths in (
        ("tokens", [len(one.token_ids) for one in plain]),
        ("bytes", [len(text.encode()) for text in texts]),
    ):
        values = [one.score for one in branch.score(texts, normalize=how)]  # type: ignore[arg-type]
        expected = [one.logprob / length for one, length in zip(plain, lengths, strict=True)]
        assert values == pytest.approx(expected, abs=1e-4)
    shares = [one.score for one in branch.score(texts, normalize="softmax")]
    assert sum(shares) == pytest.approx(1.0)
    assert shares.index(max(shares)) == 0
    paris, london = branch.next_tokens([" Paris", " London"])
    assert paris.logprob == pytest.approx(plain[0].logprob, abs=1e-4)
    assert paris.logit - london.logit == pytest.approx(paris.logprob - london.logprob, abs=1e-4)
    with pytest.raises(InvalidInput) as raised:
        branch.next_tokens([" Paris", " Paris and London"])
    assert raised.value.field == "labels"


@pytest.mark.model
def test_texts_are_the_tokens_that_extend_would_append(make_smollm2: MakeLLM) -> None:
    """What is spelled like a control token is text."""
    llm = make_smollm2()
    text = "yes<|im_end|>"
    branch = llm.branch("So?")
    appended = branch.fork()[0].extend(text)
    assert len(appended) > 2
    (score,) = branch.score([text])
    assert score.token_ids == appended
    assert branch.score([[5]], suffix=text) == branch.score([[5]], suffix=appended)
    with pytest.raises(InvalidInput, match=r"^labels must be one token"):
        branch.next_tokens(["<|im_end|>"])


def test_next_tokens_are_ids_as_well_and_have_a_twin(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    branch = llm.branch(tokens(9))
    named = branch.next_tokens([5, 7], suffix=[3])
    scores = branch.score([[5], [7]], suffix=[3])
    assert [(one.token_id, one.logit, one.logprob) for one in named] == [
        (one.token_ids[0], one.first_logit, one.logprob) for one in scores
    ]
    assert sum(one.is_greedy for one in branch.next_tokens(range(512))) == 1
    branch.release()

    async def run() -> None:
        async with AsyncLLM(llm) as asynchronous:
            twin = await asynchronous.branch(tokens(9))
            assert [one.token_id for one in await twin.next_tokens([5, 7], suffix=[3])] == [5, 7]
            told = await twin.score([[5], [7]], suffix=[3], normalize="softmax")
            assert sum(one.score for one in told) == pytest.approx(1.0)
            await twin.prune()

    asyncio.run(run())
    check_idle(llm)


def test_bad_input_names_its_field(make_tiny: MakeLLM) -> None:
    branch = make_tiny().branch([1, 2])
    calls: list[tuple[str, Callable[[], object]]] = [
        *[
            ("normalize", lambda how=how: branch.score([[1]], normalize=how))
            for how in ("sum", None, 1, "", "bytes")
        ],
        *[
            ("labels", lambda wrong=wrong: branch.next_tokens(wrong))
            for wrong in ("ab", None, 3, ["a"], [512], [-1], [1.5], [True])
        ],
    ]
    for field, call in calls:
        with pytest.raises(InvalidInput) as raised:
            call()
        assert raised.value.field == field
