"""The C products against fp64, for every number of rows that a tile can have."""

from __future__ import annotations

import pytest
import torch

from ramet.kernels.products import Panels, panels


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Panels:
    made = panels(weight, bias)
    assert made is not None, "these tests need a C compiler, as CI has one"
    return made


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("rows", [*range(1, 30), 100])
def test_products_of_every_height(rows: int, num_threads: int) -> None:
    torch.manual_seed(rows)
    torch.set_num_threads(num_threads)
    try:
        x, weight = torch.randn(rows, 80).bfloat16(), torch.randn(80, 160).bfloat16()
        bias, residual = torch.randn(160).bfloat16(), torch.randn(rows, 160).bfloat16()
        found = packed(weight, bias).plain(x, residual)
        expected = x.double() @ weight.double() + bias.double() + residual.double()
        # One rounding to bfloat16's 8 bits: at most 2^-8 of each number, and fp32 sums before it.
        assert ((found.double() - expected).abs() <= expected.abs() / 2**8 + 1e-4).all()
        alone = torch.cat(
            [packed(weight, bias).plain(x[i : i + 1], residual[i : i + 1]) for i in range(rows)]
        )
        assert torch.equal(found, alone), "a row does not depend on the rows beside it"
    finally:
        torch.set_num_threads(1)


def test_no_rows() -> None:
    assert packed(torch.randn(32, 64).bfloat16()).plain(torch.empty(0, 32).bfloat16()).shape == (0, 64)


def test_norms_and_gates_are_not_rounded_in_between() -> None:
    torch.manual_seed(0)
    weight, norm = torch.randn(64, 96).bfloat16(), torch.rand(64) + 0.5
    x, gate_up = 100 * torch.randn(5, 64).bfloat16(), 30 * torch.randn(5, 128).bfloat16()
    exact = weight.double()
    wide = x.double()
    normed = wide / (wide.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * norm.double()
    gate, up = gate_up.double().chunk(2, dim=1)
    for found, rows in (
        (packed(weight).normed(x, norm, 1e-6), normed),
        (packed(weight).gated(gate_up), gate / (1 + (-gate).exp()) * up),
    ):
        expected = rows @ exact
        slack = expected.abs().mean() * 1e-5
        assert ((found.double() - expected).abs() <= expected.abs() / 2**8 + slack).all()


def test_extreme_numbers_stay_what_they_are() -> None:
    """A gate far below zero closes; NaN and infinity are not hidden; a row of zeros stays zero."""
    weight = torch.eye(32).bfloat16()
    gate_up = torch.ones(1, 64).bfloat16()
    gate_up[0, :4] = torch.tensor([-1e30, 1e30, -200.0, 1.0])
    found = packed(weight).gated(gate_up)[0]
    assert found[0] == 0 and found[2] == 0 and found[1] == torch.tensor(1e30).bfloat16()
    gate_up[0, 3] = float("nan")
    assert packed(weight).gated(gate_up)[0, 3].isnan()
    x = torch.zeros(2, 32).bfloat16()
    x[1, 0] = float("inf")
    assert packed(weight).normed(x[:1], torch.ones(32), 1e-6).eq(0).all()
    assert not packed(weight).plain(x)[1, 0].isfinite()


def test_shapes_without_a_kernel() -> None:
    assert panels(torch.randn(24, 32).bfloat16(), None) is None
    assert panels(torch.randn(32, 24).bfloat16(), None) is None
    assert panels(torch.randn(32, 32), None) is None
