"""The launches of a decode step, in numbers: items, parts and merges, for a tree of some shape.

An item is one chunk of a segment for the query rows of one tile. What a chunk yields for a row is one part,
and the parts of a row are numbered along its path. `csrc/lists.c` makes them.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ramet.kernels.cuda import planning
from ramet.kernels.cuda.step_buffer import BLOCK_IDS, KV_LENS, SIZES
from ramet.kernels.cuda.tile import FLOPS_PER_BYTE, Tile
from ramet.kernels.plan import AttentionPlan, IntArray

if TYPE_CHECKING:
    from ramet.kernels.cuda.workspace import Workspace

MIN_CHUNK = 256  # tokens: a part has to be written, read and added up
SPARE_TOKENS = 128  # by how much rows may grow before they want new lists
# Shared segments cost a further launch, 2 to 2.6 us a layer however small they are, and L2 serves some of
# what is read twice. They pay from so many bytes a layer that are not read again; more if few rows share.
GATE_BYTES, GATE_BYTES_FEW_ROWS = 36e6, 54e6

_LONG, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_ARRAY = ctypes.c_char_p  # as bytes: to copy a small array takes less time than to ask for its address
_LENGTHS, _IDS, _ALL, _OUTGROWN = range(4)  # of csrc/prepare.c: what has changed


class _Tile(ctypes.Structure):
    """`Tile` of csrc/cut.h."""

    _fields_ = tuple((name, _LONG) for name in ("rows", "grain", "num_slots"))


class _Card(ctypes.Structure):
    """`Card` of csrc/lists.h."""

    _fields_ = (
        ("tiles", _Tile * 6),
        *((name, _LONG) for name in ("num_sms", "num_kv_heads", "head_dim", "group", "narrow_rows")),
        ("block_bytes", _LONG),
        *((name, ctypes.c_int32) for name in ("block_size", "spare_tokens")),
        ("min_chunk", _LONG),
        *((name, _DOUBLE) for name in ("gate_bytes", "gate_bytes_few_rows", "flops_per_byte")),
    )


class _Lists(ctypes.Structure):
    """`Lists` of csrc/lists.h."""

    _fields_ = (
        ("card", _Card),
        ("needed", _LONG * len(SIZES)),
        *((name, _LONG) for name in ("narrow_tile", "wide_tile")),
        *((name, _LONG) for name in ("num_narrow", "num_wide", "num_merges", "num_parts", "most_parts")),
        *((name, _POINTER) for name in ("buffer", "tree")),
    )


@functools.cache
def _functions() -> tuple[Callable[..., int], Callable[..., None]]:
    """`ramet_prepare` and `ramet_forget` of csrc/prepare.c."""
    library = planning.library()
    prepare, forget = library.ramet_prepare, library.ramet_forget
    plan = ctypes.py_object, _ARRAY, _LONG, _ARRAY, _LONG, _ARRAY, _ARRAY
    prepare.argtypes = (_POINTER, _POINTER, *plan, ctypes.c_int, ctypes.c_int)
    prepare.restype = _LONG
    forget.argtypes, forget.restype = (_POINTER,), None
    return prepare, forget


@dataclass
class WorkList:
    """The lists of steps of one shape. They lie in the workspace's buffer until others are made."""

    narrow_tile: Tile
    wide_tile: Tile
    num_narrow: int  # items, without the one that ends them
    num_wide: int
    num_merges: int
    num_parts: int
    most_parts: int  # of a row


