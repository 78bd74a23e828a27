"""The trees that grow split where a transformers model's own log-probabilities are lowest."""

from __future__ import annotations

from collections.abc import Callable

import torch

from examples.treerl_split import Chain, grow
from ramet import LLM, SamplingParams
from ramet.testing import check_idle, tiny_llama

MakeLLM = Callable[..., LLM]

PROMPT = list(range(30, 70))
PARAMS = SamplingParams(temperature=1.0, max_tokens=20)


def own_logprobs(chain: Chain) -> list[float]:
    """Of the tokens from its start on, by a model that runs the whole sequence at once."""
    token_ids = chain.branch.token_ids
    with torch.no_grad():
        logprobs = tiny_llama()(torch.tensor([token_ids])).logits[0].log_softmax(-1)  # [T, V]
    return [float(logprobs[at - 1, token_ids[at]]) for at in range(chain.start, len(token_ids))]


def test_splits_are_those_of_recorded_logprobs(make_tiny: MakeLLM) -> None:
    llm = make_tiny(num_blocks=256)
    with llm.branch(PROMPT) as root:
        trees = grow(root, PARAMS, num_trees=2, num_splits=3, num_rounds=2)
        for tree in trees:
            assert [chain.is_split for chain in tree] == [False] + [True] * 6
            assert all(len(chain.branch) <= len(PROMPT) + 20 for chain in tree)
            for size in (1, 4):  # chains there were before each round
                ranked = sorted(
                    (logprob, chain.start + offset)
                    for chain in tree[:size]
                    for offset, logprob in enumerate(own_logprobs(chain))
                    if offset or not chain.is_split
                )
                made = tree[size : size + 3]
                assert [chain.start for chain in made] == [position for _, position in ranked[:3]]
                for chain in made:
                    past = chain.branch.token_ids[: chain.start]
                    assert any(other.branch.token_ids[: chain.start] == past for other in tree[:size])
        # The prompt once; of each chain what it drew but for the last token, and where it starts once more.
        chains = [chain for tree in trees for chain in tree]
        drawn = sum(len(chain.logprobs) - 1 for chain in chains)
        assert llm.stats().num_computed_tokens <= len(PROMPT) + len(chains) + drawn
    check_idle(llm)
