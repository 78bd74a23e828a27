"""A matrix product with a stored weight, in the layout that is fastest for the rows of a step."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Not 16: there a whole step, whose weights no cache holds, loses again what the products alone gain.
_TRIED_ROWS = (32, 64)
_TRIED_SHAPE = (1024, 2048)  # larger than a core's own cache in bfloat16
_WORTH_IT = 1.1  # an fp32 copy of the weights must be so much faster
_MEMORY_SHARE = 0.25  # of the free memory, for these copies


class Linear:
    """x [T, I] -> x W + b [T, O].

    In fp32 the weight lies as [I, O]. In bfloat16 on a CPU, oneDNN would reorder a plain weight at each call,
    so it is stored in its order. A CPU with AVX512-BF16 but without AMX multiplies few rows faster in
    bfloat16, for these wait for memory, and many rows faster in fp32: from `wide_from` rows on an fp32 copy
    is used, which takes two more bytes for each one of the weight's. It is made when it is first needed.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, sources: Sequence[Any] = (), wide_from: int | None = None
    ) -> None:
        """weight: [I, O], contiguous. sources: the nn.Linear whose weights it holds, for the fp32 copy."""
        self._bias = bias  # [O]
        self._packed = _pack(weight)
        self._weight = weight if self._packed is None else None
        self._wide_from = wide_from if self._packed is not None and sources else None
        self._sources = sources
        self._wide: Tensor | None = None
        self._wide_bias = None if bias is None else bias.float()

    @property
    def is_packed(self) -> bool:
        """Whether the weight lies in oneDNN's own order, and so in a copy of its own."""
        return self._packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        """x in fp32, where the weight is bfloat16, is for the fp32 copy, and so is the result."""
        if self._wide_from is not None and x.shape[0] >= self._wide_from:
            if self._wide is None:
                self._wide = _reorder(torch.cat([source.weight.detach() for source in self._sources]).float())
            return _multiply(x.float(), self._wide, self._wide_bias).to(x.dtype)
        if self._packed is not None:
            return _multiply(x, self._packed, self._bias)
        assert self._weight is not None, "a weight that is not packed is kept as it came"
        return x @ self._weight if self._bias is None else torch.addmm(self._bias, x, self._weight)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, O] + self(x) [T, O]."""
        if self._weight is None:
            return self(x).add_(residual)
        if self._bias is not None:
            residual = residual + self._bias
        return torch.addmm(residual, x, self._weight)


def join_linears(linears: Sequence[Any], wide_from: int | None = None) -> Linear:
    """Several nn.Linear with one input as one product with their outputs side by side.

    Where the weight is not packed, the modules' own weights become views of it: nothing is held twice.
    """
    joined = torch.cat([linear.weight.detach().t() for linear in linears], dim=1).contiguous()  # [I, O]
    biases = [linear.bias for linear in linears]
    result = Linear(joined, None if biases[0] is None else torch.cat(biases).detach(), linears, wide_from)
    if not result.is_packed:
        parts = torch.split(joined, [linear.weight.shape[0] for linear in linears], dim=1)
        for linear, part in zip(linears, parts, strict=True):
            linear.weight.data = part.t()
    return result


def rows_for_fp32(num_weights: int, dtype: torch.dtype) -> int | None:
    """From how many rows on an fp32 copy of bfloat16 weights pays here; None if never, or too large."""
    if dtype != torch.bfloat16 or num_weights * 4 > _free_bytes() * _MEMORY_SHARE:
        return None
    return _measured_rows(torch.get_num_threads())


@functools.lru_cache(maxsize=4)
def _measured_rows(num_threads: int) -> int | None:
    """A measurement of some 50 ms: what a CPU is fast at does not follow from its flags."""
    assert num_threads == torch.get_num_threads(), "the key of the cache"
    plain = torch.rand(_TRIED_SHAPE)
    narrow = _pack(plain.bfloat16())
    if narrow is None:
        return None
    wide = _reorder(plain.t().contiguous())
    for rows in _TRIED_ROWS:
        x = torch.rand(rows, _TRIED_SHAPE[0], dtype=torch.bfloat16)
        # In turn, and the best of several: a neighbour's load only ever adds.
        pairs = [(_seconds(x, narrow), _seconds(x, wide)) for _ in range(6)]
        if min(pair[0] for pair in pairs) > _WORTH_IT * min(pair[1] for pair in pairs):
            return rows
    return None


def _seconds(x: Tensor, packed: Tensor) -> float:
    start = time.perf_counter()
    _multiply(x if packed.dtype == x.dtype else x.float(), packed, None).to(x.dtype)
    return time.perf_counter() - start


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


def _pack(weight: Tensor) -> Tensor | None:
    """The weight [I, O] in oneDNN's own order, or None where there is no use or no way."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return None
    try:
        return _reorder(weight.t().contiguous())
    except (AttributeError, RuntimeError):
        return None  # a build without oneDNN, or a torch that names it otherwise


def _reorder(weight: Tensor) -> Tensor:
    """A weight [O, I] in oneDNN's own order."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # type: ignore[no-any-return]


def _free_bytes() -> float:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return float("inf")  # the system does not say
