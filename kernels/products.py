"""Products of a step's rows with bfloat16 weights in C (`csrc/products.c`): a weight is read once for all.

A CPU with AVX512 but without AMX multiplies like this faster than oneDNN does: the weights stay bfloat16 in
memory, the sums are fp32 ones. A row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ramet.kernels import native

_LANES = 16  # of vector.h
_PANEL = 32  # columns, of products.c
_PLAIN, _NORMED, _GATED = range(3)
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class Panels:
    """A weight [K, N] in the order that the C kernel reads."""

    def __init__(self, multiply: Any, weight: Tensor, bias: Tensor | None) -> None:
        """See `panels`, which makes them where that is possible."""
        self._multiply = multiply
        self.num_inputs, self.num_outputs = weight.shape
        pairs = weight.view(torch.int16).view(self.num_inputs, -1, 2, _LANES)
        self._weight = pairs.permute(1, 0, 3, 2).contiguous()  # [N / 32, K, 16, 2]
        self._bias = None if bias is None else bias.float()
        self._weight_at = self._weight.data_ptr()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

    def plain(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, K] W + b (+ residual [T, N]): [T, N]. All are bfloat16 and contiguous, here and below."""
        return self._run(_PLAIN, x, self.num_inputs, None, 0.0, residual)

    def normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """The same of x's RMS norm, with the norm's weight [K] in fp32."""
        assert norm.dtype == torch.float32 and norm.shape == (self.num_inputs,), "one fp32 factor a channel"
        return self._run(_NORMED, x, self.num_inputs, norm.data_ptr(), eps, None)

    def gated(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The same of silu(gate) * up, where x [T, 2 K] holds gate, then up."""
        return self._run(_GATED, x, 2 * self.num_inputs, None, 0.0, residual)

    def _run(
        self, source: int, x: Tensor, width: int, norm_at: int | None, eps: float, residual: Tensor | None
    ) -> Tensor:
        rows = x.shape[0]
        assert x.dtype == torch.bfloat16 and x.shape == (rows, width), "rows of bfloat16"
        x = x.contiguous()
        out = torch.empty(rows, self.num_outputs, dtype=torch.bfloat16)
        residual_at = None
        if residual is not None:
            assert residual.dtype == x.dtype and residual.shape == out.shape, "a residual is like the result"
            residual = residual.contiguous()
            residual_at = residual.data_ptr()
        scratch = torch.empty(rows * self.num_inputs)
        self._multiply(
            x.data_ptr(),
            source,
            norm_at,
            eps,
            self._weight_at,
            self._bias_at,
            residual_at,
            out.data_ptr(),
            scratch.data_ptr(),
            rows,
            self.num_inputs,
            self.num_outputs,
        )
        return out


def panels(weight: Tensor, bias: Tensor | None) -> Panels | None:
    """The panels of a weight [K, N] and its bias [N]; None where there is no C kernel for it."""
    num_inputs, num_outputs = weight.shape
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return None
    library = native.library()
    if library is None or num_inputs % _LANES or num_outputs % _PANEL:
        return None
    multiply = library.ramet_multiply
    multiply.restype = None
    multiply.argtypes = [
        _POINTER, ctypes.c_int, _POINTER, ctypes.c_float, *[_POINTER] * 5, _LONG, _LONG, _LONG
    ]  # fmt: skip
    return Panels(multiply, weight.contiguous(), bias)
