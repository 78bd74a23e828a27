"""Turns an attention plan into the CPU's work list: what is gathered, and which queries read it.

Made once a step and used by every layer, so everything that does not depend on the layer is made here: slot
indices, masks, and the views of the gather buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch

from ramet.kernels.plan import AttentionPlan, IntArray

# Rows padded to one length share their operations; a new batch costs about as much as this many slots.
FREE_PADDING = 64
MAX_PADDING = 0.125


class WorkItem(NamedTuple):
    """R stretches of K slots, each read by its own n queries: one gather and one attention call.

    `source` is None where K and V of the item before are read once more. One stretch is gathered by blocks,
    in long runs of memory, and bounded by slot0 and slot1; several are gathered by slots, so that padding can
    be a slot that is in use.
    """

    source: torch.Tensor | None  # int64: [K / B] blocks where R is 1, else [R * K] slots
    num_gathered: int  # K
    slot0: int  # of the K gathered slots, those from slot0
    slot1: int  # to slot1 are read
    tokens: slice | torch.Tensor  # [R * n], an index only where they are not adjacent
    num_queries: int  # n
    num_stretches: int = 1  # R
    lens: IntArray | None = None  # [R], None where all of them are K
    causal: bool = False  # query i sees slots slot0 to slot0 + i
    # [n] each: query i sees slots slot0 + sees[0][i] to slot0 + sees[1][i]; None: all, or what `causal` says
    sees: tuple[IntArray, IntArray] | None = None
    widens: bool = True  # half-precision K and V are widened to fp32 after the gather
    merges: bool = False  # its tokens have results already


class WorkList(NamedTuple):
    items: tuple[WorkItem, ...]
    starts_empty: bool  # an item merges into tokens of which some have no result yet


class Stretch(NamedTuple):
    """Positions [start, stop) of one block table, for num_tokens queries from token0 on."""

    table: Sequence[int]
    start: int
    stop: int
    token0: int
    num_tokens: int

    @property
    def num_slots(self) -> int:
        return self.stop - self.start


class WorkListBuilder:
    """Collects the items of a step: private segments first, then shared ones from the leaves to the root."""

    def __init__(self, plan: AttentionPlan, max_slots: int, max_widened: int) -> None:
        self.plan = plan
        self.max_slots = max_slots
        self.max_widened = max_widened
        self.items: list[WorkItem] = []
        self.seen = np.zeros(plan.num_tokens, dtype=np.bool_)
        self.starts_empty = False

    def build(self) -> WorkList:
        rows = list(self._private_rows())
        self._add_decodes([row for row in rows if row.num_tokens == 1])
        for row in rows:
            if row.num_tokens > 1:
                self._add_extend(row)
        for _, level in groupby(reversed(self.plan.segments), key=lambda s: s.level):
            self._add_level([self._shared(*segment[1:]) for segment in reversed(list(level))])
        assert self.seen.all(), "a query has no KV to see"
        return WorkList(tuple(self.items), self.starts_empty)

    def _private_rows(self) -> Iterator[Stretch]:
        plan = self.plan
        rows = zip(
            plan.block_tables,
            (plan.private_block0 * plan.block_size).tolist(),
            plan.kv_lens.tolist(),
            plan.query_starts.tolist(),
            plan.query_lens.tolist(),
            strict=False,
        )
        return (Stretch(*row) for row in rows if row[1] < row[2])

    def _add_decodes(self, rows: list[Stretch]) -> None:
        """Rows of like length go together; a long row leaves whole pieces behind, which go alone.

        Nothing is widened: for so few query rows that would cost half as much again as their attention.
        """
        tails: list[Stretch] = []
        pieces: list[Stretch] = []
        for row in rows:
            *whole, (start, _) = self._pieces(row.start, row.stop, self.max_slots)
            tails.append(row._replace(start=start))
            pieces += (row._replace(start=a, stop=b) for a, b in whole)
        for batch in _batches(sorted(tails, key=lambda s: -s.num_slots), self.max_slots):
            self._add_batch(sorted(batch, key=lambda s: s.token0), widens=False)
        for piece in pieces:
            self._add_batch([piece], widens=False)

    def _shared(self, row0: int, row1: int, block0: int, block1: int) -> Stretch:
        size, starts = self.plan.block_size, self.plan.query_starts
        token0, token1 = int(starts[row0]), int(starts[row1])
        return Stretch(self.plan.block_tables[row0], block0 * size, block1 * size, token0, token1 - token0)

    def _add_level(self, shared: list[Stretch]) -> None:
        """Siblings of like shape that stand side by side go together; the others go alone."""
        for batch in _batches(shared, self.max_widened):
            if len(batch) > 1:
                self._add_batch(batch, widens=True)
                continue
            for start, stop in self._pieces(batch[0].start, batch[0].stop, self.max_widened):
                self._add_batch([batch[0]._replace(start=start, stop=stop)], widens=True)

    def _add_extend(self, row: Stretch) -> None:
        """A row with several queries: what lies before the first of them, then squares on the diagonal."""
        first = row.stop - row.num_tokens  # the position of its first query
        for start, stop in self._pieces(row.start, row.stop, self.max_widened):
            index: torch.Tensor | None = self._blocks(row._replace(start=start, stop=stop))
            middle = min(max(start, first), stop)
            for token, num_queries, a, b, causal in (
                (0, row.num_tokens, start, middle, False),  # before the first query: all see it
                (middle - first, stop - middle, middle, stop, True),  # the queries that lie in this piece
                (stop - first, row.stop - stop, middle, stop, False),  # those after it
            ):
                if num_queries > 0 and a < b:
                    tokens = slice(row.token0 + token, row.token0 + token + num_queries)
                    gathered, a, b = self._whole_blocks(stop - start), a - start, b - start
                    self._append(WorkItem(index, gathered, a, b, tokens, num_queries, causal=causal))
                    index = None

    def _add_batch(self, batch: list[Stretch], widens: bool) -> None:
        n, longest = batch[0].num_tokens, max(s.num_slots for s in batch)
        tokens = self._tokens(batch)
        if len(batch) == 1:
            slot0 = batch[0].start % self.plan.block_size
            index, gathered = self._blocks(batch[0]), self._whole_blocks(slot0 + longest)
            self._append(WorkItem(index, gathered, slot0, slot0 + longest, tokens, n, widens=widens))
            return
        index = self._slots(batch, longest)
        lens = np.array([s.num_slots for s in batch], dtype=np.int64)
        masked = lens if (lens < longest).any() else None
        self._append(WorkItem(index, longest, 0, longest, tokens, n, len(batch), masked, widens=widens))

    def _tokens(self, batch: list[Stretch]) -> slice | torch.Tensor:
        first, last = batch[0], batch[-1]
        if last.token0 - first.token0 == (len(batch) - 1) * first.num_tokens:
            return slice(first.token0, last.token0 + last.num_tokens)
        assert first.num_tokens == 1, "stretches of several queries stand side by side"
        return torch.tensor([s.token0 for s in batch], dtype=torch.int64)

    def _append(self, item: WorkItem) -> None:
        where = item.tokens if isinstance(item.tokens, slice) else item.tokens.numpy()
        seen = self.seen[where]
        if seen.any():
            assert isinstance(item.tokens, slice), "only results of adjacent tokens are merged"
            self.starts_empty |= not seen.all()
            item = item._replace(merges=True)
        self.seen[where] = True
        self.items.append(item)

    def _pieces(self, start: int, stop: int, longest: int) -> Iterable[tuple[int, int]]:
        """[start, stop) in pieces of `longest` slots, a whole number of blocks, that end where blocks do."""
        first = start - start % self.plan.block_size
        return pairwise([start, *range(first + longest, stop, longest), stop])

    def _whole_blocks(self, num_slots: int) -> int:
        return -(-num_slots // self.plan.block_size) * self.plan.block_size

    def _blocks(self, s: Stretch) -> torch.Tensor:
        """The blocks that a stretch lies in."""
        size = self.plan.block_size
        return torch.tensor(s.table[s.start // size : -(-s.stop // size)], dtype=torch.int64)

    def _slots(self, batch: list[Stretch], longest: int) -> torch.Tensor:
        """The slots of each stretch [R * K], those past its end replaced by its last one.

        So whatever an unused slot holds is never read; the mask gives the repeated slot no weight.
        """
        size = self.plan.block_size
        out = np.empty((len(batch), longest), dtype=np.int64)
        for row, s in zip(out, batch, strict=True):
            first = s.start // size
            # 64 bits: block id times block size times head size passes 2^31 in large pools.
            ids = np.array(s.table[first : -(-s.stop // size)], dtype=np.int64)
            slots = (ids[:, None] * size + np.arange(size)).ravel()[s.start - first * size :]
            row[: s.num_slots] = slots[: s.num_slots]
            row[s.num_slots :] = row[s.num_slots - 1]
        return torch.from_numpy(out.ravel())


def _batches(stretches: Iterable[Stretch], max_slots: int) -> Iterator[list[Stretch]]:
    """Cut a run of stretches where padding them to one length would waste too much, or fill the buffer."""
    batch: list[Stretch] = []
    longest = total = 0
    for s in stretches:
        top = max(longest, s.num_slots)
        size = top * (len(batch) + 1)
        wasted = size - total - s.num_slots
        fits = size <= max_slots and wasted <= max(FREE_PADDING, MAX_PADDING * size)
        if batch and not (fits and s.num_tokens == batch[0].num_tokens and _may_join(batch[-1], s)):
            yield batch
            batch, total, top = [], 0, s.num_slots
        batch.append(s)
        longest, total = top, total + s.num_slots
    if batch:
        yield batch


def _may_join(last: Stretch, s: Stretch) -> bool:
    """Single queries may stand anywhere in the batch; more than one must follow the stretch before."""
    return s.num_tokens == 1 or last.token0 + last.num_tokens == s.token0
