"""Matrix products: every layout computes the same, and a model in bfloat16 runs fused, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ramet.engine import linear
from ramet.engine.fused_llama import _attend_densely
from ramet.engine.linear import join_linears
from ramet.engine.models import load_model
from ramet.engine.tiny_model import tiny_llama
from ramet.kernels.options import AttentionOptions


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wide_from", [None, 4])
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layout_multiplies(dtype: torch.dtype, rows: int, wide_from: int | None, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(48, 32).to(dtype)
    added, residual = torch.randn(32).to(dtype), torch.randn(rows, 32).to(dtype)
    module = torch.nn.Linear(48, 32, bias=bias).to(dtype)
    module.weight.data = weight.t().contiguous()
    if bias:
        module.bias.data = added
    product = join_linears([module], wide_from)
    expected = x.float() @ weight.float() + (added.float() if bias else 0)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert product(x).dtype == dtype
    torch.testing.assert_close(product(x).float(), expected, rtol=tolerance, atol=10 * tolerance)
    summed = product.added_to(residual, x).float()
    torch.testing.assert_close(summed, expected + residual.float(), rtol=tolerance, atol=10 * tolerance)


def test_a_copy_that_does_not_fit_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_free_bytes", lambda: 4000.0)
    monkeypatch.setattr(linear, "_measured_rows", lambda threads: 16)
    assert linear.rows_for_fp32(250, torch.bfloat16) == 16
    assert linear.rows_for_fp32(251, torch.bfloat16) is None
    assert linear.rows_for_fp32(250, torch.float32) is None, "it is fp32 already"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_llama_runs_fused_in_both_dtypes(dtype: str) -> None:
    assert load_model(tiny_llama(weight_std=0.05), dtype=dtype)._fused is not None


@pytest.mark.model
def test_the_embedded_model_runs_fused_in_bfloat16() -> None:
    assert load_model("smollm2", dtype="bfloat16")._fused is not None


@pytest.mark.parametrize("rows", [3, 4, 20])
def test_many_rows_in_fp32_compute_the_same(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """From four rows on the pass stays in fp32 between the layers: only attention sees bfloat16."""
    monkeypatch.setattr(linear, "_measured_rows", lambda threads: 4)
    ids = (torch.arange(rows) * 37 + 5) % 512
    seen: list[torch.dtype] = []

    def attend(layer: int, q: Any, k: Any, v: Any, scale: float, options: AttentionOptions) -> Any:
        seen.extend((q.dtype, k.dtype, v.dtype))
        return _attend_densely(layer, q, k, v, scale, options)

    positions = torch.arange(rows)
    exact = load_model(tiny_llama(weight_std=0.05)).forward(ids, positions, positions, _attend_densely)
    model = load_model(tiny_llama(weight_std=0.05), dtype="bfloat16")
    assert model._fused is not None and model._fused._wide_from == 4
    found = model.forward(ids, positions, positions, attend)
    assert set(seen) == {torch.bfloat16} and found.dtype == torch.bfloat16
    assert (found.float() - exact).norm() < 0.02 * exact.norm()
