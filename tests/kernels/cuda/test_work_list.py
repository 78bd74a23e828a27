"""Work lists: every key of every row once, every part once, whatever the tree."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from ramet.kernels.cuda import work_list as list_module
from ramet.kernels.cuda.work import DecodeWork
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.plan import AttentionPlan, IntArray, Planner

NUM_HEADS = 8


def work_of(rows: Any, device: str, min_saved: int = 0) -> DecodeWork:
    pool = KVPool(1, rows.num_blocks, 1, 16, rows.block_size, torch.float32, device, "block-major")
    plan = rows.plan(min_saved)
    return DecodeWork(plan, decoding(plan), Workspace(pool, NUM_HEADS))


def decoding(plan: AttentionPlan) -> IntArray:
    return np.flatnonzero(plan.query_lens == 1)


def items_of(work: DecodeWork) -> list[list[int]]:
    buffer = work.workspace.buffer
    lists = (buffer.narrow_items, work.list.num_narrow), (buffer.wide_items, work.list.num_wide)
    return [item for items, num in lists for item in items[: 8 * num].view(num, 8).tolist()]


@pytest.fixture
def always_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are too small here to pay, and chunks would never be cut."""
    monkeypatch.setattr(list_module, "GATE_BYTES", 0)
    monkeypatch.setattr(list_module, "GATE_BYTES_FEW_ROWS", 0)
    monkeypatch.setattr(list_module, "MIN_CHUNK", 16)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.usefixtures("always_shares")
def test_each_key_is_read_once(
    seed: int, rows_of: Callable[..., Any], device: str, check_work: Callable[..., None]
) -> None:
    rng = random.Random(seed)
    rows = rows_of(rng, rng.choice((1, 4, 16)), 4, rng.choice((3, 20)))
    plan = rows.plan()
    if len(decoding(plan)):
        check_work(work_of(rows, device), plan)


def test_little_sharing_is_not_worth_a_launch(no_rows: Any, device: str) -> None:
    """4 rows share 64 tokens: 64 bytes a token that are not read again are nothing."""
    rows = no_rows(16)
    prefix = rows.take(4)
    for _ in range(4):
        rows.add(prefix + rows.take(1), 1, 70)
    work = work_of(rows, device)
    assert len(rows.plan().segments) == 1
    assert (work.list.num_narrow, work.list.num_wide, work.list.num_merges) == (4, 0, 0)


@pytest.mark.parametrize(("num_rows", "num_blocks"), [(2, 1374), (16, 44)])
def test_sharing_pays_from_so_many_bytes_on(num_rows: int, num_blocks: int) -> None:
    """A block has 65,536 bytes. 1,374 of them are the first to exceed 36 MB and 54 MB times 2 / 2; 15 rows
    spare the reading of 44 each, where it is 36 MB and 54 MB times 2 / 16.
    """
    pool = KVPool(1, 1, 8, 128, 16, torch.bfloat16, "cpu", "block-major")
    for n, pays in (num_blocks - 1, False), (num_blocks, True):
        shared = [0] + [n] * (num_rows - 1)
        plan = Planner(16).plan([[0] * (n + 1)] * num_rows, [1] * num_rows, [16 * n + 1] * num_rows, shared)
        work = DecodeWork(plan, decoding(plan), Workspace(pool, 32))
        assert any(item[1] > 1 for item in items_of(work)) == pays


