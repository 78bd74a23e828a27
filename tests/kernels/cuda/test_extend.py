"""The extend kernel against attention from its definition: ragged trees, every edge, every head shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ramet.kernels.cuda.extend import extend
from ramet.kernels.cuda.extend_work import ExtendWork
from ramet.kernels.cuda.workspace import Workspace
from ramet.kernels.kv_pool import KVPool, Layout
from ramet.kernels.options import PLAIN, AttentionOptions
from ramet.kernels.reference import paged_attention

RowsOf = Callable[..., Any]
CaseOf = Callable[..., Any]


def write(case: Any) -> None:
    """Put k and v of the tokens that have a slot into the pool, without the kernel under another test."""
    size = case.pool.block_size
    for token, slot in enumerate(case.rows.slots):
        if slot >= 0:
            case.pool.key(0)[:, slot // size, slot % size] = case.k[token]
            case.pool.value(0)[:, slot // size, slot % size] = case.v[token]


def run(
    case: Any, options: AttentionOptions = PLAIN, scale: float = 0.25, min_saved: int = 0
) -> torch.Tensor:
    """All rows through the kernel, with poison wherever it has to write."""
    workspace = Workspace(case.pool, case.q.shape[1])
    work = ExtendWork(case.rows.plan(min_saved), np.arange(len(case.rows.query_lens)), workspace)
    workspace.part_out.fill_(torch.nan)
    workspace.part_lse.fill_(torch.nan)
    out = torch.full_like(case.q, torch.nan)
    extend(work, 0, case.q, out, scale, options)
    return out


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((got.double().cpu() - want).norm() / want.norm())


def expected(case: Any, options: AttentionOptions = PLAIN, scale: float = 0.25) -> torch.Tensor:
    rows, pool = case.rows, case.pool
    key, value = pool.key(0).cpu(), pool.value(0).cpu()
    if options.sinks is not None:
        options = AttentionOptions(options.window, options.softcap, options.sinks.cpu())
    tables, queries, lens = rows.block_tables, rows.query_lens, rows.kv_lens
    return paged_attention(case.q.cpu(), key, value, tables, queries, lens, scale, options)[0]


def check(case: Any, options: AttentionOptions = PLAIN, scale: float = 0.25, min_saved: int = 0) -> None:
    write(case)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}[case.pool.dtype]
    assert error(run(case, options, scale, min_saved), expected(case, options, scale)) < tolerance


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("seed", range(2))
def test_ragged_trees_of_mixed_rows(
    rows_of: RowsOf, case_of: CaseOf, device: str, block_size: int, seed: int
) -> None:
    rows = rows_of(random.Random(seed), block_size, 3, {1: 40, 4: 12, 16: 3, 64: 1}[block_size])
    check(case_of(rows, seed=seed, device=device, layout="block-major"))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (9, 3, 64, 16),
        (5, 1, 80, 2),
        (6, 2, 96, 8),
        (16, 1, 64, 32),
        (1, 1, 128, 128),
        (7, 1, 64, 256),
        (2, 1, 256, 16),
        (71, 1, 64, 16),
        (3, 1, 16, 16),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_shapes(
    no_rows: type[Any],
    case_of: CaseOf,
    device: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    rows = no_rows(block_size)
    path = rows.take(-(-64 // block_size))
    shared = len(path) * block_size
    for n, own in ((3, 5), (20, 20)):
        rows.add(path + rows.take(-(-own // block_size)), n, shared + own)
    case = case_of(
        rows.permuted(random.Random(1)), heads, kv_heads, head_dim, dtype, device=device, layout="block-major"
    )
    check(case, scale=head_dim**-0.5)


@pytest.mark.parametrize("query_len", [1, 2, 31, 33])
def test_lengths_around_every_edge(no_rows: type[Any], case_of: CaseOf, device: str, query_len: int) -> None:
    rows = no_rows(16)
    for kv_len in (*range(query_len, query_len + 3), 63, 64, 65):
        if kv_len >= query_len:
            rows.add(rows.take(-(-kv_len // 16)), query_len, kv_len)
    check(case_of(rows.permuted(random.Random(0)), 2, 1, 16, device=device, layout="block-major"))


OPTIONS = {
    "window": AttentionOptions(window=40),
    "narrow window": AttentionOptions(window=1),
    "softcap": AttentionOptions(softcap=3.0),
    "sinks": AttentionOptions(sinks=torch.tensor([0.5, -2.0, 4.0, 30.0])),
    "all": AttentionOptions(window=70, softcap=5.0, sinks=torch.tensor([0.5, -2.0, 4.0, 1.0])),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("min_saved", [0, 10**9], ids=["shared", "unshared"])
def test_options(no_rows: type[Any], case_of: CaseOf, device: str, name: str, min_saved: int) -> None:
    options = OPTIONS[name]
    if options.sinks is not None:
        options = AttentionOptions(options.window, options.softcap, options.sinks.to(device))
    rows = no_rows(16)
    path = rows.take(8)
    for n, own in ((3, 5), (9, 150), (1, 1), (7, 21)):
        rows.add(path + rows.take(-(-own // 16)), n, 128 + own)
    case = case_of(rows.permuted(random.Random(3)), device=device, layout="block-major", q_scale=3.0)
    check(case, options, min_saved=min_saved)


def test_siblings_read_their_trunk_together(no_rows: type[Any], case_of: CaseOf, device: str) -> None:
    """Eight tool results of 5 tokens on one trunk of 320, half of them below a second fork 64 tokens on."""
    rows = no_rows(16)
    trunk = rows.take(20)
    fork = trunk + rows.take(4)
    for i in range(8):
        path = fork if i < 4 else trunk
        rows.add(path + rows.take(1), 5, len(path) * 16 + 5 + i)
    case = case_of(rows.permuted(random.Random(4)), device=device, layout="block-major")
    workspace = Workspace(case.pool, 4)
    shared = ExtendWork(case.rows.plan(), np.arange(8), workspace)
    alone = ExtendWork(case.rows.plan(10**9), np.arange(8), workspace)

    def tokens_read(work: ExtendWork) -> int:
        items = work.items.cpu()
        return int((items[:, 4] - items[:, 3]).sum())

    assert (shared.tile.rows, shared.tile.tokens) == (16, 32), "8 queries of 2 heads on a KV head are a tile"
    assert tokens_read(alone) == sum(case.rows.kv_lens)
    # 40 queries are 5 tiles on the trunk; 20 are 3 on the fork; each row reads its own tokens.
    assert tokens_read(shared) == 5 * 320 + 3 * 64 + sum(range(5, 13))
    check(case)


def test_rows_that_are_not_asked_for_stay(no_rows: type[Any], case_of: CaseOf, device: str) -> None:
    rows = no_rows(4)
    path = rows.take(20)
    for n in (1, 6, 1, 3):
        rows.add(path + rows.take(2), n, 80 + 7)
    case = case_of(rows.permuted(random.Random(5)), device=device, layout="block-major")
    write(case)
    work = ExtendWork(case.rows.plan(), np.array([1, 3]), Workspace(case.pool, 4))
    out = torch.full_like(case.q, torch.nan)
    extend(work, 0, case.q, out, 0.25)
    asked = torch.tensor([1, 2, 3, 4, 5, 6, 8, 9, 10])
    assert out[[0, 7]].isnan().all()
    assert error(out[asked.to(device)], expected(case)[asked]) < 1e-5


def test_large_logits(rows_of: RowsOf, case_of: CaseOf, device: str) -> None:
    for seed in range(2):
        rows = rows_of(random.Random(seed), 4, 3)
        case = case_of(rows, q_scale=80.0, seed=seed, device=device, layout="block-major")
        write(case)
        assert error(run(case), expected(case)) < 5e-5


@pytest.mark.parametrize("cut", [1, 17, 64])
def test_a_prompt_in_pieces_gives_the_same_bits(
    no_rows: type[Any], case_of: CaseOf, device: str, cut: int
) -> None:
    """Tiles lie at multiples of their size in the sequence, so a prefix hit changes no order of addition."""
    rows = no_rows(16)
    rows.add(rows.take(6), 90, 90)
    whole = case_of(rows, device=device, layout="block-major")
    write(whole)
    out = run(whole, min_saved=10**9)
    rest = no_rows(16)
    rest.add(rest.take(6), 90 - cut, 90)
    part = case_of(rest, device=device, layout="block-major")
    part.pool.storage.copy_(whole.pool.storage)
    part.q = whole.q[cut:]
    assert torch.equal(run(part, min_saved=10**9), out[cut:])


def test_inputs_may_be_views(no_rows: type[Any], case_of: CaseOf, device: str) -> None:
    """Models hand over [H, T, D] transposed."""
    rows = no_rows(4)
    rows.add(rows.take(5), 7, 18)
    case = case_of(rows, device=device, layout="block-major")
    write(case)
    dense = run(case)
    case.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(run(case), dense)


@pytest.mark.parametrize("layout", ["block-major", "head-major"])
def test_offsets_pass_32_bits(no_rows: type[Any], case_of: CaseOf, device: str, layout: Layout) -> None:
    """Blocks just above 2**31 numbers; on the CPU few of the pool's pages ever take memory."""
    rows = no_rows(16)
    rows.add(rows.take(2), 3, 20)
    small = case_of(rows, 1, 1, 64, torch.float16, device=device, layout="block-major")
    write(small)
    num_blocks = 2**31 // (16 * 64) + 2 if layout == "head-major" else 2**30 // (16 * 64) + 2
    far = no_rows(16)
    far.num_blocks = num_blocks - 2
    far.add(far.take(2), 3, 20)
    big = KVPool(1, num_blocks, 1, 64, 16, torch.float16, device, layout)
    big.storage[:, :, :, -2:] = small.pool.storage
    near = run(small)
    small.pool, small.rows = big, far
    assert torch.equal(run(small), near)
