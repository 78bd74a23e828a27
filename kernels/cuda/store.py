"""Reshape-and-cache: writes K and V of a step's tokens into their slots, rotated on the way or not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOKENS = 2  # that one program stores; 1 to 8 are within 3 % of each other


@triton.jit
def _store_kernel(
    key_ptr,
    value_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    num_tokens,
    head_stride: tl.int64,
    block_stride: tl.int64,
    slot_stride: tl.int64,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # of one program
    HEADS: tl.constexpr,  # NUM_KV_HEADS, up to a power of two
    DIMS: tl.constexpr,  # HEAD_DIM, up to a power of two
):
    rows = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0) * TOKENS + rows // HEADS
    head = (rows % HEADS).to(tl.int64)
    dim = tl.arange(0, DIMS)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    mask = ((slot >= 0) & (head < NUM_KV_HEADS))[:, None] & (dim < HEAD_DIM)[None, :]
    token = token.to(tl.int64)

    k = tl.load(k_ptr + (token * k_token_stride + head * k_head_stride)[:, None] + dim[None, :], mask=mask)
    v = tl.load(v_ptr + (token * v_token_stride + head * v_head_stride)[:, None] + dim[None, :], mask=mask)
    there = head * head_stride + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    tl.store(key_ptr + there[:, None] + dim[None, :], k, mask=mask)
    tl.store(value_ptr + there[:, None] + dim[None, :], v, mask=mask)


def store(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write k, v [T, Hkv, D] to the slots [T] int64 of key, value [Hkv, N, B, D]; -1 is none.

    Heads and tokens of k and v may lie anywhere, a head's numbers side by side.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    assert k.stride(2) == v.stride(2) == key.stride(3) == 1, "a head's numbers lie side by side"
    assert key.stride() == value.stride(), "K and V of a layer have one layout"
    _store_kernel[(triton.cdiv(num_tokens, TOKENS),)](
        key,
        value,
        slots,
        k,
        v,
        num_tokens,
        *key.stride()[:3],
        *k.stride()[:2],
        *v.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key.shape[2],
        TOKENS=TOKENS,
        HEADS=triton.next_power_of_2(num_kv_heads),
        DIMS=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _rotate_half(x, partner, cos, sin, dim, HEAD_DIM: tl.constexpr):
    """x cos + rotate_half(x) sin, rotate_half(x) = (-x2, x1); `partner` is the other half's number."""
    return x * cos + tl.where(dim < HEAD_DIM // 2, -partner, partner) * sin


@triton.jit
def _rotate_and_store_kernel(
    key_ptr,
    value_ptr,
    slots_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    head_stride: tl.int64,
    block_stride: tl.int64,
    slot_stride: tl.int64,
    q_token_stride: tl.int64,
    q_head_stride: tl.int64,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_HEADS: tl.constexpr,  # NUM_HEADS, up to a power of two
    KV_HEADS: tl.constexpr,  # NUM_KV_HEADS, up to a power of two
    DIMS: tl.constexpr,  # HEAD_DIM, up to a power of two
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    dim = tl.arange(0, DIMS)
    inside = dim < HEAD_DIM
    other = (dim + HEAD_DIM // 2) % HEAD_DIM
    cos = tl.load(cos_ptr + token * HEAD_DIM + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * HEAD_DIM + dim, mask=inside, other=0.0).to(tl.float32)[None, :]

    head = tl.arange(0, Q_HEADS)
    mask = (head < NUM_HEADS)[:, None] & inside[None, :]
    row = q_ptr + token * q_token_stride + (head * q_head_stride)[:, None]
    q = tl.load(row + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(row + other[None, :], mask=mask, other=0.0).to(tl.float32)
    q = _rotate_half(q, partner, cos, sin, dim[None, :], HEAD_DIM)
    there = (token * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_ptr + there[:, None] + dim[None, :], q.to(out_ptr.dtype.element_ty), mask=mask)

    kv_head = tl.arange(0, KV_HEADS)
    num_stored = tl.where(slot >= 0, NUM_KV_HEADS, 0)
    kv_mask = (kv_head < num_stored)[:, None] & inside[None, :]
    k_row = k_ptr + token * k_token_stride + (kv_head * k_head_stride)[:, None]
    k = tl.load(k_row + dim[None, :], mask=kv_mask, other=0.0).to(tl.float32)
    k_partner = tl.load(k_row + other[None, :], mask=kv_mask, other=0.0).to(tl.float32)
    k = _rotate_half(k, k_partner, cos, sin, dim[None, :], HEAD_DIM)
    v_row = v_ptr + token * v_token_stride + (kv_head * v_head_stride)[:, None]
    v = tl.load(v_row + dim[None, :], mask=kv_mask)
    slot_start = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    stored = (slot_start + kv_head * head_stride)[:, None] + dim[None, :]
    tl.store(key_ptr + stored, k.to(key_ptr.dtype.element_ty), mask=kv_mask)
    tl.store(value_ptr + stored, v, mask=kv_mask)


def rotate_and_store(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Rotate q [T, H, D] and k [T, Hkv, D] by their positions, then store k and v; the rotated q, dense.

    cos and sin [T, D], dense, are those of the rotary embedding (arXiv 2104.09864) in the form of two halves,
    as llama-shaped models have it; the arithmetic is fp32. Otherwise as `store`: at decode it spares the
    launches of the rotation and one pass over q and k.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert q.stride(2) == k.stride(2) == v.stride(2) == key.stride(3) == 1, (
        "a head's numbers lie side by side"
    )
    assert key.stride() == value.stride(), "K and V of a layer have one layout"
    assert cos.is_contiguous() and sin.is_contiguous(), "cos and sin are dense"
    assert head_dim % 2 == 0, "a head has two halves"
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    _rotate_and_store_kernel[(num_tokens,)](
        key,
        value,
        slots,
        q,
        k,
        v,
        cos,
        sin,
        out,
        *key.stride()[:3],
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key.shape[2],
        Q_HEADS=triton.next_power_of_2(num_heads),
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        DIMS=triton.next_power_of_2(head_dim),
    )
    return out
