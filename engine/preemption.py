"""Who makes room when the pool is dry and something must. One function, and no state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq

from ramet.engine.sequence import Sequence


def choose_victim(running: Iterable[Sequence], needy: Sequence, num_short: int) -> Sequence:
    """The running sequence to park so that `needy`, which lacks `num_short` blocks, can go on.

    Never one that is served before `needy`: of lower rank are those of lower priority, and the younger of the
    same. Of these, one that frees enough for the least work lost, or else the one that frees most. A sequence
    that was resumed first makes a block of progress, unless nobody else is left.
    """
    candidates = [s for s in running if s.rank > needy.rank]
    settled = [s for s in candidates if len(s.token_ids) >= s.safe_until]
    return _cheapest(settled or candidates, num_short) if candidates else needy


def _cheapest(candidates: Seq[Sequence], num_short: int) -> Sequence:
    freed = {s: s.live_cursor.num_exclusive_blocks for s in candidates}
    enough = [s for s in candidates if freed[s] >= num_short]
    if enough:
        # What is shared stays; what is exclusive has to be computed again if it is evicted meanwhile.
        return min(enough, key=lambda s: (freed[s], [-n for n in s.arrival]))
    return max(candidates, key=lambda s: (freed[s], s.arrival))
