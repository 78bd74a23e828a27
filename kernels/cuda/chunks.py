"""How segments are cut into chunks, such that all of the card works until the end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ramet.kernels.plan import IntArray

EVEN_ENOUGH = 0.94  # of the rate of a perfect fit
# What starting and ending a CTA costs, and a part that has to be merged, in tokens read.
CTA_TOKENS, PART_TOKENS = 40, 8
FULL_RATE_FROM = 0.55  # of the slots: with fewer CTAs the memory is not busy any more


class Cut(NamedTuple):
    """The chunks of each segment: how many, and the tokens of one; the last of a segment may have fewer."""

    num_chunks: IntArray  # [X]
    num_tokens: IntArray  # [X]


def cut(num_tokens: IntArray, least: int, grain: int, share: float) -> Cut:
    """Cut segments of `num_tokens` [X] into chunks of about `share` tokens, not below about `least`.

    Chunks are multiples of `grain`, and those of one segment are alike.
    """
    num_chunks = np.maximum(np.rint(num_tokens / max(share, least)), 1).astype(np.int64)
    size = -(-num_tokens // (num_chunks * grain)) * grain
    return Cut(-(-num_tokens // size), size)


def even_cut(num_tokens: IntArray, least: int, grain: int, num_slots: int) -> Cut:
    """Cut segments so that the slots (CTAs that run at a time) get about the same.

    A chunk a slot is best, as each halving costs 1 to 3 %, but only if that comes out even. Otherwise finer
    cuts are tried: they leave less to wait for at the end.
    """
    share = int(num_tokens.sum()) / num_slots
    longest = int(num_tokens.max(initial=0))
    found: list[tuple[float, Cut]] = []
    for finer in (1, 1.75, 3):
        if found and longest < 1.5 * max(share / finer, least):
            continue  # all stay whole, as they were
        trial = cut(num_tokens, least, grain, share / finer)
        if found and np.array_equal(trial.num_chunks, found[-1][1].num_chunks):
            continue
        found.append((_duration(trial, num_slots), trial))
        if found[-1][0] * EVEN_ENOUGH <= share:
            break
    return min(found, key=lambda timed: timed[0])[1]


def _duration(chunks: Cut, num_slots: int) -> float:
    """How long the chunks take, in tokens that a slot reads at full rate.

    The longest start first, and the slot that is through first takes the next: approximated by dealing them
    out in rounds that go back and forth. All that run share the memory evenly.
    """
    tokens = np.repeat(chunks.num_tokens, chunks.num_chunks)
    num_rounds = -(-len(tokens) // num_slots)
    dealt = np.zeros((num_rounds, num_slots))
    dealt.reshape(-1)[: len(tokens)] = np.sort(tokens)[::-1] + CTA_TOKENS
    dealt[1::2] = dealt[1::2, ::-1]
    ends = np.sort(dealt.sum(0))
    running = np.maximum(num_slots - np.arange(num_slots), FULL_RATE_FROM * num_slots)
    reading = float(np.diff(ends, prepend=0.0) @ running) / num_slots
    return reading + PART_TOKENS * (len(tokens) - len(chunks.num_tokens)) / num_slots
