"""The reference agrees with torch's own attention on contiguous KV, and with one case done by hand."""

from __future__ import annotations

import math

import torch

from ramet.kernels.reference import paged_attention


def test_by_hand() -> None:
    key = torch.tensor([0.0, math.log(3.0)]).view(
        1, 2, 1, 1
    )  # blocks of one slot: block 1 weighs three times
    value = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)
    out, lse = paged_attention(torch.ones(1, 1, 1), key, value, [[1, 0]], [1], [2], scale=1.0)
    assert math.isclose(out.item(), 17.5, rel_tol=1e-6)
    assert math.isclose(lse.item(), math.log(4.0), rel_tol=1e-6)


def test_agrees_with_torch_on_contiguous_kv() -> None:
    q = torch.randn(12, 6, 16, dtype=torch.float64)
    key, value = (torch.randn(2, 3, 4, 16, dtype=torch.float64) for _ in range(2))
    out, _ = paged_attention(q, key, value, [[0, 1, 2]], [12], [12])
    k, v = (t.flatten(1, 2)[None].repeat_interleave(3, 1) for t in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True)
    torch.testing.assert_close(out, expected[0].transpose(0, 1))