class WorkLists:
    """Makes the lists of each step over one pool and sends what has changed, in one copy.

    Lists stay while the tree does and no row grew by more than SPARE_TOKENS. Block ids stay as long as tables
    do, but for the last one or two of each (see AttentionPlan); also in new lists.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._tiles = _tiles(workspace)
        self._for_c = _Lists(card=_card(workspace, self._tiles))
        self._prepare, forget = _functions()
        weakref.finalize(self, forget, ctypes.pointer(self._for_c))
        # Of the last step, as far as the device has them:
        self._known: WorkList | None = None
        self._tables: Sequence[Sequence[int]] | None = None

    def forget(self) -> None:
        """Read all ids again: a step goes by without these rows, which may change by more than a block."""
        self._tables = None

    def prepare(self, plan: AttentionPlan, rows: IntArray) -> WorkList:
        """Prepare a step of the rows `rows` [R] of a plan, which have one query each."""
        known, self._known = self._known, None  # an interrupt in between would leave host and device apart
        known_tables, self._tables = self._tables, None
        tables = list(plan.block_tables)  # kept: an object that is gone would make place for another one
        assert len(tables) == len(plan.kv_lens), "each row has a table"
        change = self._make(plan, tables, rows, known is not None, known_tables is not None)
        if change == _OUTGROWN:
            self._workspace.buffer = self._workspace.buffer.grown(self._for_c.needed)
            change = self._make(plan, tables, rows, False, False)
        if known is None or change == _ALL:
            known = self._made()
        self._send(change, len(rows))
        self._known, self._tables = known, tables
        return known

    def _make(
        self,
        plan: AttentionPlan,
        tables: Sequence[Sequence[int]],
        rows: IntArray,
        knows_list: bool,
        knows_ids: bool,
    ) -> int:
        """Write what a step needs into the buffer's host side. Returns what has changed there."""
        return self._prepare(
            ctypes.addressof(self._for_c),
            self._workspace.buffer.address,
            tables,
            plan.segment_array.tobytes(),
            len(plan.segment_array),
            rows.tobytes(),
            len(rows),
            plan.kv_lens.tobytes(),
            plan.query_starts.tobytes(),
            knows_list,
            knows_ids,
        )

    def _made(self) -> WorkList:
        made = self._for_c
        self._workspace.reserve_parts(made.num_parts)
        narrow_tile, wide_tile = self._tiles[made.narrow_tile], self._tiles[made.wide_tile]
        assert narrow_tile is not None and wide_tile is not None, "lists are for builds that there are"
        return WorkList(
            narrow_tile,
            wide_tile,
            made.num_narrow,
            made.num_wide,
            made.num_merges,
            made.num_parts,
            made.most_parts,
        )

    def _send(self, change: int, num_rows: int) -> None:
        buffer = self._workspace.buffer
        stop = buffer.starts[KV_LENS] + num_rows
        if change != _LENGTHS:
            stop = buffer.starts[BLOCK_IDS] + self._for_c.needed[BLOCK_IDS]
        buffer.send(0 if change == _ALL else buffer.starts[KV_LENS], stop)


def _tiles(workspace: Workspace) -> list[Tile | None]:
    """In the order of csrc/lists.h."""
    tiles = workspace.tiles
    narrow = tiles.narrow(), tiles.narrow(few=True), tiles.narrow(beside_wide=True)
    return [*narrow, tiles.deep, tiles.wide(False), tiles.wide(True)]


def _card(workspace: Workspace, tiles: list[Tile | None]) -> _Card:
    pool = workspace.pool
    made = _Card(
        num_sms=workspace.num_sms,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        block_size=pool.block_size,
        group=workspace.group,
        block_bytes=pool.bytes_per_block // pool.num_layers,
        narrow_rows=workspace.tiles.narrow_rows,
        min_chunk=MIN_CHUNK,
        spare_tokens=SPARE_TOKENS,
        gate_bytes=GATE_BYTES,
        gate_bytes_few_rows=GATE_BYTES_FEW_ROWS,
        flops_per_byte=FLOPS_PER_BYTE,
    )
    for place, tile in zip(made.tiles, tiles, strict=True):
        if tile is not None:
            place.rows = tile.rows // workspace.group
            place.grain = max(tile.tokens, pool.block_size)
            place.num_slots = max(workspace.num_sms * tile.ctas_per_sm // pool.num_kv_heads, 1)
    return made
