"""Writing the pages on a GPU: copy-on-write, reshape-and-cache with and without rotation, and the layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from rich.table import Table

from ramet.api.bench import Report
from ramet.api.bench_attention_cases import (
    BLOCK_SIZE,
    DTYPE,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    SCALE,
    TOKEN_BYTES,
    UNSHARED,
    case,
)
from ramet.api.cuda_timing import Timer
from ramet.kernels.cuda.copy_blocks import copy_blocks
from ramet.kernels.cuda.decode import decode
from ramet.kernels.cuda.store import rotate_and_store, store
from ramet.kernels.cuda.work import DecodeWork
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.options import PLAIN
from ramet.kernels.plan import Planner

NUM_LAYERS = 32  # of the model whose blocks are copied: 2 MiB each
COPIES = ((64, 16), (64, 8), (8, 16), (1, 16))  # blocks, slots filled
NUM_TOKENS = (64, 256, 2048, 8192)
# The order of memory of each layout, as axes of [num_layers, 2, Hkv, N, B, D].
LAYOUTS = {
    "block-major": (3, 0, 1, 2, 4, 5),
    "layer-major": (0, 3, 1, 2, 4, 5),
    "head-major": (0, 1, 2, 3, 4, 5),
    "token-major": (0, 3, 1, 4, 2, 5),  # the heads of a token side by side
}


def measure(timer: Timer, report: Report) -> None:
    """Add to a report that has the card's ceilings already."""
    _copies(timer, report)
    torch.cuda.empty_cache()
    _stores(timer, report)
    torch.cuda.empty_cache()
    _layouts(timer, report)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _copies(timer: Timer, report: Report) -> None:
    table = _table("Copy-on-write of blocks of 2 MiB", "blocks", "slots filled", "us", "share of a copy")
    pool = KVPool(NUM_LAYERS, 2 * 64, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, DTYPE, "cuda")
    pool.storage.normal_()
    order = torch.randperm(pool.num_blocks).tolist()
    for num_blocks, filled in COPIES:
        copies = [(order[i], order[64 + i], filled) for i in range(num_blocks)]
        sent = torch.tensor(copies, dtype=torch.int32, device="cuda")
        us = timer.graph_us(partial(copy_blocks, pool.storage, sent))
        for source, destination, _ in copies:
            sides = (pool.storage[:, :, :, block, :filled] for block in (source, destination))
            assert torch.equal(*sides), "a block was not copied"
        num_bytes = 2 * num_blocks * pool.bytes_per_block * filled // BLOCK_SIZE
        share = num_bytes / us / 1e3 / report.metrics["copy_gb_s"]
        name = f"cow_{num_blocks}_blocks" + ("" if filled == BLOCK_SIZE else f"_{filled}_slots")
        report.metrics[f"{name}_us"], report.metrics[f"{name}_share"] = us, share
        table.add_row(str(num_blocks), str(filled), f"{us:.1f}", f"{share:.3f}")
    report.tables.append(table)
    report.target("cow_64_blocks_share", ">=", 0.86)
    report.target("cow_64_blocks_share", ">=", 0.92, "goal")


def _stores(timer: Timer, report: Report) -> None:
    table = _table("Reshape-and-cache", "tokens", "us", "share of a copy", "with rotation, us", "torch's, us")
    pool = KVPool(1, 1024, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, DTYPE, "cuda")
    key, value = pool.key(0), pool.value(0)
    for num_tokens in NUM_TOKENS:
        slots = torch.randperm(pool.num_blocks * BLOCK_SIZE, device="cuda")[:num_tokens]
        qkv = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        q, k, v = torch.split(qkv, [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], 1)
        cos, sin = torch.randn(2, num_tokens, HEAD_DIM, dtype=DTYPE, device="cuda")

        def rotate_then_store(
            qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor
        ) -> None:
            """In torch's own operators; `sin` has its signs."""
            x = qkv[:, : NUM_HEADS + NUM_KV_HEADS]
            x = torch.addcmul(x * cos[:, None], x.roll(HEAD_DIM // 2, -1), sin[:, None])
            store(key, value, slots, x[:, NUM_HEADS:], qkv[:, NUM_HEADS + NUM_KV_HEADS :])

        ways: dict[str, Callable[[], object]] = {
            "store": partial(store, key, value, slots, k, v),
            "rotate_and_store": partial(rotate_and_store, key, value, slots, q, k, v, cos, sin),
            "rotate_then_store": partial(rotate_then_store, qkv, cos, sin, slots),
        }
        times = {name: timer.graph_us(way) for name, way in ways.items()}
        share = 2 * num_tokens * TOKEN_BYTES / times["store"] / 1e3 / report.metrics["copy_gb_s"]
        for name, us in times.items():
            report.metrics[f"{name}_{num_tokens}_us"] = us
        report.metrics[f"store_{num_tokens}_share"] = share
        stored, *rotated = (f"{us:.1f}" for us in times.values())
        table.add_row(str(num_tokens), stored, f"{share:.2f}", *rotated)
    report.tables.append(table)


def _layouts(timer: Timer, report: Report) -> None:
    """Unshared decode from pools that differ in their order of memory only: kernels take any strides."""
    table = _table("Layouts, decode of 64 x 8k, a layer", "layout", "us", "share of the read ceiling")
    step = case("64x8k", UNSHARED["64x8k"])
    num_layers = 3
    for name, order in LAYOUTS.items():
        pool = KVPool(num_layers, 1, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, DTYPE, "cuda")
        shape = (num_layers, 2, NUM_KV_HEADS, step.num_blocks, BLOCK_SIZE, HEAD_DIM)
        memory = torch.empty([shape[axis] for axis in order], dtype=DTYPE, device="cuda").normal_()
        storage = memory.permute(*np.argsort(order).tolist())
        pool._keys, pool._values = (list(storage.select(1, side).unbind(0)) for side in (0, 1))
        work = DecodeWork(
            step.plan(Planner(BLOCK_SIZE)), np.arange(step.num_branches), Workspace(pool, NUM_HEADS)
        )
        q = torch.randn(step.num_branches, NUM_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        out = torch.empty_like(q)
        us = timer.layer_us(partial(_decode, work, q, out), num_layers)
        share = step.unique_bytes / us / 1e3 / report.metrics["read_gb_s"]
        report.metrics[f"layout_{name}_us"], report.metrics[f"layout_{name}_share"] = us, share
        table.add_row(name, f"{us:.1f}", f"{share:.3f}")
        del pool, memory, storage, work
        torch.cuda.empty_cache()
    report.tables.append(table)


def _decode(work: DecodeWork, q: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    decode(work, layer, q, out, SCALE, PLAIN)
