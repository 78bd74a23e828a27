"""Matrix products: every layout computes the same, and a model in bfloat16 runs fused, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ramet.engine import linear
from ramet.engine.linear import Linear, RMSNorm, join_linears
from ramet.engine.models import load_model
from ramet.engine.tiny_model import tiny_llama


def make(
    monkeypatch: pytest.MonkeyPatch, native: bool, *modules: torch.nn.Linear, onednn_from: int | None
) -> Linear:
    if not native:
        monkeypatch.setattr(linear, "panels", lambda weight, bias: None)
    return join_linears(modules, onednn_from)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 13, 40])
@pytest.mark.parametrize(
    ("dtype", "native", "onednn_from"),
    [
        (torch.float32, True, None),
        (torch.bfloat16, True, None),
        (torch.bfloat16, True, 4),
        (torch.bfloat16, False, None),
    ],
)
def test_every_layout_multiplies(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    native: bool,
    onednn_from: int | None,
    rows: int,
    bias: bool,
) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(rows, 48).to(dtype), torch.randn(rows, 96).to(dtype)
    modules = [torch.nn.Linear(48, width, bias=bias).to(dtype) for width in (32, 64)]
    weight = torch.cat([module.weight.detach().float().clone() for module in modules])
    product = make(monkeypatch, native, *modules, onednn_from=onednn_from)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2

    def check(found: torch.Tensor, rows_in: torch.Tensor, added: Any = 0.0) -> None:
        assert found.dtype == dtype
        expected = rows_in @ weight.t() + added
        if bias:
            expected = expected + torch.cat([module.bias.detach().float() for module in modules])
        assert (found.float() - expected).norm() < tolerance * expected.norm()

    check(product(x), x.float())
    check(product(x, residual), x.float(), residual.float())
    norm = RMSNorm(SimpleNamespace(weight=torch.rand(48).to(dtype), variance_epsilon=1e-5))
    check(product.of_normed(x, norm), torch.nn.functional.rms_norm(x.float(), (48,), norm.in_fp32, 1e-5))
    gate_up = torch.randn(rows, 96).to(dtype) * 4
    gate, up = gate_up.float().chunk(2, dim=1)
    check(product.of_gated(gate_up, residual), gate * torch.sigmoid(gate) * up, residual.float())


def test_onednn_takes_over_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with AMX: the time of our own kernel grows with the rows, oneDNN's does not."""
    assert linear.rows_for_onednn(torch.zeros(1)) is None, "our own kernel is for bfloat16"
    seconds = iter([1.0, 2.0] * 6 + [4.0, 2.0] * 6)
    monkeypatch.setattr(linear, "_seconds", lambda *_: next(seconds))
    linear._measured_rows.cache_clear()
    try:
        assert linear.rows_for_onednn(torch.zeros(1).bfloat16()) == 128
    finally:
        linear._measured_rows.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_llama_runs_fused_in_both_dtypes(dtype: str) -> None:
    assert load_model(tiny_llama(weight_std=0.05), dtype=dtype)._fused is not None


@pytest.mark.model
def test_the_embedded_model_runs_fused_in_bfloat16() -> None:
    assert load_model("smollm2", dtype="bfloat16")._fused is not None
