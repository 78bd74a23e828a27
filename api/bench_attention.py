"""Attention over a shared prefix, per layer: the tree path against the best way that shares nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.table import Table

from ramet.api.bench import Report
from ramet.kernels import attention
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.plan import shared_with_previous

NUM_ROWS, SHARED, PRIVATE = 16, 2048, 128
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
KV_LEN = SHARED + PRIVATE
SCALE = HEAD_DIM**-0.5
NUM_PAIRS = 25

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """One decode step of 16 rows on randomly permuted blocks."""

    pool: KVPool
    block_tables: list[list[int]]
    q: torch.Tensor  # [S, H, D]
    k: torch.Tensor  # [S, Hkv, D]
    v: torch.Tensor  # [S, Hkv, D]

    @property
    def slots(self) -> list[int]:
        """Where the last token of each row is written."""
        last = (KV_LEN - 1) % BLOCK_SIZE
        return [table[-1] * BLOCK_SIZE + last for table in self.block_tables]


def _setting(dtype: torch.dtype, num_shared: int) -> Setting:
    torch.manual_seed(0)
    shared, own = num_shared // BLOCK_SIZE, (KV_LEN - num_shared) // BLOCK_SIZE
    num_blocks = shared + NUM_ROWS * own
    pool = KVPool(1, num_blocks, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype)
    pool.storage.normal_()
    ids = torch.randperm(num_blocks).tolist()
    own_ids = [ids[shared + i * own : shared + (i + 1) * own] for i in range(NUM_ROWS)]
    q = torch.randn(NUM_ROWS, NUM_HEADS, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, NUM_ROWS, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    return Setting(pool, [ids[:shared] + tail for tail in own_ids], q, k, v)


def _through_plan(setting: Setting) -> Call:
    """What an engine runs in each layer; it also writes the step's K and V, which the other side does not."""
    shared = shared_with_previous(setting.block_tables)
    plan = attention.planner(setting.pool).plan(
        setting.block_tables, [1] * NUM_ROWS, [KV_LEN] * NUM_ROWS, shared
    )
    prepared = attention.prepare(setting.pool, plan, setting.slots)
    return lambda: attention.attend(prepared, 0, setting.q, setting.k, setting.v, SCALE)


def _plan_us(setting: Setting) -> float:
    """Microseconds to plan the step, once for all layers."""
    shared = shared_with_previous(setting.block_tables)
    planner, ones, lens = attention.planner(setting.pool), [1] * NUM_ROWS, [KV_LEN] * NUM_ROWS
    return _median_s(lambda: planner.plan(setting.block_tables, ones, lens, shared), 200) * 1e6


def _unshared_ways(setting: Setting) -> dict[str, Call]:
    """Each row gathers its whole table into a buffer made beforehand; heads are packed as query rows."""
    pool = setting.pool
    index = torch.tensor(setting.block_tables, dtype=torch.int64)  # [S, blocks]
    blocks = pool.storage[0].view(2 * NUM_KV_HEADS, pool.num_blocks, BLOCK_SIZE * HEAD_DIM)
    q = setting.q.view(NUM_ROWS, NUM_KV_HEADS, NUM_HEADS // NUM_KV_HEADS, HEAD_DIM)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attend_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash(q, k, v, 0.0, False, scale=SCALE)[0]
        return out

    def attend_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=SCALE)

    def way(rows_at_once: int, attend: Callable[..., torch.Tensor]) -> Call:
        shape = (2, NUM_KV_HEADS, rows_at_once, KV_LEN, HEAD_DIM)
        room = torch.empty(shape, dtype=pool.dtype)
        flat = room.view(2 * NUM_KV_HEADS, -1, BLOCK_SIZE * HEAD_DIM)
        k, v = room.transpose(1, 2)  # each [rows, Hkv, KV_LEN, D]

        def call() -> torch.Tensor:
            outs = []
            for row in range(0, NUM_ROWS, rows_at_once):
                torch.index_select(blocks, 1, index[row : row + rows_at_once].view(-1), out=flat)
                outs.append(attend(q[row : row + rows_at_once], k, v))
            return torch.cat(outs).reshape(setting.q.shape)

        return call

    return {
        f"{name}, {rows} rows at once": way(rows, attend)
        for name, attend in (("flash", attend_flash), ("SDPA", attend_sdpa))
        for rows in (1, NUM_ROWS)
    }


def _median_s(call: Callable[[], object], repeats: int) -> float:
    return median(_seconds(call) for _ in range(repeats))


def _seconds(call: Callable[[], object]) -> float:
    """Seconds of processor time: all runs on this one thread, and the machine may be busy with others."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


@dataclass(frozen=True)
class Comparison:
    way: str  # the best unshared one
    unshared_ms: float
    ours_ms: float
    speedup: float  # the median over interleaved pairs: a neighbour's load hits both sides of a pair


def _compare(setting: Setting) -> Comparison:
    ways, ours = _unshared_ways(setting), _through_plan(setting)
    expected = ours()
    for call in ways.values():
        error = (call().double() - expected.double()).norm() / expected.double().norm()
        assert error < 1e-2, "the two sides do not compute the same"
    way = min(ways, key=lambda name: min(_seconds(ways[name]) for _ in range(4)))
    pairs = [(_seconds(ways[way]), _seconds(ours)) for _ in range(NUM_PAIRS)]
    unshared, mine = (median(side) for side in zip(*pairs, strict=True))
    return Comparison(way, unshared * 1e3, mine * 1e3, median(a / b for a, b in pairs))


def run(device: str = "cpu", plot: Path | None = None) -> Report:
    """On a CPU: 16 rows on 2,048 shared and 128 private tokens, 32 query, 8 KV heads of 128, one thread."""
    if device == "cuda":
        from ramet.api import bench_attention_cuda

        return bench_attention_cuda.run(plot)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run_cpu()
    finally:
        torch.set_num_threads(threads)


def _run_cpu() -> Report:
    report = Report("attention")
    table = Table(title="Attention, ms a layer (16 rows x 2,176 tokens, one thread)", title_justify="left")
    for column in ("dtype", "shared tokens", "best unshared way", "unshared", "ramet", "ratio"):
        table.add_column(column, justify="left" if column in ("dtype", "best unshared way") else "right")
    metrics = report.metrics
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for num_shared, ratio in ((SHARED, "tree_speedup"), (0, "unshared_ratio")):
            setting = _setting(dtype, num_shared)
            if num_shared and dtype == torch.float32:
                metrics["plan_us"] = _plan_us(setting)
            c = _compare(setting)
            metrics[f"{ratio}_{name}"] = c.speedup
            case = "tree" if num_shared else "flat"
            metrics[f"{case}_{name}_unshared_ms"], metrics[f"{case}_{name}_ms"] = c.unshared_ms, c.ours_ms
            times = (f"{c.unshared_ms:.2f}", f"{c.ours_ms:.2f}", f"{c.speedup:.2f}")
            table.add_row(name, f"{num_shared:,}", c.way, *times)
    metrics["unshared_ratio"] = min(metrics["unshared_ratio_fp32"], metrics["unshared_ratio_bf16"])
    report.tables.append(table)
    report.target("tree_speedup_fp32", ">=", 3.0)
    report.target("tree_speedup_bf16", ">=", 2.5)
    report.target("unshared_ratio", ">=", 0.95)
    return report
