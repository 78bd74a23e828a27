"""The algebra that the attention kernels share: one tile of paged KV, added to a running softmax.

A running softmax over the keys so far is (acc, total, top): top is the largest score, total the sum of
2^(score - top), acc the sum of 2^(score - top) * value. Scores are in powers of two, because the hardware has
exp2 and no exp: they are scaled with log2(e) on the way. (Online softmax, arXiv 1805.02867, by tiles as in
FlashAttention, arXiv 2205.14135.)
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# The top of a softmax over no keys. Not -inf: the difference of two of them would be no number.
NOTHING: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def block_ids_of(table, tile, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The ids of the blocks of one tile: [TILE / B], or a single one where a block holds several tiles.

    May read up to a tile past the end of the table; what it finds there is never followed.
    """
    if TILE > BLOCK_SIZE:
        NUM_BLOCKS: tl.constexpr = TILE // BLOCK_SIZE
        ids = tl.load(table + tile * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS))
    else:
        ids = tl.load(table + tile * TILE // BLOCK_SIZE)
    return ids


@triton.jit
def slot_offsets(ids, tile, block_stride, slot_stride, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """How far from the start of a KV head each of the TILE slots of a tile lies: [TILE], 64 bit."""
    slot = tl.arange(0, TILE)
    if TILE > BLOCK_SIZE:
        NUM_BLOCKS: tl.constexpr = TILE // BLOCK_SIZE
        block = tl.reshape(tl.broadcast_to(ids[:, None], [NUM_BLOCKS, BLOCK_SIZE]), [TILE])
        offsets = block.to(tl.int64) * block_stride + slot % BLOCK_SIZE * slot_stride
    else:
        offsets = ids.to(tl.int64) * block_stride + (tile * TILE % BLOCK_SIZE + slot) * slot_stride
    return offsets


@triton.jit
def attend_tile(
    acc,
    total,
    top,
    q,
    key,
    value,
    offsets,
    dims,
    position,
    end,
    low,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    high=None,
    CAUSAL: tl.constexpr = False,
    MASKS_KEYS: tl.constexpr = False,
):
    """Add the TILE keys at `position` to the running softmax acc [ROWS, DIMS], total and top [ROWS].

    q [ROWS, DIMS]; key and value point to a KV head, offsets [TILE] from there. Keys at or past `end` are not
    seen (if MASKED), nor those before low (if HAS_WINDOW) or after high (if CAUSAL), both [ROWS]. `scale` is
    that of the softmax, and includes log2(e) unless there is a cap.

    Values past the end are not fetched: they may be no numbers, which a weight of 0 does not undo. Keys are,
    from wherever their ids lead, unless MASKS_KEYS: that spares bytes and takes registers.
    """
    positions = position + tl.arange(0, TILE)
    seen = positions < end
    keys, values = key + offsets[None, :] + dims[:, None], value + offsets[:, None] + dims[None, :]
    if MASKS_KEYS and MASKED:
        k = tl.load(keys, mask=seen[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
    elif HEAD_DIM < DIMS:
        k = tl.load(keys, mask=(dims < HEAD_DIM)[:, None], other=0.0)
    else:
        k = tl.load(keys)
    # "ieee" is for fp32, where the default would round to tf32; half precision is exact anyway.
    scores = tl.dot(q, k, input_precision="ieee")
    if HAS_SOFTCAP:
        scores = softcap * _tanh(scores * (scale / softcap))
        scale = LOG2_E
    if MASKED:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    if HAS_WINDOW:
        scores = tl.where(positions[None, :] >= low[:, None], scores, float("-inf"))
    if CAUSAL:
        scores = tl.where(positions[None, :] <= high[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    if HEAD_DIM < DIMS:
        v = tl.load(values, mask=seen[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif MASKED:
        v = tl.load(values, mask=seen[:, None], other=0.0)
    else:
        v = tl.load(values)
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, total, new_top


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def add_logit(acc, total, top, logit):
    """Add one more logit a row, that has no value (a sink), to the running softmax."""
    new_top = tl.maximum(top, logit)
    shrink = tl.exp2(top - new_top)
    return acc * shrink[:, None], total * shrink + tl.exp2(logit - new_top), new_top
