"""Attention on the CPU by the C kernels (`csrc/attention.c`): a step's tasks are made once, a layer is one call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ramet.kernels import native
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.options import PLAIN, AttentionOptions
from ramet.kernels.plan import AttentionPlan, IntArray

Int32s = npt.NDArray[np.int32]

# What csrc/attention.h has room for.
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_TASK_QUERIES = 128

# A stretch of KV is cut so that the cores share its work: into pieces of that many slots for a task of up to 64
# queries, longer ones for more of them, which are cut by queries as well. It does not depend on what else the
# step holds, so neither does the result of a row.
PIECE_SLOTS = 256
PIECE_QUERIES = 64
# Below so many products of two numbers a layer, waking other threads takes longer than the work.
MIN_PRODUCTS_FOR_THREADS = 400_000


class _Step(ctypes.Structure):
    """`Step` of csrc/attention.h, which says what is what."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tasks", "blocks", "lows", "ends", "slots", "part_starts")),
        *((name, ctypes.c_void_p) for name in ("parts", "part_outs", "part_maxima", "part_sums", "storage")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("layer", "value", "head", "block")),
        *((f"num_{name}", ctypes.c_int64) for name in ("tasks", "tokens", "parts", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("group", "head_dim", "block_size", "is_half", "num_threads")),
    )


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """`ramet_attend` of csrc/attention.c."""
    library = native.library()
    if library is None:
        return None
    kernel = library.ramet_attend
    heads = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    kernel.argtypes = (
        *(ctypes.c_void_p, ctypes.c_int64),
        *(heads * 3),
        *(ctypes.c_void_p, ctypes.c_float, ctypes.c_float, ctypes.c_void_p),
    )
    kernel.restype = None
    return kernel


def serves(pool: KVPool) -> bool:
    """Whether the C kernels are there, and for a pool like this."""
    fits = MIN_HEAD_DIM <= pool.head_dim <= MAX_HEAD_DIM and pool.dtype in (torch.float32, torch.bfloat16)
    return fits and pool.device.type == "cpu" and _kernel() is not None


class Stretches(NamedTuple):
    """Positions [start, stop) of rows, for tokens [token0, token0 + num_tokens). Each [n]."""

    row: IntArray
    start: IntArray
    stop: IntArray
    token0: IntArray
    num_tokens: IntArray

    def select(self, index: npt.NDArray[Any]) -> Stretches:
        return Stretches(*(column[index] for column in self))


class Tasks(NamedTuple):
    """What `Step` of csrc/attention.h points to, and the number of partial results of a KV head."""

    tasks: Int32s  # [n, 8]
    blocks: Int32s
    part_starts: Int32s  # [T + 1]
    parts: Int32s
    num_parts: int


def stretches_of(plan: AttentionPlan, lows: IntArray) -> Stretches:
    """What a step reads: each row's own KV, and what rows share. `lows` [T] is where the tokens' windows begin."""
    size, starts = plan.block_size, plan.query_starts
    rows = np.arange(plan.num_rows)
    _, row0, row1, block0, block1 = np.array(plan.segments, dtype=np.int64).reshape(-1, 5).T
    row = np.concatenate([rows, row0])
    token0 = np.concatenate([starts[:-1], starts[row0]])
    token1 = np.concatenate([starts[1:], starts[row1]])
    start = np.concatenate([plan.private_block0, block0]) * size
    stop = np.concatenate([plan.kv_lens, block1 * size])
    # What no token sees is not read. An end must be an index, hence the last number.
    first_seen = np.minimum.reduceat(np.append(lows, 0), np.array([token0, token1]).T.ravel())[::2]
    start = np.maximum(start, first_seen)
    return Stretches(row, start, stop, token0, token1 - token0).select(start < stop)


