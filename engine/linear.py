"""A matrix product with a stored weight, in the layout that is fastest for the few rows of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Linear:
    """x [T, I] -> x W + b [T, O].

    In fp32 the weight lies as [I, O]. In bfloat16 on a CPU, oneDNN would put a plain weight into its own
    order at each call, so it is stored in that order.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias  # [O]
        self._packed = _pack(weight)
        self._weight = weight  # [I, O], contiguous
        if self._packed is not None:
            self._weight = weight.new_empty(0)

    @property
    def is_packed(self) -> bool:
        """Whether the weight lies in oneDNN's own order, and so in a copy of its own."""
        return self._packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]
        return x @ self._weight if self._bias is None else torch.addmm(self._bias, x, self._weight)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, O] + self(x) [T, O]."""
        if self._packed is not None:
            return self(x).add_(residual)
        if self._bias is not None:
            residual = residual + self._bias
        return torch.addmm(residual, x, self._weight)


def join_linears(linears: list[Any]) -> Linear:
    """Several nn.Linear with one input as one product with their outputs side by side.

    Where the weight is not packed, the modules' own weights become views of it: nothing is held twice.
    """
    joined = torch.cat([linear.weight.detach().t() for linear in linears], dim=1).contiguous()
    biases = [linear.bias for linear in linears]
    result = Linear(joined, None if biases[0] is None else torch.cat(biases).detach())
    if not result.is_packed:
        parts = torch.split(joined, [linear.weight.shape[0] for linear in linears], dim=1)
        for linear, part in zip(linears, parts, strict=True):
            linear.weight.data = part.t()
    return result


def _pack(weight: Tensor) -> Tensor | None:
    """The weight [I, O] in oneDNN's own order, or None where there is no use or no way."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous(), None)  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):
        return None  # a build without oneDNN, or a torch that names it otherwise
