"""Admission as engines without paging do it: only while a contiguous reservation fits. For the benchmark.

The pages stay what they are; only the count of slots decides who may start. Nothing is lost between the
reservations, so this flatters the contiguous ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from ramet.engine.sequence import Sequence

Reserve: TypeAlias = Literal["max", "pow2", "exact", "paged"]
Gate: TypeAlias = Callable[[Sequence, Iterable[Sequence]], bool]  # (waiting, running) -> may start


def reservation_gate(reserve: Reserve, num_slots: int, max_model_len: int) -> Gate | None:
    """The gate of a way to reserve; None for "paged", which takes blocks as they are needed."""
    if reserve == "paged":
        return None

    def may_start(waiting: Sequence, running: Iterable[Sequence]) -> bool:
        reserved = sum(num_reserved(reserve, one, max_model_len) for one in running)
        return reserved + num_reserved(reserve, waiting, max_model_len) <= num_slots

    return may_start


def num_reserved(reserve: Reserve, sequence: Sequence, max_model_len: int) -> int:
    """Slots that a sequence reserves: the context, its own need rounded up to a power of two, or its need.

    The need is known here from `max_tokens`; a real engine would have to guess it for "pow2", and could not
    know it for "exact".
    """
    assert sequence.run is not None, "only what runs, or will, reserves"
    need = len(sequence.token_ids) + sequence.run.num_tokens_left - 1  # the last token is not fed
    if reserve == "max":
        return max_model_len
    return min(max_model_len, 1 << (need - 1).bit_length()) if reserve == "pow2" else need
