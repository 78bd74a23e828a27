"""Continuations of a branch are scored, and compared although their lengths differ."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal, get_args

from ramet.engine.errors import InvalidInput
from ramet.engine.operation import Operation
from ramet.engine.outputs import Score
from ramet.engine.runs import HeadScoring
from ramet.engine.sequence import Sequence

if TYPE_CHECKING:
    from ramet.engine.engine import Engine

Normalize = Literal["none", "tokens", "bytes", "softmax"]


def check_normalize(value: object) -> None:
    if not isinstance(value, str) or value not in get_args(Normalize):
        raise InvalidInput("normalize", f"must be one of {', '.join(get_args(Normalize))}", value)


def normalized(how: Normalize, logprobs: Seq[float], lengths: Seq[int]) -> list[float]:
    """What candidates with these log-probabilities are compared by.

    "none" is the log-probability itself, "tokens" and "bytes" that over the candidate's length, given in this
    unit, and "softmax" its share of the probability that all candidates have together.
    """
    if how == "none":
        return list(logprobs)
    if how == "softmax":
        best = max(logprobs, default=0.0)
        weights = [0.0 if value == -math.inf else math.exp(value - best) for value in logprobs]
        return [weight / (sum(weights) or 1.0) for weight in weights]
    return [value / max(1, length) for value, length in zip(logprobs, lengths, strict=True)]


def scoring(
    engine: Engine, sequence: Sequence, candidates: list[list[int]], suffix: Seq[int], *, aside: bool
) -> Operation[list[Score]]:
    """Score candidates after `sequence` and `suffix`: one step, and one before if tokens are to be computed.

    Of a sequence that runs, what is there so far is scored. With `aside` it may be used meanwhile.
    """
    if not (suffix or aside) and sequence.run is None:
        return (yield from _scoring_on(engine, sequence, candidates))
    fork = engine.fork(sequence, keep=True)
    fork.token_ids += suffix
    try:
        return (yield from _scoring_on(engine, fork, candidates))
    finally:
        engine.release(fork, prune=True)


def _scoring_on(engine: Engine, sequence: Sequence, candidates: list[list[int]]) -> Operation[list[Score]]:
    run = HeadScoring(candidates)
    try:
        engine.submit(sequence, run)
        if sequence.is_live and sequence.num_to_do == 0:
            engine.score_rests(sequence, run)  # they need no logits of the sequence: the same step does all
        yield [run]
        yield [rest for rest in run.rests if rest is not None]
    finally:
        engine.abort(sequence, run)  # its own part was done early: others may have begun since
        for child in run.children:
            engine.release(child, prune=True)
    return run.scores()
