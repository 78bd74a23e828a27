"""The launches of a decode step, in numbers: items, parts and merges, for a tree of some shape.

An item is one chunk of a segment for the query rows of one tile. What a chunk yields for a row is one part,
and the parts of a row are numbered along its path. Numpy only; the workspace sends the lists.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ramet.kernels.cuda.chunks import cut, even_cut
from ramet.kernels.cuda.tile import FLOPS_PER_BYTE, Tile
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.plan import IntArray

BoolArray = npt.NDArray[np.bool_]

MIN_CHUNK = 256  # tokens: a part has to be written, read and added up
OPEN = -1  # an item that reaches as far as its row, whose length the kernel looks up
SPARE_TOKENS = 128  # by how much rows may grow before they want new lists


class Shape(NamedTuple):
    """What the lists follow from, for R rows."""

    shared: IntArray  # [X, 5], as segments of a plan: level, row0, row1, block0, block1
    private_block0: IntArray  # [R]
    tokens: IntArray  # [R], the index of each row's query in the batch
    kv_lens: IntArray  # [R]


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


class WorkList:
    """The lists of steps of one shape. They lie in the workspace until others are made."""

    def __init__(self, shape: Shape, workspace: Workspace) -> None:
        self.shape, self.workspace = shape, workspace
        size = self.block_size = workspace.pool.block_size
        segments = self.segments = self._segments()
        is_wide = segments.num_rows * workspace.group > workspace.tiles.narrow().rows
        self.narrow_tile, self.wide_tile = self._tiles(segments, is_wide)
        chunks = self._chunks(segments, is_wide)
        part0, num_parts = self._parts(segments, chunks)
        # A row with a private segment and nothing else needs no merge: its item writes the output.
        is_whole = np.zeros(len(shape.tokens), dtype=np.bool_)
        is_whole[segments.row0[segments.is_private]] = True
        is_whole &= num_parts == 1
        num_parts[is_whole] = 0
        part_starts = np.cumsum(num_parts) - num_parts
        self.num_parts, self.most_parts = int(num_parts.sum()), int(num_parts.max())
        # Room for the block ids of each segment; private ones may grow.
        self.num_blocks = -(-segments.num_tokens // size) + segments.is_private * -(-SPARE_TOKENS // size)
        first_ids = np.cumsum(self.num_blocks) - self.num_blocks
        segment, items = self._items(segments, chunks, first_ids, part0, is_whole)
        # One more item without rows: see attend_kernel.
        narrow_items = np.concatenate((items[~is_wide[segment]], np.zeros((1, 8), dtype=np.int64)))
        self.num_narrow = workspace.narrow_items.send(narrow_items) - 1
        self.num_wide = workspace.wide_items.send(items[is_wide[segment]])
        workspace.tokens.send(shape.tokens)
        workspace.part_starts.send(part_starts)
        merges = np.stack((shape.tokens, part_starts, num_parts, num_parts), 1)[num_parts > 0]
        self.num_merges = workspace.merges.send(merges)
        workspace.reserve_parts(self.num_parts)

    def suits(self, shape: Shape) -> bool:
        """Whether the lists hold for a step of this shape: the same tree, its rows grown a little at most."""
        mine = self.shape
        if not all(map(np.array_equal, shape[:3], mine[:3])):
            return False
        grown = shape.kv_lens - mine.kv_lens
        has_private = mine.kv_lens > mine.private_block0 * self.block_size
        return bool(((grown == 0) | (grown > 0) & (grown <= SPARE_TOKENS) & has_private).all())

    def _segments(self) -> Segments:
        shared, private_block0, _, kv_lens = self.shape
        start = private_block0 * self.block_size
        num_tokens = kv_lens - start
        (private,) = np.nonzero(num_tokens)
        _, row0, row1, block0, block1 = shared.T
        return Segments(
            np.concatenate((row0, private)),
            np.concatenate((row1 - row0, np.ones_like(private))),
            np.concatenate((block0 * self.block_size, start[private])),
            np.concatenate(((block1 - block0) * self.block_size, num_tokens[private])),
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
        workspace, block_size = self.workspace, self.block_size
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
        num_parts = np.zeros(len(self.shape.tokens), dtype=np.int64)
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
        items[:, 2] = first_ids[of] + first_token // self.block_size
        items[:, 3] = segments.start[of] + first_token
        items[:, 4] = num_tokens
        items[:, 5] = part0[of] + chunk
        items[:, 6] = is_whole[items[:, 0]]
        return of, items