@pytest.mark.usefixtures("always_shares")
def test_tiles_of_a_chunk_stand_side_by_side(no_rows: Any, device: str) -> None:
    """50 rows of 8 query heads are 400 query rows: more than one tile, read from memory once."""
    rows = no_rows(16)
    prefix = rows.take(64)
    for _ in range(50):
        rows.add(prefix + rows.take(1), 1, 1030)
    work = work_of(rows, device)
    assert work.list.wide_tile is not None
    starts = [item[3] for item in items_of(work) if item[1] > 1]
    num_tiles = -(-50 // (work.list.wide_tile.rows // NUM_HEADS))
    assert len(starts) % num_tiles == 0 and len(starts) > num_tiles
    assert starts == [start for start in sorted(set(starts)) for _ in range(num_tiles)]


def test_long_rows_are_cut_to_fill_the_card(no_rows: Any, device: str) -> None:
    """One row of 8,192 tokens would run on one SM."""
    rows = no_rows(16)
    rows.add(rows.take(512), 1, 8192)
    work = work_of(rows, device)
    assert work.list.num_narrow == 8192 // list_module.MIN_CHUNK
    assert work.list.num_merges == 1


@pytest.mark.parametrize(("num_rows", "num_chunks"), [(8, 4), (32, 1), (33, 1)])
def test_few_rows_make_one_wave_of_deep_tiles(num_rows: int, num_chunks: int, no_rows: Any) -> None:
    """132 SMs take 264 such CTAs at a time: 33 items of 8 KV heads."""
    work = unshared(no_rows(16), num_rows)
    assert work.list.narrow_tile == work.workspace.tiles.deep
    assert work.list.num_narrow == num_rows * num_chunks


@pytest.mark.parametrize("num_rows", [1, 12, 34])
def test_no_deep_tiles_for_less_or_more_than_one_wave(num_rows: int, no_rows: Any) -> None:
    """12 rows in two chunks each would leave a quarter of the card idle, in three take a second wave."""
    work = unshared(no_rows(16), num_rows)
    assert work.list.narrow_tile == work.workspace.tiles.narrow(few=num_rows == 1)


def unshared(rows: Any, num_rows: int) -> DecodeWork:
    """Rows of 8,192 tokens on a Hopper card with 132 SMs, 8 KV heads."""
    table = rows.take(512)  # the same blocks for all, of which the plan is not told
    for _ in range(num_rows):
        rows.add(table, 1, 8192)
    pool = KVPool(1, 512, 8, 128, 16, torch.bfloat16, "cpu", "block-major")
    plan = Planner(16).plan(rows.block_tables, rows.query_lens, rows.kv_lens, [0] * num_rows)
    return DecodeWork(plan, decoding(plan), Workspace(pool, 32))


@pytest.mark.parametrize(
    ("num_rows", "shared", "is_capped", "tile_rows"),
    [(64, 4096, False, 64), (64, 8192, True, 64), (64, 16384, True, 128), (16, 16384, True, 64)],
)
def test_tiles_follow_what_takes_longer(
    num_rows: int, shared: int, is_capped: bool, tile_rows: int, no_rows: Any
) -> None:
    """Rows of 512 tokens on `shared` ones, 4,096 bytes and, for each row, 16,384 flops a token.

    At 89 flops in the time of a byte the wide items take 4 * shared / (89 * 512) times what the narrow ones
    take: 0.36, 0.72 and 1.44. 64 query rows are no more than the smaller tile holds.
    """
    rows = no_rows(16)
    for row in range(num_rows):
        rows.add([*range(shared // 16), *(10_000 + 32 * row + i for i in range(32))], 1, shared + 512)
    pool = KVPool(1, 1, 8, 128, 16, torch.bfloat16, "cpu", "block-major")
    plan = rows.plan()
    tiles = Workspace(pool, 32).tiles
    made = DecodeWork(plan, decoding(plan), Workspace(pool, 32)).list
    assert made.narrow_tile == tiles.narrow(beside_wide=is_capped)
    assert made.wide_tile.rows == tile_rows


def test_rows_may_grow_a_little(no_rows: Any, device: str) -> None:
    """Lists stay as long as rows are not shorter than they were, nor more than SPARE_TOKENS longer."""
    rows, spare = no_rows(16), list_module.SPARE_TOKENS
    for _ in range(2):
        rows.add(rows.take(30), 1, 480)
    rows.kv_lens = [200, 100]
    work = work_of(rows, device)
    lists = [work.list]
    for grown in (1, spare, 0, spare + 1, spare, spare + 1):
        rows.kv_lens[0] = 200 + grown
        lists.append(DecodeWork(rows.plan(), np.arange(2), work.workspace).list)
    changed = [after is not before for before, after in pairwise(lists)]
    assert changed == [False, False, False, True, True, False]


@pytest.mark.parametrize(
    ("chosen", "kv_lens", "why"),
    [
        ([1, 0], [4, 4], "in order"),
        ([0, 0], [4, 4], "in order"),
        ([-1, 0], [4, 4], "in order"),
        ([1, 2], [4, 4], "in order"),
        ([0, 1], [4, 0], "1 to 2\\^30 tokens"),
        ([0, 1], [4, 2**30 + 1], "1 to 2\\^30 tokens"),
    ],
)
def test_rows_that_a_plan_does_not_have(
    chosen: list[int], kv_lens: list[int], why: str, no_rows: Any
) -> None:
    rows = no_rows(4)
    for _ in range(2):
        rows.add(rows.take(1), 1, 4)
    plan = replace(rows.plan(), kv_lens=np.array(kv_lens))
    pool = KVPool(1, 2, 1, 16, 4, torch.float32, "cpu", "block-major")
    with pytest.raises(ValueError, match=why):
        DecodeWork(plan, np.array(chosen), Workspace(pool, 2))


def test_what_is_remembered_in_c_goes_with_the_lists(monkeypatch: pytest.MonkeyPatch, no_rows: Any) -> None:
    freed: list[Any] = []
    prepare, forget = list_module._functions()
    monkeypatch.setattr(list_module, "_functions", lambda: (prepare, lambda it: freed.append(forget(it))))
    rows = no_rows(4)
    rows.add(rows.take(1), 1, 4)
    work = work_of(rows, "cpu")
    assert not freed
    del work
    gc.collect()  # lists and workspace know each other
    assert len(freed) == 1
