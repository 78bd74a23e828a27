"""The decode kernel: queries of some rows over one stretch of paged KV, read once.

One kernel serves private segments and shared ones; they differ in the size of the tile
(ramet.kernels.cuda.tile). Its parts are added up by ramet.kernels.cuda.merge.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ramet.kernels.cuda.softmax import LOG2_E, NOTHING, add_logit, attend_tile, block_ids_of, slot_offsets


@triton.jit(do_not_specialize=["window"])
def attend_kernel(
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
    kv_lens,
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
    MASKS_ALL: tl.constexpr,
    MASKS_KEYS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STARTS_NEXT: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Grid (Hkv, W): one program attends with the queries of one item to its stretch of one KV head.

    q, out [T, H, D]; key, value [Hkv, N, B, D], D contiguous, Hkv and N at any stride (64 bit: a pool may
    hold more than 2^31 numbers). items [W, 8] are described in ramet.kernels.cuda.work, block_ids holds the
    ids of their blocks; tokens, kv_lens, part_starts [R] are of the decoding rows. part_out [P, H, D] and
    part_lse [P, H] are fp32, the latter in powers of two. The KV head is the fastest axis of the grid, so
    that neighbours read one block's slabs, which is 1.5 % faster.

    The query rows of a tile are the GROUP query heads of each of the item's rows, ROWS at most. Scores are
    masked in every tile (MASKS_ALL), or only in the last one; MASKS_KEYS is explained at attend_tile.

    STARTS_NEXT lets the next kernel start once all programs of this one have, and say itself what it waits
    for: programmatic dependent launch. BESIDE is for a kernel started so that needs nothing of this one. But
    it must not end before this one does, so its last program, which has to be one without an item, waits.
    """
    head = tl.program_id(0)
    item = items + tl.program_id(1) * 8
    num_rows = tl.load(item + 1)
    if num_rows == 0:  # fills up a launch whose size is fixed
        if BESIDE and head == 0 and tl.program_id(1) == tl.num_programs(1) - 1:
            gdc_wait()
        return
    row0 = tl.load(item)
    table = block_ids + tl.load(item + 2)
    start = tl.load(item + 3)
    num_tokens = tl.load(item + 4)
    part = tl.load(item + 5)
    is_whole = tl.load(item + 6)
    # The ids of the next tile's blocks are carried through the loop: loaded inside, the compiler's pipeline
    # would have to wait for them before it can fetch K and V ahead.
    ids = block_ids_of(table, 0, TILE, BLOCK_SIZE)
    if STARTS_NEXT:
        gdc_launch_dependents()

    lanes = tl.arange(0, ROWS)
    in_use = lanes < num_rows * GROUP
    row = row0 + lanes // GROUP
    q_head = head * GROUP + lanes % GROUP
    token = tl.load(tokens + row, mask=in_use, other=0).to(tl.int64)
    dims = tl.arange(0, DIMS)
    stored = in_use[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(
        q + token[:, None] * q_token_stride + q_head[:, None] * q_head_stride + dims[None, :],
        mask=stored,
        other=0.0,
    )
    if num_tokens < 0:  # the open end of a row grows with it
        num_tokens = tl.load(kv_lens + row0) - start
    low = tl.zeros([ROWS], tl.int32)
    first = 0
    if HAS_WINDOW:  # positions count from the item's start
        low = tl.load(kv_lens + row, mask=in_use, other=0) - window - start
        seen_from = tl.min(tl.where(in_use, low, num_tokens), 0)
        first = tl.minimum(tl.maximum(seen_from, 0), num_tokens) // TILE
        ids = block_ids_of(table, first, TILE, BLOCK_SIZE)

    key += head * kv_head_stride
    value += head * kv_head_stride
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], NOTHING, tl.float32)
    if MASKS_ALL:
        num_full = tl.cdiv(num_tokens, TILE)
    else:
        num_full = num_tokens // TILE
    for tile in tl.range(first, num_full):
        offsets = slot_offsets(ids, tile, kv_block_stride, kv_slot_stride, TILE, BLOCK_SIZE)
        ids = block_ids_of(table, tile + 1, TILE, BLOCK_SIZE)
        acc, total, top = attend_tile(
            acc, total, top, q_tile, key, value, offsets, dims, tile * TILE, num_tokens, low, scale, softcap,
            HEAD_DIM, DIMS, TILE, MASKS_ALL, HAS_SOFTCAP, HAS_WINDOW, MASKS_KEYS=MASKS_KEYS,
        )  # fmt: skip
    if not MASKS_ALL and num_full * TILE < num_tokens:
        offsets = slot_offsets(ids, num_full, kv_block_stride, kv_slot_stride, TILE, BLOCK_SIZE)
        acc, total, top = attend_tile(
            acc, total, top, q_tile, key, value, offsets, dims, num_full * TILE, num_tokens, low, scale,
            softcap, HEAD_DIM, DIMS, TILE, True, HAS_SOFTCAP, HAS_WINDOW,
        )  # fmt: skip

    if is_whole != 0:
        if HAS_SINKS:
            sink = tl.load(sinks + q_head, mask=in_use, other=0.0).to(tl.float32) * LOG2_E
            acc, total, top = add_logit(acc, total, top, sink)
        result = acc / total[:, None]
        place = out + token[:, None] * out_token_stride + q_head[:, None] * out_head_stride + dims[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=stored)
    else:
        # A row that sees nothing of this part leaves zeros, and the weight of NOTHING.
        total = tl.where(total > 0, total, 1.0)
        result = acc / total[:, None]
        num_heads = tl.num_programs(0) * GROUP
        slot = (tl.load(part_starts + row, mask=in_use, other=0) + part).to(tl.int64) * num_heads + q_head
        tl.store(part_out + slot[:, None] * HEAD_DIM + dims[None, :], result, mask=stored)
        tl.store(part_lse + slot, top + tl.log2(total), mask=in_use)
