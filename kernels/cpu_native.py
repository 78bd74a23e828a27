"""Attention on the CPU in C (`csrc/attention.c`): a step is prepared once, a layer is one call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ramet.kernels import native
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.native_work import make_tasks, stretches_of
from ramet.kernels.options import PLAIN, AttentionOptions
from ramet.kernels.plan import AttentionPlan, IntArray

MIN_HEAD_DIM = 16  # a vector
MAX_HEAD_DIM = 256  # of csrc/attention.h
# Below so many products of two numbers a layer, waking other threads takes longer than the work.
MIN_PRODUCTS_FOR_THREADS = 400_000

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Step(ctypes.Structure):
    """`Step` of csrc/attention.h, which says what is what."""

    _fields_ = (
        *((name, _POINTER) for name in ("tasks", "blocks", "lows", "ends", "slots", "part_starts", "parts")),
        *((name, _POINTER) for name in ("part_outs", "part_maxima", "part_sums", "storage")),
        *((f"{name}_stride", _LONG) for name in ("layer", "value", "head", "block")),
        *((f"num_{name}", _LONG) for name in ("tasks", "tokens", "parts", "kv_heads")),
        *((name, _LONG) for name in ("group", "head_dim", "block_size", "is_half", "num_threads")),
    )


class _Prepared(NamedTuple):
    step: Any  # a reference to the C structure
    arrays: tuple[Any, ...]  # what it points to


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """`ramet_attend` of csrc/attention.c."""
    library = native.library()
    if library is None:
        return None
    kernel = library.ramet_attend
    heads = (_POINTER, _LONG, _LONG)
    kernel.argtypes = (_POINTER, _LONG, *(heads * 3), _POINTER, _FLOAT, _FLOAT, _POINTER)
    kernel.restype = None
    return kernel


def serves(pool: KVPool) -> bool:
    """Whether the C kernels are there, and for a pool like this."""
    fits = MIN_HEAD_DIM <= pool.head_dim <= MAX_HEAD_DIM and pool.dtype in (torch.float32, torch.bfloat16)
    return fits and pool.device.type == "cpu" and _kernel() is not None


class NativeAttention:
    """One step's attention over one pool, prepared once and called by each layer. It writes K and V, too."""

    def __init__(self, plan: AttentionPlan, pool: KVPool, slots: IntArray) -> None:
        """slots [T]: where K and V of each token go, -1 for one that writes none."""
        kernel = _kernel()
        assert kernel is not None, "the C kernels are there"
        self.pool = pool
        self._kernel = kernel
        self._plan = plan
        self._slots = slots.copy()  # its address is kept
        first = plan.kv_lens - plan.query_lens - plan.query_starts[:-1]
        self._ends = np.arange(plan.num_tokens) + np.repeat(first, plan.query_lens) + 1  # [T]
        self._longest = int(plan.kv_lens.max())
        self._prepared: dict[tuple[int, int | None], _Prepared] = {}  # by query heads and window

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        """Write k, v [T, Hkv, D] of tokens that have a slot, then attend with q [T, H, D]: out [T, H, D]."""
        pool = self.pool
        num_tokens, num_heads, head_dim = q.shape
        kv_shape = (num_tokens, pool.num_kv_heads, head_dim)
        assert num_tokens == len(self._slots), "the batch is not the one that was planned"
        assert head_dim == pool.head_dim and k.shape == v.shape == kv_shape, "the heads are not the pool's"
        assert q.dtype == k.dtype == v.dtype == pool.dtype, "queries, keys, values and pool differ in dtype"
        assert 0 <= layer < pool.num_layers, "the pool has no such layer"
        q_token, q_head, q_one = q.stride()
        k_token, k_head, k_one = k.stride()
        v_token, v_head, v_one = v.stride()
        assert q_one == k_one == v_one == 1, "the numbers of a head are not adjacent"
        window = options.window
        if window is not None and window >= self._longest:
            window = None  # it cuts nothing off in this step
        prepared = self._prepared.get((num_heads, window)) or self._prepare(num_heads, window)
        sinks = None
        if options.sinks is not None:
            sinks = options.sinks.float().contiguous()
            assert sinks.shape == (num_heads,), "there is one sink a head"
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._kernel(
            prepared.step,
            layer,
            *(q.data_ptr(), q_token, q_head),
            *(k.data_ptr(), k_token, k_head),
            *(v.data_ptr(), v_token, v_head),
            out.data_ptr(),
            scale,
            options.softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
        )
        return out

    def _prepare(self, num_heads: int, window: int | None) -> _Prepared:
        pool, plan = self.pool, self._plan
        num_kv_heads, head_dim = pool.num_kv_heads, pool.head_dim
        assert num_heads % num_kv_heads == 0, "the query heads do not divide among the KV heads"
        group = num_heads // num_kv_heads
        lows = np.zeros_like(self._ends) if window is None else np.maximum(self._ends - window, 0)
        work = make_tasks(plan, stretches_of(plan, lows), group)
        seen = lows.astype(np.int32), self._ends.astype(np.int32)
        arrays = (work.tasks, work.blocks, *seen, self._slots, work.part_starts, work.parts)
        num_parts = num_kv_heads * work.num_parts
        outs = torch.empty(num_parts, head_dim, dtype=torch.float32)
        maxima, sums = torch.empty(2, num_parts, dtype=torch.float32)
        has_many = work.num_products * 2 * num_kv_heads * head_dim >= MIN_PRODUCTS_FOR_THREADS
        step = _Step(
            *(array.ctypes.data for array in arrays),
            *(outs.data_ptr(), maxima.data_ptr(), sums.data_ptr(), pool.data_ptr),
            *pool.storage.stride()[:4],
            *(len(work.tasks), plan.num_tokens, work.num_parts, num_kv_heads),
            *(group, head_dim, pool.block_size, pool.dtype == torch.bfloat16),
            torch.get_num_threads() if has_many else 1,
        )
        prepared = _Prepared(ctypes.byref(step), (*arrays, outs, maxima, sums))
        self._prepared[num_heads, window] = prepared
        return prepared
