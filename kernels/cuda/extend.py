"""The extend kernel: rows with several queries each over their paged KV; prefill is its simplest case."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ramet.kernels.cuda.extend_work import WHOLE, ExtendWork
from ramet.kernels.cuda.merge import merge
from ramet.kernels.cuda.softmax import LOG2_E, NOTHING, add_logit, attend_tile, block_ids_of, slot_offsets
from ramet.kernels.cuda.tile import padded
from ramet.kernels.options import PLAIN, AttentionOptions

_WHOLE: tl.constexpr = tl.constexpr(WHOLE)


@triton.jit(do_not_specialize=["window"])
def extend_kernel(
    q,
    q_token_stride,
    q_head_stride,
    key,
    value,
    kv_head_stride: tl.int64,
    kv_block_stride: tl.int64,
    kv_slot_stride,
    items,
    block_ids,
    tokens,
    query_positions,
    part_starts,
    part_out,
    part_lse,
    out,
    out_token_stride,
    out_head_stride,
    sinks,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid (Hkv, W): one program attends with one item's queries to one KV head.

    q, out [T, H, D]; key, value [Hkv, N, B, D], D contiguous, N and Hkv at any stride. items [W, 7] and
    block_ids: see ramet.kernels.cuda.extend_work; tokens, query_positions, part_starts [Q] of the extending
    rows' queries. part_out [P, H, D] and part_lse [P, H] fp32, the latter in powers of two.

    The rows of a tile are GROUP query heads of ROWS // GROUP queries. Only the tiles at the end of what the
    queries see need a mask, or all of them where there is a window.
    """
    head = tl.program_id(0)
    item = items + tl.program_id(1) * 7
    query0 = tl.load(item)
    num_queries = tl.load(item + 1)
    table = block_ids + tl.load(item + 2)
    start = tl.load(item + 3)
    stop = tl.load(item + 4)
    part = tl.load(item + 5)
    first_position = tl.load(item + 6)

    lanes = tl.arange(0, ROWS)
    in_use = lanes < num_queries * GROUP
    query = query0 + lanes // GROUP
    q_head = head * GROUP + lanes % GROUP
    token = tl.load(tokens + query, mask=in_use, other=0).to(tl.int64)
    position = tl.load(query_positions + query, mask=in_use, other=0)
    dims = tl.arange(0, DIMS)
    stored = in_use[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(
        q + token[:, None] * q_token_stride + q_head[:, None] * q_head_stride + dims[None, :],
        mask=stored,
        other=0.0,
    )
    if HAS_WINDOW:
        first = tl.minimum(tl.maximum(start, first_position - window + 1), stop) // TILE
        num_full = first
        low = position - window + 1
    else:
        first = start // TILE
        num_full = tl.minimum(stop, first_position + 1) // TILE
        low = position

    key += head * kv_head_stride
    value += head * kv_head_stride
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], NOTHING, tl.float32)
    ids = block_ids_of(table, first, TILE, BLOCK_SIZE)  # of the next tile, carried: see attend.py
    if not HAS_WINDOW:
        for tile in tl.range(first, num_full):
            offsets = slot_offsets(ids, tile, kv_block_stride, kv_slot_stride, TILE, BLOCK_SIZE)
            ids = block_ids_of(table, tile + 1, TILE, BLOCK_SIZE)
            acc, total, top = attend_tile(
                acc, total, top, q_tile, key, value, offsets, dims, tile * TILE, stop, low, scale, softcap,
                HEAD_DIM, DIMS, TILE, False, HAS_SOFTCAP, False,
            )  # fmt: skip
    for tile in tl.range(tl.maximum(first, num_full), tl.cdiv(stop, TILE)):
        offsets = slot_offsets(ids, tile, kv_block_stride, kv_slot_stride, TILE, BLOCK_SIZE)
        ids = block_ids_of(table, tile + 1, TILE, BLOCK_SIZE)
        acc, total, top = attend_tile(
            acc, total, top, q_tile, key, value, offsets, dims, tile * TILE, stop, low, scale, softcap,
            HEAD_DIM, DIMS, TILE, True, HAS_SOFTCAP, HAS_WINDOW, position, True,
        )  # fmt: skip

    if part == _WHOLE:
        if HAS_SINKS:
            sink = tl.load(sinks + q_head, mask=in_use, other=0.0).to(tl.float32) * LOG2_E
            acc, total, top = add_logit(acc, total, top, sink)
        result = acc / total[:, None]
        place = out + token[:, None] * out_token_stride + q_head[:, None] * out_head_stride + dims[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=stored)
    else:
        # A query that sees nothing of this part leaves zeros of no weight.
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        num_heads = tl.num_programs(0) * GROUP
        slot = (tl.load(part_starts + query, mask=in_use, other=0) + part).to(tl.int64) * num_heads + q_head
        tl.store(part_out + slot[:, None] * HEAD_DIM + dims[None, :], result, mask=stored)
        tl.store(part_lse + slot, top + tl.log2(total), mask=in_use)


def extend(
    work: ExtendWork,
    layer: int,
    q: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    options: AttentionOptions = PLAIN,
) -> None:
    """Attend with the queries q [T, H, D] of the rows of `work`, and write their rows of out [T, H, D]."""
    workspace, tile = work.workspace, work.tile
    pool = workspace.pool
    key, value = pool.key(layer), pool.value(layer)
    extend_kernel[(pool.num_kv_heads, work.num_items)](
        q,
        q.stride(0),
        q.stride(1),
        key,
        value,
        *key.stride()[:3],
        work.items,
        work.block_ids,
        work.tokens,
        work.positions,
        work.part_starts,
        workspace.part_out,
        workspace.part_lse,
        out,
        out.stride(0),
        out.stride(1),
        options.sinks,
        scale if options.softcap is not None else scale * LOG2_E.value,
        options.softcap,
        options.window,
        GROUP=workspace.group,
        HEAD_DIM=pool.head_dim,
        DIMS=padded(pool.head_dim),
        BLOCK_SIZE=pool.block_size,
        ROWS=tile.rows,
        TILE=tile.tokens,
        HAS_SOFTCAP=options.softcap is not None,
        HAS_WINDOW=options.window is not None,
        HAS_SINKS=options.sinks is not None,
        **tile.options,
    )
    if work.num_merges:
        merge(work.merges, work.num_merges, workspace.part_out, workspace.part_lse, out, options.sinks)
