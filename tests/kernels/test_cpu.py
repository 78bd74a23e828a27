"""The CPU path against the fp64 reference: shapes, trees, edges, poison, large logits, wrong pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from ramet.kernels.cpu import CPUAttention
from ramet.kernels.kv_pool import KVPool
from ramet.kernels.reference import paged_attention

fixtures_are_functions = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write(case: Any, layer: int = 0) -> None:
    slots = torch.tensor(case.rows.slots)
    keep = slots >= 0
    case.pool.write(layer, slots[keep], case.k[keep], case.v[keep])


def expected(case: Any, layer: int = 0, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    rows, pool = case.rows, case.pool
    return paged_attention(
        case.q, pool.key(layer), pool.value(layer), rows.block_tables, rows.query_lens, rows.kv_lens, scale
    )


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((got.double() - want).norm() / want.norm())


def check(case: Any, min_saved: int = 0, tolerance: float = 1e-5, scale: float | None = None) -> None:
    write(case)
    attention = CPUAttention(case.rows.plan(min_saved), case.pool)
    got = attention(0, case.q, case.q.shape[-1] ** -0.5 if scale is None else scale)
    out, lse = expected(case, scale=scale)
    assert got.out.shape == case.q.shape
    assert got.out.dtype == case.q.dtype
    assert error(got.out, out) < tolerance
    torch.testing.assert_close(got.lse.double(), lse, rtol=0, atol=1e-3)


@fixtures_are_functions
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(0, 4),
    block_size=st.sampled_from((1, 2, 4, 16, 32)),
    min_saved=st.sampled_from((0, 16, 128)),
    buffer_slots=st.sampled_from((None, 1, 3)),
)
def test_ragged_trees_of_mixed_rows(
    rows_of: Callable[..., Any],
    case_of: Callable[..., Any],
    seed: int,
    depth: int,
    block_size: int,
    min_saved: int,
    buffer_slots: int | None,
) -> None:
    rows = rows_of(random.Random(seed), block_size, depth, 3 if block_size < 16 else 1)
    case = case_of(rows, seed=seed)
    if buffer_slots is not None:  # so small that every segment goes in pieces, with diagonals cut anywhere
        case.pool.max_gather_slots = case.pool.max_widened_slots = buffer_slots * block_size
    check(case, min_saved)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (5, 1, 80), (6, 2, 96), (12, 4, 72), (16, 1, 64), (4, 4, 128), (14, 2, 64), (8, 2, 256)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_shapes(
    rows_of: Callable[..., Any],
    case_of: Callable[..., Any],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    rows = rows_of(random.Random(heads), 4, 3)
    case = case_of(rows, heads, kv_heads, head_dim, dtype)
    check(case, tolerance=1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("shared", [0, 2])
def test_lengths_around_every_edge(
    no_rows: type[Any], case_of: Callable[..., Any], block_size: int, shared: int
) -> None:
    rows = no_rows(block_size)
    path = rows.take(shared)
    for length in range(1, 34):
        rows.add(path + rows.take(-(-length // block_size)), 1, shared * block_size + length)
    check(case_of(rows.permuted(random.Random(0)), 2, 1, 8))


def test_chunked_prefill_over_a_shared_prefix(no_rows: type[Any], case_of: Callable[..., Any]) -> None:
    rows = no_rows(4)
    path = rows.take(5)
    for query_len, own in ((11, 11), (3, 11), (1, 11), (16, 16), (7, 9)):
        rows.add(path + rows.take(-(-own // 4)), query_len, 20 + own)
    check(case_of(rows.permuted(random.Random(1)), 9, 3, 64))


@pytest.mark.parametrize("query_len", [1, 2, 5, 9])
def test_queries_that_start_where_the_shared_part_ends(
    no_rows: type[Any], case_of: Callable[..., Any], query_len: int
) -> None:
    rows = no_rows(4)
    path = rows.take(4)
    for _ in range(2):  # the first query sees just what is shared, and nothing of the private part
        rows.add(path, query_len, 7 + query_len, writes=False)
    check(case_of(rows))


def test_large_logits(rows_of: Callable[..., Any], case_of: Callable[..., Any]) -> None:
    for seed in range(5):
        rows = rows_of(random.Random(seed), 4, 3)
        case = case_of(rows, q_scale=80.0, seed=seed)
        assert (case.q.norm(dim=-1) > 80).all()
        check(case, tolerance=5e-5)


def test_a_wrong_page_would_show(rows_of: Callable[..., Any], case_of: Callable[..., Any]) -> None:
    """With one-hot values and equal keys, the output counts how often each physical block was read."""
    for seed in range(10):
        rows = rows_of(random.Random(seed), 4, 3)
        case = case_of(rows, 2, 1, head_dim=max(8, rows.num_blocks))
        case.pool.storage[:, 0].nan_to_num_(0.0).mul_(0)
        case.k.zero_()
        block_of_slot = torch.tensor(rows.slots) // 4
        case.v = torch.nn.functional.one_hot(block_of_slot.clamp(min=0), case.q.shape[-1])[:, None].float()
        for block in range(rows.num_blocks):
            written = case.pool.value(0)[0, block].isfinite()
            one_hot = torch.nn.functional.one_hot(torch.tensor(block), case.q.shape[-1]).float()
            case.pool.value(0)[0, block] = torch.where(written, one_hot, torch.nan)
        write(case)
        got = CPUAttention(rows.plan(), case.pool)(0, case.q, 1.0).out
        token = 0
        for table, n, kv_len in zip(rows.block_tables, rows.query_lens, rows.kv_lens, strict=True):
            for sees in range(kv_len - n + 1, kv_len + 1):
                counts = torch.zeros(case.q.shape[-1])
                for position in range(sees):
                    counts[table[position // 4]] += 1 / sees
                torch.testing.assert_close(got[token, 0], counts)
                token += 1


def sdpa_bf16(case: Any) -> torch.Tensor:
    """Torch's own bf16 attention on the same inputs, row by row on contiguous KV [T, H, D]."""
    rows, pool, token, outs = case.rows, case.pool, 0, []
    group = case.q.shape[1] // pool.num_kv_heads
    for table, n, kv_len in zip(rows.block_tables, rows.query_lens, rows.kv_lens, strict=True):
        index = torch.tensor(table)
        k, v = (
            t[:, index].flatten(1, 2)[None, :, :kv_len].repeat_interleave(group, 1)
            for t in (pool.key(0), pool.value(0))
        )
        mask = torch.ones(n, kv_len, dtype=torch.bool).tril(kv_len - n)
        q = case.q[token : token + n].transpose(0, 1)[None]
        outs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)[0].transpose(0, 1))
        token += n
    return torch.cat(outs)


