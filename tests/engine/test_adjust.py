"""Biases, forbidden tokens and penalties, beside those of transformers and beside a naive loop."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ramet.engine.adjust import TokenCounts, adjusted, adjustment_of
from ramet.engine.sampler import RowSampling, sample
from ramet.engine.sampling_params import SamplingParams

VOCAB = 200


def logits_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def past(seed: int, length: int = 60) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def theirs(processors: list[LogitsProcessor], ids: list[list[int]], logits: Tensor) -> Tensor:
    past_ids: Any = torch.tensor(ids)
    result: Tensor = LogitsProcessorList(processors)(past_ids, logits.clone())
    return result


def counts_of(prompt: list[int], made: list[int]) -> TokenCounts:
    counts = TokenCounts(prompt)
    for token_id in made:
        counts.add(token_id)
    return counts


@pytest.mark.parametrize("penalty", [0.5, 1.1, 1.3, 10.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = logits_of(5)
    many = [past(seed) for seed in range(5)]
    params = SamplingParams(repetition_penalty=penalty)
    mine = adjusted(logits, [adjustment_of(params, counts_of(ids[:40], ids[40:])) for ids in many])
    assert torch.equal(mine, theirs([RepetitionPenaltyLogitsProcessor(penalty)], many, logits))


def test_bias_and_bans_are_those_of_transformers() -> None:
    logits = logits_of(1)
    biases = {3: 2.5, 7: -100.0, 199: 0.25}
    mine = adjusted(logits, [adjustment_of(SamplingParams(logit_bias=biases), None)])
    bias: Any = {(token_id,): value for token_id, value in biases.items()}
    assert torch.equal(mine, theirs([SequenceBiasLogitsProcessor(bias)], [[1]], logits))
    mine = adjusted(logits, [adjustment_of(SamplingParams(banned_token_ids=[0, 5, 199]), None)])
    assert torch.equal(mine, theirs([NoBadWordsLogitsProcessor([[0], [5], [199]])], [[1]], logits))


def test_openai_penalties_see_the_output_only() -> None:
    logits = logits_of(2)
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=-0.3)
    made = [5, 9, 5, 5, 12]
    mine = adjusted(logits, [adjustment_of(params, counts_of([1, 5, 9], made)), None])
    expected = logits.clone()
    for token_id, count in Counter(made).items():
        expected[0, token_id] -= 0.7 - 0.3 * count
    torch.testing.assert_close(mine, expected)
    before = adjusted(logits, [adjustment_of(params, counts_of([1, 5, 9], [])), None])
    assert torch.equal(before, logits), "nothing was made yet"


def test_all_at_once_beside_a_naive_loop() -> None:
    generator = random.Random(4)
    for seed in range(20):
        logits, ids = logits_of(1, seed), past(seed)
        biases = {token_id: generator.uniform(-9, 9) for token_id in generator.sample(range(VOCAB), 5)}
        allowed, banned = generator.sample(range(VOCAB), 150), generator.sample(range(VOCAB), 40)
        params = SamplingParams(
            logit_bias=biases,
            allowed_token_ids=allowed,
            banned_token_ids=banned,
            repetition_penalty=1.4,
            presence_penalty=0.5,
            frequency_penalty=0.25,
        )
        mine = adjusted(logits, [adjustment_of(params, counts_of(ids[:30], ids[30:]))])[0]
        for token_id in range(VOCAB):
            logit = float(logits[0, token_id]) + biases.get(token_id, 0.0)
            if token_id not in allowed or token_id in banned:
                logit = -float("inf")
            if token_id in ids:
                logit = logit / 1.4 if logit > 0 else logit * 1.4
            count = ids[30:].count(token_id)
            logit -= 0.25 * count + 0.5 * (count > 0)
            assert float(mine[token_id]) == pytest.approx(logit, rel=1e-5, abs=1e-5)


def test_the_whole_chain_keeps_the_tokens_that_transformers_keeps() -> None:
    """Penalty, temperature, top_k, top_p, min_p: the same set, and the same proportions within it."""
    for seed in range(10):
        logits, ids = logits_of(1, seed) / 4, past(seed)
        chain = [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(1.5),
            TopKLogitsWarper(60),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.15),
        ]
        probabilities = theirs(chain, [ids], logits)[0].softmax(-1)
        adjustment = adjustment_of(SamplingParams(repetition_penalty=1.3), counts_of(ids, []))
        row = RowSampling(1.5, 60, 0.8, seed, 0, min_p=0.15, adjustment=adjustment)
        rows = [row._replace(position=position) for position in range(4000)]
        drawn = Counter(sample(logits.expand(4000, -1), rows).token_ids)
        assert set(drawn) <= set(probabilities.nonzero()[:, 0].tolist())
        for token_id, probability in enumerate(probabilities.tolist()):
            assert drawn[token_id] / 4000 == pytest.approx(probability, abs=0.04)


def test_rows_that_ask_for_nothing_are_not_copied() -> None:
    logits = logits_of(3)
    assert adjusted(logits, [None] * 3) is logits
    assert adjustment_of(SamplingParams(temperature=0.5, top_k=3, min_p=0.1), None) is None
    before = logits.clone()
    changed = adjusted(logits, [None, adjustment_of(SamplingParams(banned_token_ids=[1]), None), None])
    assert torch.equal(logits, before)
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])


def test_counts_fork() -> None:
    counts = counts_of([4, 4, 2], [2, 9])
    other = counts.fork()
    other.add(4)
    counts.add(9)
    assert (counts.ids().tolist(), counts.counts().tolist()) == ([4, 2, 9], [0, 1, 2])
    assert (other.ids().tolist(), other.counts().tolist()) == ([4, 2, 9], [1, 1, 1])


def test_counts_do_not_depend_on_how_often_they_were_read() -> None:
    counts = TokenCounts()
    for token_id in range(1000):
        assert len(counts.ids()) == token_id
        counts.add(token_id)
    assert counts.counts().tolist() == [1] * 1000
