"""The launches of a decode step, in numbers: items, parts and merges, for a tree of some shape.

An item is one chunk of a segment for the query rows of one tile. What a chunk yields for a row is one part,
and the parts of a row are numbered along its path. Numpy only; the workspace sends the lists.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ramet.kernels.cuda.chunks import Cut, cut, even_cut
from ramet.kernels.cuda.tile import FLOPS_PER_BYTE, Tile
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.plan import IntArray, Segment

MIN_CHUNK = 256  # tokens: a part has to be written, read and added up
OPEN = -1  # an item that reaches as far as its row, whose length the kernel looks up
SPARE_TOKENS = 128  # by how much rows may grow before they want new lists

# What stays as long as the lists do: the plan's segments, which of its rows decode, and their tokens.
Tree = tuple[tuple[Segment, ...], bytes, bytes]


class Shape(NamedTuple):
    """What the lists follow from, for R rows."""

    tree: Tree
    shared: IntArray  # [X, 5], as segments of a plan: level, row0, row1, block0, block1
    private_block0: IntArray  # [R]
    tokens: IntArray  # [R], the index of each row's query in the batch
    kv_lens: IntArray  # [R]


class Segments(NamedTuple):
    """What is read: shared segments by level, then the private segments of rows. Each array is [X]."""

    row0: IntArray
    num_rows: IntArray
    start: IntArray  # position of the first token
    num_tokens: IntArray
    num_shared: int

    @property
    def private_rows(self) -> IntArray:
        return self.row0[self.num_shared :]


class WorkList:
    """The lists of steps of one shape. They lie in the workspace until others are made."""

    def __init__(self, shape: Shape, workspace: Workspace) -> None:
        self.shape, self.workspace = shape, workspace
        self.block_size = workspace.pool.block_size
        segments = self.segments = self._segments()
        shared_rows = segments.num_rows[: segments.num_shared]
        wide = np.flatnonzero(shared_rows * workspace.group > workspace.tiles.narrow_rows)
        num_tiles = np.ones_like(segments.row0)  # a narrow segment fits into one
        if len(wide):
            self.narrow_tile, self.wide_tile = self._tiles_side_by_side(wide)
            num_tiles[wide] = -(-segments.num_rows[wide] // self._wide_rows)
            chunks = self._cut_side_by_side(wide, num_tiles)
        else:
            self.narrow_tile, chunks = self._narrow_alone()
            self.wide_tile = workspace.tiles.wide(False)  # of no items
        part0, num_parts = self._parts(chunks.num_chunks)
        # A row with a private segment and nothing else needs no merge: its item writes the output.
        is_whole = np.zeros_like(segments.row0)
        is_whole[segments.num_shared :] = num_parts[segments.private_rows] == 1
        num_parts[segments.row0[is_whole > 0]] = 0
        part_ends = np.cumsum(num_parts)
        part_starts = part_ends - num_parts
        self.num_parts, self.most_parts = int(part_ends[-1]), int(num_parts.max())
        first_ids = self._make_room()
        self._send_items(wide, num_tiles, chunks, np.array((first_ids, part0, is_whole)))
        workspace.tokens.send(shape.tokens)
        workspace.part_starts.send(part_starts)
        merges = np.array((shape.tokens, part_starts, num_parts, num_parts)).T
        self.num_merges = workspace.merges.send(merges[num_parts > 0])
        workspace.reserve_parts(self.num_parts)

    def suits(self, tree: Tree, kv_lens: IntArray) -> bool:
        """Whether the lists hold for a step: the same tree, its rows [R] grown a little at most."""
        if tree != self.shape.tree:
            return False
        grown = (kv_lens - self.shape.kv_lens).view(np.uint64)  # a row that went back grew by very much
        return bool((grown <= self._spare_tokens).all())

    def _segments(self) -> Segments:
        _, shared, private_block0, _, kv_lens = self.shape
        size = self.block_size
        start = private_block0 * size
        num_tokens = kv_lens - start
        private = np.flatnonzero(num_tokens)
        _, row0, row1, block0, block1 = shared.T
        return Segments(
            np.concatenate((row0, private)),
            np.concatenate((row1 - row0, np.ones_like(private))),
            np.concatenate((block0 * size, start[private])),
            np.concatenate(((block1 - block0) * size, num_tokens[private])),
            len(shared),
        )

    @property
    def _wide_rows(self) -> int:
        """How many rows a wide tile takes."""
        return self.wide_tile.rows // self.workspace.group

    def _narrow_alone(self) -> tuple[Tile, Cut]:
        """The tile of narrow segments where no others are, and how they are cut to fill the card."""
        tiles, num_tokens = self.workspace.tiles, self.segments.num_tokens

        def even(tile: Tile) -> Cut:
            return even_cut(num_tokens, MIN_CHUNK, max(tile.tokens, self.block_size), self._num_slots(tile))

        few = num_tokens.sum() * self.workspace.pool.num_kv_heads < MIN_CHUNK * 2 * self.workspace.num_sms
        if tiles.deep is not None and not few:
            chunks = even(tiles.deep)
            if chunks.num_chunks.sum() <= self._num_slots(tiles.deep):
                return tiles.deep, chunks
        tile = tiles.narrow(few=bool(few))
        return tile, even(tile)

    def _tiles_side_by_side(self, wide: IntArray) -> tuple[Tile, Tile]:
        """The tile of narrow segments, and that of wide ones.

        One size for all that are wide: launches of three sizes side by side gained nothing.
        """
        workspace, segments = self.workspace, self.segments
        pool, tiles = workspace.pool, workspace.tiles
        wide_tokens, wide_rows = segments.num_tokens[wide], segments.num_rows[wide]
        tokens = int(segments.num_tokens.sum()) - int(wide_tokens.sum())
        flops = 4 * int(wide_tokens @ wide_rows) * workspace.num_heads * pool.head_dim
        read = tokens * pool.bytes_per_block / (pool.num_layers * pool.block_size)
        balance = flops / max(read, 1) / FLOPS_PER_BYTE
        fills = int(wide_rows.max()) * workspace.group > 64
        return tiles.narrow(beside_wide=balance > 0.6), tiles.wide(balance > 1 and fills)

    def _cut_side_by_side(self, wide: IntArray, num_tiles: IntArray) -> Cut:
        """How each segment is cut for its tile: wide ones over the SMs, narrow ones to fill the card."""
        num_tokens, size = self.segments.num_tokens, self.block_size
        narrow_grain, narrow_slots = max(self.narrow_tile.tokens, size), self._num_slots(self.narrow_tile)
        chunks = Cut(np.empty_like(num_tokens), np.empty_like(num_tokens))
        is_narrow = np.ones(len(num_tokens), dtype=np.bool_)
        is_narrow[wide] = False
        share = int(num_tokens[wide] @ num_tiles[wide]) / self._num_slots(self.wide_tile)
        wide_cut = cut(num_tokens[wide], MIN_CHUNK, max(self.wide_tile.tokens, size), share)
        narrow_cut = even_cut(num_tokens[is_narrow], MIN_CHUNK, narrow_grain, narrow_slots)
        for field, of_wide, of_narrow in zip(chunks, wide_cut, narrow_cut, strict=True):
            field[wide], field[is_narrow] = of_wide, of_narrow
        return chunks

    def _num_slots(self, tile: Tile) -> int:
        """How many items of a tile can run at a time; each takes one CTA a KV head."""
        workspace = self.workspace
        return max(workspace.num_sms * tile.ctas_per_sm // workspace.pool.num_kv_heads, 1)

    def _parts(self, num_chunks: IntArray) -> tuple[IntArray, IntArray]:
        """The index of the first part of each segment [X], and the number of parts of each row [R]."""
        segments = self.segments
        num_parts = np.zeros_like(self.shape.tokens)
        part0 = np.zeros_like(segments.row0)
        of_shared = (field[: segments.num_shared].tolist() for field in (*segments[:2], num_chunks))
        for i, (row0, num_rows, n) in enumerate(zip(*of_shared, strict=True)):
            part0[i] = num_parts[row0]  # a segment comes after those above it
            num_parts[row0 : row0 + num_rows] += n
        private = segments.private_rows
        part0[segments.num_shared :] = num_parts[private]
        num_parts[private] += num_chunks[segments.num_shared :]
        return part0, num_parts

    def _make_room(self) -> IntArray:
        """Give each segment room for its block ids, private ones for more as they grow: the first ids [X]."""
        segments, size, kv_lens = self.segments, self.block_size, self.shape.kv_lens
        private = segments.private_rows
        self.num_blocks = -(-segments.num_tokens // size)  # [X]
        self.num_blocks[segments.num_shared :] += -(-SPARE_TOKENS // size)
        ends = np.cumsum(self.num_blocks)
        first_ids = ends - self.num_blocks
        self._spare_tokens = np.zeros(len(kv_lens), dtype=np.uint64)  # [R]
        self._spare_tokens[private] = SPARE_TOKENS
        # Where block 0 of each row's table would lie beside the row's last block: in its private segment, or
        # in the deepest shared one.
        starts = first_ids - segments.start // size
        self.id_places = np.zeros_like(kv_lens)  # [R]
        if len(private) < len(kv_lens):
            of_shared = (field[: segments.num_shared].tolist() for field in (*segments[:2], starts))
            for row0, num_rows, start in zip(*of_shared, strict=True):
                self.id_places[row0 : row0 + num_rows] = start
        self.id_places[private] = starts[segments.num_shared :]
        return first_ids

    def _send_items(self, wide: IntArray, num_tiles: IntArray, chunks: Cut, places: IntArray) -> None:
        """Make all items, the longest first so that the last to finish are short.

        An item is (first row, rows, first block id, position, tokens, part, whether it is all of its row, 0).
        `places` [3, X] are first block id, first part and whether it is all, of each segment. The tiles of
        one chunk stand side by side: the first reads it from memory, the others from L2.
        """
        segments, size = self.segments, self.block_size
        order = chunks.num_tokens.copy()
        order[wide] -= 1 << 40  # behind the narrow ones
        order = np.argsort(-order, kind="stable")
        num_items = (chunks.num_chunks * num_tiles)[order]
        ends = np.cumsum(num_items)
        of = np.repeat(order, num_items)
        chunk = np.arange(len(of)) - np.repeat(ends - num_items, num_items)

        items_of = np.zeros((len(order), 8), dtype=np.int64)
        items_of[:, 0], items_of[:, 1] = segments.row0, segments.num_rows
        items_of[:, 3], items_of[:, 4] = segments.start, chunks.num_tokens
        items_of[:, (2, 5, 6)] = places.T
        items = items_of[of]
        num_wide = 0
        if len(wide):
            num_wide = int(num_items[-len(wide) :].sum())
            tiled = items[-num_wide:]
            chunk[-num_wide:], tile = np.divmod(chunk[-num_wide:], num_tiles[of[-num_wide:]])
            tiled[:, 0] += tile * self._wide_rows
            tiled[:, 1] = np.minimum(tiled[:, 1] - tile * self._wide_rows, self._wide_rows)
        first_token = chunk * items[:, 4]
        items[:, 2] += first_token // size
        items[:, 3] += first_token
        items[:, 4] = np.minimum(segments.num_tokens[of] - first_token, items[:, 4])
        items[:, 5] += chunk
        items[ends[order >= segments.num_shared] - 1, 4] = OPEN
        num_narrow = len(items) - num_wide
        self.num_narrow, self.num_wide = num_narrow, num_wide
        # One more item without rows ends the narrow ones: see attend_kernel.
        narrow = np.zeros((num_narrow + 1, 8), dtype=np.int64)
        narrow[:num_narrow] = items[:num_narrow]
        self.workspace.narrow_items.send(narrow)
        self.workspace.wide_items.send(items[num_narrow:])
