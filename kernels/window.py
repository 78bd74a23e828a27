"""The CPU's work list for layers with a sliding window: the same plan, less of it read.

A window cuts the front of what a query sees. What no query of a row, or of a shared segment, sees is not
gathered; what only some of them see gets a mask. A shared segment stays one, read once for all its rows.
All pages stay where they are: a window frees nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from ramet.kernels.cpu_work import Stretch, WorkItem, WorkListBuilder
from ramet.kernels.plan import AttentionPlan, IntArray


class WindowedBuilder(WorkListBuilder):
    """Collects the items of a step for the layers whose queries see `window` tokens each."""

    def __init__(self, plan: AttentionPlan, max_slots: int, max_widened: int, window: int) -> None:
        super().__init__(plan, max_slots, max_widened)
        # Query i sees positions [lows[i], ends[i]) of its row; both are [T].
        first = plan.kv_lens - plan.query_lens - plan.query_starts[:-1]
        self.ends = np.arange(plan.num_tokens) + np.repeat(first, plan.query_lens) + 1
        self.lows = np.maximum(self.ends - window, 0)

    def _private_rows(self) -> Iterator[Stretch]:
        for row in super()._private_rows():
            yield row._replace(start=max(row.start, int(self.lows[row.token0])))

    def _add_extend(self, row: Stretch) -> None:
        for start, stop in self._pieces(row.start, row.stop, self.max_widened):
            self._add_seen(row._replace(start=start, stop=stop))

    def _add_level(self, shared: list[Stretch]) -> None:
        """Segments that all their queries see whole go the usual way, the others alone and masked."""
        seen = list(chain.from_iterable(map(self._cut, shared)))
        super()._add_level([s for s in seen if self._sees_all(s)])
        for s in seen:
            if not self._sees_all(s):
                for start, stop in self._pieces(s.start, s.stop, self.max_widened):
                    self._add_seen(s._replace(start=start, stop=stop))

    def _cut(self, s: Stretch) -> Iterator[Stretch]:
        """The part of a shared segment that any of its queries sees, if there is one."""
        start = max(s.start, int(self._of(self.lows, s).min()))
        if start < s.stop:
            yield s._replace(start=start)

    def _sees_all(self, s: Stretch) -> bool:
        """Whether each of its queries sees the whole stretch."""
        return bool(self._of(self.lows, s).max() <= s.start and self._of(self.ends, s).min() >= s.stop)

    def _add_seen(self, s: Stretch) -> None:
        """One piece, for its queries from the first to the last that sees any of it."""
        seeing = np.flatnonzero((self._of(self.lows, s) < s.stop) & (self._of(self.ends, s) > s.start))
        if not len(seeing):
            return
        s = s._replace(token0=s.token0 + int(seeing[0]), num_tokens=int(seeing[-1] - seeing[0]) + 1)
        sees = None
        if not self._sees_all(s):
            lows = np.maximum(self._of(self.lows, s) - s.start, 0)
            sees = lows, np.minimum(self._of(self.ends, s) - s.start, s.num_slots)
        slot0 = s.start % self.plan.block_size
        slot1 = slot0 + s.num_slots
        tokens = slice(s.token0, s.token0 + s.num_tokens)
        gathered = self._whole_blocks(slot1)
        self._append(WorkItem(self._blocks(s), gathered, slot0, slot1, tokens, s.num_tokens, sees=sees))

    @staticmethod
    def _of(values: IntArray, s: Stretch) -> IntArray:
        """The values [n] of a stretch's queries."""
        return values[s.token0 : s.token0 + s.num_tokens]
