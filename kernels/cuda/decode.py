"""Decode attention on a GPU: the launches of one layer.

Wide segments are bound by arithmetic, narrow ones by memory, so they should run at the same time (as in
POD-Attention, arXiv 2410.18038). All in one stream: the narrow kernel starts as soon as every wide CTA runs,
fills the rest of the SMs and reads while the others compute; the merge stands ready when both are through.
Two streams were as fast, and a fused kernel slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ramet.kernels.cuda.attend import attend_kernel
from ramet.kernels.cuda.merge import merge
from ramet.kernels.cuda.tile import Tile, padded
from ramet.kernels.cuda.work import DecodeWork
from ramet.kernels.options import AttentionOptions

LOG2_E = 1.4426950408889634
MANY_PARTS = 16


def decode(
    work: DecodeWork, layer: int, q: Tensor, out: Tensor, scale: float, options: AttentionOptions
) -> None:
    """Attend with the queries q [T, H, D] of the rows of `work`, and write their rows of out [T, H, D]."""
    workspace = work.workspace
    buffer = workspace.buffer
    heads = (workspace.num_heads, workspace.pool.head_dim)
    assert q.shape == out.shape and q.shape[1:] == heads, f"the heads of this work are {heads}"
    assert q.stride(-1) == out.stride(-1) == 1, "the numbers of a head lie side by side"
    assert scale > 0, "a scale keeps the order of the scores"
    call = _Call(work, layer, q, out, scale, options)
    todo = work.list
    if todo.num_wide:
        call.attend(todo.wide_tile, buffer.wide_items, todo.num_wide)
    # The last narrow item has no rows and waits: see attend_kernel.
    call.attend(todo.narrow_tile, buffer.narrow_items, todo.num_narrow + 1, beside=todo.num_wide > 0)
    if todo.num_merges:
        parts = workspace.part_out, workspace.part_lse
        many, early = todo.most_parts > MANY_PARTS, workspace.can_overlap
        merge(buffer.merges, todo.num_merges, *parts, out, options.sinks, many, early)


@dataclass(frozen=True)
class _Call:
    """The launches of one layer have almost all their arguments in common."""

    work: DecodeWork
    layer: int
    q: Tensor
    out: Tensor
    scale: float
    options: AttentionOptions

    def attend(self, tile: Tile, items: Tensor, num_items: int, beside: bool = False) -> None:
        workspace, options, q, out = self.work.workspace, self.options, self.q, self.out
        pool, buffer, overlaps = workspace.pool, workspace.buffer, workspace.can_overlap
        key, value = pool.key(self.layer), pool.value(self.layer)  # [Hkv, N, B, D]
        assert key.stride() == value.stride() and key.stride(-1) == 1, "K and V of a layer lie alike"
        attend_kernel[(pool.num_kv_heads, num_items)](
            q, q.stride(0), q.stride(1), key, value, key.stride(0), key.stride(1), key.stride(2),
            items, buffer.block_ids, buffer.tokens, buffer.kv_lens,
            buffer.part_starts, workspace.part_out, workspace.part_lse,
            out, out.stride(0), out.stride(1), options.sinks,
            self.scale if options.softcap is not None else self.scale * LOG2_E,
            options.softcap or 0.0, options.window or 0,
            GROUP=workspace.group, HEAD_DIM=pool.head_dim, DIMS=padded(pool.head_dim),
            BLOCK_SIZE=pool.block_size, ROWS=tile.rows, TILE=tile.tokens,
            MASKS_ALL=tile.masks_all, MASKS_KEYS=tile.masks_keys(pool.block_size),
            HAS_SOFTCAP=options.softcap is not None, HAS_WINDOW=options.window is not None,
            HAS_SINKS=options.sinks is not None,
            STARTS_NEXT=overlaps, BESIDE=beside and overlaps, launch_pdl=beside and overlaps, **tile.options,
        )  # fmt: skip
