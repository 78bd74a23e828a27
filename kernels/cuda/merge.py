"""Adds the parts of a row's attention: softmax over all its keys from the softmax over each part."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ramet.kernels.cuda.softmax import LOG2_E, NOTHING
from ramet.kernels.cuda.tile import padded


@triton.jit
def merge_kernel(
    merges,
    part_out,
    part_lse,
    out,
    out_token_stride,
    out_head_stride,
    sinks,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """Grid (H, M): one program adds the parts of one query head of one row.

    merges [M, 4] int32: (token, first part, number of parts, -); 0 parts fill up a launch of fixed size.
    part_out [P, H, D] and part_lse [P, H] fp32, log-sum-exps in powers of two; out [T, H, D], whose rows are
    written.
    PARTS parts are in flight at once. The parts of a row are added in the order of its path, whatever else is
    in the batch. With sinks [H], one more logit a head joins. See ramet.kernels.merge for the sources.
    """
    head = tl.program_id(0)
    merge = merges + tl.program_id(1) * 4
    num_parts = tl.load(merge + 2)
    if num_parts == 0:
        return
    token = tl.load(merge).to(tl.int64)
    first = tl.load(merge + 1).to(tl.int64)
    dims = tl.arange(0, DIMS)
    in_head = dims < HEAD_DIM
    if STARTS_EARLY:  # see attend_kernel
        gdc_wait()
    acc = tl.zeros([DIMS], tl.float32)
    total = 0.0
    top = NOTHING
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = 1.0
    for part0 in tl.range(0, num_parts, PARTS):
        part = part0 + tl.arange(0, PARTS)
        exists = part < num_parts
        place = (first + part) * tl.num_programs(0) + head
        lse = tl.load(part_lse + place, mask=exists, other=float("-inf"))
        parts = tl.load(
            part_out + place[:, None] * HEAD_DIM + dims[None, :],
            mask=exists[:, None] & in_head[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top)
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    place = out + token * out_token_stride + head * out_head_stride + dims
    tl.store(place, (acc / total).to(out.dtype.element_ty), mask=in_head)


def merge(
    merges: Tensor,
    num_merges: int,
    part_out: Tensor,
    part_lse: Tensor,
    out: Tensor,
    sinks: Tensor | None,
    has_many_parts: bool = False,
    starts_early: bool = False,
) -> None:
    """Write the rows of out [T, H, D] that `merges` [num_merges, 4] int32 name: each the sum of its parts.

    part_out [P, H, D] and part_lse [P, H], fp32, may have any shape of that order. Rows of many parts have
    more of them in flight. `starts_early`: the kernel before allows it.
    """
    _, num_heads, head_dim = out.shape
    merge_kernel[(num_heads, num_merges)](
        merges, part_out, part_lse, out, out.stride(0), out.stride(1), sinks,
        HEAD_DIM=head_dim, DIMS=padded(head_dim), PARTS=32 if has_many_parts else 8,
        HAS_SINKS=sinks is not None, STARTS_EARLY=starts_early, num_warps=1, launch_pdl=starts_early,
    )  # fmt: skip
