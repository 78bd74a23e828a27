"""The door to attention: picks the path by the pool. A step prepares once, each layer attends.

A head-major pool is read by the CPU path, a block-major one by the GPU's Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ramet.kernels import cpu_native
from ramet.kernels.cpu import CPUAttention
from ramet.kernels.cpu_native import NativeAttention
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.options import PLAIN, AttentionOptions
from ramet.kernels.plan import AttentionPlan, Ints, Planner


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to run with torch's operators: where its tokens are written, and its work list."""

    pool: KVPool
    slots: torch.Tensor  # [W] int64, of the tokens that are written; on a GPU [T], -1 for the others
    written: torch.Tensor | None  # [W] int64, those tokens; None where k and v of all T are handed on
    attend: Callable[[int, torch.Tensor, float, AttentionOptions], torch.Tensor]


# A segment costs the C kernels a task and a merge more for its rows, about as much as reading some hundred
# tokens of one row does: it has to spare more than that.
NATIVE_MIN_TOKENS_SAVED = 256
# With torch's operators a segment costs tens of microseconds, so it has to spare the reading of many numbers.
# Half precision needs more, because shared segments are widened to fp32. There a segment has to be a good
# part of what its rows read as well, because a large private part is rounded once more when it is merged.
CPU_MIN_NUMBERS_SAVED = 200_000
CPU_MIN_NUMBERS_SAVED_HALF = 400_000
CPU_MIN_FRACTION_HALF = 0.2


# What the GPU's kernels have tiles for.
MAX_HEAD_DIM = 256
MAX_GROUP = 128  # query heads of a KV head
# Of a step. CUDA launches 65,535 programs along the axis of work items, and a token may need more than one.
MAX_BATCH_TOKENS = 32768


def planner(pool: KVPool) -> Planner:
    """The planner whose idea of what pays suits the pool."""
    if pool.layout == "block-major":
        from ramet.kernels.cuda.work import planner as gpu_planner

        return gpu_planner(pool)
    if cpu_native.serves(pool):
        return Planner(pool.block_size, NATIVE_MIN_TOKENS_SAVED)
    half = pool.dtype != torch.float32
    numbers = CPU_MIN_NUMBERS_SAVED_HALF if half else CPU_MIN_NUMBERS_SAVED
    tokens = numbers // (2 * pool.num_kv_heads * pool.head_dim)
    return Planner(pool.block_size, max(tokens, 128), CPU_MIN_FRACTION_HALF if half else 0.0)


def prepare(pool: KVPool, plan: AttentionPlan, slots: Ints) -> Prepared | NativeAttention:
    """Make all that the layers of a step have in common.

    `slots` [T] says where K and V of each token go, -1 for a query-only token, which writes none.
    """
    assert plan.block_size == pool.block_size, "plan and pool differ in block size"
    where = np.asarray(slots, dtype=np.int64)
    assert where.shape == (plan.num_tokens,), "each token of the plan has one slot, or -1"
    assert where.max() < pool.num_blocks * pool.block_size, "a slot lies outside the pool"
    if pool.layout == "block-major":
        # Not at the top: Triton is only there where a GPU is, or a test.
        from ramet.kernels.cuda.attention import GPUAttention

        return Prepared(
            pool, torch.tensor(where).to(pool.device, non_blocking=True), None, GPUAttention(plan, pool)
        )
    if cpu_native.serves(pool):
        return NativeAttention(plan, pool, where)
    written = None
    if where.min() < 0:
        index = np.flatnonzero(where >= 0)
        written, where = torch.from_numpy(index), where[index]
    return Prepared(pool, torch.tensor(where), written, CPUAttention(plan, pool).output)


def attend(
    prepared: Prepared | NativeAttention,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    options: AttentionOptions = PLAIN,
) -> torch.Tensor:
    """Write k, v [T, Hkv, D] of the tokens that have a slot, then attend with q [T, H, D]: out [T, H, D]."""
    if isinstance(prepared, NativeAttention):
        return prepared(layer, q, k, v, scale, options)
    if prepared.written is not None:
        k, v = k.index_select(0, prepared.written), v.index_select(0, prepared.written)
    if len(prepared.slots):
        prepared.pool.write(layer, prepared.slots, k, v)
    return prepared.attend(layer, q, scale, options)
