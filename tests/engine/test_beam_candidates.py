"""The best continuations of several beams against a full sort."""

from __future__ import annotations

import math

import pytest
import torch

from ramet.engine.adjust import Adjustment
from ramet.engine.beam_candidates import best_candidates
from ramet.engine.errors import BadLogits


def random_logits(num_beams: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_beams, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("num_beams", "vocab_size", "count"),
    [
        (1, 5, 2),
        (1, 5, 20),
        (3, 64, 6),
        (2, 65, 130),
        (4, 1000, 8),
        (7, 333, 500),
        (16, 4096, 32),
        (40, 100, 70),
    ],
)
def test_the_best_are_those_of_a_full_sort(num_beams: int, vocab_size: int, count: int) -> None:
    logits = random_logits(num_beams, vocab_size)
    scores = [-0.5 * beam for beam in range(num_beams)]
    found = best_candidates(list(logits), scores, [None] * num_beams, count)
    sums = torch.log_softmax(logits.double(), -1) + torch.tensor(scores).double()[:, None]
    order = sums.flatten().sort(descending=True).indices[:count].tolist()
    assert [(c.beam, c.token_id) for c in found] == [divmod(place, vocab_size) for place in order]
    for candidate in found:
        total = float(sums[candidate.beam, candidate.token_id])
        assert candidate.score == pytest.approx(total, abs=1e-5)
        assert candidate.logprob == pytest.approx(total - scores[candidate.beam], abs=1e-5)


def test_of_equal_candidates_the_lower_beam_and_token_come_first() -> None:
    found = best_candidates(list(torch.zeros(2, 3)), [0.0, 0.0], [None, None], 6)
    assert [(c.beam, c.token_id) for c in found] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_what_is_impossible_is_no_candidate() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    found = best_candidates(list(logits), [0.0], [Adjustment(banned_ids=torch.tensor([2]).numpy())], 3)
    assert [c.token_id for c in found] == [0]
    assert found[0].logprob == pytest.approx(math.log(0.5))


def test_adjustments_act_on_log_probabilities_and_not_on_those_reported() -> None:
    logits = torch.tensor([[1.0, 1.0]])
    bias = Adjustment(bias_ids=torch.tensor([1]).numpy(), biases=torch.tensor([2.0]).numpy())
    found = best_candidates(list(logits), [-1.0], [bias], 2)
    assert [c.token_id for c in found] == [1, 0]
    assert [c.score for c in found] == pytest.approx([1.0 + math.log(0.5), -1.0 + math.log(0.5)])
    assert [c.logprob for c in found] == pytest.approx([math.log(0.5)] * 2)


def test_rows_that_are_no_numbers_are_named() -> None:
    logits = random_logits(40, 70)
    logits[1, 3], logits[20], logits[39, 0] = math.nan, -math.inf, math.inf
    with pytest.raises(BadLogits) as raised:
        best_candidates(list(logits), [0.0] * 40, [None] * 40, 80)
    assert raised.value.rows == (1, 20, 39)
