"""Softmax over parts, merged, is softmax over all of it."""

from __future__ import annotations

import torch

from ramet.kernels.merge import merge_


def attend(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)


def test_parts_merge_to_the_whole() -> None:
    scores, values = 80 * torch.randn(5, 30, dtype=torch.float64), torch.randn(30, 8, dtype=torch.float64)
    out, lse = attend(scores[:, :7], values[:7])
    for cut in (slice(7, 8), slice(8, 21), slice(21, 30)):
        merge_(out, lse, *attend(scores[:, cut], values[cut]))
    whole, whole_lse = attend(scores, values)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_a_part_without_keys_changes_nothing_on_either_side() -> None:
    part, part_lse = torch.randn(3, 4), torch.randn(3)
    nothing, empty = torch.zeros(3, 4), torch.full((3,), -torch.inf)
    out, lse = part.clone(), part_lse.clone()
    merge_(out, lse, nothing, empty)
    assert torch.equal(out, part)
    assert torch.equal(lse, part_lse)
    merge_(nothing, empty, part, part_lse)
    assert torch.equal(nothing, part)
    assert torch.equal(empty, part_lse)


def test_far_apart_parts_do_not_overflow() -> None:
    out, lse = torch.ones(1, 2), torch.tensor([1e4])
    merge_(out, lse, torch.full((1, 2), 5.0), torch.tensor([-1e4]))
    assert out.tolist() == [[1.0, 1.0]]
    assert lse.tolist() == [1e4]
