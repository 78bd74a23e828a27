"""Several whole answers to one prompt: the best one, or the one that most agree on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from ramet.api.search.branches import B
from ramet.api.search.policy import OfText, Value, call, likelihood, valued
from ramet.api.search.tasks import all_of
from ramet.api.search.tree import Found, Tree
from ramet.engine.checks import check_int
from ramet.engine.sampling_params import MAX_CHOICES


async def best_of(branch: B, n: int, value: Value = likelihood, **settings: Any) -> Found[B]:
    """Sample `n` answers in one batch and keep the one of the highest value.

    `settings` are the fields of SamplingParams. Raises InvalidInput, whatever `value` raises, and as
    `expand` does; then no branch is left.
    """
    check_int("n", n, 1, MAX_CHOICES)
    async with Tree(branch) as tree:
        answers = await tree.root.sample(n, **settings)
        worths = await all_of(valued(value, answer) for answer in answers)
        for answer, worth in zip(answers, worths, strict=True):
            answer.value = worth
        answers.sort(key=lambda answer: -answer.value)
        return await tree.found(answers[0], answers)


async def self_consistency(branch: B, n: int, answer: OfText[Hashable | None], **settings: Any) -> Found[B]:
    """Sample `n` chains of thought and keep the answer that most of them come to (Wang et al., 2023).

    `answer` reads it off a text, None if there is none; `votes` of what is found counts them. The branch that
    stays is the likeliest of those that came to it. Raises as `best_of` does.
    """
    check_int("n", n, 1, MAX_CHOICES)
    async with Tree(branch) as tree:
        nodes = await tree.root.sample(n, **settings)
        said = dict(zip(nodes, await all_of(call(answer, node.text) for node in nodes), strict=True))
        votes = Counter(one for one in said.values() if one is not None)
        for node in nodes:
            node.value = votes[said[node]] / n
        nodes.sort(key=lambda node: (-node.value, -node.logprob))
        return await tree.found(nodes[0], nodes, dict(votes.most_common()))
