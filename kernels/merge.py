"""Adds partial attention results: softmax over a union of keys from the softmax over each part."""

from __future__ import annotations

import torch


def merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge `part` [..., D] with its `part_lse` [...] into `out` and `lse` of the same shapes, in place.

    With lse_j the natural log of the sum of exponentials over the keys of part j,

        lse = log(exp(lse_1) + exp(lse_2)),   out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

    which is what FlashAttention (arXiv 2205.14135) does between tiles, Flash-Decoding between splits of the
    KV, and Hydragen (arXiv 2402.05099) between a shared prefix and its suffixes. The second weight is
    sigmoid(lse_2 - lse_1), so one interpolation does it, nothing overflows, and a part over no keys
    (lse -inf, out finite) changes nothing. At least one of the two parts has a key.
    """
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    out.lerp_(part, weight)
    torch.logaddexp(lse, part_lse, out=lse)
