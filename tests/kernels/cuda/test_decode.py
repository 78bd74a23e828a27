"""Decode attention against fp64, over pools and buffers that hold no numbers where nobody should look."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ramet.kernels.cuda import work_list as list_module
from ramet.kernels.cuda.decode import decode
from ramet.kernels.cuda.work import DecodeWork
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.options import PLAIN, AttentionOptions
from ramet.kernels.plan import Planner
from ramet.kernels.reference import paged_attention

ON_GPU = torch.cuda.is_available()
HALF = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter has no dot of bf16


@pytest.fixture(autouse=True)
def _always_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are too small here to pay, and chunks would never be cut."""
    monkeypatch.setattr(list_module, "GATE_BYTES", 0)
    monkeypatch.setattr(list_module, "GATE_BYTES_FEW_ROWS", 0)
    monkeypatch.setattr(list_module, "MIN_CHUNK", 32)


class Step:
    """A step whose K and V are written, with the work of its decoding rows."""

    def __init__(self, case: Any, num_heads: int, options: AttentionOptions = PLAIN) -> None:
        self.case, self.options = case, options
        rows, self.pool = case.rows, case.pool
        slots = torch.tensor(rows.slots, device=self.pool.device)
        written, b = slots >= 0, rows.block_size
        for side, new in ((self.pool.key(0), case.k), (self.pool.value(0), case.v)):
            side[:, slots[written] // b, slots[written] % b] = new[written].transpose(0, 1)
        plan = rows.plan()
        self.decoding = np.flatnonzero(plan.query_lens == 1)
        self.tokens = plan.query_starts[self.decoding]
        self.workspace = Workspace(self.pool, num_heads)
        self.work = DecodeWork(plan, self.decoding, self.workspace)
        self.scale = self.pool.head_dim**-0.5

    def run(self) -> torch.Tensor:
        """Outputs [T, H, D], no numbers where none was written."""
        for part in (self.workspace.part_out, self.workspace.part_lse):
            part.fill_(math.nan)
        out = torch.full_like(self.case.q, math.nan)
        decode(self.work, 0, self.case.q, out, self.scale, self.options)
        return out

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [T, H, D] and log-sum-exps [T, H] from the definition."""
        rows, key, value = self.case.rows, self.pool.key(0).cpu(), self.pool.value(0).cpu()
        sinks = self.options.sinks
        options = AttentionOptions(
            self.options.window, self.options.softcap, None if sinks is None else sinks.cpu()
        )
        return paged_attention(
            self.case.q.cpu(),
            key,
            value,
            rows.block_tables,
            rows.query_lens,
            rows.kv_lens,
            self.scale,
            options,
        )

    def error(self) -> float:
        """The relative error of the decoding rows; no other row may be written."""
        out, expected = self.run().cpu().double(), self.expected()[0]
        others = np.setdiff1d(np.arange(len(out)), self.tokens)
        assert out[others].isnan().all(), "a row was written that is not ours"
        difference = out[self.tokens] - expected[self.tokens]
        return float(difference.norm() / expected[self.tokens].norm())


@pytest.fixture
def step_of(case_of: Callable[..., Any], device: str) -> Callable[..., Step]:
    """A step over given rows: (rows, num_heads, num_kv_heads, head_dim, dtype, options)."""

    def make(
        rows: Any,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        options: AttentionOptions = PLAIN,
        q_scale: float = 1.0,
    ) -> Step:
        case = case_of(
            rows,
            num_heads,
            num_kv_heads,
            head_dim,
            dtype,
            q_scale=q_scale,
            device=device,
            layout="block-major",
        )
        return Step(case, num_heads, options)

    return make


def shared_rows(no_rows: Any, block_size: int, num_rows: int, shared: int, *own: int) -> Any:
    """Rows on `shared` tokens in whole blocks, with own[i % len(own)] tokens of their own each."""
    rows = no_rows(block_size)
    prefix = rows.take(shared // block_size)
    for i in range(num_rows):
        length = own[i % len(own)]
        rows.add(prefix + rows.take(-(-length // block_size)), 1, shared + length)
    return rows.permuted(random.Random(0))


@pytest.mark.parametrize(("seed", "block_size"), [(0, 4), (3, 2), (4, 8), (6, 1), (8, 16), (12, 4), (13, 2)])
def test_random_trees(seed: int, block_size: int, rows_of: Any, step_of: Callable[..., Step]) -> None:
    step = step_of(rows_of(random.Random(seed), block_size, 3))
    assert step.error() < 1e-5


@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 32, 64, 128])
def test_block_sizes(block_size: int, no_rows: Any, step_of: Callable[..., Step]) -> None:
    rows = shared_rows(no_rows, block_size, 3, 128, 1, block_size, 150)
    assert step_of(rows, num_heads=2, num_kv_heads=1, head_dim=64).error() < 1e-5


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(2, 2, 64), (3, 1, 80), (7, 1, 96), (8, 1, 128), (16, 1, 64), (4, 2, 256), (6, 2, 128), (20, 1, 64)],
)
def test_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, no_rows: Any, step_of: Callable[..., Step]
) -> None:
    """Groups of 1 to 20 query heads; head sizes that are no power of two. 18 rows fill more than one tile."""
    rows = shared_rows(no_rows, 16, 4 if num_heads > 8 else 18, 32, 7, 20)
    assert step_of(rows, num_heads, num_kv_heads, head_dim).error() < 1e-5


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129, 300])
def test_lengths_around_edges(length: int, no_rows: Any, step_of: Callable[..., Step]) -> None:
    """Of blocks (16), tiles (128 tokens at this head size) and chunks."""
    assert step_of(shared_rows(no_rows, 16, 1, 0, length), 2, 1).error() < 1e-5


def test_half_precision(no_rows: Any, step_of: Callable[..., Step]) -> None:
    rows = shared_rows(no_rows, 16, 10, 160, 30, 90)
    assert step_of(rows, 8, 2, 64, HALF).error() < (4e-3 if ON_GPU else 1e-3)


@pytest.mark.parametrize("window", [1, 5, 40, 1000])
def test_window(window: int, no_rows: Any, step_of: Callable[..., Step]) -> None:
    """A window may end inside a row's own tokens, or inside what is shared: there, row by row elsewhere."""
    rows = shared_rows(no_rows, 4, 9, 64, 3, 17, 42)
    assert step_of(rows, options=AttentionOptions(window=window)).error() < 1e-5


@pytest.mark.parametrize("shared", [0, 32])
def test_softcap_and_sinks(shared: int, no_rows: Any, step_of: Callable[..., Step], device: str) -> None:
    """Both where one part is all there is, and where parts are merged."""
    rows = shared_rows(no_rows, 4, 5, shared, 3, 30)
    sinks = torch.linspace(-2, 6, 4, device=device)
    assert step_of(rows, options=AttentionOptions(softcap=2.0)).error() < 1e-5
    assert step_of(rows, options=AttentionOptions(sinks=sinks)).error() < 1e-5
    assert step_of(rows, options=AttentionOptions(7, 2.0, sinks)).error() < 1e-5


def test_large_scores(no_rows: Any, step_of: Callable[..., Step]) -> None:
    """Scores of several hundred, which overflow unless the largest is taken off."""
    rows = shared_rows(no_rows, 4, 5, 32, 3, 30)
    assert step_of(rows, q_scale=300.0).error() < 1e-4


def test_log_sum_exp_of_the_parts(no_rows: Any, step_of: Callable[..., Step]) -> None:
    """A merge hides errors of the log-sum-exp that all parts have in common, so here is the number itself."""
    step = step_of(shared_rows(no_rows, 4, 5, 64, 3, 70))
    step.run()
    _, lse = step.expected()
    parts = step.workspace.part_lse[: step.work.list.num_parts * 4].view(-1, 4).double().cpu() * math.log(2)
    merges = step.workspace.buffer.merges[: 4 * step.work.list.num_merges].view(-1, 4).tolist()
    assert len(merges) == 5
    for token, first, num_parts, _ in merges:
        assert num_parts >= 2
        torch.testing.assert_close(torch.logsumexp(parts[first : first + num_parts], 0), lse[token])


def test_rows_grow_without_a_new_work_list(no_rows: Any, step_of: Callable[..., Step]) -> None:
    """What a captured graph relies on: the device knows the lengths, and the lists stay."""
    grown = shared_rows(no_rows, 16, 3, 32, 10, 12)
    step = step_of(grown)
    expected = step.run()
    lens = list(grown.kv_lens)
    grown.kv_lens = [n - 4 for n in lens]
    step.work = DecodeWork(grown.plan(), step.decoding, step.workspace)
    assert not torch.equal(step.run(), expected)
    step.workspace.buffer.kv_lens[:3] += 4
    assert torch.equal(step.run(), expected)


def test_lists_serve_many_steps(no_rows: Any, step_of: Callable[..., Step]) -> None:
    """Rows grow into new blocks, and the lists stay until a row is too short for them or the tree another."""
    rows = shared_rows(no_rows, 4, 3, 32, 11, 20)
    step = step_of(rows)
    tables, lens = rows.block_tables, rows.kv_lens
    lists = []
    for missing in (9, 8, 5, 0, 3, 10):
        rows.kv_lens = [n - missing for n in lens]
        rows.block_tables = [table[: -(-n // 4)] for table, n in zip(tables, rows.kv_lens, strict=True)]
        step.work = DecodeWork(rows.plan(), step.decoding, step.workspace)
        lists.append(step.work.list)
        assert step.error() < 1e-5
    assert [known is lists[0] for known in lists] == [True] * 5 + [False]
    unshared = Planner(4, min_shared_tokens_saved=1 << 40)
    flat = unshared.plan(rows.block_tables, rows.query_lens, rows.kv_lens, [0, 8, 8])
    step.work = DecodeWork(flat, step.decoding, step.workspace)
    assert step.work.list is not lists[-1]
    assert step.error() < 1e-5


def test_items_without_rows_fill_up_a_launch(no_rows: Any, step_of: Callable[..., Step]) -> None:
    step = step_of(shared_rows(no_rows, 4, 9, 32, 3, 30))
    expected = step.run()
    assert step.work.list.num_wide and step.work.list.num_merges
    step.work.list.num_narrow += 3
    step.work.list.num_wide += 2
    step.work.list.num_merges += 4
    assert torch.equal(step.run(), expected)


def test_rows_do_not_depend_on_their_place_in_memory(step_of: Callable[..., Step], no_rows: Any) -> None:
    """The same queries, keys and values under other block ids: the same bits."""
    rows = shared_rows(no_rows, 4, 5, 32, 3, 30)
    step = step_of(rows)
    expected = step.run()
    ids = torch.randperm(rows.num_blocks, device=step.pool.device)
    storage = step.pool.storage.clone()
    step.pool.storage[:, :, :, ids] = storage
    plan = rows.plan()
    moved = [[int(ids[block]) for block in table] for table in rows.block_tables]
    plan = replace(plan, block_tables=moved)
    step.work = DecodeWork(plan, step.decoding, step.workspace)
    assert torch.equal(step.run(), expected)


def test_offsets_past_two_to_the_31(no_rows: Any, device: str) -> None:
    """Blocks that lie more than 2^31 numbers into the pool; of its 8 GiB only they are ever touched."""
    head_dim, block_size = 64, 16
    num_blocks = 2**31 // (2 * head_dim * block_size) + 8
    pool = KVPool(1, num_blocks, 1, head_dim, block_size, torch.float16, device, "block-major")
    table = [num_blocks - 1, num_blocks - 3]
    for side in (pool.key(0), pool.value(0)):
        side[:, table] = torch.randn(1, 2, block_size, head_dim, device=device).half()
    rows = no_rows(block_size)
    rows.add(table, 1, 20)
    work = DecodeWork(rows.plan(), np.array([0]), Workspace(pool, 2))
    q = torch.randn(1, 2, head_dim, device=device).half()
    out = torch.empty_like(q)
    decode(work, 0, q, out, 0.125, PLAIN)
    key, value = (side[:, table].cpu() for side in (pool.key(0), pool.value(0)))
    expected, _ = paged_attention(q.cpu(), key, value, [[0, 1]], [1], [20], 0.125)
    assert (out.cpu().double() - expected).norm() / expected.norm() < 1e-3
