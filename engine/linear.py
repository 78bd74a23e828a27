"""A matrix product with a stored weight, in the layout that is fastest for the rows of a step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ramet.kernels.products import Panels, panels

_TRIED_ROWS = (32, 128)
_TRIED_SHAPE = (1024, 2048)  # larger than a core's own cache in bfloat16
_WORTH_IT = 1.1  # oneDNN must be so much faster to take over


class Linear:
    """x [T, I] -> x W + b [T, O], also of an RMS norm or a gated activation of x, and added to a residual.

    In fp32 the weight lies as [I, O]. In bfloat16 on a CPU it lies in panels for our own kernel; from
    `onednn_from` rows on, which only a CPU with AMX has, and where there is no such kernel, oneDNN
    multiplies, with the weight in its own order.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, onednn_from: int | None = None) -> None:
        """weight: [I, O], contiguous. bias: [O]."""
        self._bias = bias
        self._panels: Panels | None = panels(weight, bias)
        self._onednn_from = 0 if self._panels is None else onednn_from
        self._packed = None if self._onednn_from is None else _pack(weight)
        self._weight = weight if self._panels is None and self._packed is None else None

    @property
    def copies(self) -> bool:
        """Whether the weight lies in a copy of its own, not as it came."""
        return self._weight is None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x W + b, plus the residual [T, O]."""
        own = self._panels_for(x)
        if own is not None:
            return own.plain(x, residual)
        if self._packed is not None:
            product = _multiply(x, self._packed, self._bias)
            return product if residual is None else product.add_(residual)
        assert self._weight is not None, "a weight without a copy is kept as it came"
        if residual is None:
            return x @ self._weight if self._bias is None else torch.addmm(self._bias, x, self._weight)
        if self._bias is not None:
            residual = residual + self._bias
        return torch.addmm(residual, x, self._weight)

    def of_normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """The product of x's norm."""
        own = self._panels_for(x)
        return self(norm(x)) if own is None else own.normed(x, norm.in_fp32, norm.eps)

    def of_gated(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        """The product of silu(gate) * up, from [T, 2 I] with gate before up, plus the residual [T, O]."""
        own = self._panels_for(gate_up)
        if own is not None:
            return own.gated(gate_up, residual)
        gate, up = gate_up.chunk(2, dim=-1)
        return self(F.silu(gate).mul_(up), residual)

    def _panels_for(self, x: Tensor) -> Panels | None:
        return self._panels if self._onednn_from is None or x.shape[0] < self._onednn_from else None


class RMSNorm:
    """An RMS norm's weight [C], in its own dtype and in fp32."""

    def __init__(self, module: Any) -> None:
        """module: a norm of transformers' llama family."""
        self._weight: Tensor = module.weight.detach()
        self.in_fp32 = self._weight.float()
        self.eps = float(module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._weight.shape, self._weight, self.eps)


def join_linears(linears: Sequence[Any], onednn_from: int | None = None) -> Linear:
    """Several nn.Linear with one input as one product with their outputs side by side.

    Where the weight is not copied, the modules' own weights become views of it: nothing is held twice.
    """
    joined = torch.cat([linear.weight.detach().t() for linear in linears], dim=1).contiguous()  # [I, O]
    biases = [linear.bias for linear in linears]
    result = Linear(joined, None if biases[0] is None else torch.cat(biases).detach(), onednn_from)
    if not result.copies:
        parts = torch.split(joined, [linear.weight.shape[0] for linear in linears], dim=1)
        for linear, part in zip(linears, parts, strict=True):
            linear.weight.data = part.t()
    return result


def rows_for_onednn(weight: Tensor) -> int | None:
    """From how many rows on oneDNN is faster than our own kernel for weights like this one; None if never."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return None
    return _measured_rows(torch.get_num_threads())


@functools.lru_cache(maxsize=4)
def _measured_rows(num_threads: int) -> int | None:
    """A measurement of some 50 ms: what a CPU is fast at does not follow from its flags."""
    assert num_threads == torch.get_num_threads(), "the key of the cache"
    weight = torch.rand(_TRIED_SHAPE).bfloat16()
    own, packed = panels(weight, None), _pack(weight)
    if own is None or packed is None:
        return None
    for rows in _TRIED_ROWS:
        x = torch.rand(rows, _TRIED_SHAPE[0]).bfloat16()
        # In turn, and the best of several: a neighbour's load only ever adds.
        pairs = [(_seconds(own.plain, x), _seconds(_multiply, x, packed, None)) for _ in range(6)]
        if min(pair[0] for pair in pairs) > _WORTH_IT * min(pair[1] for pair in pairs):
            return rows
    return None


def _seconds(multiply: Callable[..., Tensor], *arguments: Tensor | None) -> float:
    start = time.perf_counter()
    multiply(*arguments)
    return time.perf_counter() - start


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


def _pack(weight: Tensor) -> Tensor | None:
    """The bfloat16 weight [I, O] in oneDNN's own order, or None where there is no use or no way."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous(), None)  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):
        return None  # a build without oneDNN, or a torch that names it otherwise
