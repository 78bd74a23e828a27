"""Turns a plan into what the extend kernel is launched on, for rows with any number of queries.

An item is a tile of queries over one stretch of KV. Numpy only; a step needs one copy to the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.plan import AttentionPlan, IntArray

# Rows that share a stretch take fewer tiles together than one by one where they have fewer queries than a
# tile holds. It costs a merge, so it has to leave this part of the tiles at most.
MAX_TILES_LEFT = 0.75
MIN_CHUNK = 512  # tokens of a tile's KV that go to one program at least, where there are too few tiles
WHOLE = -1  # instead of a part: the item is all that its queries see


class Piece(NamedTuple):
    """Positions [start, stop) for the queries of the extending rows [row0, row1); `start` begins a tile."""

    row0: int
    row1: int
    start: int
    stop: int
    is_shared: bool


class Item(NamedTuple):
    """One program's work, for each KV head; the kernel reads these seven numbers."""

    query0: int  # of the extending rows' queries, side by side
    num_queries: int
    table: int  # where the block ids of its row start
    start: int  # position
    stop: int  # position
    part: int  # of its queries' partial results, or WHOLE
    first_position: int  # the lowest of its queries


class ExtendWork:
    """One step's work for the rows `rows` [R] of a plan.

    A tile's KV starts at a multiple of the tile's size in its sequence, wherever a prefix hit, a piece of the
    prompt or a shared stretch ends, so what a query adds up, and in which order, does not depend on how its
    prompt came in. What a shared stretch holds past the last multiple is left to each of its rows.
    """

    def __init__(self, plan: AttentionPlan, rows: IntArray, workspace: Workspace) -> None:
        self.workspace = workspace
        self._plan, self._rows = plan, rows
        lens = plan.query_lens[rows]
        self._query_starts = np.concatenate([[0], np.cumsum(lens)])  # [R + 1]
        first = plan.kv_lens[rows] - lens - self._query_starts[:-1]
        self._positions = np.repeat(first, lens) + np.arange(lens.sum())  # [Q]
        self.tile = workspace.tiles.extend
        self._tile_queries = self.tile.rows // workspace.group
        tables = [plan.block_tables[row] for row in rows.tolist()]
        self._table_starts = np.concatenate([[0], np.cumsum([len(table) for table in tables])])
        items, num_parts = self._items(self._pieces())
        starts = np.cumsum(num_parts) - num_parts
        first_token = plan.query_starts[rows] - self._query_starts[:-1]
        tokens = np.repeat(first_token, lens) + np.arange(lens.sum())
        merged = np.flatnonzero(num_parts)
        self.num_items, self.num_merges = len(items), len(merged)
        workspace.reserve_parts(int(num_parts.sum()))
        # A tile looks up its blocks one tile ahead: what it finds past the end is never followed.
        ids = np.concatenate([*tables, np.zeros(2 * self.tile.tokens, np.int64)])
        merges = np.stack([tokens, starts, num_parts, num_parts], 1)[merged]
        arrays = _to_device([items, tokens, self._positions, starts, merges, ids], workspace.pool.device)
        self.items, self.tokens, self.positions, self.part_starts, self.merges, self.block_ids = arrays

    def _pieces(self) -> list[Piece]:
        """What there is to read: shared stretches, each after those around it, then a private one a row."""
        plan, step = self._plan, self.tile.tokens
        covered = [0] * len(self._rows)
        pieces: list[Piece] = []
        for segment in plan.segments:
            row0, row1 = np.searchsorted(self._rows, (segment.row0, segment.row1)).tolist()
            stop = segment.block1 * plan.block_size // step * step
            if self._pays(row0, row1) and covered[row0] < stop:
                pieces.append(Piece(row0, row1, covered[row0], stop, True))
                covered[row0:row1] = [stop] * (row1 - row0)
        kv_lens = plan.kv_lens[self._rows].tolist()
        for row, (start, stop) in enumerate(zip(covered, kv_lens, strict=True)):
            if start < stop:
                pieces.append(Piece(row, row + 1, start, stop, False))
        return pieces

    def _pays(self, row0: int, row1: int) -> bool:
        """Whether the rows take markedly fewer tiles together than one by one."""
        if row1 - row0 < 2:
            return False
        lens = np.diff(self._query_starts[row0 : row1 + 1])
        together = -(-int(lens.sum()) // self._tile_queries)
        return together <= MAX_TILES_LEFT * int((-(-lens // self._tile_queries)).sum())

    def _items(self, pieces: list[Piece]) -> tuple[IntArray, IntArray]:
        """The items [W, 7], longest first, and the number of parts [Q] of each query, 0 where it is whole."""
        tiles = [tile for piece in pieces for tile in self._tiles(piece)]
        chunk = self._chunk(sum(tile.stop - tile.start for _, tile in tiles), len(tiles))
        num_parts = np.zeros(len(self._positions), dtype=np.int64)
        items: list[Item] = []
        for piece, tile in tiles:
            starts = range(tile.start // chunk * chunk, tile.stop, chunk)
            part0 = int(num_parts[tile.query0])
            if not piece.is_shared and part0 == 0 and len(starts) == 1:
                items.append(tile)
                continue
            for part, start in enumerate(starts, part0):
                start, stop = max(start, tile.start), min(start + chunk, tile.stop)
                items.append(tile._replace(start=start, stop=stop, part=part))
            num_parts[tile.query0 : tile.query0 + tile.num_queries] += len(starts)
        items.sort(key=lambda item: item.start - item.stop)
        return np.array(items, dtype=np.int64), num_parts

    def _tiles(self, piece: Piece) -> list[tuple[Piece, Item]]:
        """A piece's queries in tiles, each over all of its KV that they see."""
        query0, query1 = self._query_starts[[piece.row0, piece.row1]].tolist()
        table = int(self._table_starts[piece.row0])
        starts = np.arange(query0, query1, self._tile_queries)
        positions, offsets = self._positions[query0:query1], starts - query0
        firsts = np.minimum.reduceat(positions, offsets).tolist()
        lasts = np.maximum.reduceat(positions, offsets).tolist()
        tiles: list[tuple[Piece, Item]] = []
        for start, first, last in zip(starts.tolist(), firsts, lasts, strict=True):
            num_queries, stop = min(self._tile_queries, query1 - start), min(piece.stop, last + 1)
            if piece.start < stop:
                item = Item(start, num_queries, table, piece.start, stop, WHOLE, first)
                tiles.append((piece, item))
        return tiles

    def _chunk(self, num_tokens: int, num_tiles: int) -> int:
        """How many tokens of KV a program takes: all, or where there are too few tiles, an even share."""
        num_programs = self.workspace.num_sms * self.tile.ctas_per_sm
        num_kv_heads, step = self.workspace.pool.num_kv_heads, self.tile.tokens
        if num_tiles * num_kv_heads >= self.workspace.num_sms:
            return int(self._plan.kv_lens.max()) // step * step + step
        share = max(MIN_CHUNK, -(-num_tokens * num_kv_heads // num_programs))
        return -(-share // step) * step


def _to_device(arrays: list[IntArray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as int32 tensors, in one copy; each begins at a multiple of 16 bytes, which kernels like."""
    starts = np.cumsum([0, *(-(-array.size // 4) * 4 for array in arrays)]).tolist()
    places = [(start, start + array.size) for array, start in zip(arrays, starts, strict=False)]
    packed = np.zeros(starts[-1], dtype=np.int32)
    for array, (start, stop) in zip(arrays, places, strict=True):
        packed[start:stop] = array.reshape(-1)
    sent = torch.from_numpy(packed).to(device, non_blocking=True)  # not pinned, so it may be freed at once
    return [sent[a:b].view(array.shape) for array, (a, b) in zip(arrays, places, strict=True)]
