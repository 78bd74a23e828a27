"""What ptxas makes of the shipped configurations: registers, spills, the width of loads, the kind of MMA.

Needs no GPU, but Triton 3.6.0 outside of its interpreter: `make test-compile` has an environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from ramet.kernels.cuda.copy_blocks import copy_blocks
from ramet.kernels.cuda.decode import decode
from ramet.kernels.cuda.extend import extend
from ramet.kernels.cuda.extend_work import ExtendWork
from ramet.kernels.cuda.store import rotate_and_store, store
from ramet.kernels.cuda.tile import Tile
from ramet.kernels.cuda.work import DecodeWork
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.options import PLAIN, AttentionOptions
from ramet.kernels.plan import AttentionPlan, Planner
from tests.compile.offline import Compiled, compiled

NUM_KV_HEADS = 8
REGISTERS = 65536  # of an SM
SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes of an SM that CTAs may take
HALF = [torch.bfloat16, torch.float16]
# Query heads a KV head, head size, block size: of Llama 3, SmolLM2, Qwen2, Phi, Gemma, MHA and MQA.
SHAPES = [(4, 128, 16), (3, 64, 16), (7, 128, 16), (1, 96, 16), (2, 256, 16), (8, 80, 32), (16, 128, 1)]
OPTIONS = AttentionOptions(window=512, softcap=50.0, sinks=torch.zeros(4 * NUM_KV_HEADS))


def make_pool(head_dim: int, block_size: int, dtype: torch.dtype = torch.bfloat16) -> KVPool:
    return KVPool(2, 2, NUM_KV_HEADS, head_dim, block_size, dtype, "cpu", "block-major")


def workspace_of(pool: KVPool, group: int, capability: int) -> Workspace:
    workspace = Workspace(pool, group * NUM_KV_HEADS)
    workspace.tiles = replace(workspace.tiles, capability=divmod(capability, 10))
    workspace.can_overlap = capability >= 90
    return workspace


def plan_of(num_rows: int, num_queries: int, num_shared: int, block_size: int) -> AttentionPlan:
    """Rows of `num_shared` common and 512 own tokens. Nothing is read, so any block id will do."""
    total = num_shared + 512
    tables = [[0] * (total // block_size)] * num_rows
    common = [0, *[num_shared // block_size] * (num_rows - 1)]
    return Planner(block_size).plan(tables, [num_queries] * num_rows, [total] * num_rows, common)


def check(kernel: Compiled, tile: Tile, capability: int, has_options: bool = False) -> None:
    """It neither spills nor takes more than its share of an SM, and uses the instructions that are meant."""
    # Where registers are capped so that other CTAs fit beside it, a few bytes do; they cost nothing visible.
    assert kernel.spilled <= (0 if tile.max_registers is None else 64)
    if capability == 90 and not has_options:  # other cards, and rare options, get no promise of speed
        threads = 32 * kernel.num_warps
        assert kernel.registers * threads * tile.ctas_per_sm <= REGISTERS, "fewer CTAs fit than planned"
    num_ctas = tile.ctas_per_sm if capability == 90 else 1
    assert (kernel.shared + 1024) * num_ctas <= SHARED[capability] + 1024
    assert set(kernel.async_loads) == {"128"}, "K and V come in 16 bytes a thread, past the registers"
    is_wide = tile.rows >= 64 and capability == 90
    assert kernel.mma["HGMMA" if is_wide else "HMMA"] > 0
    assert kernel.mma["HMMA" if is_wide else "HGMMA"] == 0


def extend_tile(
    capability: int,
    shape: tuple[int, int, int],
    num_queries: int,
    dtype: torch.dtype = torch.bfloat16,
    options: AttentionOptions = PLAIN,
) -> tuple[Compiled, Tile]:
    group, head_dim, block_size = shape
    workspace = workspace_of(make_pool(head_dim, block_size, dtype), group, capability)
    work = ExtendWork(plan_of(1, num_queries, 0, block_size), np.arange(1), workspace)
    q = torch.empty(num_queries, workspace.num_heads, head_dim, dtype=dtype)
    kernel, *_ = compiled(capability, lambda: extend(work, 0, q, torch.empty_like(q), 0.1, options))
    return kernel, work.tile


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_extend(capability: int, shape: tuple[int, int, int]) -> None:
    kernel, tile = extend_tile(capability, shape, 512)
    assert tile.rows >= 64
    check(kernel, tile, capability)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_extend_with_every_option(dtype: torch.dtype) -> None:
    check(*extend_tile(90, (4, 128, 16), 512, dtype, OPTIONS), 90, has_options=True)


def decode_kernels(
    capability: int,
    shape: tuple[int, int, int],
    num_rows: int,
    dtype: torch.dtype = torch.bfloat16,
    options: AttentionOptions = PLAIN,
) -> tuple[DecodeWork, list[Compiled]]:
    """The kernels of rows that share 64k tokens, in the order of their launch."""
    group, head_dim, block_size = shape
    workspace = workspace_of(make_pool(head_dim, block_size, dtype), group, capability)
    work = DecodeWork(plan_of(num_rows, 1, 65536, block_size), np.arange(num_rows), workspace)
    q = torch.empty(num_rows, workspace.num_heads, head_dim, dtype=dtype)
    return work, compiled(capability, lambda: decode(work, 0, q, torch.empty_like(q), 0.1, options))


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unshared_decode(capability: int, shape: tuple[int, int, int]) -> None:
    work, kernels = decode_kernels(capability, shape, 1)
    assert work.list.num_wide == 0
    check(kernels[0], work.list.narrow_tile, capability)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unshared_decode_in_one_wave(shape: tuple[int, int, int]) -> None:
    """The deep tile is for Hopper only."""
    group, head_dim, block_size = shape
    workspace = workspace_of(make_pool(head_dim, block_size), group, 90)
    tables, rows = [[0] * (65536 // block_size)] * 8, np.arange(8)
    plan = Planner(block_size).plan(tables, [1] * 8, [65536] * 8, [0] * 8)
    work = DecodeWork(plan, rows, workspace)
    assert work.list.narrow_tile == workspace.tiles.deep
    q = torch.empty(8, workspace.num_heads, head_dim, dtype=torch.bfloat16)
    narrow, *_ = compiled(90, lambda: decode(work, 0, q, torch.empty_like(q), 0.1, PLAIN))
    check(narrow, work.list.narrow_tile, 90)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_decode_with_every_option(dtype: torch.dtype) -> None:
    work, (wide, narrow, merge) = decode_kernels(90, (4, 128, 16), 64, dtype, OPTIONS)
    check(narrow, work.list.narrow_tile, 90, has_options=True)
    check(wide, work.list.wide_tile, 90, has_options=True)
    assert merge.spilled == 0


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("num_rows", [8, 16, 64])
def test_shared_decode(capability: int, num_rows: int) -> None:
    work, (wide, narrow, merge) = decode_kernels(capability, (4, 128, 16), num_rows)
    assert work.list.wide_tile.rows == (32 if capability == 80 else 64 if num_rows < 64 else 128)
    check(wide, work.list.wide_tile, capability)
    check(narrow, work.list.narrow_tile, capability)
    assert merge.spilled == 0


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("name", ["store", "rotate_and_store", "copy_blocks"])
def test_writes(capability: int, name: str) -> None:
    pool = make_pool(128, 16)
    k = torch.empty(64, NUM_KV_HEADS, 128, dtype=pool.dtype)
    q = torch.empty(64, 4 * NUM_KV_HEADS, 128, dtype=pool.dtype)
    cos, slots = torch.empty(64, 128), torch.zeros(64, dtype=torch.int64)
    there = pool.key(1), pool.value(1), slots
    launches: dict[str, Callable[[], object]] = {
        "store": lambda: store(*there, k, k),
        "rotate_and_store": lambda: rotate_and_store(*there, q, k, k, cos, cos),
        "copy_blocks": lambda: copy_blocks(pool.storage, torch.zeros(3, 3, dtype=torch.int32)),
    }
    (kernel,) = compiled(capability, launches[name])
    assert kernel.spilled == 0
    assert kernel.registers <= 128
    assert kernel.stores.get("128", 0) > 0
    assert set(kernel.stores) == {"128"}, "16 bytes a thread"
