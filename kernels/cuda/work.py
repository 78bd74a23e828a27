"""Turns a plan into what the decode kernels are launched on: items, parts, block ids.

An item is one chunk of a segment for the query rows of one tile. What a chunk yields for a row is one part,
and the parts of a row are numbered along its path. Numpy only; the workspace sends the lists.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ramet.kernels.cuda.chunks import cut, even_cut
from ramet.kernels.cuda.tile import FLOPS_PER_BYTE, Tile
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.plan import AttentionPlan, IntArray, Planner

BoolArray = npt.NDArray[np.bool_]

# Shared segments cost a further launch, 2 to 2.6 us a layer however small they are, and L2 serves some of
# what is read twice. They pay from so many bytes a layer that are not read again; more if few rows share.
GATE_BYTES, GATE_BYTES_FEW_ROWS = 36e6, 54e6
MIN_SHARED_TOKENS_SAVED = 256  # by one segment, once there are some
MIN_CHUNK = 256  # tokens: a part has to be written, read and added up
OPEN = -1  # an item that reaches as far as its row, whose length the kernel looks up


def planner(pool: KVPool) -> Planner:
    """The planner for a pool on a GPU. Whether its segments pay together is decided by DecodeWork."""
    return Planner(pool.block_size, MIN_SHARED_TOKENS_SAVED)


class Segments(NamedTuple):
    """What is read: shared segments by level, then the private segments of rows. Each field is [X]."""

    row0: IntArray
    num_rows: IntArray
    start: IntArray  # position of the first token
    num_tokens: IntArray
    is_private: BoolArray


class Chunks(NamedTuple):
    """How each segment is cut for its tile. Each field is [X]."""

    rows: IntArray  # of a tile
    num_tiles: IntArray
    num_chunks: IntArray
    num_tokens: IntArray  # of a chunk, the last of a segment may have fewer


class DecodeWork:
    """One step's work for the rows `rows` [R] of a plan, which have one query each.

    The lists stay valid in the workspace until the next step's are made. A row's last item is open: it reads
    the row's length on the device.
    """

    def __init__(self, plan: AttentionPlan, rows: IntArray, workspace: Workspace) -> None:
        assert len(rows) > 0, "there are rows to decode"
        assert (plan.query_lens[rows] == 1).all(), "a decoding row has one query"
        self.plan, self.rows, self.workspace = plan, rows, workspace
        segments = self._segments(*self._shared())
        is_wide = segments.num_rows * workspace.group > workspace.tiles.narrow().rows
        self.narrow_tile, self.wide_tile = self._tiles(segments, is_wide)
        chunks = self._chunks(segments, is_wide)
        part0, num_parts = self._parts(segments, chunks)
        # A row with a private segment and nothing else needs no merge: its item writes the output.
        is_whole = np.zeros(len(rows), dtype=np.bool_)
        is_whole[segments.row0[segments.is_private]] = True
        is_whole &= num_parts == 1
        num_parts[is_whole] = 0
        part_starts = np.cumsum(num_parts) - num_parts
        self.num_parts, self.most_parts = int(num_parts.sum()), int(num_parts.max())

        workspace.begin()
        first_ids = self._send_block_ids(segments)
        segment, items = self._items(segments, chunks, first_ids, part0, is_whole)
        # One more item without rows: see attend_kernel.
        narrow_items = np.concatenate((items[~is_wide[segment]], np.zeros((1, 8), dtype=np.int64)))
        self.num_narrow = workspace.narrow_items.send(narrow_items) - 1
        self.num_wide = workspace.wide_items.send(items[is_wide[segment]])
        tokens = plan.query_starts[rows]
        workspace.tokens.send(tokens)
        workspace.kv_lens.send(plan.kv_lens[rows])
        workspace.part_starts.send(part_starts)
        merges = np.stack((tokens, part_starts, num_parts, num_parts), 1)[num_parts > 0]
        self.num_merges = workspace.merges.send(merges)
        workspace.reserve_parts(self.num_parts)
        workspace.end()

    def _shared(self) -> tuple[IntArray, IntArray]:
        """The shared segments [X, 5] of the decoding rows, as in the plan, and where private ones start [R].

        Without any of them, if what they spare is too little.
        """
        plan, rows = self.plan, self.rows
        shared = np.array(plan.segments, dtype=np.int64).reshape(-1, 5)
        if len(rows) < plan.num_rows:  # rows with several queries are not here
            shared[:, 1:3] = np.searchsorted(rows, shared[:, 1:3])
            shared = shared[shared[:, 2] > shared[:, 1]]
        num_rows, num_blocks = shared[:, 2] - shared[:, 1], shared[:, 4] - shared[:, 3]
        read = int(num_blocks.sum())
        saved = int((num_blocks * num_rows).sum()) - read
        pool = self.workspace.pool
        block_bytes = pool.bytes_per_block // pool.num_layers
        if saved * block_bytes < GATE_BYTES + GATE_BYTES_FEW_ROWS * 2 * read / max(saved + read, 1):
            return shared[:0], np.zeros(len(rows), dtype=np.int64)
        return shared, plan.private_block0[rows]

    def _segments(self, shared: IntArray, private_block0: IntArray) -> Segments:
        size = self.plan.block_size
        start = private_block0 * size
        num_tokens = self.plan.kv_lens[self.rows] - start
        (private,) = np.nonzero(num_tokens)
        _, row0, row1, block0, block1 = shared.T
        ones = np.ones_like(private)
        return Segments(
            np.concatenate((row0, private)),
            np.concatenate((row1 - row0, ones)),
            np.concatenate((block0 * size, start[private])),
            np.concatenate(((block1 - block0) * size, num_tokens[private])),
            np.arange(len(shared) + len(private)) >= len(shared),
        )

    def _tiles(self, segments: Segments, is_wide: BoolArray) -> tuple[Tile, Tile]:
        """The tile of narrow segments, and that of wide ones.

        One size for all that are wide: launches of three sizes side by side gained nothing.
        """
        workspace = self.workspace
        pool, tiles = workspace.pool, workspace.tiles
        tokens = int(segments.num_tokens[~is_wide].sum())
        if not is_wide.any():
            few = tokens * pool.num_kv_heads < MIN_CHUNK * 2 * workspace.num_sms
            return tiles.narrow(few=few), tiles.wide(False)
        scores = int((segments.num_tokens * segments.num_rows)[is_wide].sum())
        flops = 4 * scores * workspace.num_heads * pool.head_dim
        read = tokens * pool.bytes_per_block / (pool.num_layers * pool.block_size)
        balance = flops / max(read, 1) / FLOPS_PER_BYTE
        fills = int(segments.num_rows.max()) * workspace.group > 64
        return tiles.narrow(beside_wide=balance > 0.6), tiles.wide(balance > 1 and fills)

    def _chunks(self, segments: Segments, is_wide: BoolArray) -> Chunks:
        workspace, block_size = self.workspace, self.plan.block_size
        narrow, wide = self.narrow_tile, self.wide_tile
        rows = np.where(is_wide, wide.rows, narrow.rows) // workspace.group
        num_tiles = -(-segments.num_rows // rows)
        num_chunks, size = np.ones_like(rows), np.ones_like(rows)
        if is_wide.any():
            share = int((segments.num_tokens * num_tiles)[is_wide].sum()) / self._num_slots(wide)
            grain = max(wide.tokens, block_size)
            num_chunks[is_wide], size[is_wide] = cut(segments.num_tokens[is_wide], MIN_CHUNK, grain, share)
        if not is_wide.all():
            grain = max(narrow.tokens, block_size)
            num_chunks[~is_wide], size[~is_wide] = even_cut(
                segments.num_tokens[~is_wide], MIN_CHUNK, grain, self._num_slots(narrow)
            )
        return Chunks(rows, num_tiles, num_chunks, size)

    def _num_slots(self, tile: Tile) -> int:
        """How many items of a tile can run at a time; each takes one CTA a KV head."""
        workspace = self.workspace
        return max(workspace.num_sms * tile.ctas_per_sm // workspace.pool.num_kv_heads, 1)

    def _parts(self, segments: Segments, chunks: Chunks) -> tuple[IntArray, IntArray]:
        """The index of the first part of each segment [X], and the number of parts of each row [R]."""
        num_parts = np.zeros(len(self.rows), dtype=np.int64)
        part0 = np.zeros_like(segments.row0)
        num_shared = len(part0) - np.count_nonzero(segments.is_private)
        row0s, num_rows = segments.row0[:num_shared].tolist(), segments.num_rows[:num_shared].tolist()
        for i, row0 in enumerate(row0s):  # a segment comes after those above it
            part0[i] = num_parts[row0]
            num_parts[row0 : row0 + num_rows[i]] += chunks.num_chunks[i]
        private = segments.row0[num_shared:]
        part0[num_shared:] = num_parts[private]
        num_parts[private] += chunks.num_chunks[num_shared:]
        return part0, num_parts

    def _send_block_ids(self, segments: Segments) -> IntArray:
        """Send the block ids of each segment, side by side; where each one's start [X]."""
        size, tables = self.plan.block_size, self.plan.block_tables
        block0 = segments.start // size
        num_blocks = -(-segments.num_tokens // size)
        rows, ends = self.rows[segments.row0].tolist(), (block0 + num_blocks).tolist()
        ids: list[int] = []
        for row, first, end in zip(rows, block0.tolist(), ends, strict=True):
            ids += tables[row][first:end]
        # Three times as fast as numpy's own conversion of a list.
        packed = struct.pack(f"{len(ids)}i", *ids)
        self.workspace.block_ids.send(np.frombuffer(packed, dtype=np.int32))
        return np.cumsum(num_blocks) - num_blocks

    def _items(
        self,
        segments: Segments,
        chunks: Chunks,
        first_ids: IntArray,
        part0: IntArray,
        is_whole: BoolArray,
    ) -> tuple[IntArray, IntArray]:
        """All items, the longest first so that the last to finish are short: segment [W] and item [W, 8].

        An item is (first row, rows, first block id, position, tokens, part, whether it is all of its row, 0).
        The tiles of one chunk stand side by side: the first reads it from memory, the others from L2.
        """
        order = np.argsort(-chunks.num_tokens, kind="stable")
        num_items = (chunks.num_chunks * chunks.num_tiles)[order]
        of = np.repeat(order, num_items)
        index = np.arange(len(of)) - np.repeat(np.cumsum(num_items) - num_items, num_items)
        chunk, tile = np.divmod(index, chunks.num_tiles[of])
        first_row, first_token = tile * chunks.rows[of], chunk * chunks.num_tokens[of]
        num_tokens = np.minimum(segments.num_tokens[of] - first_token, chunks.num_tokens[of])
        num_tokens[segments.is_private[of] & (chunk == chunks.num_chunks[of] - 1)] = OPEN
        items = np.zeros((len(of), 8), dtype=np.int64)
        items[:, 0] = segments.row0[of] + first_row
        items[:, 1] = np.minimum(segments.num_rows[of] - first_row, chunks.rows[of])
        items[:, 2] = first_ids[of] + first_token // self.plan.block_size
        items[:, 3] = segments.start[of] + first_token
        items[:, 4] = num_tokens
        items[:, 5] = part0[of] + chunk
        items[:, 6] = is_whole[items[:, 0]]
        return of, items
