"""Where rollouts split is where a transformers model's own log-probabilities say that they should."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from examples.arpo_split import Limits, Rollout, roll_out
from ramet import LLM, SamplingParams
from ramet.testing import check_idle, tiny_llama

MakeLLM = Callable[..., LLM]

PROMPT = list(range(30, 70))
CALL = 7  # the token that calls the tool
PARAMS = SamplingParams(
    temperature=1.0,
    max_tokens=30,
    stop_token_ids=[CALL],
    allowed_token_ids=[CALL, *range(100, 106)],  # so that most turns end in a call
    return_entropy=True,
)


def entropies(token_ids: list[int]) -> list[float]:
    """Of what follows each token, in nats."""
    with torch.no_grad():
        logprobs = tiny_llama()(torch.tensor([token_ids])).logits[0].log_softmax(-1)  # [T, V]
    return [float(entropy) for entropy in -(logprobs.exp() * logprobs).sum(-1)]


def turn_entropy(rollout: Rollout, begin: int) -> float:
    """ARPO's measure of the turn that begins there, recomputed: its first 20 tokens, in units of log V."""
    token_ids = rollout.branch.token_ids
    length = token_ids[begin:].index(CALL) + 1
    return sum(entropies(token_ids)[begin - 1 : begin - 1 + min(20, length)]) / math.log(512)


def test_splits_are_those_of_recorded_logprobs(make_tiny: MakeLLM) -> None:
    llm = make_tiny(num_blocks=256)
    drawn = random.Random(1)
    with llm.branch(PROMPT) as root:
        rollouts = roll_out(
            root,
            PARAMS,
            lambda _: [200, 201],
            CALL,
            Limits(num_first=3, num_rollouts=8, num_calls=3),
            lambda: 0.4 + 0.2 * drawn.random(),
        )
        decisions = []
        for rollout in rollouts:
            first = turn_entropy(rollout, rollout.turns[0][0]) if rollout.tries else 0.0
            assert not rollout.tries or rollout.first_entropy == pytest.approx(first, abs=1e-4)
            answers = [begin for begin, _ in rollout.turns if rollout.branch.token_ids[begin - 1] == 201]
            for position, draw, split in rollout.tries:
                begin = max(begin for begin, _ in rollout.turns if begin < position)
                rise = turn_entropy(rollout, begin) - first
                assert split == (draw - 0.5 * rise <= 0.5), (position, draw, rise)
                assert position in answers, "right after the tool's answer"
                decisions.append(split)
        assert True in decisions and False in decisions, "both happen, or nothing is compared"
        assert sum(decisions) == len(rollouts) - 3 > 0
        for rollout in rollouts[3:]:
            begin = rollout.turns[0][0]
            assert any(
                begin in [position for position, _, split in other.tries if split]
                and other.branch.token_ids[:begin] == rollout.branch.token_ids[:begin]
                for other in rollouts
            ), "a split has the past of the rollout that it left"
    check_idle(llm)