def make_tasks(plan: AttentionPlan, stretches: Stretches, group: int) -> Tasks:
    """Cut stretches into tasks, for `group` query heads a KV head."""
    size = plan.block_size
    block0, block1 = stretches.start // size, -(-stretches.stop // size)
    ids = (
        plan.block_tables[row][a:b]
        for row, a, b in zip(stretches.row.tolist(), block0.tolist(), block1.tolist(), strict=True)
    )
    num_blocks = block1 - block0
    blocks = np.fromiter(chain.from_iterable(ids), np.int32, count=int(num_blocks.sum()))
    # Where the id of position 0 would stand if all were there.
    table0 = num_blocks.cumsum() - num_blocks - block0

    longest = PIECE_SLOTS * -(-stretches.num_tokens * group // PIECE_QUERIES)
    piece_of, i = _parts_of(-(-(stretches.stop - stretches.start) // longest))
    pieces, longest, table0 = stretches.select(piece_of), longest[piece_of], table0[piece_of]
    start = pieces.start + i * longest
    stop = np.minimum(start + longest, pieces.stop)
    num_queries = pieces.num_tokens * group
    part0 = num_queries.cumsum() - num_queries

    num_groups = -(-num_queries // MAX_TASK_QUERIES)
    piece, i = _parts_of(num_groups)
    per_task = (-(-num_queries // num_groups) + 15) // 16 * 16
    query0 = i * per_task[piece]
    query1 = np.minimum(query0 + per_task[piece], num_queries[piece])
    columns = np.array([table0 + start // size, start % size, stop - start, start, pieces.token0, part0])
    *rest, part0 = columns[:, piece]
    tasks = np.array([*rest, query0, query1, part0], dtype=np.int32).T
    work = tasks[:, 2] * (query1 - query0)
    # The largest first: no thread is left alone with one.
    tasks = np.ascontiguousarray(tasks[np.argsort(-work, kind="stable")])

    # A token's results lie in the pieces that it is a token of, in their order.
    owner, i = _parts_of(pieces.num_tokens)
    tokens = pieces.token0[owner] + i
    parts = np.argsort(tokens, kind="stable") * group
    part_starts = np.zeros(plan.num_tokens + 1, dtype=np.int32)
    np.bincount(tokens, minlength=plan.num_tokens).cumsum(out=part_starts[1:])
    return Tasks(tasks, blocks, part_starts, parts.astype(np.int32), int(num_queries.sum()))


def _parts_of(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Of things with so many parts each: for every part, the thing that it is of, and its number in it."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]


class NativeAttention:
    """One step's attention over one pool: prepared once, then called by each layer. It writes K and V, too."""

    def __init__(self, plan: AttentionPlan, pool: KVPool, slots: IntArray) -> None:
        kernel = _kernel()
        assert kernel is not None, "the C kernels are there"
        self.pool = pool
        self._kernel = kernel
        self._plan = plan
        self._slots = slots.copy()  # its address is kept
        first = plan.kv_lens - plan.query_lens - plan.query_starts[:-1]
        self._ends = np.arange(plan.num_tokens) + np.repeat(first, plan.query_lens) + 1  # [T]
        self._longest = int(plan.kv_lens.max())
        self._steps: dict[tuple[int, int | None], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        """Write k, v [T, Hkv, D] of the tokens that have a slot, then attend with q [T, H, D]: out [T, H, D]."""
        pool = self.pool
        num_tokens, num_heads, head_dim = q.shape
        kv_shape = (num_tokens, pool.num_kv_heads, head_dim)
        assert num_tokens == len(self._slots), "the batch is not the one that was planned"
        assert k.shape == v.shape == kv_shape and head_dim == pool.head_dim, "the heads differ from the pool's"
        assert q.dtype == k.dtype == v.dtype == pool.dtype, "queries, keys, values and pool differ in dtype"
        assert 0 <= layer < pool.num_layers, "the pool has no such layer"
        q_token, q_head, q_one = q.stride()
        k_token, k_head, k_one = k.stride()
        v_token, v_head, v_one = v.stride()
        assert q_one == k_one == v_one == 1, "the numbers of a head are not adjacent"
        window = options.window
        if window is not None and window >= self._longest:
            window = None  # it cuts nothing off in this step
        step = self._steps.get((num_heads, window)) or self._make_step(num_heads, window)
        sinks = None
        if options.sinks is not None:
            sinks = options.sinks.float().contiguous()
            assert sinks.shape == (num_heads,), "there is one sink a head"
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._kernel(
            step[0],
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

    def _make_step(self, num_heads: int, window: int | None) -> tuple[Any, tuple[Any, ...]]:
        """A reference to the C structure, and what it points to."""
        pool, plan = self.pool, self._plan
        assert num_heads % pool.num_kv_heads == 0, "the query heads do not divide among the KV heads"
        group = num_heads // pool.num_kv_heads
        lows = np.zeros_like(self._ends) if window is None else np.maximum(self._ends - window, 0)
        made = make_tasks(plan, stretches_of(plan, lows), group)
        per_head = made.num_parts * pool.num_kv_heads
        room = torch.empty(per_head * (pool.head_dim + 2), dtype=torch.float32)
        maxima = room.data_ptr() + 4 * per_head * pool.head_dim
        layer, value, head, block = pool.storage.stride()[:4]
        products = int((made.tasks[:, 2] * (made.tasks[:, 6] - made.tasks[:, 5])).sum())
        products *= 2 * pool.num_kv_heads * pool.head_dim
        arrays = (made.tasks, made.blocks, lows.astype(np.int32), self._ends.astype(np.int32), self._slots)
        arrays = (*arrays, made.part_starts, made.parts)
        step = _Step(
            *(array.ctypes.data for array in arrays),
            *(room.data_ptr(), maxima, maxima + 4 * per_head, pool.data_ptr),
            *(layer, value, head, block),
            *(len(made.tasks), plan.num_tokens, made.num_parts, pool.num_kv_heads),
            *(group, pool.head_dim, pool.block_size, pool.dtype == torch.bfloat16),
            torch.get_num_threads() if products >= MIN_PRODUCTS_FOR_THREADS else 1,
        )
        kept = self._steps[num_heads, window] = ctypes.byref(step), (*arrays, room)
        return kept
