"""Copy-on-write of many blocks, K and V of all layers, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_blocks_kernel(
    pool_ptr,
    copies_ptr,  # [C, 3] int32: source, destination, slots filled
    block_stride: tl.int64,  # also the numbers of a block, over all layers
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,  # numbers of one head's slots, B * D
    NUMBERS: tl.constexpr,  # of one program
):
    copy = tl.program_id(1)
    source = tl.load(copies_ptr + copy * 3).to(tl.int64)
    destination = tl.load(copies_ptr + copy * 3 + 1).to(tl.int64)
    filled = tl.load(copies_ptr + copy * 3 + 2)

    number = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    # A head's slots lie in order: what is filled is their front.
    mask = (number < block_stride) & (number % PAGE < filled * HEAD_DIM)
    data = tl.load(pool_ptr + source * block_stride + number, mask=mask)
    tl.store(pool_ptr + destination * block_stride + number, data, mask=mask)


def copy_blocks(storage: torch.Tensor, copies: torch.Tensor) -> None:
    """Copy blocks inside a block-major pool's storage [num_layers, 2, Hkv, N, B, D].

    copies: [C, 3] int32 on the device: source, destination, and how many of the source's slots are filled and
    so copied. No destination is a source or named twice.
    """
    num_layers, _, num_kv_heads, _, block_size, head_dim = storage.shape
    numbers = num_layers * 2 * num_kv_heads * block_size * head_dim
    assert storage.stride(3) == numbers, "a block is one stretch of memory"
    _copy_blocks_kernel[(triton.cdiv(numbers, 2048), len(copies))](
        storage, copies, numbers, HEAD_DIM=head_dim, PAGE=block_size * head_dim, NUMBERS=2048, num_warps=4
    )
