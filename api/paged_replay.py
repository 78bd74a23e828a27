"""The trace on which a contiguous allocator refused a request, replayed on the real pool and tree.

The same requests enter and leave at the same steps. Each takes blocks as it grows, as paging does; at the
moment of the refusal every resident is also given all the room it will ever need, as the contiguous allocator
had done, so that paging does not win by having promised less.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from ramet.api.contiguous_sim import Event, Refusal
from ramet.api.paged_sim import NAMESPACE
from ramet.api.request_lengths import Request
from ramet.radix.block_pool import OutOfBlocks
from ramet.radix.cursor import Cursor
from ramet.radix.prefix_cache import PrefixCache
from ramet.radix.tokens import TOKEN_BYTES


class Replayed(NamedTuple):
    """What paging made of the refused request, in blocks."""

    admitted: bool
    num_needed: int  # by the refused request, to its end
    num_free: int  # with every resident at its final length


class _Resident(NamedTuple):
    request: Request
    entered_at: int
    cursor: Cursor


def replay(cache: PrefixCache, events: Sequence[Event], refusal: Refusal, seed: int = 0) -> Replayed:
    """Replay what came before `refusal` on an empty cache, then try the refused request at full length."""
    rng = random.Random(f"replay:{seed}")
    residents: dict[int, _Resident] = {}
    for kind, now, request in events[: refusal.num_events]:
        for resident in residents.values():
            _grow(cache, resident, resident.request.num_prompt + now - resident.entered_at, rng)
        if kind == "leave":
            residents.pop(request.index).cursor.prune()
        else:
            residents[request.index] = _Resident(request, now, cache.attach(NAMESPACE, b""))
            _grow(cache, residents[request.index], request.num_prompt, rng)
    for resident in residents.values():
        _grow(cache, resident, resident.request.num_kv, rng)
    return _admit(cache, refusal.request, rng)


def _grow(cache: PrefixCache, resident: _Resident, num_tokens: int, rng: random.Random) -> None:
    """Write random tokens up to a length of `num_tokens`, at most the request's own final length."""
    missing = min(num_tokens, resident.request.num_kv) - resident.cursor.length
    if missing > 0:
        [reservation] = cache.reserve([(resident.cursor, missing)])
        cache.commit(reservation, rng.randbytes(TOKEN_BYTES * missing))


def _admit(cache: PrefixCache, request: Request, rng: random.Random) -> Replayed:
    num_needed, num_free = -(-request.num_kv // cache.block_size), cache.pool.num_free
    newcomer = _Resident(request, 0, cache.attach(NAMESPACE, b""))
    try:
        _grow(cache, newcomer, request.num_kv, rng)
    except OutOfBlocks:
        return Replayed(False, num_needed, num_free)
    return Replayed(True, num_needed, num_free)