@pytest.mark.parametrize("num_rows", [1, 2, 12])
@pytest.mark.parametrize("shared", [0, 2, 12])
def test_bf16_is_as_good_as_torch(
    no_rows: type[Any], case_of: Callable[..., Any], num_rows: int, shared: int
) -> None:
    rows = no_rows(16)
    path = rows.take(shared)
    for i in range(num_rows):
        own = 20 + 9 * i
        rows.add(path + rows.take(-(-own // 16)), 17 if i % 5 == 2 else 1, shared * 16 + own)
    case = case_of(rows.permuted(random.Random(2)), 8, 2, 64, torch.bfloat16)
    write(case)
    out, lse = CPUAttention(case.rows.plan(), case.pool)(0, case.q, 64**-0.5)
    want, want_lse = expected(case)
    assert error(out, want) < 5e-3
    assert error(out, want) <= 1.2 * error(sdpa_bf16(case), want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-3)


def test_a_step_serves_every_layer(rows_of: Callable[..., Any], case_of: Callable[..., Any]) -> None:
    rows = rows_of(random.Random(3), 4, 3)
    case = case_of(rows, num_layers=3)
    attention = CPUAttention(rows.plan(), case.pool)
    outs = []
    for layer in range(3):
        write(case, layer)
        outs.append(attention(layer, case.q, 0.3).out)
    for layer, out in enumerate(outs):  # compared last: no layer may write into another's result
        assert error(out, expected(case, layer, 0.3)[0]) < 1e-5


def test_offsets_pass_32_bits(no_rows: type[Any], case_of: Callable[..., Any]) -> None:
    """Slots just below and above 2**31 elements, in a pool of which few pages are ever touched."""
    rows = no_rows(16)
    rows.num_blocks = 2**31 // (16 * 64) - 2  # K of the last row's blocks lies just above
    path = rows.take(1)
    for _ in range(2):
        rows.add(path + rows.take(1), 1, 16 + 9)
    near = rows.block_tables
    low = no_rows(16)
    low_path = low.take(1)
    for _ in range(2):
        low.add(low_path + low.take(1), 1, 16 + 9)
    small = case_of(low, 1, 1, 64, torch.bfloat16)
    write(small)
    big = KVPool(1, rows.num_blocks, 1, 64, 16, torch.bfloat16)
    for table, near_table in zip(low.block_tables, near, strict=True):
        for block, far in zip(table, near_table, strict=True):
            big.storage[:, :, :, far] = small.pool.storage[:, :, :, block]
    a = CPUAttention(low.plan(), small.pool)(0, small.q, 0.1).out
    b = CPUAttention(rows.plan(), big)(0, small.q, 0.1).out
    assert torch.equal(a, b)
    assert not big.storage[:, :, :, :4].any()
